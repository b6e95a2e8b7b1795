"""Which architectures of transformers give the same numbers after export and loading, and which are refused.

    python benchmarks/equality/architectures.py  # all that a tiny config makes; ten minutes of one core
    python benchmarks/equality/architectures.py --task CausalLM --only llama qwen3_moe --scheme int4

Each model is random, of two layers. It is calibrated for transformers, exported and loaded by ``from_pretrained``.
``equal``: no logit differs from those of ``quantized()``. ``refused``: a CalibrationError before data, or
after them where no data reached a module. Anything else is a fault, and makes the exit code 1; a convolution may round
differently in a tensor that lies elsewhere in memory, so differences below 1e-6 of the largest logit count as equal.
"""

from __future__ import annotations

import argparse
import inspect
import os
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto as auto
from transformers.utils import logging

from lightning_obs import CalibrationError, CalibrationSession, export_checkpoint, linearize_experts, quantized

SCHEMES: dict[str, Any] = {
    "int4": {"weights": {"num_bits": 4, "group_size": 32}},
    "int8": "INT8_STATIC",
    "fp8": "FP8_DYNAMIC",
    "w8": {"weights": {"num_bits": 8, "strategy": "channel"}},
}
TASKS = {
    "CausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "Seq2SeqLM": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "MaskedLM": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "SequenceClassification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "ImageTextToText": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "ImageClassification": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
#: fields of configs, where a config has them
WIDTHS = dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 64)
WIDTHS |= dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 128)
WIDTHS |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64)
COUNTS = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"), 2
)
COUNTS |= dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4)
COUNTS |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
COUNTS |= dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "moe_k", "moe_topk"), 2)
COUNTS |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
COUNTS |= dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "bos_token_id"), 1)
REST = dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32)
REST |= dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim", "sliding_window"), 16)
REST |= {"vocab_size": 128, "max_position_embeddings": 128, "n_positions": 128, "initializer_range": 0.05}
REST |= {"pad_token_id": 0, "eos_token_id": 2, "use_cache": False}
IMAGES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LARGEST = 40_000_000  # parameters; what a config leaves larger is left out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", nargs="*", choices=TASKS, default=[*TASKS])
    parser.add_argument("--only", nargs="*", help="model types; all by default")
    parser.add_argument("--scheme", nargs="*", choices=SCHEMES, default=[*SCHEMES])
    parser.add_argument("--seconds", type=int, default=60, help="for one model and scheme")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _late)
    found = Counter[str]()
    for task in options.task:
        for kind in sorted(options.only or TASKS[task]):
            if kind not in TASKS[task]:
                continue
            for scheme in options.scheme:
                verdict, text = judge(task, kind, SCHEMES[scheme], options.seconds)
                found[verdict] += 1
                print(f"{task:23}{kind:28}{scheme:6}{verdict:9}{text[:160]}", flush=True)
                if verdict == "left out":
                    break
    print(", ".join(f"{verdict} {count}" for verdict, count in found.items()))
    return int(found["fault"] > 0)


def judge(task: str, kind: str, scheme: Any, seconds: int) -> tuple[str, str]:
    """The verdict on one architecture and scheme, and its reason."""
    signal.alarm(seconds)
    try:
        model, inputs = make(task, kind)
    except Exception as error:
        signal.alarm(0)
        return "left out", f"{type(error).__name__}: {error}".partition("\n")[0]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            linearize_experts(model)
            verdict, text = compare(model, inputs, scheme)
    except CalibrationError as error:
        return "refused", str(error)
    except Exception as error:
        verdict, text = "fault", f"{type(error).__name__}: {error}".replace("\n", " ")
    finally:
        signal.alarm(0)
    if verdict == "fault" and not loads_unquantized(*make(task, kind)):
        return "left out", "transformers does not load it unquantized either"
    return verdict, text


def make(task: str, kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A random model, and an input that it runs on."""
    config = shrunk(type(AutoConfig.for_model(kind)), IMAGES if task == "ImageClassification" else None)
    build = getattr(transformers, f"AutoModelFor{task}").from_config
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    model = build(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.std():
            nn.init.normal_(parameter, std=0.05)
    tokens = torch.randint(3, 120, (2, 16))
    tokens[:, -1] = REST["eos_token_id"]
    inputs = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if task == "Seq2SeqLM" else {})
    if task == "ImageClassification":
        side = getattr(config, "image_size", 64)
        inputs = {"pixel_values": torch.randn(1, 3, *([side] * 2 if isinstance(side, int) else side))}
    if not logits(model, inputs).isfinite().all():
        raise ValueError("logits that are not finite")
    return model, inputs


def shrunk(kind: type[Any], only: Sequence[str] | None = None) -> Any:
    """A config of small numbers, also in the configs that it has in it."""
    default = kind()
    known, renamed = default.to_dict(), getattr(default, "attribute_map", {})
    fields = {n: v for n, v in {**WIDTHS, **COUNTS, **REST}.items() if n in known or n in renamed}
    fields = {n: v for n, v in fields.items() if renamed.get(n) not in fields and (only is None or n in only)}
    if "kv_lora_rank" in fields:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    source = Path(str(inspect.getsourcefile(kind)).replace("configuration_", "modeling_"))
    if "rope_parameters" in known and source.exists() and "mrope_section" in source.read_text():
        fields["rope_parameters"] = (known["rope_parameters"] or {}) | {"mrope_section": [2, 3, 3]}
    for name, inner in getattr(kind, "sub_configs", {}).items():
        inner = type(getattr(default, name, None)) if inner is AutoConfig else inner
        if issubclass(inner, PreTrainedConfig):
            fields[name] = shrunk(inner)
    return kind(**fields)


def compare(model: nn.Module, inputs: dict[str, torch.Tensor], scheme: Any) -> tuple[str, str]:
    ignore = [n for n, module in model.named_modules() if module is getattr(model, "get_output_embeddings", int)()]
    with torch.no_grad(), CalibrationSession(model, scheme, ignore=ignore, on_missing="siblings") as session:
        if session.needs_data:
            model(**inputs)
    with quantized(model):
        expected = logits(model, inputs)
    with tempfile.TemporaryDirectory() as folder:
        export_checkpoint(model, Path(folder, "model"))
        loaded: Any = type(model)
        found = logits(loaded.from_pretrained(Path(folder, "model"), dtype="auto").eval(), inputs)
    difference = float((found - expected).abs().max())
    modules = f"{len(session.result.modules) if session.result else 0} modules"
    if difference > 1e-6 * float(expected.abs().max()):
        return "fault", f"{modules}, largest difference {difference:.3g}"
    return "equal", modules


def loads_unquantized(model: Any, inputs: dict[str, torch.Tensor]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return torch.allclose(logits(type(model).from_pretrained(folder).eval(), inputs), logits(model, inputs))


@torch.no_grad()
def logits(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**inputs).logits


def _late(*_: Any) -> None:
    raise TimeoutError("it takes longer")


if __name__ == "__main__":
    sys.exit(main())
