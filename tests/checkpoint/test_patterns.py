"""A pattern of somebody else's config cannot hang the loader."""

import json
import time

import pytest
from torch import nn

from lightning_obs import CalibrationError, CalibrationSession, export_checkpoint, load_checkpoint
from lightning_obs.checkpoint import patterns
from lightning_obs.checkpoint.patterns import refuse_slow_patterns

SLOW = r"re:(\w+)+!"


class Long(nn.Module):
    def __init__(self):
        super().__init__()
        self.a_layer_with_a_long_name_as_models_have_them = nn.Linear(4, 4)


@pytest.mark.parametrize("key", ["ignore", "targets"])
def test_a_pattern_that_backtracks_for_hours_is_named(tmp_path, monkeypatch, key):
    model = Long()
    with CalibrationSession(model, "W8A8"):
        pass
    folder = export_checkpoint(model, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    quantization = config["quantization_config"]
    (quantization if key == "ignore" else quantization["config_groups"]["group_0"])[key] = [SLOW]
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(patterns, "SECONDS", 1.0)
    start = time.monotonic()
    with pytest.raises(CalibrationError, match=r"config\.json has a pattern that takes more than 1 s") as error:
        load_checkpoint(Long(), folder)
    assert error.value.got == SLOW
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("config", [None, 3, [], {"ignore": ["lm_head", "re:.*gate", "re:["]}, {"a": {"re:x": None}}])
def test_other_configs_pass(config, tmp_path):
    refuse_slow_patterns(config, ["lm_head"], tmp_path)
