"""Quantization parameters on modules: write, read, remove; and checksums of the tensors that they belong to.

The parameters are plain tensor attributes under compressed-tensors' names (``weight_scale``, ``input_zero_point``,
``weight_global_scale``), beside its ``quantization_scheme`` and ``quantization_status``. They are neither parameters
nor buffers, on purpose: ``state_dict`` and strict loading, DDP's buffer broadcast, FSDP's sharding, the zip of weight
averaging and ``model.to(torch.bfloat16)`` (which would round global scales) never see them. compressed-tensors' forward
reads them by ``getattr``, so it does not mind.

The forward of the model does not change until :func:`~lightning_obs.quantized` is entered.

Checksums tell whether a model is as it was calibrated. A module keeps the checksums of its own parameters and buffers:
they survive renaming and wrapping of modules around it. Where parameters are sharded, every rank must call the
functions of checksums.

A tensor's bytes are words of 32 bits, in tiles of 2**17. With pseudorandom odd multipliers of 64 bits, ``a`` for each
tile and ``b`` for each place in a tile, the checksum is ``sum a * b * word`` modulo 2**64. A sum needs no order of its
terms: the checksums of the parts that ranks hold add up to the checksum of the whole, under any sharding, and every
device computes the same one.

Why it is sound. The difference of two words is below 2**32, so ``b`` times it takes a given value modulo 2**64 for at
most 2**-32 of all multipliers. Two different tensors therefore have one checksum by chance only: multipliers do not
depend on weights. No two positions have the same product ``a * b`` but by chance, so swapped rows are noticed. (With
words of 64 bits, two changes of the highest bit would cancel, since every multiplier is odd.)
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, TypeAlias

import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationMetadata,
    QuantizationScheme,
    QuantizationStatus,
    QuantizationType,
    is_cached_attention_module,
)
from torch import distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.model.kinds import is_dispatched, kind_of, without_wrappers
from lightning_obs.model.offload import at_rest, execution_device, is_offloaded
from lightning_obs.model.weight import (
    adapters_of,
    by_unit,
    identity,
    onloaded,
    part_here,
    place_of,
    register_surroundings,
    reshard,
)
from lightning_obs.numerics.qparams import ATTENTION, SCHEME_FIELDS, scheme_args
from lightning_obs.ranks.collectives import all_ranks_answer

#: the attribute of a module that holds the checksums of its own parameters and buffers, by name. A plain dict: copies
#: and pickles of a calibrated module have it, too, and need nothing of this package for it
CHECKSUMS = "calibrated_checksums"
#: how the names of quantization parameters end, after a base name and ``_``
SUFFIXES = ("scale", "zero_point", "global_scale")
#: a weight ``(R, C)`` in the numbers of its format that a rounding chose, where they are not the nearest; like scales,
#: a plain attribute that copies have
ROUNDED = "weight_rounded"


def _qparam_names() -> tuple[str, ...]:
    # Every name that a quantization parameter can have: weight_scale, input_zero_point, k_scale...; and ROUNDED.
    names = []
    for base_name in (*SCHEME_FIELDS, *ATTENTION):
        for suffix in SUFFIXES:
            names.append(f"{base_name}_{suffix}")
    return (*names, ROUNDED)


_QPARAMS = _qparam_names()
#: attributes of a calibrated module by which compressed-tensors knows how it is quantized
_SCHEME = ("quantization_scheme", "quantization_status", "quantization_enabled")
#: names that calibration sets on a module: plain attributes, or buffers
CALIBRATED = (*_QPARAMS, *_SCHEME)

#: the values that calibration has put on each module of a model, by name
Calibration: TypeAlias = dict[nn.Module, dict[str, Any]]


def args_of(module: nn.Module, base_name: str) -> QuantizationArgs | None:
    """The args that a calibrated module's scheme has for one of its tensors; None: the tensor is not quantized.

    Called by the writers, and by the quantized forward.

    Args:
        module: a module, calibrated or not.
        base_name: ``"weight"``, ``"input"`` or ``"output"``; for the states ``"q"``, ``"k"`` and ``"v"`` of attention,
            the result is the scheme's ``input_activations``.
    """
    scheme = get_scheme(module)
    return None if scheme is None else getattr(scheme, SCHEME_FIELDS.get(base_name, "input_activations"))


def get_scheme(module: nn.Module) -> QuantizationScheme | None:
    """The scheme that a module was calibrated with; None if it was not calibrated.

    Asked wherever calibrated modules are read: by exports, reports and the quantized forward, and by a session that
    compares schemes.
    """
    return getattr(module, "quantization_scheme", None)


def quantized_states(module: nn.Module) -> tuple[str, ...]:
    """The attention states (q, k, v) for which a module has scales.

    Called by the export, the quantized attention and the report.
    """
    states = []
    for state in ATTENTION:
        if isinstance(getattr(module, f"{state}_scale", None), torch.Tensor):
            states.append(state)
    return tuple(states)


@at_rest()
def qparams_home(module: nn.Module) -> torch.Tensor | None:
    """The tensor whose dtype and device a module's scales have: its weight; for attention its first parameter.

    Asked when observers are made, for the dtype, and when parameters are stored or read. None: the module has neither.

    The tensor of an offloaded module is at rest; its qparams are on the device on which the module computes.
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor):
        return weight
    return next(module.parameters(), None) if is_cached_attention_module(module) else None


def calibrated_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every calibrated module under its first name.

    Names are those without wrappers (DDP, FSDP1, torch.compile: see :mod:`.kinds`).

    Called for whole models, by exports, by :func:`~lightning_obs.quantized` and by
    :func:`~lightning_obs.keep_packed`, to find the modules with a scheme.
    """
    with without_wrappers(model):
        named_modules = list(model.named_modules())
    for name, module in named_modules:
        if get_scheme(module) is not None:
            yield name, module


def calibrated_schemes(model: nn.Module) -> dict[str, QuantizationScheme]:
    """The scheme of every calibrated module, by its first name.

    Called when a model is exported to ONNX, GGUF or a program, to ask whether the format can hold these schemes.
    """
    schemes = {}
    for name, module in calibrated_modules(model):
        scheme = get_scheme(module)
        assert scheme is not None
        schemes[name] = scheme
    return schemes


def write_qparams(module: nn.Module, scheme: QuantizationScheme, qparams: dict[str, torch.Tensor]) -> None:
    """Put copies of a scheme and of ``{"weight_scale": ..., "k_scale": ...}`` on a module, in place of earlier ones.

    Called by finalize, by a session that restores a calibration, and for a loaded checkpoint; for a checkpoint that is
    quantized from its files, with meta tensors, so that its layout is known before the data.
    """
    scheme = _copy_scheme(scheme)
    qparams = as_stored(module, qparams)
    _clear(module)
    for name, value in qparams.items():
        setattr(module, name, value)
    scheme.format = storage_format(_stored_class(module), scheme)
    module.quantization_scheme = scheme
    module.quantization_status = QuantizationStatus.FROZEN


def _copy_scheme(scheme: QuantizationScheme) -> QuantizationScheme:
    """A copy for one module, into which compressed-tensors may write a format.

    pydantic's deep copy takes longer than the rest of calibrating.
    """
    fields: dict[str, Any] = {"targets": copy(scheme.targets)}
    for base_name, args in scheme_args(scheme):
        fields[SCHEME_FIELDS[base_name]] = args.model_copy(update={"observer_kwargs": copy(args.observer_kwargs)})
    return scheme.model_copy(update=fields)


def _stored_class(module: nn.Module) -> type[nn.Module]:
    """The class for which compressed-tensors knows a format: a convolution's weight is stored like a Linear's."""
    stored_class = kind_of(module).stored_as
    if stored_class is not None:
        return stored_class
    return type(module) if is_cached_attention_module(module) else nn.Linear


def storage_format(kind: type[nn.Module], scheme: QuantizationScheme) -> str:
    """The name of the compressed-tensors format in which a module is stored: the scheme's own, or else an inferred one.

    Called when qparams are written to a module, and by transformers' engine before any data.

    Args:
        kind: the class under which compressed-tensors stores the module: ``nn.Linear`` for a convolution, too.
        scheme: how the module is quantized.

    Integer weights below 8 bits are packed, also where inputs are quantized: compressed-tensors would give each a byte
    there (``int-quantized``), twice the size, which vLLM refuses.

    >>> from compressed_tensors.quantization import preset_name_to_scheme
    >>> storage_format(nn.Linear, preset_name_to_scheme("W4A8", ["Linear"]))
    'pack-quantized'
    """
    weights = scheme.weights
    if scheme.format is not None:
        return CompressionFormat(scheme.format).value
    if weights is not None and weights.type == QuantizationType.INT and weights.num_bits < 8:
        return CompressionFormat.pack_quantized.value
    return str(infer_module_format(kind, scheme).value)


def as_stored(module: nn.Module, qparams: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of quantization parameters as the module will hold them.

    Finalize calls it before it computes errors, so that errors are measured with the numbers that a checkpoint will
    hold; :func:`write_qparams` calls it, too. The copies are on the device of the module's weight (attention: of its
    first parameter; an offloaded module: where it computes). Scales are cast to the weight's dtype, in which
    compressed-tensors stores them. Global scales, zero points and ``weight_rounded`` keep their dtypes.
    """
    home = qparams_home(module)
    scale_dtype = home.dtype if home is not None and home.is_floating_point() else None
    qparams_device = _device_of_qparams(module)
    stored = {}
    for name, value in qparams.items():
        is_scale = name.endswith("_scale") and not name.endswith("_global_scale")
        dtype = scale_dtype if is_scale and scale_dtype is not None else value.dtype
        device = qparams_device or value.device
        stored[name] = value.detach().to(device, dtype, non_blocking=device.type != "cpu", copy=True)
    return stored


def read_qparams(module: nn.Module) -> dict[str, torch.Tensor]:
    """The quantization parameters on a module, on its weight's device; empty if it was not calibrated.

    Called when a calibration is saved, reported or exported. ``model.to(device)`` does not take plain attributes along,
    so they are moved when they are read.
    """
    qparams: dict[str, torch.Tensor] = {}
    attribute_names = _attribute_names(module)
    for name in _QPARAMS:
        if name in attribute_names:
            value = getattr(module, name)
            if isinstance(value, torch.Tensor):
                qparams[name] = value
    device = _device_of_qparams(module) if qparams else None
    if device is None:
        return qparams
    return {name: value.to(device) for name, value in qparams.items()}


def move_qparams(module: nn.Module) -> None:
    """Move a module's quantization parameters to its weight's device, as :func:`read_qparams` gives them.

    Called when a module begins to run quantized.
    """
    with torch.inference_mode(False):
        for name, value in read_qparams(module).items():
            setattr(module, name, value)


def _device_of_qparams(module: nn.Module) -> torch.device | None:
    """Where a module computes if it is dispatched, else where its weight is; None: it has neither."""
    if any(is_dispatched(inner) for inner in module.modules()):
        device = execution_device(module)
        if device is not None:
            return device
    home = qparams_home(module)
    return None if home is None else home.device


def _attribute_names(module: nn.Module) -> set[str]:
    """Names of the module's attributes, parameters and buffers; ``getattr`` is slow for a name that a module lacks."""
    return {*vars(module), *module._parameters, *module._buffers}


def clear_qparams(module: nn.Module) -> None:
    """Remove everything that calibration has set on a module.

    Called before a module is calibrated anew, and where a module's data are released after they were stored.
    """
    _clear(module)
    vars(module).pop(CHECKSUMS, None)


def _clear(module: nn.Module) -> None:
    """Remove qparams and scheme, but not the checksums."""
    # The parameters that compressed-tensors may have registered. A parameter of another name is the model's own.
    registered_names = QuantizationMetadata.all_qparam_names()
    for name in _attribute_names(module).intersection((*registered_names, *_QPARAMS)):
        if name in registered_names or name not in module._parameters:
            delattr(module, name)
    for name in _SCHEME:
        vars(module).pop(name, None)


def calibration_of(model: nn.Module, only: Collection[nn.Module] | None = None) -> Calibration:
    """The calibration that modules hold now, for :func:`put_back`; its values are not copied.

    Called before another calibration replaces it, for good or for the length of a block, and by ``sensitivity``, which
    calibrates the same model with each scheme.

    Args:
        model: any module.
        only: the modules whose qparams and checksums are taken; of all other modules only the checksums are taken.
            None: qparams and checksums of all modules. A session passes the modules of its plan, to keep its own
            calibration: :func:`put_back` then takes qparams of other sessions off all other modules.
    """
    calibration: Calibration = {}
    for module in model.modules():
        names: tuple[str, ...] = (CHECKSUMS,)
        if only is None or module in only:
            names = (*CALIBRATED, CHECKSUMS)
        values = {}
        for name in names:
            if name in vars(module):
                values[name] = vars(module)[name]
            elif name in module._buffers:
                values[name] = module._buffers[name]
        calibration[module] = values
    return calibration


def qparams_of(calibration: Calibration, module: nn.Module) -> dict[str, torch.Tensor]:
    """The quantization parameters of one module in a result of :func:`calibration_of`; empty if it has none there.

    A session calls it for its own ``qparams``, also while another calibration is on the modules.
    """
    qparams = {}
    for name, value in calibration.get(module, {}).items():
        if name in _QPARAMS and isinstance(value, torch.Tensor):
            qparams[name] = value
    return qparams


def put_back(calibration: Calibration) -> None:
    """Replace the calibration of all modules in ``calibration``, a result of :func:`calibration_of`, by that one.

    Modules outside the ``only`` of :func:`calibration_of` have no qparams afterwards. A value that was a buffer comes
    back as a plain attribute, which is read in the same way; its name stays in torch's set of non-persistent buffers,
    where it has no effect.

    Called where a new calibration fails, at the start and the end of a block in which one session's calibration is on
    the modules, and by ``sensitivity`` once it has calibrated the model with each scheme.
    """
    for module, values in calibration.items():
        for name in (*CALIBRATED, CHECKSUMS):
            module._buffers.pop(name, None)
            vars(module).pop(name, None)
        vars(module).update(values)


# ---------------------------------------------------------------------- checksums of models

#: a module, and the name of one of its own parameters or buffers
_TensorOf: TypeAlias = tuple[nn.Module, str]
#: the device and the groups of ranks over which checksums of parts are added up
_Reduction: TypeAlias = tuple[torch.device, tuple[dist.ProcessGroup, ...]]

_WORDS_PER_TILE = 1 << 17  # a tile and its sums stay in a CPU's cache
_BYTES_PER_WORD = 4
_TILES_AT_ONCE = 256  # multipliers of so many tiles are computed together


def require_ready(model: nn.Module, merged_for: str | None = None) -> None:
    """Raise the error of :func:`not_ready`, if there is one.

    Every export calls it first.

    Args:
        model: a model, calibrated or not.
        merged_for: what the model is needed for, if that needs adapters of LoRA merged into the weights.
    """
    if merged_for is not None:
        refuse_unmerged(model, merged_for)
    problem = not_ready(model)
    if problem is not None:
        raise problem


def refuse_unmerged(model: nn.Module, what: str) -> None:
    """Raise a CalibrationError that ``what`` cannot be done if adapters are not merged into weights of the model.

    Exports that trace the model or write its weights into a base file call it.
    """
    register_surroundings(model)
    refuse(
        [name for name, module in model.named_modules() if adapters_of(module) is not None],
        f"{what} needs adapters merged into their weights",
        remedy="model.merge_and_unload() of peft first; the quantization parameters stay on the merged layers.",
    )


def not_ready(model: nn.Module) -> CalibrationError | None:
    """The error of a model that was not calibrated, or has changed since; None: it is as it was calibrated.

    :func:`~lightning_obs.quantized` and, through :func:`require_ready`, every export ask it.
    """
    if next(calibrated_modules(model), None) is None:
        return CalibrationError(
            f"{type(model).__name__} was not calibrated, it is in full precision",
            remedy="run CalibrationSession or CalibrationCallback on it first.",
        )
    changed = changed_since(model)
    if not changed:
        return None
    return CalibrationError(
        f"{len(changed)} parameters and buffers have changed since the model was calibrated",
        where=changed,
        remedy="calibrate the model as it is now (trainer.validate with the callback).",
    )


@at_rest()
def remember(model: nn.Module) -> None:
    """Write the checksums of all tensors that a checkpoint of ``model`` holds to its modules, as plain attributes.

    Called at the end of a calibration, after a checkpoint was loaded, and when quantized training notes that the
    present weights have the present scales.
    """
    reshard(model)  # FSDP2 leaves its outermost module gathered after a forward; each rank reads its own part here
    tensors = [(module, name) for module in model.modules() for name in _names_in_checkpoint(module)]
    by_module: dict[nn.Module, dict[str, int]] = {}
    for (module, name), value in zip(tensors, checksums(tensors), strict=True):
        by_module.setdefault(module, {})[name] = value
    for module in model.modules():
        vars(module)[CHECKSUMS] = by_module.get(module, {})


@at_rest()
def changed_since(model: nn.Module) -> list[str]:
    """Names of parameters and buffers that have changed since ``model`` was calibrated.

    A tensor that does not exist any more is left out. :func:`not_ready` calls this before an export and before a model
    runs quantized, quantized training before it searches ranges of weights again.
    """
    register_surroundings(model)
    reshard(model)  # as in remember
    with without_wrappers(model):
        named_modules = list(model.named_modules())
    paths: dict[_TensorOf, str] = {}
    for module_name, module in named_modules:
        for name in vars(module).get(CHECKSUMS, {}):
            if isinstance(getattr(module, name, None), torch.Tensor):
                paths[module, name] = f"{module_name}.{name}" if module_name else name
    changed = []
    for (module, name), value in zip(paths, checksums(list(paths)), strict=True):
        if value != vars(module)[CHECKSUMS][name]:
            changed.append(paths[module, name])
    return changed


def _names_in_checkpoint(module: nn.Module) -> Iterator[str]:
    """The module's own parameters and buffers in a checkpoint; without integer buffers, which count steps."""
    meta_has_data = is_dispatched(module) and is_offloaded(module)
    for name, parameter in module.named_parameters(recurse=False):
        if (meta_has_data or not parameter.is_meta) and not is_lazy(parameter):
            yield name
    for name, buffer in module.named_buffers(recurse=False):
        has_data = meta_has_data or not buffer.is_meta
        if buffer.is_floating_point() and has_data and name not in module._non_persistent_buffers_set:
            yield name
    yield from _computed_names(module)


def _computed_names(module: nn.Module) -> Iterator[str]:
    """The module's tensors that pruning or the older ``weight_norm`` computes from parameters before each forward.

    They are parameters once the pruning is made permanent, and may have been pruned further until then.
    """
    for name in module._parameters:
        for suffix in ("_orig", "_g"):
            computed_name = name.removesuffix(suffix)
            if computed_name != name and isinstance(vars(module).get(computed_name), torch.Tensor):
                yield computed_name


# ---------------------------------------------------------------------- checksums of tensors, wherever they are


@at_rest()
def checksums(tensors: Sequence[_TensorOf]) -> list[int]:
    """The checksum of each whole tensor, in the order of ``tensors``; the same on all ranks.

    :func:`remember` and :func:`changed_since` call it. A tensor that several modules share under one name is read once.
    A weight with LoRA adapters counts as the sum of both.

    Args:
        tensors: pairs of a module and the name of one of its parameters or buffers.
    """
    alive = [getattr(module, name) for module, name in tensors]  # an id names one object only while that is alive
    keys: list[Hashable] = []
    for module, name in tensors:
        # Adapters are added to what is called "weight" only, and make another sum in each module.
        adapters = adapters_of(module)
        keys.append((identity(module, name), name if adapters is None else id(module)))
    unique = dict(zip(keys, tensors, strict=True))
    sums = _sum_over_ranks(_sums_of_parts(list(unique.values())), len(unique))
    del alive
    checksum_by_key = dict(zip(unique, sums, strict=True))
    return [checksum_by_key[key] for key in keys]


def _sums_of_parts(tensors: Sequence[_TensorOf]) -> dict[_Reduction, torch.Tensor]:
    """For each device and group of ranks, the checksums of this rank's parts; :func:`checksums` calls it.

    Args:
        tensors: pairs of a module and a tensor's name, each tensor once.

    Returns:
        Sums ``(len(tensors),)`` in the order of ``tensors``; 0 for tensors of another device or group.
    """
    indices: dict[nn.Module, list[tuple[int, str]]] = defaultdict(list)
    for index, (module, name) in enumerate(tensors):
        indices[module].append((index, name))
    # One tensor holds the sums of all. A small tensor for each sum, between the large ones of checksum(), would keep
    # glibc from using their memory for the next.
    sums: dict[_Reduction, torch.Tensor] = {}
    for unit in by_unit(indices):
        with onloaded(unit[0]):  # loads the whole unit, since one hook brings in all of its offloaded modules
            for module in unit:
                for index, name in indices[module]:
                    local, first = part_here(module, name)
                    reduction = local.device, place_of(module, name).groups
                    if reduction not in sums:
                        sums[reduction] = torch.zeros(len(tensors), dtype=torch.int64, device=local.device)
                    checksum(local, first, out=sums[reduction][index])
    return sums


def _sum_over_ranks(sums: Mapping[_Reduction, torch.Tensor], count: int) -> list[int]:
    """Add up the checksums of parts, with one reduction and one copy to the host for each group of ranks."""
    totals = [0] * count
    for (_, groups), of_parts in sums.items():
        for group in groups:
            with all_ranks_answer():
                dist.all_reduce(of_parts, group=group)
    for of_parts in sums.values():
        for index, value in enumerate(of_parts.tolist()):
            totals[index] += value  # zero in all groups but the tensor's
    return totals


# ---------------------------------------------------------------------- the checksum of one tensor


def checksum(values: torch.Tensor, first: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
    """The checksum of a tensor, or of a run of its elements; the docstring of this file explains the sum.

    Args:
        values: the tensor, or the run of elements, of any dtype and shape.
        first: the index of the first of ``values`` in the flattened whole tensor. The checksum of the whole is the sum
            of the checksums of its runs, modulo 2**64.
        out: a scalar in int64 to write the checksum to.

    Returns:
        A scalar in int64; ``out`` if it is given.
    """
    start = first * values.element_size()
    words = _words(values, start % _BYTES_PER_WORD)
    tile, column = divmod(start // _BYTES_PER_WORD, _WORDS_PER_TILE)
    width = min(_WORDS_PER_TILE, column + len(words))
    column_sums = torch.zeros(width, dtype=torch.int64, device=words.device)
    while len(words):
        in_tile = words[: _WORDS_PER_TILE - column]
        words = words[len(in_tile) :]
        column_sums[column : column + len(in_tile)].add_(in_tile, alpha=_tile_multiplier(tile))
        tile += 1
        column = 0
    column_sums.mul_(_column_multipliers(words.device)[:width])
    return torch.sum(column_sums, 0, out=out)


@functools.cache
def _column_multipliers(device: torch.device) -> torch.Tensor:
    """The multiplier of each place in a tile: 1 MiB that takes longer to make than to use."""
    return _odd_numbers(torch.arange(_WORDS_PER_TILE, device=device))


def _tile_multiplier(tile: int) -> int:
    """The multiplier of one tile."""
    return _tile_multipliers(tile // _TILES_AT_ONCE)[tile % _TILES_AT_ONCE]


@functools.lru_cache(maxsize=64)
def _tile_multipliers(number: int) -> list[int]:
    """The multipliers of one run of ``_TILES_AT_ONCE`` tiles.

    Their indices follow those of the places in a tile, so no tile has the multiplier of a place: else place 1 of tile 0
    and place 0 of tile 1 would have the same product.
    """
    first = _WORDS_PER_TILE + number * _TILES_AT_ONCE
    return _odd_numbers(torch.arange(first, first + _TILES_AT_ONCE, device="cpu")).tolist()


def _words(values: torch.Tensor, bytes_before: int) -> torch.Tensor:
    """The bits of a tensor as words of 32 bits, in int32; bytes of its first and last word that it lacks are zero.

    Args:
        values: a tensor, or the run of its elements that this rank holds.
        bytes_before: how many bytes of the first word precede ``values`` in the whole tensor.
    """
    bits = values.contiguous().view(-1).view(torch.uint8)
    bytes_after = -(bytes_before + len(bits)) % _BYTES_PER_WORD
    if bytes_before or bytes_after or bits.storage_offset() % _BYTES_PER_WORD:
        bits = torch.nn.functional.pad(bits, (bytes_before, bytes_after))
    return bits.view(torch.int32)


def _odd_numbers(indices: torch.Tensor) -> torch.Tensor:
    """A pseudorandom odd number for each index, the same on every device and in every version.

    The constants and shifts are those of the generator splitmix64, as signed 64-bit integers.
    """
    bits = (indices + 1) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        shifted = (bits >> shift) & ((1 << (64 - shift)) - 1)
        bits = (bits ^ shifted) * factor
    return bits ^ ((bits >> 31) & ((1 << 33) - 1)) | 1
