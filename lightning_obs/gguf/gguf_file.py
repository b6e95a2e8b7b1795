"""Export a calibrated model as a GGUF file for llama.cpp, with the codes and scales that were calibrated.

llama.cpp's own tools forget them: its converter dequantizes a compressed-tensors checkpoint, and ``llama-quantize``
chooses other scales, from the largest weight of each block. But its formats are what a scheme in groups of 32 computes:
``Q4_0`` is ``d * (q - 8)``, symmetric int4, whose ``d`` may be negative; ``Q4_1`` is ``d * q + m``, int4 with a zero
point. So the weights of a GGUF file of the model in float are replaced, and everything else (vocabulary, metadata,
norms) stays byte for byte: llama.cpp's converter has written it, and knows best how.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy, is_cached_attention_module
from numpy.typing import NDArray
from torch import nn

from lightning_obs.errors import CalibrationError, refuse, require_bool, warn
from lightning_obs.files.write import require_new_file, whole_file
from lightning_obs.gguf.base_file import BaseFile
from lightning_obs.gguf.block_formats import BLOCK, FORMATS, BlockFormat, InFloat16, format_for, to_blocks
from lightning_obs.model.module_qparams import calibrated_modules, calibrated_schemes, refuse_unmerged, require_ready
from lightning_obs.model.offload import is_offloaded
from lightning_obs.model.stored import stored_range, stored_weight
from lightning_obs.model.weight import in_shards, matrix_shape, whole_matrix
from lightning_obs.numerics.qparams import scheme_args
from lightning_obs.packages import import_package
from lightning_obs.schemes.config import describe, describe_scheme

_FILE_KIND = "a GGUF file"
_SCHEMES = (
    f"integer weights of 4, 5 or 8 bits, symmetric, or of 4 or 5 bits with zero points, that share their scale in "
    f"{BLOCK}, 64, 96... columns; MXFP4A16"
)
_REMEDY = "use the scheme Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0, or list them in `ignore`."


class _Replacement(NamedTuple):
    """A tensor of the base that gets other data; ``_replacements`` makes it, and ``_write`` packs the data.

    Attributes:
        block_format: the format of the new data.
        modules: the modules whose weights the tensor holds, in order: one, or the experts of a layer.
        row_orders: for each module, ``(R,)``, the numbers of its weight's rows in the order of the file.
    """

    block_format: BlockFormat
    modules: list[nn.Module]
    row_orders: list[NDArray[np.int64]]


def export_gguf(
    model: nn.Module,
    file: str | os.PathLike[str],
    base: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> Path:
    """Write a calibrated model as a GGUF file, which llama.cpp and what is built on it run.

    The calibrated weights of a GGUF file of the same model in float are replaced: int4 is stored as Q4_0, with zero
    points as Q4_1, int5 as Q5_0 and Q5_1, int8 as Q8_0, MXFP4 as MXFP4, with the codes that were calibrated. GGUF
    stores scales in float16. The schemes ``Q4_0`` to ``Q8_0`` calibrate scales that float16 holds exactly; other scales
    are rounded, with a warning. For a zero point GGUF stores the number of the lowest code in float16, so that weights
    differ from ``quantized()`` by up to 0.7 % of a step (5 bits: 1.5 %). Needs the package of the extra ``gguf``. The
    user calls it, and a callback or the command line at the end of a run that exports.

    Args:
        model: a model of transformers, calibrated in weights alone. It is not changed.
        file: path of the new file, which appears complete or not at all.
        base: a GGUF file of the model in float16, bfloat16 or float32, made by llama.cpp's ``convert_hf_to_gguf.py``.
            Everything but the calibrated weights is taken from it.
        overwrite: replace an existing ``file``.

    Returns:
        The path of the file.

    Raises:
        CalibrationError: the model was not calibrated, or has changed since; GGUF cannot hold the scheme, or float16
            the scales; ``base`` is of another model, or has no tensor for a calibrated module; the file exists, or
            cannot be written.
    """
    import_package("gguf", "export_gguf")
    file = Path(file)
    require_ready(model, merged_for=_FILE_KIND)
    calibrated = dict(calibrated_modules(model))
    base_file, replacements = _prepare(model, calibrated_schemes(model), file, base, overwrite)
    _check_scales(calibrated)
    with whole_file(file, overwrite) as partial_file:
        _write(partial_file, base_file, replacements)
    return file


def require_gguf(
    model: nn.Module,
    schemes: Mapping[str, QuantizationScheme],
    file: str | os.PathLike[str],
    base: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> None:
    """Refuse what :func:`export_gguf` could not write.

    A run that exports at its end calls it before its model sees data (``GgufFile.check_model`` in
    ``callbacks/destinations.py``).

    Args:
        model: a model that is calibrated, or will be.
        schemes: schemes of the modules that are calibrated, or will be, by module name.
        file, base, overwrite: as for :func:`export_gguf`.

    Raises:
        CalibrationError: all that :func:`export_gguf` raises, unless the values of the calibration are the cause.
    """
    _prepare(model, schemes, file, base, overwrite)


def _prepare(
    model: nn.Module,
    schemes: Mapping[str, QuantizationScheme],
    file: str | os.PathLike[str],
    base: str | os.PathLike[str],
    overwrite: bool,
) -> tuple[BaseFile, dict[str, _Replacement]]:
    """Make all checks of :func:`require_gguf`, and return the base and its tensors that get other data, by name.

    :func:`export_gguf` calls it too, and writes by what it returns.
    """
    base_file = check_files(file, base, overwrite)
    refuse_unmerged(model, _FILE_KIND)
    refuse(
        [name for name in schemes if is_cached_attention_module(model.get_submodule(name))],
        "GGUF has no quantized attention states",
        remedy="leave the kv cache in full precision; llama.cpp quantizes its own (--cache-type-k).",
    )
    refuse(
        [name for name, module in model.named_modules() if in_shards(module) or is_offloaded(module)],
        "weights are sharded over ranks, or offloaded",
        remedy="export_checkpoint, then load_checkpoint in one process and export_gguf there.",
    )
    _refuse_schemes(model, schemes)
    _refuse_other_embeddings(model, schemes, base_file)
    return base_file, _replacements(model, schemes, base_file)


# ---------------------------------------------------------------------- refusals


def check_files(file: str | os.PathLike[str], base: str | os.PathLike[str], overwrite: bool) -> BaseFile:
    """Open the base; refuse files that could not be written or read, whatever the model.

    ``callbacks/destinations.py`` calls it when a run starts; :func:`export_gguf` and :func:`require_gguf` call it
    again.

    Args:
        file, base, overwrite: as for :func:`export_gguf`.

    Returns:
        The opened base.
    """
    import_package("gguf", "export_gguf")
    require_bool(overwrite=overwrite)
    file = Path(file)
    require_new_file(file, overwrite)
    if file.exists() and Path(base).exists() and file.samefile(base):
        raise CalibrationError(f"{file} is the base itself", remedy="choose another name.")
    return BaseFile(Path(base))


def _refuse_schemes(model: nn.Module, schemes: Mapping[str, QuantizationScheme]) -> None:
    """Refuse schemes that no format of GGUF holds."""
    modules_by_reason: dict[str, list[str]] = {}
    for name, scheme in schemes.items():
        reason = _reason_against(model.get_submodule(name), scheme)
        if reason is not None:
            modules_by_reason.setdefault(reason, []).append(name)
    for reason, names in modules_by_reason.items():
        refuse(names, f"GGUF cannot hold {reason}", expected=_SCHEMES, remedy=_REMEDY)


def _reason_against(module: nn.Module, scheme: QuantizationScheme) -> str | None:
    """The part of one module's scheme that GGUF cannot hold, in words for an error; None if GGUF holds the scheme."""
    if scheme.weights is None or len(list(scheme_args(scheme))) > 1:
        return f"{describe_scheme(scheme)}: only weights"
    shape = matrix_shape(module)
    if shape is None:
        return f"the weight of a {type(module).__name__}"
    if scheme.weights.strategy == QuantizationStrategy.TENSOR_GROUP:
        return f"{describe(scheme.weights)} weights with their global scale, which llama.cpp leaves out in many models"
    if format_for(scheme.weights, shape[1]) is None:
        return f"{describe(scheme.weights)} weights of {shape[1]} columns"
    if hasattr(module, "weight_g_idx"):
        return "weights in activation order"
    return None


def _refuse_other_embeddings(model: nn.Module, schemes: Mapping[str, QuantizationScheme], base: BaseFile) -> None:
    """Refuse a base whose embeddings differ from the model's, and a quantized embedding that would be the output layer.

    llama.cpp takes the embedding as the output layer where the base has none. An embedding whose shape
    differs from the base's is not compared. ``base.row_order`` is None where the base's values are another weight's.
    """
    embeddings = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    tensor_names = base.names_of(model, list(embeddings))
    others = []
    tied = []
    for name, tensor in tensor_names.items():
        weight = whole_matrix(embeddings[name])
        is_comparable = weight is not None and base.shape(tensor) == tuple(weight.shape)
        if weight is not None and is_comparable and base.row_order(tensor, weight) is None:
            others.append(f"{name} ({tensor})")
        if name in schemes and tensor == "token_embd.weight" and "output.weight" not in base.tensors:
            tied.append(name)
    _refuse_other_weights(others, base)
    refuse(
        tied,
        f"{base.path} has no output layer: llama.cpp would take the quantized embedding, which the model does not",
        remedy="list the embedding in `ignore`.",
    )


def _refuse_other_weights(where: Sequence[str], base: BaseFile) -> None:
    """Refuse a base that holds the weights of another model."""
    refuse(
        where,
        f"{base.path} holds other weights than the model",
        expected="the model's own, in float16, bfloat16 or float32",
        remedy="convert the model as it is now: save_pretrained, then llama.cpp's convert_hf_to_gguf.py.",
    )


def _check_scales(modules: Mapping[str, nn.Module]) -> None:
    """Refuse scales that float16 cannot hold; warn of scales that it rounds.

    :func:`export_gguf` calls it before it writes.

    Args:
        modules: the calibrated modules, by name.

    Raises:
        CalibrationError: names the modules.
    """
    lost = []
    rounded = []
    for name, module in modules.items():
        stored = stored_range(module, "weight")
        shape = matrix_shape(module)
        assert stored is not None
        assert shape is not None
        block_format = format_for(stored.args, shape[1])
        assert block_format is not None  # _refuse_schemes
        in_float16 = InFloat16.of(stored.scale, block_format)
        if not in_float16.is_close:
            lost.append(name)
        elif not in_float16.is_exact:
            rounded.append(name)
    refuse(
        lost,
        "GGUF stores scales in float16, which is too narrow for these",
        remedy="list them in `ignore`, or scale their weights.",
    )
    if rounded:
        warn(
            f"GGUF stores scales in float16: those of {len(rounded)} modules are rounded, by up to 0.05 %, and the "
            "file differs from quantized() by that. The schemes Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 calibrate scales that "
            "are float16."
        )


# ---------------------------------------------------------------------- modules and tensors


def _replacements(
    model: nn.Module, schemes: Mapping[str, QuantizationScheme], base: BaseFile
) -> dict[str, _Replacement]:
    """The tensors of the base that get other data, by name.

    A tensor holds one module, or all experts of a layer; each expert is compared with its own part of the tensor.
    ``base.row_order`` gives the order of a module's rows in the file, by which :func:`export_gguf` reorders its data:
    llama.cpp's converter permutes the rows of rotated queries and keys. None: the values are another weight's.

    Args:
        model: the model whose weights the base holds in float.
        schemes: schemes of the modules to replace, by module name; GGUF holds them.
        base: the file whose tensors are replaced.

    Raises:
        CalibrationError: the base has no tensor for a module, or one of another shape or with other values; experts of
            a layer that are not all quantized alike.
    """
    tensor_names = base.names_of(model, list(schemes))
    refuse(
        [name for name in schemes if name not in tensor_names],
        f"{base.path} has no tensors for calibrated modules, by the names that llama.cpp's converter gives",
        remedy="list them in `ignore`; other parts of a model (vision towers) are in a file of their own.",
    )
    names_by_tensor: dict[str, list[str]] = {}
    for name, tensor in tensor_names.items():
        names_by_tensor.setdefault(tensor, []).append(name)
    replacements = {}
    others: list[str] = []
    for tensor, names in names_by_tensor.items():
        modules = [model.get_submodule(name) for name in names]
        block_format = _one_format(tensor, names, modules, schemes)
        _refuse_other_shape(tensor, modules, base)
        values = base.values(tensor).reshape(len(modules), -1, base.shape(tensor)[-1])
        row_orders = []
        for module, matrix in zip(modules, values, strict=True):
            weight = whole_matrix(module)
            assert weight is not None  # _reason_against
            order = base.row_order(tensor, weight, matrix)
            if order is not None:
                row_orders.append(order)
        if len(row_orders) < len(modules):
            others.append(f"{tensor} ({names[0]})")
        replacements[tensor] = _Replacement(block_format, modules, row_orders)
    _refuse_other_weights(others, base)
    return replacements


def _one_format(
    tensor: str, names: Sequence[str], modules: Sequence[nn.Module], schemes: Mapping[str, QuantizationScheme]
) -> BlockFormat:
    """The format of the modules that one tensor holds.

    Raises:
        CalibrationError: they have several.
    """
    formats: set[BlockFormat] = set()
    for name, module in zip(names, modules, strict=True):
        shape = matrix_shape(module)
        weights = schemes[name].weights
        assert shape is not None
        assert weights is not None
        block_format = format_for(weights, shape[1])
        assert block_format is not None  # _refuse_schemes
        formats.add(block_format)
    if len(formats) > 1:
        raise CalibrationError(
            f"experts of one layer are one tensor of a GGUF file ({tensor}), and have several schemes",
            where=names,
            remedy="give all experts one scheme.",
        )
    return formats.pop()


def _refuse_other_shape(tensor: str, modules: Sequence[nn.Module], base: BaseFile) -> None:
    """Refuse a tensor of another shape than the modules' weights have together."""
    shape = matrix_shape(modules[0])
    assert shape is not None
    expected: tuple[int, ...] = tuple(shape)
    if len(base.shape(tensor)) > 2:
        expected = (len(modules), *expected)
    if base.shape(tensor) != expected:
        raise CalibrationError(
            f"a tensor of {base.path} has another shape than the model's weights",
            where=[tensor],
            got=f"{base.shape(tensor)}, the calibrated modules have {expected}",
            remedy="convert this very model; calibrate all experts of a layer, or none.",
        )


# ---------------------------------------------------------------------- writing


def _write(file: Path, base: BaseFile, replacements: Mapping[str, _Replacement]) -> None:
    """Write the file: the base with other data for the tensors in ``replacements``, packed when they are written.

    The metadata give the format of most of the replaced weights as the format of the file.
    """
    gguf: Any = import_package("gguf", "export_gguf")

    # base.write calls it when it comes to the tensor.
    def data(tensor: str) -> bytes:
        replacement = replacements[tensor]
        parts = []
        for module, order in zip(replacement.modules, replacement.row_orders, strict=True):
            weight = stored_weight(module)
            assert weight is not None  # _reason_against
            parts.append(to_blocks(weight, replacement.block_format)[order].tobytes())
        return b"".join(parts)

    types = {}
    counts: Counter[str] = Counter()
    for tensor, replacement in replacements.items():
        name = replacement.block_format.name
        types[tensor] = int(gguf.GGMLQuantizationType[name])
        counts[name] += int(base.tensors[tensor].n_elements)
    most = counts.most_common(1)[0][0]
    file_types = {block_format.name: block_format.file_type for block_format in FORMATS}
    numbers = {
        "general.file_type": int(gguf.LlamaFileType[file_types[most]]),
        "general.quantization_version": int(gguf.GGML_QUANT_VERSION),
    }
    base.write(file, types, numbers, data)
