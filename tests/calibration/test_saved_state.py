"""A saved calibration is loaded again, or refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import nn

from lightning_obs import CalibrationSession, quantized
from lightning_obs.calibration.saved_state import dump_statistics, load_statistics
from lightning_obs.errors import CalibrationError
from lightning_obs.files.sealed import sealed
from lightning_obs.model.module_qparams import calibrated_modules, read_qparams
from lightning_obs.schemes.config import make_observer
from tests.calibration.common import STATIC, attributes, calibrate

ASYMMETRIC = {"symmetric": False, "observer": "static_minmax"}


def test_a_loaded_state_gives_the_same_qparams_and_outputs(mlp, tmp_path):
    fresh = copy.deepcopy(mlp)
    torch.save(calibrate(mlp, STATIC, torch.randn(4, 16)).state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    CalibrationSession(fresh, STATIC).load_state_dict(state)
    for name, module in calibrated_modules(mlp):
        expected = read_qparams(fresh.get_submodule(name))
        assert expected.keys() == read_qparams(module).keys()
        assert all(torch.equal(value, expected[key]) for key, value in read_qparams(module).items())
    x = torch.randn(4, 16)
    with quantized(mlp), quantized(fresh):
        assert torch.equal(mlp(x), fresh(x))


def test_a_loaded_state_can_be_saved_again(mlp):
    state = calibrate(mlp, STATIC, torch.randn(4, 16)).state_dict()
    session = CalibrationSession(copy.deepcopy(mlp), STATIC)
    session.load_state_dict(state)
    again = session.state_dict()
    assert again["qparams"].keys() == state["qparams"].keys()
    assert all(torch.equal(again["qparams"][key], value) for key, value in state["qparams"].items())


@pytest.mark.filterwarnings("ignore:.*left in full precision, because no data reached them")
def test_a_module_that_a_loaded_state_left_out_loses_its_earlier_qparams_and_stays_left_out():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.seldom = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, seldom=True):
            return self.always(x) + (self.seldom(x) if seldom else 0)

    model, x = Branches(), torch.randn(3, 4)
    with CalibrationSession(model, STATIC, on_missing="warn") as session:
        model(x, seldom=False)
    state = session.state_dict()
    calibrate(model, STATIC, x)
    loaded = CalibrationSession(model, STATIC, on_missing="warn")
    loaded.load_state_dict(state)
    assert [name for name, _ in calibrated_modules(model)] == ["always"]
    loaded.finalize(activations=False)  # as fine-tuning does before each validation
    assert [name for name, _ in calibrated_modules(model)] == ["always"]


def test_a_saved_state_does_not_change_with_the_model(mlp):
    session = calibrate(mlp, STATIC, torch.randn(4, 16))
    state = session.state_dict()
    before = {key: value.clone() for key, value in state["qparams"].items()}
    mlp.fc1.input_scale.zero_()
    session.result.qparams["fc1.input_scale"].zero_()
    assert all(torch.equal(state["qparams"][key], value) for key, value in before.items())


@pytest.mark.parametrize(
    ("scheme", "options"),
    [("W8A8", {}), (STATIC, {"ignore": "fc2"}), (STATIC, {"observers": {"input": "minmax"}})],
    ids=["scheme", "ignore", "observer"],
)
def test_the_state_of_another_configuration_is_refused(mlp, scheme, options):
    state = calibrate(copy.deepcopy(mlp), STATIC, torch.randn(4, 16)).state_dict()
    assert json.loads(state["config"])["config_groups"]
    before = attributes(mlp)
    with pytest.raises(CalibrationError, match="made with another scheme, other observers or another ignore list"):
        CalibrationSession(mlp, scheme, **options).load_state_dict(state)
    assert attributes(mlp) == before


@pytest.mark.filterwarnings("ignore:.* stay in full precision")
def test_the_state_of_another_model_is_refused(mlp, cnn):
    state = calibrate(mlp, STATIC, torch.randn(4, 16)).state_dict()
    before = attributes(cnn)
    with pytest.raises(CalibrationError, match="has modules that this model does not have: fc1, fc2"):
        CalibrationSession(cnn, STATIC).load_state_dict(state)
    assert attributes(cnn) == before


def test_a_state_of_another_shape_or_format_is_refused(mlp):
    with CalibrationSession(mlp, "W8A8") as session:
        pass
    other = CalibrationSession(type(mlp)(width=64), "W8A8")
    message = r"does not fit: fc1\.weight_scale has shape \(32, 1\) instead of \(64, 1\)"
    with pytest.raises(CalibrationError, match=message):
        other.load_state_dict(session.state_dict())
    with pytest.raises(CalibrationError, match="a format that this version does not know"):
        session.load_state_dict(sealed({**session.state_dict(), "format": 1}))
    assert not hasattr(other.model.fc1, "weight_scale")


def without(state, *keys):
    for key in keys:
        del state[key]


DAMAGES = {
    "no input scale": (lambda s: without(s["qparams"], "fc1.input_scale"), r"fc1\.input_scale is missing"),
    "no zero point": (lambda s: without(s["qparams"], "fc2.input_zero_point"), r"fc2\.input_zero_point is missing"),
    "no module": (
        lambda s: without(s["qparams"], *[key for key in s["qparams"] if key.startswith("fc2.")]),
        "changed since it was saved",
    ),
    "NaN": (lambda s: s["qparams"]["fc1.weight_scale"][3].fill_(float("nan")), "weight_scale is not finite"),
    "zero": (lambda s: s["qparams"]["fc1.weight_scale"][3].fill_(0), "weight_scale is not finite and other than zero"),
    "negative": (lambda s: s["qparams"]["fc1.input_scale"].neg_(), "input_scale is not finite and positive"),
    "broadcast": (
        lambda s: s["qparams"].update({"fc1.weight_scale": torch.ones(1, 1)}),
        r"weight_scale has shape \(1, 1\) instead of \(32, 1\)",
    ),
    "zero point": (
        lambda s: s["qparams"].update({"fc1.input_zero_point": torch.tensor([200])}),
        "input_zero_point is not from -128 to 127",
    ),
    "other values": (lambda s: s["qparams"]["fc1.weight_scale"][3].mul_(2), "has changed since it was saved"),
    "no values": (lambda s: s["qparams"].clear(), "has changed since it was saved"),
    "no tensor": (lambda s: s["qparams"].update({"fc1.input_scale": 0.5}), "input_scale is a float, not a tensor"),
    "a method": (
        lambda s: s["qparams"].update({"fc1.forward": torch.ones(1)}),
        r"fc1\.forward belongs to nothing that is quantized",
    ),
    "no qparams": (lambda s: without(s, "qparams"), "has changed since it was saved"),
    "no checksum": (lambda s: without(s["checksums"], "fc1"), "has changed since it was saved"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_state_is_refused_and_nothing_is_written(mlp, damage, message):
    fresh = copy.deepcopy(mlp)
    scheme = {"a": {"targets": ["Linear"], "weights": {"strategy": "channel"}, "input_activations": ASYMMETRIC}}
    state = copy.deepcopy(calibrate(mlp, scheme, torch.randn(4, 16)).state_dict())
    damage(state)
    if "since it was saved" not in message:
        with pytest.raises(CalibrationError, match="has changed since it was saved"):
            CalibrationSession(fresh, scheme).load_state_dict(state)
        state = sealed(state)
    before = attributes(fresh)
    with pytest.raises(CalibrationError, match=message):
        CalibrationSession(fresh, scheme).load_state_dict(state)
    assert attributes(fresh) == before


def test_a_state_that_is_none_is_refused(mlp):
    with pytest.raises(CalibrationError, match=r"the saved calibration cannot be read. Got AttributeError: 'list'"):
        CalibrationSession(mlp, STATIC).load_state_dict(["a", "list"])


def test_statistics_that_lack_one_that_is_declared_now_are_refused():
    args = QuantizationArgs(num_bits=8, observer="normal_observer")
    observer = make_observer("input", args)
    observer(torch.randn(4, 16))
    saved = dump_statistics({("fc1", "input"): observer})
    del saved["fc1.input"][observer.statistics[-1].name]
    fresh = make_observer("input", args)
    message = rf"another version of {type(observer).__name__}: fc1 \(input\)\. Got no {observer.statistics[-1].name}"
    with pytest.raises(CalibrationError, match=message):
        load_statistics({("fc1", "input"): fresh}, saved)
    assert not fresh.get_statistics()
