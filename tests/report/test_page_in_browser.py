"""The page in a browser: what it shows, sorts, searches and opens, by mouse and by keys, at every width."""

import json
import re
from dataclasses import replace

import pytest

from lightning_obs.engines import Verdict
from lightning_obs.report.facts import LayerFacts, Report
from lightning_obs.report.judgement import judge
from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.metrics import TensorError
from lightning_obs.report.page import write_report
from tests.report.browser import Browser, in_chromium
from tests.report.pages import made_up


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser
        assert browser.errors == []


NAMES = "[...document.querySelectorAll('tr.layer td:first-child')].map((cell) => cell.textContent)"
WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def sort_by(browser, title):
    clicked = f"(one) => one.textContent.startsWith('{title}')"
    browser.run(f"[...document.querySelectorAll('#layers thead button')].find({clicked}).click()")
    return browser.run(NAMES)[0]


def search(browser, words):
    browser.run(f"document.getElementById('search').value = {words!r}")
    browser.run("document.getElementById('search').dispatchEvent(new Event('input'))")
    return browser.run(NAMES)


@pytest.mark.slow_but_first
@in_chromium
@pytest.mark.parametrize(("width", "dark"), [(1600, False), (1300, True), (390, False)])
def test_a_browser_shows_sorts_searches_and_opens_at_every_width(folder, browser, width, dark):
    report = made_up(210)
    browser.open(folder / "report.html", width=width, dark=dark)
    order = sorted(report.decisions.sensitivity, key=report.decisions.sensitivity.get)
    assert browser.run("document.getElementById('count').textContent") == "210 of 210 layers"
    assert (len(browser.run(NAMES)), browser.run(NAMES)[0]) == (200, report.errors[0].name)
    assert (sort_by(browser, "sensitivity"), sort_by(browser, "sensitivity")) == (order[-1], order[0])
    assert browser.run("document.querySelector('[aria-sort]').getAttribute('aria-sort')") == "ascending"
    assert sorted(search(browser, "Q_PROJ 3")) == sorted(
        n for n in report.decisions.sensitivity if "q_proj" in n and "3" in n
    )
    search(browser, "")
    browser.click("#more")
    assert len(browser.run(NAMES)) == 210
    browser.click("tr.layer td:first-child button")
    assert browser.run("document.querySelectorAll('#layer svg.histogram rect.bin').length") > 9
    assert 0 < browser.run("document.querySelectorAll('#layer svg.histogram rect.out').length") < 64
    assert browser.run("document.querySelectorAll('#layer svg.histogram rect.chosen').length") == 1
    browser.click("tr.layer td:first-child button")
    assert browser.run("document.getElementById('layer').hidden")
    assert browser.run(WIDE) <= 0  # nothing sticks out of the window, at the width of a phone either


@in_chromium
def test_a_click_in_the_map_opens_the_layer_and_escape_closes_it(folder, browser):
    browser.open(folder / "report.html")
    assert browser.run("document.querySelectorAll('.map td button').length") == 210
    name = "model.layers.7.mlp.gate_proj"
    browser.click(f".map [data-name='{name}']")
    assert browser.run("document.querySelector('#layer h3').textContent") == name
    assert browser.run("document.querySelectorAll('#layer svg.histogram').length") == 1
    said = "read first by: model.layers.7.mlp.up_proj, model.layers.8.self_attn.q_proj"
    assert said in browser.run("document.getElementById('layer').textContent")
    browser.press("Escape")
    assert browser.run("document.getElementById('layer').hidden")


@in_chromium
def test_the_map_is_operated_by_keys_alone(folder, browser):
    browser.open(folder / "report.html")
    browser.run("document.querySelector('.map td button').focus()")
    browser.press("ArrowRight", "ArrowDown", "Enter")
    assert browser.run("document.querySelector('#layer h3').textContent") == "model.layers.1.self_attn.k_proj"


@in_chromium
def test_a_switch_of_the_map_changes_what_its_colours_say(folder, browser):
    browser.open(folder / "report.html")
    worst = made_up(210).errors[0]
    for mode, said in (("sqnr", f"{worst.sqnr:.1f} dB"), ("choice", made_up(210).decisions.choices[worst.name])):
        browser.click(f"[data-mode={mode}]")
        label = browser.run(f"document.querySelector('[data-name=\"{worst.name}\"]').getAttribute('aria-label')")
        assert label == f"{worst.name}: {said}"


@in_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_a_lower_ratio_is_never_lighter_in_the_light_nor_darker_in_the_dark_and_can_be_read(folder, browser, dark):
    browser.open(folder / "report.html", dark=dark)
    browser.click("[data-mode=sqnr]")
    script = """(() => {
      const pixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
      const light = (colour) => {
        pixel.fillStyle = colour;
        pixel.fillRect(0, 0, 1, 1);
        const part = [...pixel.getImageData(0, 0, 1, 1).data].map((v) => v / 255)
          .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
      };
      return [...document.querySelectorAll(".map td button")].map((cell) => {
        const style = getComputedStyle(cell);
        return [Number(cell.title.match(/: ([\\d.]+) dB/)[1]), light(style.backgroundColor), light(style.color)];
      });
    })()"""
    cells = sorted(browser.run(script), key=lambda cell: (cell[0], -cell[1] if dark else cell[1]))
    backs = [back for _, back, _ in cells]
    assert backs == sorted(backs, reverse=dark)
    assert max(backs) > 4 * min(backs)
    contrasts = [(max(pair) + 0.05) / (min(pair) + 0.05) for pair in (cell[1:] for cell in cells)]
    assert min(contrasts) > 3


@in_chromium
def test_a_layer_shows_what_was_observed_what_its_scale_holds_its_levels_and_its_channels(tmp_path, browser):
    report = made_up(6, choices={}, sensitivity={}, frontier=[])
    four_bits = LayerFacts(
        "int4 weights, int4 inputs", 4, 4, "mse", "minmax", 2048, 1024, 3, [1.0, 2.0, 0.5], (-4.0, 3.5)
    )
    report.layers = {error.name: four_bits for error in report.errors}
    name, *others = report.result.modules
    report.result.plan.fused = [[name, *others[:2]]]
    browser.open(write_report(tmp_path, report), fragment=f"#layer={name}")
    shown = {"observed": 1, "chosen": 1, "level": 16, "out": 2}
    found = {one: browser.run(f"document.querySelectorAll('#layer svg.histogram .{one}').length") for one in shown}
    assert found["out"] >= 1
    assert {**found, "out": 2} == shown
    heard = [text for role, text in browser.heard() if role == "image"]
    assert f"largest weight of each output channel of {name}" in heard
    text = browser.run("document.getElementById('layer').textContent")
    assert "the scale holds -4 to 3.5 (band); 16 levels, 0.5 apart" in text
    assert "ranges found by: mse (weight), minmax (input)" in text
    assert f"shares its scheme with: {', '.join(others[:2])}" in text
    modes = browser.run("[...document.querySelectorAll('#map [data-mode]')].map((one) => one.dataset.mode)")
    assert modes == [
        "sqnr",
        "share",
        "weight_width",
        "input_width",
        "weight_observer",
        "input_observer",
        "clipped",
        "after",
    ]
    for mode, said in {"weight_width": "4 bit weights", "weight_observer": "mse", "after": "1.00 KiB"}.items():
        browser.click(f"[data-mode={mode}]")
        assert browser.run(f"document.querySelector('.map [data-name=\"{name}\"]').title") == f"{name}: {said}"


@in_chromium
def test_a_screen_reader_finds_verdict_cells_charts_and_rows(folder, browser):
    browser.open(folder / "report.html")
    heard = browser.heard()
    assert ("region", "verdict and next steps") in heard
    assert ("image", "estimated loss against bits per weight") in heard
    assert any(role == "button" and name.startswith("model.layers.3.mlp.up_proj: ") for role, name in heard)
    assert any(role == "columnheader" and name.startswith("SQNR") for role, name in heard)
    assert any(role == "button" and name.startswith("copy the Python") for role, name in heard)


@in_chromium
def test_210_layers_are_interactive_in_a_second(folder, browser):
    """All that the page's thread has computed since it was opened, in CPU time: other tests may run beside it."""
    browser.send("Performance.enable", timeDomain="threadTicks")
    browser.open(folder / "report.html")
    spent = {one["name"]: one["value"] for one in browser.send("Performance.getMetrics")["metrics"]}
    assert 0 < spent["ScriptDuration"] < spent["TaskDuration"] < 1


@in_chromium
@pytest.mark.slow
def test_5000_layers_are_still_usable(tmp_path, browser):
    page = write_report(tmp_path / "out", made_up(5000))
    browser.open(page)
    assert browser.run("document.getElementById('count').textContent") == "5,000 of 5,000 layers"
    assert len(browser.run(NAMES)) == 200
    assert browser.run("performance.now()") < 15000
    assert page.stat().st_size < 10 * 2**20


@in_chromium
def test_layers_without_depth_are_a_strip_and_unknown_numbers_leave_the_page_whole(tmp_path, browser):
    nothing = TensorError()
    names = ["encoder", "head", "extra.proj"]
    errors = [LayerError(name, nothing, nothing) for name in names]
    report = Report.of("odd", errors=errors, metrics={"loss": (0.0, float("nan"))}, sensitivity={"head": float("inf")})
    report.decisions.scores = [
        {"of": "input", "observer": "mse", "loss": float("nan"), "measured": float("nan"), "tensors": 2}
    ]
    report.decisions.frontier = [
        {"name": name, "bits_per_weight": 4, "loss": loss} for name, loss in (("a", float("nan")), ("b", 0))
    ]
    report.quality.curves = [{"step": 0, "val_loss": float("nan")}, {"step": 1, "val_loss": 1.0}]
    report.other_runs.runs = [{"run": "y", "metric": "m", "m": (1.0, float("nan"))}]
    browser.open(write_report(tmp_path, report), fragment="#layer=head")
    assert browser.run("document.querySelector('.grade').textContent") == "Broken"
    assert browser.run("document.querySelector('#map h2').textContent") == "All layers"
    assert browser.run("document.querySelectorAll('.map td button.unknown').length") == 3
    assert browser.run("document.querySelector('#layer h3').textContent") == "head"


@in_chromium
def test_a_plan_observers_bytes_and_curves_each_have_their_picture(tmp_path, browser):
    points = [("", 4.0, 2.0), ("chosen", 5.0, 0.1), ("measured", 5.0, 0.12), ("full precision", 32.0, 0.0)]
    report = made_up(
        210,
        frontier=[{"name": n, "mark": n, "bits_per_weight": bits, "loss": loss} for n, bits, loss in points],
        scores=[
            {"of": "input", "observer": name, "loss": 9.0, "measured": value, "tensors": 3, "chosen": name == "b"}
            for name, value in (("a", 2.0), ("b", 1))
        ],
        scored=["input observers: b for all"],
        kinds={"embeddings": (2**20, 2**20), "quantized weights": (2**22, 2**20)},
        curves=[{"step": at, "val_loss": 2.0 - at, "val_loss_quantized": 2.1 - at} for at in range(3)],
    )
    browser.open(write_report(tmp_path, report))
    titles = browser.run("[...document.querySelectorAll('figcaption')].map((one) => one.textContent)")
    assert titles == [
        "Estimated loss against size",
        "What each observer would lose",
        "Where the noise sits",
        "The worst layers: is it the weight or the input?",
        "Bytes of the weights",
        "val_loss",
        "Drift of the scales: those that moved most",
    ]
    assert browser.run("document.querySelectorAll('.chosen-mark, figure .ring').length") == 2
    assert browser.run("document.querySelector('#map [aria-pressed=true]').textContent") == "choice"
    shown = browser.run("document.getElementById('pictures').textContent")
    assert "32 bits per weight, loss 0." in shown
    assert "input observers: b for all. What was chosen is orange" in shown
    heard = browser.heard()
    assert ("image", "after: 2.00 MiB") in heard
    assert ("image", "val_loss") in heard


@in_chromium
def test_the_page_says_what_each_engine_says_and_why_not(tmp_path, browser):
    report = made_up(6, checkpoint="out")
    report.result.plan.engines = {
        "vLLM": Verdict(True, "CUDA capability 7.5 or newer"),
        "SGLang": Verdict(False, "long", "no such scheme"),
    }
    browser.open(write_report(tmp_path, report))
    lines = "[...document.querySelectorAll('.engines tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    assert browser.run(lines) == [["vLLM", "yes", "CUDA capability 7.5 or newer"], ["SGLang", "no", "no such scheme"]]
    written = json.loads((tmp_path / "report.json").read_text())["engines"]
    assert written["SGLang"] == {"loads": False, "text": "long", "what": "no such scheme"}


@in_chromium
def test_a_step_without_a_command_shows_its_python_under_either_switch(tmp_path, browser):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    report = made_up(6, checkpoint=tmp_path, metrics={"perplexity": (14.8, 14.9)}, choices={})
    report.result.plan.engines = {"transformers": Verdict(True), "vLLM": Verdict(True, "CPU")}
    judgement = judge(report)
    serve, load = judgement.steps
    serve = replace(serve, command="vllm serve checkpoint")
    browser.open(write_report(tmp_path, report, replace(judgement, steps=[serve, load])))
    for switch, shown in (("python", "vllm.LLM("), ("command", "vllm serve ")):
        browser.click(f"[data-as={switch}]")
        texts = browser.run("[...document.querySelectorAll('.copy:not([hidden]) pre')].map((one) => one.textContent)")
        assert len(texts) == 2
        assert texts[0].startswith(shown)
        assert texts[1].startswith("transformers.LlamaForCausalLM")


@in_chromium
def test_runs_of_almost_one_size_lie_together_above_the_line_of_full_precision(tmp_path, browser):
    sizes = {"scheme=int8_static": (210.0, 33.0), "scheme=fp8": (209.4, 15.2)}
    runs = [
        {"run": name, "metric": "perplexity", "perplexity": (14.8, after), "size": size * 2**20}
        for name, (size, after) in sizes.items()
    ]
    browser.open(write_report(tmp_path, Report.of("comparison", runs=runs)))
    places = browser.run(
        "[...document.querySelectorAll('figure circle')].map((one) => [one.cx, one.cy].map((v) => v.baseVal.value))"
    )
    (x, y), (other_x, other_y) = places
    assert abs(x - other_x) < 40 < abs(y - other_y)
    assert browser.run("document.querySelector('.limit').y1.baseVal.value") > max(y, other_y)
    assert "original 14.8" in browser.run("document.querySelector('figure').textContent")


@in_chromium
def test_the_page_of_chosen_observers_begins_with_them(tmp_path, browser):
    score = {"observer": "histogram(criterion=entropy)", "loss": 1.0, "measured": 1.0, "tensors": 6, "chosen": True}
    scores = [{"of": "input", **score}]
    report = made_up(6, choices={}, frontier=[], scores=scores)
    report.layers = {
        error.name: LayerFacts("int8", 8, 8, "mse", "minmax", 2, 1, 0, [], None) for error in report.errors
    }
    browser.open(write_report(tmp_path, report), width=390)
    assert browser.run("document.querySelector('#map [aria-pressed=true]').textContent") == "input observer"
    assert browser.run("document.querySelector('figcaption').textContent") == "What each observer would lose"
    assert browser.run(WIDE) <= 0


@in_chromium
def test_a_page_of_noise_and_one_of_a_plan_s_estimate_each_have_one_word_for_what_layers_lose(tmp_path, browser):
    report = made_up(6, choices={}, frontier=[], sensitivity={})
    for losses, word, other in (
        ({}, "noise", "loss"),
        (dict.fromkeys(report.result.modules, 1.0), "estimated loss", "noise"),
    ):
        report.decisions.losses = losses
        browser.open(write_report(tmp_path, report))
        texts = [
            browser.run(f"document.querySelector('{one}').textContent") for one in ("#pictures", "#layers", "#map")
        ]
        assert all(f"share of the {word}" in text for text in texts)
        assert not any(re.search(rf"\b{other}\b", text.replace("3 % noise", "")) for text in texts)


@in_chromium
def test_runs_with_long_names_and_without_a_size_stay_in_the_comparison(tmp_path, browser):
    runs = [
        {"run": "scheme=int8_static " * 9, "metric": "perplexity", "perplexity": (14.8, 33.0), "size": 10**8},
        {"run": "scheme=fp8", "metric": "perplexity", "perplexity": (14.8, 15.2), "size": None},
    ]
    browser.open(write_report(tmp_path, Report.of("comparison", runs=runs)), width=390)
    assert browser.run("[...document.querySelectorAll('figure circle')].map((one) => one.getAttribute('class'))") == [
        "mark",
        "ring",
    ]
    assert browser.run(WIDE) <= 0


def points_of(browser):
    return browser.run(
        "[...document.querySelectorAll('figure circle')].map((one) => [one.cx, one.cy].map((v) => v.baseVal.value))"
    )


@in_chromium
@pytest.mark.parametrize("width", [1300, 390])
def test_a_comparison_links_runs_to_their_pages_names_points_and_has_the_original(tmp_path, browser, width):
    runs = [
        {"run": name, "metric": "perplexity", "perplexity": (14.8, after), "size": size * 2**20, "grade": grade}
        for name, after, size, grade in [("W4A16", 16.3, 112.0, "usable"), ("FP8", 15.2, 213.0, "good")]
    ]
    for run, folder in zip(runs, ("four", "eight"), strict=True):
        run |= {"original_size": 513 * 2**20, "page": f"../{folder}/report.html", "headline": "Said."}
    runs.append({"run": "scheme=w8a8 (failed)"})
    browser.open(write_report(tmp_path, Report.of("comparison", runs=runs)), width=width)
    assert browser.run("[...document.querySelectorAll('.runs a')].map((link) => link.getAttribute('href'))") == [
        "../four/report.html",
        "../eight/report.html",
    ]
    assert browser.run("[...document.querySelectorAll('.verdict')].map((cell) => cell.textContent)") == [
        "usable",
        "good",
        "",
    ]
    named = browser.run("[...document.querySelectorAll('figure text.strong')].map((text) => text.textContent)")
    assert named == (["original", "1. W4A16", "2. FP8"] if width > 560 else ["original", "1", "2"])
    assert browser.run("document.querySelectorAll('figure .original-mark, figure .frontier').length") == 2
    assert browser.run("document.querySelectorAll('#map *').length") == 0
    assert browser.run(WIDE) <= 0


@in_chromium
def test_runs_that_are_almost_equal_lie_on_one_another_and_share_a_name(tmp_path, browser):
    runs = [
        {"run": name, "metric": "perplexity", "perplexity": (14.8, after), "size": 213 * 2**20}
        for name, after in (("a", 15.20), ("b", 15.21))
    ]
    browser.open(write_report(tmp_path, Report.of("comparison", runs=runs)))
    (x, y), (other_x, other_y) = points_of(browser)
    assert abs(x - other_x) + abs(y - other_y) < 9
    assert browser.run("document.querySelector('figure text.strong').textContent") == "1, 2"


@in_chromium
def test_few_layers_have_a_line_each_with_their_whole_names_and_do_not_fill_the_window(tmp_path, browser):
    report = made_up(2, choices={}, sensitivity={}, frontier=[], drift=None)
    names = ["stem.0", "3.c1"]
    report.errors = [replace(error, name=name, feeds=()) for error, name in zip(report.errors, names, strict=True)]
    report.result.modules = names
    browser.open(write_report(tmp_path, report))
    assert browser.run("[...document.querySelectorAll('.map tbody th')].map((cell) => cell.textContent)") == names
    assert browser.run("document.querySelector('.map').getBoundingClientRect().width") < 300
    titles = browser.run("[...document.querySelectorAll('figcaption')].map((title) => title.textContent)")
    assert titles == ["The worst layers: is it the weight or the input?"]
    assert browser.run("[...document.querySelectorAll('.bars tbody th')].map((cell) => cell.textContent)") == sorted(
        names, key=lambda name: next(error.sqnr for error in report.errors if error.name == name)
    )


@in_chromium
def test_the_map_begins_with_a_view_that_has_values(tmp_path, browser):
    report = made_up(6, choices={}, frontier=[])
    report.errors = []
    browser.open(write_report(tmp_path, report))
    assert browser.run("document.querySelector('#map [aria-pressed=true]').dataset.mode") == "sensitivity"
    assert browser.run("document.querySelectorAll('.map td button.unknown').length") == 0


@in_chromium
def test_one_large_bar_does_not_hide_the_others(tmp_path, browser):
    scores = [
        {"of": "input", "observer": name, "loss": 1.0, "measured": loss, "tensors": 1}
        for name, loss in (("a", 1000.0), ("b", 2.0), ("c", 1.0))
    ]
    report = made_up(6, choices={}, frontier=[], scores=scores)
    browser.open(write_report(tmp_path, report))
    widths = browser.run(
        "[...document.querySelector('figure').querySelectorAll('.track i')].map((bar) => parseFloat(bar.style.width))"
    )
    assert widths[0] == 100
    assert 100 > widths[1] > widths[2] >= 5
    assert "logarithmic" in browser.run("document.querySelector('figure').textContent")


@in_chromium
def test_scales_that_did_not_move_have_no_picture(tmp_path, browser):
    report = made_up(6, choices={}, frontier=[], sensitivity={})
    for history in report.drift.drifts.values():
        history[:] = [0.0] * len(history)
    browser.open(write_report(tmp_path, report))
    assert "Drift" not in browser.run("document.getElementById('pictures').textContent")
