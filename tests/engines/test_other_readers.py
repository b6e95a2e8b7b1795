"""llama.cpp's converter and SGLang themselves (`make engines` installs them): what they take and read.

Each reader gets every preset and the schemes of ``tests/engines/test_readers.py`` as checkpoints of a tiny model, and
has to take those that its engine takes, with the numbers that were calibrated, and no others.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from dataclasses import dataclass, field

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_obs import CalibrationSession, export_checkpoint
from lightning_obs.engines.engine import ENGINES, Verdict
from lightning_obs.forward.quantized_module import quantized_weight
from lightning_obs.schemes.config import preset_names
from tests.engines.test_readers import SAID, int_weights
from tests.engines.test_schemes_in_vllm import in_vllm, pytestmark

__all__ = ["pytestmark"]  # slow, and skipped where the environment is not there

CASES = {**{name: (name, {}) for name in preset_names()}, **{name: given[:2] for name, given in SAID.items()}}
SEVERAL = {
    "NVFP4 and NVFP4A16": {"NVFP4": ["re:.*mlp.*_proj"], "NVFP4A16": ["re:.*self_attn.*_proj"]},
    "W8A8 and FP8_DYNAMIC": {"W8A8": ["re:.*mlp.*_proj"], "FP8_DYNAMIC": ["re:.*self_attn.*_proj"]},
    "W4A16 and W8A16": {"W4A16": ["re:.*mlp.*_proj"], "W8A16": ["re:.*self_attn.*_proj"]},
    "groups of 32 and 64": {
        "mlp": {"targets": ["re:.*mlp.*_proj"], **int_weights(group_size=32)},
        "attention": {"targets": ["re:.*self_attn.*_proj"], **int_weights(group_size=64)},
    },
}
WRONG = "W4A16 with a wrong scale"
#: parts of SGLang's fused layers
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
#: bound of what rounding to bfloat16 changes, of one; integers of 8 bits are further apart
BFLOAT16 = 2**-8


@dataclass
class Written:
    """A checkpoint: the engines' verdicts, the tensors in its file, and the weights that a reader has to find there."""

    verdicts: dict[str, Verdict]
    stored: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor] = field(repr=False)


def tiny_llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    further = {"vocab_size": 256, "max_position_embeddings": 128, "initializer_range": 0.1}
    config = LlamaConfig(num_hidden_layers=1, tie_word_embeddings=False, **sizes, **further)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def unrounded(module):
    """The quantized weight in float32; of int4 in groups without the rounding of scale times integer to bfloat16."""
    weight, scale = quantized_weight(module).float(), module.weight_scale.float()
    if module.quantization_scheme.weights.num_bits == 4 and module.quantization_scheme.weights.strategy == "group":
        scale = scale.repeat_interleave(weight.shape[1] // scale.shape[1], dim=1)
        weight = (weight / scale).round() * scale
    return weight


@torch.no_grad()
def written(model, ids, scheme, options, folder):
    model.eval()
    options = {"ignore": ["lm_head"], **options}
    with CalibrationSession(model, scheme, engines="unchecked", **options) as session:
        if session.needs_data:
            model(ids)
    export_checkpoint(model, folder)
    modules = {name: m for name, m in model.named_modules() if hasattr(m, "weight_scale")}
    for module in modules.values():
        module.weight.data = unrounded(module)
    weights = {f"{name}.weight": module.weight.detach() for name, module in modules.items()}
    return Written(session.engines, load_file(folder / "model.safetensors"), weights)


def all_written(cases, make, root):
    """Every case's checkpoint, and one whose numbers are no longer those that were calibrated."""
    ids = torch.randint(3, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    found = {name: written(make(), ids, *case, root / name) for name, case in cases.items()}
    found[WRONG] = found["W4A16 group 32"]
    shutil.copytree(root / "W4A16 group 32", root / WRONG)
    tensors = load_file(root / WRONG / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight_scale"] *= 2
    save_file(tensors, root / WRONG / "model.safetensors", metadata={"format": "pt"})
    return root, found


@pytest.fixture(scope="module")
def of_llama(tmp_path_factory):
    several = {name: (scheme, {"ignore": []}) for name, scheme in SEVERAL.items()}
    return all_written({**CASES, **several}, tiny_llama, tmp_path_factory.mktemp("llama"))


@functools.cache
def read_by(reader, root):
    """What the reader says of each checkpoint: its reason to refuse it, or the tensors that it made of it."""
    in_vllm("in_readers.py", reader, root, seconds=900)
    answer = json.loads((root / f"{reader}.json").read_text())
    if "missing" in answer:
        pytest.skip(f"{reader} is not there: {answer['missing']} (make .venv-engines/.installed)")
    return {
        name: refused or load_file(root / name / f"{reader}.safetensors") for name, refused in answer["refused"].items()
    }


def far(one, other):
    """The greatest difference, in shares of the greatest number."""
    return float((one - other).abs().max() / other.abs().max())


def weights_are_ours(found, ours):
    return found.keys() == ours.weights.keys() and max(far(found[n], ours.weights[n]) for n in found) < BFLOAT16


def layers_hold_what_is_stored(found, ours):
    """Whether SGLang's layers hold the parts of the file and nothing else (a shape is that of the part loaded last)."""
    for name, tensor in found.items():
        if name != "capability" and not name.endswith("weight_shape"):
            parent, layer, key = name.rsplit(".", 2)
            parts = torch.cat([ours.stored[f"{parent}.{part}.{key}"] for part in FUSED.get(layer, (layer,))])
            if not torch.equal(parts.float().flatten(), tensor.float().flatten()):
                return False
    return True


IS_OURS = {
    "llama.cpp": weights_are_ours,
    "sglang": layers_hold_what_is_stored,
}


@pytest.mark.parametrize("reader", IS_OURS)
def test_a_reader_takes_what_its_engine_says_and_reads_our_numbers(reader, of_llama):
    root, ours = of_llama
    wrong = []
    for name, found in read_by(reader, root).items():
        verdict = ours[name].verdicts[ENGINES[reader].name]
        takes = not isinstance(found, str) and IS_OURS[reader](found, ours[name])
        if takes != (verdict.loads and name != WRONG):
            wrong.append(f"{name}: {verdict.text}; {reader}: {found if isinstance(found, str) else takes}")
    assert not wrong, "\n".join(wrong)


def test_sglang_needs_the_compute_capability_that_its_engine_says(of_llama):
    root, ours = of_llama
    said = {name: re.findall(r"CUDA (\d+)\.(\d+)", ours[name].verdicts["SGLang"].text) for name in ours}
    found = {name: answer for name, answer in read_by("sglang", root).items() if not isinstance(answer, str)}
    assert {name: answer["capability"].tolist() for name, answer in found.items()} == {
        name: [int(digit) for digit in said[name][0]] for name in found
    }
