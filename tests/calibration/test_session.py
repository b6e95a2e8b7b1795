"""A session attaches, finishes and writes; nothing is left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationSession, export_checkpoint
from lightning_obs.calibration import finalize
from lightning_obs.errors import CalibrationError, CalibrationWarning
from lightning_obs.model.module_qparams import calibrated_modules, read_qparams, write_qparams
from tests.calibration.common import STATIC, Experts, attributes, calibrate, hooks, input_scale

# ---------------------------------------------------------------------- what is written


@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC", {"weights": {"num_bits": 4, "group_size": 8}}])
def test_a_scheme_without_static_activations_needs_no_forward(mlp, scheme):
    with CalibrationSession(mlp, scheme) as session:
        pass
    assert session.result.modules == ["fc1", "fc2"]
    assert session.result.batches == session.result.measurements == 0
    assert set(read_qparams(mlp.fc1)) == {"weight_scale"}


def test_a_static_scheme_writes_the_range_of_all_batches(mlp):
    batches = torch.randn(3, 4, 16)
    with CalibrationSession(mlp, STATIC) as session:
        for x in batches:
            mlp(x)
    assert torch.equal(mlp.fc1.input_scale, input_scale(batches))
    assert torch.equal(mlp.fc2.input_scale, input_scale(mlp.act(mlp.fc1(batches.flatten(0, 1)))))
    assert torch.equal(mlp.fc1.weight_scale, mlp.fc1.weight.detach().abs().amax(1, keepdim=True) / 127.5)
    assert session.result.batches == 3


def test_the_result_says_what_was_done(mlp):
    x = torch.randn(4, 16)
    with CalibrationSession(mlp, STATIC) as session:
        mlp(x)
    result = session.result
    assert (result.scheme, result.modules, result.plan.observers, result.skipped) == (STATIC, ["fc1", "fc2"], 4, [])
    assert result.input_ranges["fc1"] == (x.min().item(), x.max().item())
    assert set(result.qparams) == {f"fc{i}.{base}_scale" for i in (1, 2) for base in ("weight", "input")}
    assert torch.equal(result.qparams["fc1.input_scale"], mlp.fc1.input_scale)
    assert result.seconds > 0


def test_asymmetric_schemes_have_zero_points_and_symmetric_ones_have_none(mlp):
    scheme = {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8, "symmetric": False}}
    with CalibrationSession(mlp, scheme):
        mlp(torch.rand(4, 16) + 1)
    assert set(read_qparams(mlp.fc1)) == {"weight_scale", "input_scale", "input_zero_point"}
    assert mlp.fc1.input_zero_point.tolist() == [-128]


def test_outputs_are_observed(mlp):
    x = torch.randn(4, 16)
    with CalibrationSession(mlp, {"output_activations": {"num_bits": 8, "observer": "static_minmax"}}, targets="fc2"):
        output = mlp(x)
    assert torch.equal(mlp.fc2.output_scale, input_scale(output))


def test_a_convolution_is_calibrated(cnn):
    x = torch.randn(2, 3, 8, 8)
    with CalibrationSession(cnn, STATIC, targets=["Conv2d", "Linear"]):
        cnn(x)
    assert torch.equal(cnn.conv.input_scale, input_scale(x))
    assert cnn.conv.weight_scale.shape == (8, 1)


def test_observers_and_their_hyperparameters_are_used(mlp):
    batches = torch.randn(2, 4, 16)
    with CalibrationSession(mlp, STATIC, observers={"input": {"name": "minmax", "averaging_constant": 0.5}}) as session:
        for x in batches:
            mlp(x)
    low, high = (torch.stack([f(x) for x in batches]).mean() for f in (torch.min, torch.max))
    assert session.result.chosen_input_ranges["fc1"] == pytest.approx((low.item(), high.item()))
    assert session.result.input_ranges["fc1"] == (batches.min().item(), batches.max().item())


@pytest.mark.parametrize("name", ["on_missing", "engines"])
def test_an_unknown_option_value_is_refused(mlp, name):
    with pytest.raises(CalibrationError, match=rf"{name}. Got 'ignore', expected '(error|transformers)'"):
        CalibrationSession(mlp, STATIC, **{name: "ignore"})


# ---------------------------------------------------------------------- how data reaches an observer


def test_no_hook_is_left(mlp):
    with CalibrationSession(mlp, STATIC):
        assert hooks(mlp) == 4  # on the inputs of two Linears, before and after the model
        mlp(torch.randn(4, 16))
    assert hooks(mlp) == 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_no_hook_and_writes_nothing(mlp, error):
    before, session = attributes(mlp), CalibrationSession(mlp, STATIC)

    def stopped():
        with session:
            mlp(torch.randn(4, 16))
            raise error("stop")

    with pytest.raises(error, match="stop"):
        stopped()
    assert hooks(mlp) == 0
    assert attributes(mlp) == before
    assert session.result is None


def test_an_exception_in_the_forward_leaves_no_hook(mlp):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), CalibrationSession(mlp, STATIC):
        mlp(torch.randn(4, 17))
    assert hooks(mlp) == 0


def test_hooks_of_the_user_s_stay(mlp):
    calls = []
    mlp.fc1.register_forward_pre_hook(lambda module, args: calls.append("pre"))
    mlp.fc1.register_forward_hook(lambda module, args, output: calls.append("post"))
    for _ in range(2):
        with CalibrationSession(mlp, STATIC):
            mlp(torch.randn(4, 16))
    assert hooks(mlp) == 2
    assert calls == ["pre", "post"] * 2


def test_calibrating_changes_no_output(mlp):
    x = torch.randn(4, 16)
    before = mlp(x)
    with CalibrationSession(mlp, STATIC):
        assert torch.equal(mlp(x), before)
    assert torch.equal(mlp(x), before)


def test_detaching_twice_is_fine_and_finishing_needs_no_block(mlp):
    session = CalibrationSession(mlp, STATIC)
    session.attach()
    mlp(torch.randn(4, 16))
    session.detach()
    session.detach()
    assert session.finalize().modules == ["fc1", "fc2"]


def test_the_caller_can_count_the_batches(mlp):
    session = CalibrationSession(mlp, STATIC)
    session.attach(count_calls=False)
    mlp(torch.randn(4, 16))
    assert session.batches == 0
    session.count_batches(7)
    assert session.finalize().batches == 7


# ---------------------------------------------------------------------- again


def test_a_second_calibration_forgets_the_first(mlp):
    session, x = CalibrationSession(mlp, STATIC), torch.randn(4, 16)
    with session:
        mlp(x * 10)
    with torch.no_grad():
        mlp.fc1.weight.mul_(0.5)
    with session:
        mlp(x)
    assert torch.equal(mlp.fc1.input_scale, input_scale(x))
    assert torch.equal(mlp.fc1.weight_scale, mlp.fc1.weight.detach().abs().amax(1, keepdim=True) / 127.5)
    assert session.result.batches == 1


def test_weights_are_observed_as_they_are_at_the_end(mlp):
    with CalibrationSession(mlp, "W8A8"), torch.no_grad():
        mlp.fc1.weight.fill_(255)
    assert (mlp.fc1.weight_scale == 2).all()


def test_finishing_twice_observes_the_weights_anew(mlp):
    session = calibrate(mlp, "W8A8", observers={"weight": "static_minmax"})
    with torch.no_grad():
        mlp.fc1.weight.mul_(0.5)
    session.finalize()
    assert torch.equal(mlp.fc1.weight_scale, mlp.fc1.weight.detach().abs().amax(1, keepdim=True) / 127.5)


def test_a_module_that_a_second_calibration_does_not_reach_loses_its_qparams():
    model, x = Experts(), torch.randn(4, 16)
    with CalibrationSession(model, STATIC):
        model(x, chosen=(0, 1, 2))
    with (
        pytest.warns(CalibrationWarning, match="left in full precision"),
        CalibrationSession(model, STATIC, on_missing="warn"),
    ):
        model(x, chosen=(0, 1))
    assert [name for name, _ in calibrated_modules(model)] == ["experts.0", "experts.1"]


# ---------------------------------------------------------------------- all or nothing


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError])
def test_what_interrupts_writing_leaves_all_modules_as_they_were(mlp, error, monkeypatch, tmp_path):
    session = calibrate(mlp, STATIC, torch.randn(4, 16))
    qparams, state = session.result.qparams, session.state_dict()

    def interrupted(module, scheme, values):
        if module is mlp.fc2:
            raise error
        write_qparams(module, scheme, values)

    monkeypatch.setattr(finalize, "write_qparams", interrupted)
    session.attach()
    mlp(100 * torch.randn(4, 16))
    with torch.no_grad():
        mlp.fc1.weight *= 2
    with pytest.raises(error):
        session.finalize()
    now = {f"{n}.{key}": value for n, m in mlp.named_children() for key, value in read_qparams(m).items()}
    assert now.keys() == qparams.keys()
    assert all(torch.equal(now[key], value) for key, value in qparams.items())
    assert session.state_dict()["checksums"] == state["checksums"]
    with pytest.raises(CalibrationError, match=r"changed since .*: fc1\.weight"):
        export_checkpoint(mlp, tmp_path / "out")


def test_an_interrupt_after_the_last_write_leaves_modules_and_session_as_they_were(mlp, monkeypatch):
    session = calibrate(mlp, STATIC, torch.randn(4, 16))
    before, state = attributes(mlp), session.state_dict()

    def interrupted(*_, **facts):
        raise KeyboardInterrupt

    monkeypatch.setattr(finalize, "result_of", interrupted)
    with torch.no_grad():
        mlp.fc1.weight *= 2
    with pytest.raises(KeyboardInterrupt):
        session.finalize(activations=False)
    assert attributes(mlp) == before
    assert session.state_dict()["crc"] == state["crc"]


def test_a_state_is_loaded_whole_or_not_at_all(mlp, monkeypatch):
    state = calibrate(mlp, STATIC, torch.randn(4, 16)).state_dict()
    other = type(mlp)()
    other.load_state_dict(mlp.state_dict())
    before = attributes(other)

    def interrupted(module, scheme, values):
        if module is other.fc2:
            raise KeyboardInterrupt
        write_qparams(module, scheme, values)

    monkeypatch.setattr(finalize, "write_qparams", interrupted)
    session = CalibrationSession(other, STATIC)
    with pytest.raises(KeyboardInterrupt):
        session.load_state_dict(state)
    assert attributes(other) == before
    assert not session.has_written


def test_the_result_says_which_tied_head_was_left_out():
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "fc": nn.Linear(4, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    with CalibrationSession(model, "FP8_DYNAMIC") as session:
        pass
    assert session.result.modules == ["fc"]
    assert "left out: head (tied to embed)" in repr(session.result)


@pytest.mark.parametrize("token_mask", [3, lambda batch: batch["mask"]])
def test_a_session_takes_the_name_of_its_token_mask(token_mask):
    with pytest.raises(CalibrationError, match=r"token_mask. Got .*, expected the name of an argument of the model"):
        CalibrationSession(nn.Linear(4, 2), "FP8", token_mask=token_mask)


def test_modules_that_keep_another_scheme_are_named():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with CalibrationSession(model, "W8A8", targets=["0"]):
        pass
    with CalibrationSession(model, "W8A8", targets=["1"]):  # the same scheme: module by module, on purpose
        pass
    expected = (
        "^0: calibrated before with another scheme, and not targeted by FP8_DYNAMIC, so the model has both schemes now"
    )
    with pytest.warns(CalibrationWarning, match=expected), CalibrationSession(model, "FP8_DYNAMIC", targets=["1"]):
        pass
