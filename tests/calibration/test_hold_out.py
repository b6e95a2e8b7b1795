"""Whether fitted weights hold on batches that were kept out: said truly, at no cost to the result."""

from __future__ import annotations

import warnings

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_obs import CalibrationCallback, CalibrationSession, CalibrationWarning, quantized
from lightning_obs.calibration.fit_errors import fit_changes, fit_text, loses, warn_of_fit
from lightning_obs.calibration.hold_out import KEPT_OUT_OF, ROWS, InputSketch, judged_targets
from lightning_obs.model.module_qparams import read_qparams
from lightning_obs.ranks.collectives import Collectives
from tests.callbacks.calibration_modules import Plain, loader, trainer
from tests.support.rank_processes import run_ranks

INT4 = {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
LITTLE_DAMPING = {"name": "gptq", "damping": 0.01}
FITTED = {"observers": {"weight": {"name": "imatrix_mse", "signed": True, "norm": 2.0}}, "rounding": LITTLE_DAMPING}
WIDTH = 256
LOSES = "larger errors on other data"


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 32)).requires_grad_(False)


def tokens(number: int, seed: int = 1) -> torch.Tensor:
    """Tokens whose channels are correlated, each seed with the same correlations."""
    mixture = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(seed)) @ mixture


def calibrated(model, batches, scheme=INT4, **options) -> CalibrationSession:
    with CalibrationSession(model, scheme, **{**FITTED, **options}) as session:
        for batch in batches:
            model(batch)
    return session


def test_the_fit_is_judged_in_float32_whatever_the_default_dtype():
    """Lightning makes bfloat16 the default while a step runs under precision="bf16-true"."""
    batches = [tokens(32, seed).bfloat16() for seed in range(4)]
    fits = []
    for dtype in (torch.float32, torch.bfloat16):
        model = wide().bfloat16()
        session = CalibrationSession(model, INT4, **FITTED)
        session.attach()
        torch.set_default_dtype(dtype)
        try:
            for batch in batches:
                model(batch)
        finally:
            torch.set_default_dtype(torch.float32)
        session.detach()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fits.append(session.finalize().fit_errors)
    assert fits[0]
    assert fits[0] == fits[1]


def held_out_error(model: nn.Module) -> float:
    """The squared error of the first layer's output on tokens that nothing was fitted to."""
    inputs = tokens(4096, seed=2)
    with quantized(model):
        outputs = model[0](inputs)
    return float((outputs - model[0](inputs)).square().sum())


def without_data() -> float:
    model = wide()
    with CalibrationSession(model, INT4, recipe="fast"):
        pass
    return held_out_error(model)


# ---------------------------------------------------------------------- it says what is true


def test_a_fit_to_few_tokens_loses_on_others_and_the_run_says_so():
    model = wide()
    with pytest.warns(CalibrationWarning, match=LOSES):
        session = calibrated(model, tokens(64).chunk(4))
    on_fitted, on_others = fit_changes(session.result.fit_errors)
    assert on_fitted < -0.5
    assert on_others > 0.2
    assert held_out_error(model) > 1.1 * without_data()


@pytest.mark.filterwarnings("error")
def test_a_fit_to_many_tokens_gains_on_others_and_the_run_says_by_how_much():
    model = wide()
    session = calibrated(model, tokens(4096).chunk(8))
    true_change = held_out_error(model) / without_data() - 1
    on_fitted, on_others = fit_changes({"0": session.result.fit_errors["0"]})
    assert on_fitted < on_others < -0.2
    assert on_others == pytest.approx(true_change, abs=0.06)
    assert f"{100 * fit_changes(session.result.fit_errors)[1]:+.1f} % on others" in session.result.line(", ")


@pytest.mark.slow_but_first
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("number", "options"),
    [
        (4096, {}),
        (64, {"rounding": {"name": "gptq", "damping": 3.0}}),
        (64, {"observers": None, "rounding": None, "recipe": "fast"}),
        (64, {"observers": {"weight": "memoryless_mse"}, "rounding": None}),
    ],
    ids=["more tokens", "damping", "recipe", "observer"],
)
def test_each_remedy_of_a_fit_that_loses_works(number, options):
    losing = wide()
    with pytest.warns(CalibrationWarning, match=r"more tokens.*damping.*recipe='fast'.*'memoryless_mse'"):
        calibrated(losing, tokens(64).chunk(4))
    mended = wide()
    with CalibrationSession(mended, INT4, **{**FITTED, **options}) as session:
        if session.needs_data:
            for batch in tokens(number).chunk(4):
                mended(batch)
    assert not loses(session.result.fit_errors)
    assert held_out_error(mended) < 0.95 * held_out_error(losing)


@pytest.mark.parametrize(
    "observer", ["imatrix_mse", "local_hessian", "hessian", {"name": "local_hessian", "signed": True}]
)
def test_observers_that_read_inputs_are_judged_without_a_rounding(observer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = calibrated(wide(), tokens(512).chunk(4), observers={"weight": observer}, rounding=None)
    assert set(session.result.fit_errors) == {"0", "2"}


def test_an_observer_that_loses_on_its_own_data_is_not_told_to_take_more():
    imatrix = {"weight": {"name": "imatrix_mse", "signed": True, "norm": 2.0}}
    with pytest.warns(CalibrationWarning, match=r"larger errors even on the calibration data.*Instead, choose"):
        session = calibrated(wide(), tokens(2048).chunk(8), observers=imatrix, rounding=None)
    assert fit_changes(session.result.fit_errors)[0] > 0


def test_weights_that_have_no_error_without_data_are_judged():
    assert fit_changes({"0": (0.0, 0.0, 0.0, 0.0)}) == (0.0, 0.0)
    assert fit_changes({"0": (0.0, 0.0, 0.1, 0.0)}) == (0.0, float("inf"))
    with pytest.warns(CalibrationWarning, match=LOSES):
        warn_of_fit({"0": (0.0, 0.0, 0.1, 0.0)})


def test_weights_without_data_are_not_judged():
    with CalibrationSession(wide(), INT4, recipe="fast") as session:
        pass
    assert not session.result.fit_errors
    assert "fit" not in session.result.facts()


@pytest.mark.filterwarnings("error")
def test_fewer_than_four_batches_are_fitted_to_and_the_run_says_that_it_is_not_judged():
    session = calibrated(wide(), tokens(64).chunk(3))
    assert session.result.facts()["fit"] == "not judged on batches kept out: it takes 4 batches"


@pytest.mark.filterwarnings("ignore:fitted weights have larger errors")
def test_a_loop_that_calls_parts_of_the_model_is_told_to_count_batches():
    model = wide()
    with CalibrationSession(model, INT4, observers={"weight": "imatrix_mse"}) as session:
        for batch in tokens(64).chunk(8):
            parts_of(model, batch)
    text = session.result.facts()["fit"]
    assert text.startswith("not judged on batches kept out: the model itself was not called, only parts of it")
    assert "session.count_batches() before each batch" in text
    with CalibrationSession(model, INT4, observers={"weight": "imatrix_mse"}) as session:
        for batch in tokens(64).chunk(8):
            session.count_batches()
            parts_of(model, batch)
    assert session.result.fit_errors


def parts_of(model, batch):
    """Run a model's layers, one by one, without a call of the model."""
    for layer in model:
        batch = layer(batch)
    return batch


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "NVFP4A16", "MXFP4A16", "W8A16"])
def test_each_format_is_judged_beside_its_own_weights_without_data(scheme):
    options = {"observers": {"weight": "imatrix_mse"}, "targets": ["0"], "engines": "unchecked"}
    session = calibrated(wide(), tokens(2048).chunk(4), scheme, **options)
    (on_fitted, on_others) = fit_changes(session.result.fit_errors)
    assert on_fitted < on_others < 0


# ---------------------------------------------------------------------- it costs no result


@pytest.mark.parametrize("rounding", [LITTLE_DAMPING, {"name": "gptq", "inputs": "quantized"}])
def test_what_is_written_is_fitted_to_all_batches(rounding):
    judged = wide()
    unjudged = wide()
    calibrated(judged, tokens(2048).chunk(8), rounding=rounding)
    with CalibrationSession(unjudged, INT4, **{**FITTED, "rounding": rounding}) as session:
        session.observation.judge_no_fit()
        for batch in tokens(2048).chunk(8):
            unjudged(batch)
    assert not session.result.fit_errors
    for module, other in zip(judged, unjudged, strict=True):
        for name, value in read_qparams(module).items():
            assert torch.equal(value, read_qparams(other)[name])


def test_each_validation_judges_alike():
    model = wide()
    session = CalibrationSession(model, INT4, **FITTED)
    results = []
    for _ in range(2):
        with session:
            for batch in tokens(2048).chunk(8):
                model(batch)
        results.append(session.result.fit_errors)
    assert results[0] == results[1]


def test_at_most_eight_modules_are_judged_of_each_shape_alike():
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(9)]
    session = CalibrationSession(nn.Sequential(*blocks), INT4, **FITTED)
    judged = [target.name for target in judged_targets(session.plan.targets, session.observers)]
    assert [sum(name.endswith(f".{place}") for name in judged) for place in range(3)] == [2, 3, 3]
    assert [name for name in judged if name.endswith(".2")] == ["1.2", "4.2", "7.2"]
    assert list(session.observation.hold_outs) == judged


# ---------------------------------------------------------------------- sketches


@pytest.mark.parametrize("number", [1, 100, ROWS])
def test_a_sketch_of_few_tokens_is_exact(number):
    sketch = InputSketch("weight", QuantizationArgs())
    inputs = tokens(number)
    for batch in inputs.split(30):
        sketch.observe_inputs(batch.unsqueeze(0))
    expected = inputs.double().mT @ inputs.double()
    gram = sketch.sketch[0].double().mT @ sketch.sketch[0].double()
    assert torch.allclose(gram, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_the_sketches_of_ranks_add_up_to_one_of_all_tokens():
    direction = torch.randn(WIDTH, 16, generator=torch.Generator().manual_seed(5))
    sketches = []
    outputs = torch.zeros(())
    for rank in range(4):
        sketch = InputSketch("weight", QuantizationArgs())
        sketch.rank = rank
        sketch.observe_inputs(tokens(1000).unsqueeze(0))  # the same: with equal signs the sum would count them 16 times
        sketches.append(sketch.sketch)
        outputs += (tokens(1000) @ direction).square().sum()
    estimate = (sum(sketches)[0] @ direction).square().sum()
    assert float(estimate / outputs) == pytest.approx(1, abs=0.15)


# ---------------------------------------------------------------------- wherever data run


def test_a_rounding_on_quantized_inputs_that_makes_up_for_their_errors_is_judged_by_the_outputs_in_full_precision():
    rounding = {"name": "gptq", "inputs": "quantized", "correction": 0.5}
    session = calibrated(wide(), tokens(2048).chunk(8), rounding=rounding)
    plain = calibrated(wide(), tokens(2048).chunk(8), rounding=rounding | {"correction": 0})
    assert set(session.result.fit_errors) == {"0", "2"}
    corrected = session.result.fit_errors["2"]
    uncorrected = plain.result.fit_errors["2"]
    assert corrected[1] > uncorrected[1]  # errors of the inputs count, too
    assert corrected[2] < corrected[3]


def test_tokens_that_are_weighed_are_judged_as_they_count():
    weighed = {"weight": {"name": "imatrix_mse", "norm": 2.0, "signed": True, "weigh_tokens": True}}
    session = calibrated(wide(), tokens(2048).chunk(8), observers=weighed, rounding="gptq")
    on_fitted, on_others = fit_changes(session.result.fit_errors)
    assert on_fitted < on_others < 0


def test_the_closing_line_of_a_trainer_and_the_page_say_it(tmp_path, caplog):
    module = Plain()
    callback = CalibrationCallback(
        {"weights": {"num_bits": 4}}, observers={"weight": "imatrix_mse"}, engines="unchecked"
    )
    with caplog.at_level("INFO"):
        trainer(callback).validate(module, loader(count=64), verbose=False)
    text = callback.result.facts()["fit"]
    assert "on others" in text
    assert f"fit: {text}" in callback.result.line(", ")
    page = callback.report(tmp_path).read_text()
    assert "beside weights without data" in page


def _on_ranks(rank, sharded):
    torch.manual_seed(0)
    model = wide()
    if sharded:
        fully_shard(model)
    batches = tokens(2048).chunk(8)[rank::2]
    with CalibrationSession(model, INT4, **FITTED, collectives=Collectives.of_group()) as session:
        for batch in batches:
            model(batch)
    return session.result.fit_errors, session.result.facts()["fit"]


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "FSDP2"])
def test_ranks_judge_as_one_device_does(sharded):
    alone = calibrated(wide(), tokens(2048).chunk(8)).result
    first, second = run_ranks(_on_ranks, 2, sharded)
    assert first == second
    errors, text = first
    assert errors.keys() == alone.fit_errors.keys()
    assert text.endswith("(2 layers)")
    for change, expected in zip(fit_changes(errors), fit_changes(alone.fit_errors), strict=True):
        assert change == pytest.approx(expected, abs=0.05)


# ---------------------------------------------------------------------- words


def test_a_loss_within_the_estimate_is_none():
    assert not loses({"a": (0.01, 0.04, 0.0407, 0.04)})
    assert loses({"a": (0.01, 0.04, 0.0409, 0.04)})
    assert not loses({})
    assert fit_text({}, KEPT_OUT_OF) == "not judged on batches kept out: none of them was observed for it"
