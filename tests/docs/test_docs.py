"""The page about writing an observer: its Python runs from top to bottom, and what it shows is true."""

from __future__ import annotations

import math
import re
import shlex
from typing import ClassVar

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import nn
from torch.distributed import ReduceOp

from lightning_obs import CalibrationCallback, CalibrationError, CalibrationSession
from lightning_obs.numerics import flatten_for_calibration
from lightning_obs.observers import Observer
from lightning_obs.observers.observer import observe_shared
from tests.callbacks.calibration_modules import Plain, loader, trainer
from tests.support.in_process import run_command_line
from tests.support.markdown import blocks, commands, page
from tests.support.tiny_model import save_tiny_llama

PAGE = page("docs/guide/new_observer.md")
EXAMPLES = blocks(PAGE, "python")


@pytest.fixture
def defined(own_registry):
    """Everything that the page's Python defines, run in order."""
    namespace: dict[str, object] = {}
    for code in EXAMPLES:
        exec(compile(code, "docs/guide/new_observer.md", "exec"), namespace)
    return namespace


def make(name, base_name="input", args=None, **kwargs):
    return Observer.load_from_registry(name, base_name=base_name, args=args or QuantizationArgs(), **kwargs)


def test_every_row_of_the_shapes_table_is_what_flattening_gives():
    row = r"^\| `(\w+)` \| `(strategy=.*?)` \| `(.*?)` \| `(.*?)` \| `(.*?)` \|$"
    rows = re.findall(row, page("docs/reference/observer_contract.md"), flags=re.MULTILINE)
    assert len(rows) == 8
    for base_name, args, value, observed, scales in rows:
        args, value, observed, scales = (eval(text) for text in (f"dict({args})", value, observed, scales))
        found = flatten_for_calibration(torch.zeros(value), base_name, QuantizationArgs(num_bits=4, **args)).shape
        assert found == observed
        assert found[1:-1] == scales


def calibrated(defined, **observers):
    """The input scale of the first layer of the page's model, on the page's data."""
    with CalibrationSession(defined["model"], "INT8_STATIC", observers=observers) as session:
        for batch in defined["tokens"]:
            defined["model"](batch)
    return defined["model"][0].input_scale, session


def test_the_one_method_observer_averages_the_ranges_of_tokens(defined):
    scale, _ = calibrated(defined, input="mean_minmax")
    low = min(batch.min(dim=-1).values.mean().item() for batch in defined["tokens"])
    high = max(batch.max(dim=-1).values.mean().item() for batch in defined["tokens"])
    assert scale.item() == pytest.approx(max(-low, high) / 127.5)
    assert scale < defined["tokens"].abs().max() / 127.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["mean_minmax", "laplace", "power_of_two"])
def test_no_example_loses_a_value_that_is_not_finite(defined, name, bad):
    observer = make(name)(torch.tensor([[1.0, 2.0], [bad, 1.0], [0.0, 1.0]]))(torch.ones(2, 2))
    with pytest.raises(CalibrationError, match="not finite"):
        observer.get_qparams()


@pytest.mark.parametrize("k", [0.5, 2.0, 100.0])
def test_the_declared_observer_clips_at_k_times_the_mean_magnitude_of_everything(defined, k):
    x = defined["tokens"].double()
    scale, session = calibrated(defined, input={"name": "laplace", "k": k})
    reach = min(k * x.abs().mean(), max(-x.min(), x.max()))
    assert scale.item() == pytest.approx((reach / 127.5).item(), rel=1e-6)
    low, high = session.result.chosen_input_ranges["0"]
    assert (low, high) == (
        pytest.approx(max(-reach, x.min()).item(), rel=1e-6),
        pytest.approx(min(reach, x.max()).item(), rel=1e-6),
    )


def test_the_declared_observer_finds_on_ranks_what_it_finds_on_one(defined):
    x = torch.randn(7, 16)
    whole = make("laplace", k=1.0)(x)
    ranks = [make("laplace", k=1.0)(part) for part in x.split([4, 3])]
    reduce = {ReduceOp.SUM: torch.sum, ReduceOp.MIN: torch.amin, ReduceOp.MAX: torch.amax}
    for statistic, op in whole._act_sync_dict.items():
        setattr(ranks[0], statistic, reduce[op](torch.stack([getattr(r, statistic) for r in ranks]), dim=0))
    for one, other in zip(whole.get_min_max(), ranks[0].get_min_max(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


def test_the_declared_observer_shares_its_measurement_and_keeps_its_own_statistics(defined):
    measured, x = {}, torch.randn(3, 8)
    first, second = make("laplace", k=1.0), make("laplace", k=1.0)
    observe_shared(first, x, measured)
    observe_shared(second, x, measured)
    assert len(measured) == 1
    torch.testing.assert_close(first.get_min_max()[1], second.get_min_max()[1])
    first.number = first.number + first.number  # as a sum over two ranks does
    torch.testing.assert_close(first.get_min_max()[1] * 2, second.get_min_max()[1])


@pytest.mark.parametrize(("num_bits", "k"), [(8, 9.9), (4, 5.03)])
def test_the_page_s_values_of_k_solve_the_equation(defined, num_bits, k):
    assert f"{k} for {num_bits}" in defined["LaplaceObserver"].__doc__
    assert k * math.exp(k) == pytest.approx(3 * 4**num_bits, rel=0.01)


def test_the_declared_observer_checks_its_hyperparameter(defined):
    with pytest.raises(CalibrationError, match=r"k\. Got 0, expected a value above 0"):
        make("laplace", k=0)
    with pytest.raises(CalibrationError, match=r"LaplaceObserver has no hyperparameter 'q'\. Expected k"):
        make("laplace", q=1)


def test_the_scales_of_power_of_two_are_the_next_powers_of_two(defined):
    plain, _ = calibrated(defined, input="static_minmax", weight="memoryless_minmax")
    plain_weight = defined["model"][0].weight_scale
    scale, _ = calibrated(defined, input="power_of_two", weight="power_of_two")
    for rounded, exact in ((scale, plain), (defined["model"][0].weight_scale, plain_weight)):
        assert (torch.frexp(rounded).mantissa == 0.5).all()
        assert ((rounded >= exact) & (rounded < 2 * exact)).all()


@pytest.mark.parametrize(
    "args",
    [
        QuantizationArgs(symmetric=False),
        QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ],
)
def test_power_of_two_refuses_what_it_cannot_keep(defined, args):
    with pytest.raises(CalibrationError, match="power_of_two needs a symmetric format with scales of one level"):
        make("power_of_two", args=args)


@pytest.mark.parametrize("name", ["mean_minmax", "laplace", "power_of_two"])
@pytest.mark.parametrize(
    ("base_name", "args", "shape"),
    [
        ("weight", QuantizationArgs(strategy="channel"), (6, 8)),
        ("weight", QuantizationArgs(num_bits=4, group_size=4), (6, 8)),
        ("weight", QuantizationArgs(strategy="block", block_structure=[4, 4]), (6, 8)),
        ("k", QuantizationArgs(strategy="attn_head"), (2, 3, 5, 4)),
    ],
    ids=["channel", "group", "block", "attn_head"],
)
def test_every_example_works_with_every_strategy(defined, name, base_name, args, shape):
    value = torch.randn(shape)
    observer = make(name, base_name, args)(value)
    first = observer.get_qparams()
    assert first["scale"].shape == flatten_for_calibration(value, base_name, args).shape[1:-1]
    assert torch.equal(first["scale"], observer.get_qparams()["scale"])
    observer.reset()
    assert not observer.has_statistics


# ---------------------------------------------------------------------- what the rules say


def test_reset_restores_tensors_lists_and_dicts_that_changed_in_place():
    class Collecting(Observer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.tensor, self.list, self.dict = torch.zeros(1), [], {}

        def update_statistics_from_observed(self, observed):
            self.tensor += observed.sum()
            self.list.append(1)
            self.dict[len(self.list)] = 1
            self.min_vals = self.max_vals = self.tensor

    observer = Collecting("input", QuantizationArgs())(torch.ones(2, 2))(torch.ones(2, 2))
    observer.reset()
    assert (observer.tensor, observer.list, observer.dict) == (torch.zeros(1), [], {})


def test_a_subclass_that_declares_hyperparameters_inherits_its_parents(defined):
    class Narrow(defined["LaplaceObserver"]):
        hyperparameters: ClassVar = {"extra": 1}

    observer = Narrow("input", QuantizationArgs(), k=3.0)
    assert (observer.k, observer.extra) == (3.0, 1)


# ---------------------------------------------------------------------- on the command line


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.mark.slow
@pytest.mark.parametrize("command", commands(PAGE))
def test_the_command_line_reaches_an_observer_of_one_s_own(command, tiny, tmp_path, own_registry):
    (laplace,) = (code for code in EXAMPLES if 'register("laplace")' in code)
    (config,) = blocks(PAGE, "yaml")
    (tmp_path / "my_observers.py").write_text(laplace.split("\nwith CalibrationSession")[0])
    (tmp_path / "my_configs" / "observer").mkdir(parents=True)
    (tmp_path / "my_configs" / "observer" / "laplace.yaml").write_text(config)
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "lightning_obs"]
    small = ["data.tokens=16", "data.batches=1", "evaluate=false", "export=none", "report.layer_error_batches=0"]
    done = run_command_line(*words[3:], f"model.path={tiny}", "trainer=cpu", *small, "output_dir=out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"name": "laplace",\n   "k": 5.03' in (tmp_path / "out" / "report.json").read_text()


def test_the_observer_takes_the_place_of_a_built_in_one_where_it_has_its_name(defined):
    with pytest.warns(UserWarning, match="observer 'static_minmax' is now .*; it replaces lightning_obs"):
        Observer.register("static_minmax")(defined["LaplaceObserver"])
    model = nn.Sequential(nn.Linear(16, 4))
    with CalibrationSession(model, "INT8_STATIC") as session:  # names static_minmax for its inputs
        model(torch.randn(4, 16))
    assert type(session.observers["0", "input"]) is defined["LaplaceObserver"]


# ---------------------------------------------------------------------- docs/guide/read_the_page.md


def test_the_python_of_reading_the_report_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = {"calibration": CalibrationCallback("INT8_STATIC"), "batch": torch.randn(4, 8)}
    trainer(known["calibration"]).validate(Plain(), loader(), verbose=False)
    for code in blocks(page("docs/guide/read_the_page.md"), "python"):
        exec(compile(code, "docs/guide/read_the_page.md", "exec"), known)
    assert (tmp_path / "report" / "report.html").is_file()


def test_every_metric_that_is_logged_is_in_the_docs():
    text = page("docs/guide/quantized_metric.md")
    callback = CalibrationCallback("INT8_STATIC", observers={"input": "histogram"}, log=True)
    run = trainer(callback, max_epochs=2, num_sanity_val_steps=0)
    run.fit(Plain(), loader(), loader())
    logged = {name for name in run.callback_metrics if name.startswith("quant/")}
    assert "quant/scale_drift_max" in logged
    assert all(f"`{name}`" in text for name in logged)
