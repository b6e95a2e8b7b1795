"""Are the quantization parameters those of llm-compressor, bit for bit?

    python benchmarks/equality/parity.py                   # a tiny Llama made on the fly
    python benchmarks/equality/parity.py --model default   # SmolLM2-135M, four batches of English text
    python benchmarks/equality/parity.py --model FOLDER

llm-compressor pins compressed-tensors 0.19 and transformers 5.17, so this runs in a venv of its own that holds both
packages: ``make parity`` makes it and runs the first command.

Each scheme calibrates one copy of the model with llm-compressor's ``oneshot`` and another with ``CalibrationSession``.
Every scale, zero point and global scale is then compared: dtype, shape, and all bits. Exit code 1 if any differs.

What must be set equal, and why:

- inputs are observed by ``static_minmax``: llm-compressor's default is a moving average, which depends on the order;
- ``attn_implementation="eager"``: llm-compressor forces it while it calibrates, and sdpa rounds differently;
- ``pipeline="basic"``: whole forwards in full precision. The sequential pipeline observes what quantized layers give;
- weights are observed once, by ``memoryless_minmax``, the default of both.

Symmetric zero points are all 0. llm-compressor stores them, lightning_obs does not: an absent one counts as zeros.
Where 128 does not divide the columns (SmolLM2 has 576), W4A16 takes groups of 64 and FP8_BLOCK loses its inputs, which
it quantizes dynamically in groups of 128.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from loguru import logger
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from lightning_obs import CalibrationSession
from lightning_obs.app.data.module import TextData
from lightning_obs.app.models.pretrained import default_model_folder, load_pretrained
from lightning_obs.model.module_qparams import SUFFIXES, calibrated_modules, read_qparams
from lightning_obs.schemes.attention_states import KV_PRESETS
from lightning_obs.schemes.config import preset_names

PRESETS = ("FP8", "FP8_BLOCK", "W4A16", "W4A16_ASYM", "NVFP4")
KV_CACHE = "FP8 and kv cache"
IGNORE = ["lm_head"]
BATCHES, TOKENS, VOCABULARY = 4, 128, 128

Batch = dict[str, torch.Tensor]
Tensors = dict[str, torch.Tensor]


def main() -> int:
    """Run every scheme in both dtypes, print one table, return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="tiny", help="tiny (made on the fly), default (SmolLM2), or a folder")
    parser.add_argument(
        "--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16", "float16"]
    )
    parser.add_argument("--scheme", nargs="+", default=["INT8_STATIC", *PRESETS], choices=["INT8_STATIC", *PRESETS])
    options = parser.parse_args()
    _quiet()

    table = Table("model", "dtype", "scheme", "tensors", "equal", "first difference")
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(options.model, Path(scratch))
        for dtype in options.dtype:
            for name, scheme in schemes(group_size(folder)).items():
                if name.split()[0] not in options.scheme:
                    continue
                theirs, ours = calibrate_both(folder, dtype, name, scheme, random_ids=options.model == "tiny")
                keys = sorted({*theirs, *ours})
                differences = [found for key in keys if (found := difference(key, theirs, ours))]
                failed |= bool(differences) or not theirs
                first = differences[0] if differences else "none"
                table.add_row(options.model, dtype, name, str(len(keys)), str(len(keys) - len(differences)), first)
    Console(width=120).print(table)
    return int(failed)


def model_folder(model: str, scratch: Path) -> Path:
    """Where the model lies that ``--model`` names."""
    if model == "tiny":
        return make_tiny(scratch)
    return default_model_folder() if model == "default" else Path(model)


def schemes(group: int) -> dict[str, QuantizationScheme]:
    """The schemes by name, fitted to a model whose columns ``group`` divides."""
    found = {
        "INT8_STATIC": QuantizationScheme(
            targets=["Linear"],
            weights=QuantizationArgs(num_bits=8, strategy="channel"),
            input_activations=QuantizationArgs(num_bits=8, strategy="tensor", observer="static_minmax"),
        )
    }
    for name in PRESETS:
        found[name] = preset_name_to_scheme(name, ["Linear"])
        if name == "FP8":
            found[KV_CACHE] = found[name]
    if group < 128:
        for name in ("W4A16", "W4A16_ASYM"):
            found[f"{name} (groups of {group})"] = scheme = found.pop(name)
            scheme.weights.group_size = group
        found["FP8_BLOCK (weights only)"] = scheme = found.pop("FP8_BLOCK")
        scheme.input_activations = None
    return found


def group_size(folder: Path) -> int:
    """The largest group size, up to 128, that divides the columns of a Llama's Linear modules."""
    config = AutoConfig.from_pretrained(folder)
    return next(size for size in (128, 64, 32, 16) if config.hidden_size % size == 0 == config.intermediate_size % size)


def calibrate_both(
    folder: Path, dtype: str, name: str, scheme: QuantizationScheme, random_ids: bool
) -> tuple[Tensors, Tensors]:
    """Quantization parameters by llm-compressor and by lightning_obs, from the same weights and batches."""
    model, tokenizer = load_pretrained(folder, dtype=dtype, attn_implementation="eager")
    batches = list(
        _random_batches() if random_ids else TextData(tokenizer, batches=BATCHES, tokens=TOKENS).val_dataloader()
    )
    kv_cache = KV_PRESETS["FP8"] if name == KV_CACHE else None
    recipe = QuantizationModifier(
        ignore=IGNORE,
        config_groups={"group_0": scheme.model_copy(deep=True)},
        kv_cache_scheme=None if kv_cache is None else kv_cache.model_copy(deep=True),
    )
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar per scheme
        oneshot(
            model=model,
            dataset=DataLoader(batches, batch_size=None),
            recipe=recipe,
            pipeline="basic",
            processor=tokenizer,  # required, and not used with a DataLoader
        )
    kinds = tuple(f".{base}_{suffix}" for base in ("weight", "input", "k", "v") for suffix in SUFFIXES)
    theirs = {key: value for key, value in model.state_dict().items() if key.endswith(kinds)}

    model, _ = load_pretrained(folder, dtype=dtype, attn_implementation="eager")
    own = name if name in preset_names() else scheme  # what users write, where there is a name
    with (
        CalibrationSession(model, own, ignore=IGNORE, kv_cache=kv_cache, engines="unchecked") as session,
        torch.no_grad(),
    ):
        for batch in batches if session.needs_data else ():
            model(**batch, use_cache=False)
    ours = {f"{name}.{key}": v for name, module in calibrated_modules(model) for key, v in read_qparams(module).items()}
    return theirs, ours


def difference(key: str, theirs: Tensors, ours: Tensors) -> str | None:
    """Say how one tensor differs, or None."""
    if key not in theirs:
        return f"{key}: only lightning_obs has it"
    expected = theirs[key]
    if key not in ours:
        absent_is_zero = key.endswith("zero_point") and not bool(expected.float().any())
        return None if absent_is_zero else f"{key}: only llm-compressor has it"
    got = ours[key]
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        return f"{key}: {got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if not torch.equal(_bits(got), _bits(expected)):
        unequal = (got.float() != expected.float()).sum().item()
        worst = (got.float() - expected.float()).abs().max().item()
        return f"{key}: {unequal} of {got.numel()} values, by up to {worst:.3g}"
    return None


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().view(torch.uint8)


def make_tiny(folder: Path) -> Path:
    """Save a Llama of two layers, 128 wide, with a tokenizer that ``oneshot`` asks for and nobody uses."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,  # k and v have 64 rows: FP8_BLOCK's blocks of 128 are ragged there
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<unk>").save_pretrained(folder)
    return folder


def _random_batches() -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(BATCHES):
        yield {"input_ids": torch.randint(3, VOCABULARY, (2, TOKENS), generator=generator)}


def _quiet() -> None:
    logger.remove()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
