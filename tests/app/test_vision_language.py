"""The text part of a vision-language model, quantized from the command line; its tower stays as it is."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForImageTextToText

from lightning_obs import CalibrationSession, quantized
from tests.support.markdown import commands, page
from tests.support.vision_models import KINDS, save_vision_model

IGNORE = ["lm_head", "re:.*(visual|vision_tower|multi_modal_projector)"]
TOWERS = {
    "llava": {
        "re:model\\.vision_tower($|\\.)", "re:model\\.multi_modal_projector($|\\.)", "re:vision_tower($|\\.)",
        "re:multi_modal_projector($|\\.)",
    },
    "qwen2_5_vl": {"re:model\\.visual($|\\.)", "re:visual($|\\.)"},
}  # fmt: skip


def load(folder):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(10, 42)[None]).logits


def names(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def require_complete(source, out, kind):
    ignore = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert {entry for entry in ignore if "vis" in entry or "projector" in entry} == TOWERS[kind]
    added = ("weight_scale", "weight_packed", "weight_shape", "input_scale", "input_zero_point")
    plain = {name.removesuffix("_packed") for name in names(out) if not name.endswith(added) or "packed" in name}
    assert plain == names(source)
    for name in ("preprocessor_config.json", "LICENSE", "tokenizer.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes(), name


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_model_in_memory(command_line, tmp_path, kind):
    source = save_vision_model(tmp_path / "model", kind)
    ignore = f"ignore={json.dumps(IGNORE)}"
    words = ["task=weights", "scheme=w4a16", "group_size=32", f"model.path={source}", ignore, "export.folder=out"]
    done = command_line(*words, tiny=False)
    assert done.returncode == 0, done.stderr
    require_complete(source, tmp_path / "out", kind)
    model = load(source)
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
    with CalibrationSession(model, {"weights": weights}, ignore=IGNORE):
        pass
    with quantized(model):
        assert torch.equal(logits(load(tmp_path / "out")), logits(model))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_calibrated_on_text(command_line, verified_here, tmp_path, kind):
    source = save_vision_model(tmp_path / "model", kind)
    [command] = [line for line in commands(page("docs/guide/larger_than_memory.md")) if "vision_tower" in line]
    words = command.replace("<folder>", str(source)).replace("<out>", "out").replace("'", "").split()[3:]
    done = command_line(*words)
    assert done.returncode == 0, done.stderr
    assert "largest difference of logits 0.0" in done.stdout
    require_complete(source, tmp_path / "out", kind)
