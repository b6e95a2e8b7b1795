"""``smooth=true`` moves outliers of inputs into weights before the calibration, and the file has these weights."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_obs import CalibrationError
from lightning_obs.app.main import run


@pytest.mark.usefixtures("verified_here")
def test_a_run_smooths_before_it_calibrates_and_exports_the_smooth_weights(composed, tiny_folder, tmp_path, capsys):
    name = "model.layers.0.input_layernorm.weight"
    shutil.copytree(tiny_folder, tmp_path / "outliers")
    original = load_file(tiny_folder / "model.safetensors")
    original[name][5] = 300
    for projection in "qkv":
        original[f"model.layers.0.self_attn.{projection}_proj.weight"][:, 5] *= 0.003
    save_file(original, tmp_path / "outliers" / "model.safetensors", metadata={"format": "pt"})
    run(composed("scheme=int8_static", "smooth=true", f"model.path={tmp_path / 'outliers'}"))
    output = capsys.readouterr().out
    assert re.search(r"smooth: outliers of \d+ inputs moved into weights; errors of their outputs -\d+\.\d%", output)
    stored = load_file(tmp_path / "run" / "checkpoint" / "model.safetensors")
    factors = original[name] / stored[name]
    assert factors[5] > 4
    assert torch.equal(factors.log2().round(), factors.log2())
    assert "largest difference of logits 0.0" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scheme=w4a16", "group_size=32"], r"quantizes none.*expected a scheme such as INT8_STATIC"),
        (["trainer.devices=2"], r"smooth=true runs on one device.*ot 2 devices.*trainer\.devices=1"),
    ],
)
def test_what_cannot_be_smoothed_is_refused_before_any_data(composed, words, message):
    with pytest.raises(CalibrationError, match=message):
        run(composed("smooth=true", "export=none", *words))


def test_padding_of_the_batches_does_not_count(composed, monkeypatch):
    """Here a token counts unless it is 0: the batches have no other mask."""
    masks = []

    def watched(model, batches, options, token_mask):
        for batch in batches:
            mask = token_mask(batch)
            assert torch.equal(mask, batch["input_ids"])
            masks.append(mask)
        return []

    monkeypatch.setattr("lightning_obs.app.tasks.calibrate.smooth_inputs", watched)
    run(composed("scheme=int8_static", "smooth=true", "export=none", "token_mask=input_ids"))
    assert masks
