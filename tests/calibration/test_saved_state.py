"""A saved calibration is loaded again, or refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from lightning_obs import CalibrationSession, quantized
from lightning_obs.errors import CalibrationError
from lightning_obs.model.qparams import calibrated_modules, read_qparams
from tests.calibration.common import STATIC, attributes, calibrate


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


def test_the_state_of_another_model_is_refused(mlp, cnn):
    state = calibrate(mlp, STATIC, torch.randn(4, 16)).state_dict()
    before = attributes(cnn)
    with pytest.raises(CalibrationError, match="has modules that this model has not: fc1, fc2"):
        CalibrationSession(cnn, STATIC).load_state_dict(state)
    assert attributes(cnn) == before


def test_a_state_of_another_shape_or_format_is_refused(mlp):
    with CalibrationSession(mlp, "W8A8") as session:
        pass
    other = CalibrationSession(type(mlp)(width=64), "W8A8")
    with pytest.raises(CalibrationError, match="weights with other shapes: fc1"):
        other.load_state_dict(session.state_dict())
    with pytest.raises(CalibrationError, match="a format that this version does not know"):
        session.load_state_dict({**session.state_dict(), "format": 3})
    assert not hasattr(other.model.fc1, "weight_scale")
