"""What targets and entries of ``ignore`` match, where a model has containers or modules with two names."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from lightning_obs.errors import CalibrationError, CalibrationWarning
from tests.schemes.plans import names, plan

PATTERN = re.compile(r"list (re:\S+)")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.gate = nn.Linear(4, 4)


class Tied(nn.Module):
    """``encoder.0`` is also ``decoder.0``."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.decoder = nn.ModuleList([self.encoder[0], nn.Linear(4, 4)])


@pytest.fixture
def blocks():
    return nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()]), "head": nn.Linear(4, 4)})


@pytest.mark.parametrize("entry", ["layers.0", "re:.*layers[.]0$"])
def test_an_ignored_container_gets_a_warning_whose_pattern_excludes_what_is_inside(blocks, entry):
    with pytest.warns(CalibrationWarning, match=r"`ignore` excludes a module, not the modules inside it") as caught:
        assert "layers.0.fc" in names(blocks, "FP8", ignore=[entry])
    pattern = PATTERN.search(str(caught[0].message)).group(1)
    assert pattern == "re:layers[.]0[.]"
    assert names(blocks, "FP8", ignore=[pattern]) == ["layers.1.fc", "layers.1.gate", "head"]


def test_an_ignored_class_of_containers_gets_a_pattern_for_each(blocks):
    with pytest.warns(CalibrationWarning, match=r"list re:layers\[\.]0\[\.], re:layers\[\.]1\[\.] in `ignore`"):
        names(blocks, "FP8", ignore=["Block"])


def test_an_entry_that_excludes_a_target_gets_no_warning(blocks):
    assert names(blocks, "FP8", ignore=["re:layers.0.*"]) == ["layers.1.fc", "layers.1.gate", "head"]
    assert names(nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 1)), "FP8", ignore=["1"]) == ["0"]


@pytest.mark.parametrize("name", ["encoder.0", "decoder.0", "re:decoder[.]0"])
def test_ignore_takes_either_name_of_a_tied_module(name):
    planned = plan(Tied(), "FP8", ignore=[name])
    assert [target.name for target in planned.targets] == ["encoder.1", "decoder.1"]
    assert "decoder.0" not in planned.config.ignore  # compressed-tensors knows the first name only


@pytest.mark.parametrize("name", ["encoder.0", "decoder.0", "re:decoder[.]0"])
def test_targets_take_either_name_of_a_tied_module(name):
    assert names(Tied(), "FP8", targets=[name]) == ["encoder.0"]


def test_a_pattern_reaches_tied_modules_and_others():
    assert names(Tied(), "FP8", targets=["re:decoder[.]"]) == ["encoder.0", "decoder.1"]
    assert names(Tied(), "FP8", ignore=["re:decoder[.]"]) == ["encoder.1"]


def test_a_target_of_the_first_name_comes_before_a_pattern_of_the_second():
    planned = plan(Tied(), {"FP8": ["re:encoder[.]"], "INT8_STATIC": ["re:decoder[.]"]})
    weight_types = {target.name: target.scheme.weights.type for target in planned.targets}
    assert weight_types == {"encoder.0": "float", "encoder.1": "float", "decoder.1": "int"}


def test_two_groups_that_name_one_module_by_its_two_names_are_refused():
    with pytest.raises(CalibrationError, match=r"a target is in two groups: encoder\.0"):
        plan(Tied(), {"FP8": ["encoder.0"], "INT8_STATIC": ["decoder.0"]})


def test_a_tied_module_ignored_by_its_second_name_is_not_calibrated():
    from lightning_obs import CalibrationSession

    model = Tied()
    with CalibrationSession(model, "W8A8", ignore="decoder.0", engines="unchecked"):
        pass
    assert not hasattr(model.encoder[0], "weight_scale")
    assert isinstance(model.encoder[1].weight_scale, torch.Tensor)
