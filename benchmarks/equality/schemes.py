"""Every scheme end to end: calibrate, export, reload with transformers, compare logits.

    python benchmarks/equality/schemes.py                         # a tiny Llama made on the fly, float32 and bfloat16
    python benchmarks/equality/schemes.py --scheme NVFP4 W4A16

Prints the table of docs/evidence/schemes.md. ``default load`` and ``dequantize=True`` are the largest difference
between the logits of ``quantized(model)`` and those of the checkpoint loaded by ``from_pretrained`` as it is, or with
``CompressedTensorsConfig(dequantize=True)``. "refused": lightning_obs says before calibrating that it would not load
back with the same numbers. Exit code 1 if a checkpoint that was not refused gives other logits by default.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from lightning_obs import CalibrationError, CalibrationSession, export_checkpoint, quantized
from lightning_obs.report.numbers import folder_size
from lightning_obs.schemes.config import label

VOCABULARY = 128
SCHEMES: dict[str, dict[str, Any]] = {
    name: {"scheme": name}
    for name in (
        *("INT8_STATIC", "INT8_STATIC_ASYM", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"),
        *("W4A16", "W4A16_ASYM", "W8A16", "W4A8", "W4AFP8"),
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
        *("NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP8", "MXFP8A16"),
    )
} | {
    "FP8, kv_cache=FP8": {"scheme": "FP8", "kv_cache": "FP8"},
    "kv_cache=FP8": {"scheme": None, "kv_cache": "FP8"},
    "kv_cache=FP8_HEAD": {"scheme": None, "kv_cache": "FP8_HEAD"},
    "q, k, v in FP8": {
        "scheme": {
            "attention": {
                "targets": ["LlamaAttention"],
                "input_activations": {"num_bits": 8, "type": "float", "observer": "static_minmax"},
            }
        }
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scheme", nargs="+", default=list(SCHEMES), choices=list(SCHEMES))
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")

    failed = False
    print("| scheme | quantized tensors | model | format | size | default load | `dequantize=True` |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_tiny(Path(scratch) / "model")
        for name in options.scheme:
            for dtype in options.dtype:
                row, is_right = try_scheme(folder, SCHEMES[name], getattr(torch, dtype), Path(scratch))
                failed |= not is_right
                print(
                    f"| `{name}` | {row['what']} | {dtype} | {row['format']} | {row['size']} | "
                    f"{row['transformers']} | ",
                    end="",
                )
                print(f"{row['dequantize']} |", flush=True)
    return int(failed)


def try_scheme(folder: Path, options: dict[str, Any], dtype: torch.dtype, scratch: Path) -> tuple[dict[str, str], bool]:
    """One line of the table, and whether the default load gives the same logits or was refused."""
    found, is_right = {"format": "", "size": "", "what": ""}, True
    for engine in ("transformers", "dequantize"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        before = sum(p.numel() * p.element_size() for p in model.parameters())
        try:
            ignore = [] if options["scheme"] is None or isinstance(options["scheme"], dict) else ["lm_head"]
            session = CalibrationSession(model, ignore=ignore, engines=engine, **options)
        except CalibrationError:
            found[engine] = "refused"
            continue
        found["what"] = label(session.options.config, session.options.config)
        with session, torch.no_grad():
            for batch in batches() if session.needs_data else ():
                model(batch)
        out = export_checkpoint(model, scratch / "out", overwrite=True)
        found["format"] = json.loads((out / "config.json").read_text())["quantization_config"]["format"]
        found["size"] = f"{100 * folder_size(out) / before:.0f} %"
        with torch.no_grad(), quantized(model):
            expected = model(batches()[0]).logits
        extra = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if engine == "dequantize" else {}
        try:
            loaded = AutoModelForCausalLM.from_pretrained(out, **extra).eval()
            with torch.no_grad():
                difference = (loaded(batches()[0]).logits.double() - expected.double()).abs().max().item()
            found[engine] = f"{difference:.2g}" if difference else "0.0"
            is_right &= engine != "transformers" or difference == 0.0
        except Exception as error:  # the table says so
            found[engine] = f"fails ({type(error).__name__})"
            is_right &= engine != "transformers"
    return found, is_right


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (2, 16), generator=generator) for _ in range(3)]


def make_tiny(folder: Path) -> Path:
    """Save a Llama of two layers, 128 wide."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        initializer_range=0.1,  # large enough for the layers to matter
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
