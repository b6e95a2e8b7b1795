"""From a scheme, as the user writes it, to one ``QuantizationConfig``.

A scheme is a preset name, a dict or a compressed-tensors object. Observers and their hyperparameters are set and
constructed once here, so that a typo is an error where it was made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeAlias

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from lightning_obs.errors import CalibrationError, likely, refuse_unknown
from lightning_obs.numerics.qparams import ATTENTION, BASE_NAMES, ROUNDING, rounding_of, scheme_args
from lightning_obs.observers import Observer
from lightning_obs.schemes.attention_states import (
    KVCacheLike,
    StatesConfig,
    quantizes_states,
    resolve_kv_cache,
    state_args,
)
from lightning_obs.schemes.recipes import Recipe, RecipeLike

SchemeLike: TypeAlias = str | Mapping[str, Any] | QuantizationScheme | QuantizationConfig
#: by base name, an observer's name or its fields in a dict; or a list of these, to choose from by measurement
ObserversLike: TypeAlias = Mapping[str, str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None] | None
RoundingLike: TypeAlias = str | Mapping[str, Any] | None

DEFAULT_TARGETS = ("Linear",)

#: default targets of presets for engines that compute convolutions with integers, too
QUANTIZED_CLASSES = ("Linear", "Conv1d", "Conv2d", "Conv3d", "Conv1D")
#: the group of followers: layers that such engines fold into the convolution or matrix product before them. Where a
#: follower reads the output of a quantized module, the follower's output is quantized instead
FOLLOWERS = "followers"
_FOLLOWERS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "ReLU", "ReLU6")

_INT8_WEIGHTS = QuantizationArgs(num_bits=8, strategy="channel")
#: ranges a little wider than the largest weight are tried, too: int8 has one step more for negative numbers than for
#: positive ones, so a largest weight that is positive may need the room
_SEARCHED_INT8_WEIGHTS = QuantizationArgs(
    num_bits=8,
    strategy="channel",
    observer="memoryless_mse",
    observer_kwargs={"expand": 1.02, "grid": 400.0, "patience": 400},
)
_SYMMETRIC = QuantizationArgs(num_bits=8, strategy="tensor", observer="static_minmax")
_ASYMMETRIC = QuantizationArgs(num_bits=8, strategy="tensor", observer="histogram", symmetric=False)
#: the one dynamic range that ONNX has an operation for
_DYNAMIC = QuantizationArgs(num_bits=8, strategy="tensor", symmetric=False, dynamic=True)


@dataclass(frozen=True)
class OwnPreset:
    """A preset of this package, beside compressed-tensors' own: an entry of :data:`OWN_PRESETS`.

    :func:`resolve_config` reads it when a scheme names the preset.
    """

    args: Mapping[str, QuantizationArgs]  # the fields of its scheme: weights, input_activations, output_activations
    targets: tuple[str, ...] = DEFAULT_TARGETS  # the modules that it quantizes where the user names none
    followers: tuple[str, ...] = ()  # classes whose outputs alone are quantized, like the outputs of its targets


def _gguf_weights(num_bits: int, *, symmetric: bool) -> dict[str, QuantizationArgs]:
    """Weights as GGUF has them: in groups of 32, with scales in float16. Scales may be negative if ``symmetric``.

    The search for a range costs no data. Scales that GGUF holds as they are need no rounding after the calibration.
    """
    weights = QuantizationArgs(
        num_bits=num_bits,
        strategy="group",
        group_size=32,
        symmetric=symmetric,
        scale_dtype=torch.float16,
        observer="memoryless_mse",
        observer_kwargs={"signed": True} if symmetric else {},
    )
    return {"weights": weights}


#: compressed-tensors' W8A8 (= INT8) quantizes activations dynamically; these are with calibrated activations. A zero
#: point gives inputs that are not centred on zero (after SiLU, GELU, ReLU) their whole range, at the same cost.
#: INT8_DYNAMIC has one range for a whole batch, found at run time, as ONNX files of speech models do.
#: onnxruntime and OpenVINO compute with integers from one quantized output to the next; TensorRT takes no zero points.
#: Q4_0 to Q8_0 are GGUF's (gguf/block_formats.py).
OWN_PRESETS: dict[str, OwnPreset] = {
    "INT8_STATIC": OwnPreset({"weights": _INT8_WEIGHTS, "input_activations": _SYMMETRIC}),
    "INT8_STATIC_ASYM": OwnPreset({"weights": _INT8_WEIGHTS, "input_activations": _ASYMMETRIC}),
    "INT8_DYNAMIC": OwnPreset({"weights": _INT8_WEIGHTS, "input_activations": _DYNAMIC}),
    "INT8_ONNX": OwnPreset(
        {"weights": _SEARCHED_INT8_WEIGHTS, "input_activations": _ASYMMETRIC, "output_activations": _ASYMMETRIC},
        QUANTIZED_CLASSES,
        _FOLLOWERS,
    ),
    "INT8_TENSORRT": OwnPreset(
        {"weights": _SEARCHED_INT8_WEIGHTS, "input_activations": _SYMMETRIC, "output_activations": _SYMMETRIC},
        QUANTIZED_CLASSES,
        _FOLLOWERS,
    ),
    "Q4_0": OwnPreset(_gguf_weights(4, symmetric=True)),
    "Q4_1": OwnPreset(_gguf_weights(4, symmetric=False)),
    "Q5_0": OwnPreset(_gguf_weights(5, symmetric=True)),
    "Q5_1": OwnPreset(_gguf_weights(5, symmetric=False)),
    "Q8_0": OwnPreset(_gguf_weights(8, symmetric=True)),
}

_EXPECTED = (
    "the name of a preset, a dict of weights, input_activations and output_activations, of targets by preset, or of "
    "config_groups, or a QuantizationConfig"
)
_SCHEME_FIELDS = set(QuantizationScheme.model_fields)
#: the key that names a preset among the fields of a scheme; the others replace the preset's own
PRESET = "preset"
#: a key of a checkpoint's ``quantization_config`` beside the fields of a ``QuantizationConfig``: the release of
#: compressed-tensors that wrote it, which says nothing about the scheme
_RELEASE = "version"
#: further such keys, which change what is computed: they are taken only if they are empty
_ONLY_EMPTY = ("sparsity_config", "transform_config")


# ---------------------------------------------------------------------- the user's request


def preset_names() -> list[str]:
    """Names of all presets, compressed-tensors' and our own, sorted; without the one that quantizes nothing.

    Called to check the name of a scheme, for its label, and for the code that a report suggests.
    """
    return sorted({*PRESET_SCHEMES, *OWN_PRESETS} - {"UNQUANTIZED"})


def resolve_config(
    scheme: SchemeLike | None,
    *,
    targets: str | Sequence[str] | None = None,
    ignore: str | Sequence[str] = (),
    observers: ObserversLike | Literal["auto"] = None,
    kv_cache: KVCacheLike = None,
    rounding: RoundingLike = None,
    recipe: RecipeLike = None,
) -> QuantizationConfig:
    """Make one ``QuantizationConfig`` of a scheme and options; :class:`~lightning_obs.CalibrationOptions` calls it.

    A scheme is one of these:

    - the name of a preset: ``"FP8"``, ``"W4A16"``, ``"INT8_STATIC"``...
    - a dict with the fields ``weights``, ``input_activations`` and ``output_activations``
    - a dict with a ``preset`` and only those of these fields that differ from it: ``{"preset": "INT8_STATIC",
      "input_activations": {"num_bits": 4}}``; the value None leaves a tensor in full precision
    - a dict of groups: ``{"FP8": ["re:.*mlp.*_proj"], "W4A16": ["Linear"]}`` or ``{"group": {"targets": [...],
      "weights": {...}}}``
    - a full ``{"config_groups": ...}``, or an object of compressed-tensors
    - None, to quantize the kv cache alone

    Args:
        scheme: a scheme in one of the forms above.
        targets: classes, names or ``re:`` patterns of the modules to quantize; None: those of the scheme. For
            the kv cache alone there are none.
        ignore: the modules to leave out, in the same form.
        observers: by base name, observers that replace the scheme's and the recipe's, with their hyperparameters. The
            rounding of weights stays. The options' other values, ``"auto"`` and several candidates for a tensor, are
            refused: callbacks choose by measurement and then give the chosen observers.
        kv_cache: the format of the kv cache; None: full precision.
        rounding: the rounding of all weights; None: that of scheme and recipe. To round one group, give its weights
            ``"observer_kwargs": {"rounding": "gptq"}``.
        recipe: replaces observers and roundings that the scheme names, for the tensors that it covers.

    Raises:
        CalibrationError: an unknown preset, field, base name, observer, hyperparameter, rounding or recipe; targets
            given twice, or without a scheme; ``observers`` that are ``"auto"``, several for a tensor, hyperparameters
            without a name, or for a tensor without observed ranges in the scheme; a rounding without quantized weights;
            a scheme that compressed-tensors refuses (its own message is in the error).
    """
    if observers is not None:
        _refuse_several_observers(observers)
    base = _config_of(scheme, targets, has_cache=kv_cache is not None)
    kv_cache_scheme: QuantizationArgs | None = None
    if kv_cache is not None or base.kv_cache_scheme is not None:
        kv_cache_scheme = resolve_kv_cache(kv_cache, base.kv_cache_scheme)
    config = QuantizationConfig(
        config_groups=base.model_copy(deep=True).config_groups,
        ignore=[*(base.ignore or []), *as_names(ignore)],
        kv_cache_scheme=kv_cache_scheme,
    )
    for group in config_groups(config):
        _refuse_broken_patterns("targets", group.targets)
    _refuse_broken_patterns("ignore", config.ignore or [])
    _refuse_impossible_bits(config)
    if observers is None:
        observers = {}
    assert not isinstance(observers, str)  # _refuse_several_observers
    if any(map(observers.get, ATTENTION)):
        config = StatesConfig(**dict(config), state_observers={})
    if recipe is not None:
        _apply_recipe(config, Recipe.of(recipe), keep_weights=names_observer(observers, "weight"))
    _set_observers(config, observers)
    if rounding is not None:
        _set_rounding(config, rounding)
    _make_every_observer(config)
    return config


def _refuse_several_observers(observers: Any) -> None:
    """Refuse all but a dict of single observers: also ``"auto"`` and sequences of candidates, which the callback takes.

    A single observer is a name, a dict with its name and hyperparameters, or None.
    """
    kinds = (str, Mapping, NoneType)
    if isinstance(observers, Mapping) and all(isinstance(observer, kinds) for observer in observers.values()):
        return
    raise CalibrationError(
        "observers",
        got=repr(observers),
        expected="one for each base name, {'input': 'minmax'}",
        remedy="CalibrationCallback(observers='auto') and choose_observers(model, batches, scheme) choose by "
        "measurement, for each tensor.",
    )


def _config_of(scheme: SchemeLike | None, targets: str | Sequence[str] | None, has_cache: bool) -> QuantizationConfig:
    """The scheme as a config; without groups where only the kv cache is quantized (``has_cache``).

    An empty mapping is then no scheme either: LightningCLI takes ``scheme: null`` for an argument that is missing.
    """
    target_names = None if targets is None else as_names(targets)
    is_empty = scheme is None or (isinstance(scheme, Mapping) and not scheme)
    if is_empty and has_cache:
        if target_names is not None:
            raise CalibrationError(
                "targets without a scheme: the kv cache alone is quantized, in every attention module",
                got=f"targets={target_names}, scheme=None",
                expected="the modules that a scheme quantizes",
                remedy="name a scheme for them (scheme='FP8'), or leave targets out. Attention modules whose kv cache "
                "stays in full precision go into `ignore`.",
            )
        return QuantizationConfig(config_groups={})
    try:
        return _config(_with_lists(scheme), target_names)
    except CalibrationError:
        raise
    except (ValueError, TypeError, NotImplementedError, KeyError) as error:
        raise CalibrationError(f"compressed-tensors refuses the scheme: {error}", got=repr(scheme)) from error


def _refuse_broken_patterns(option: str, names: Iterable[str]) -> None:
    """Refuse ``re:`` patterns that are no regular expressions."""
    for name in names:
        if name.startswith("re:"):
            try:
                re.compile(name.removeprefix("re:"))
            except re.error as error:
                raise CalibrationError(
                    f"{option}: a pattern is no regular expression",
                    where=[name],
                    got=str(error),
                    expected="a module name, a class, or re: and a regular expression, 're:.*mlp.*'",
                    remedy="write a backslash before a bracket, dot or star that is meant as it stands.",
                ) from error


def as_names(value: str | Iterable[str]) -> list[str]:
    """Names as a list: a string is one name, not its letters.

    Called for options that take one name or several (``targets``, ``ignore``, ``engines``), here and on the command
    line.

    >>> as_names("lm_head"), as_names(["q_proj", "k_proj"])
    (['lm_head'], ['q_proj', 'k_proj'])
    """
    if isinstance(value, str):
        return [value]
    return list(value)


def _with_lists(scheme: Any) -> Any:
    """A scheme whose ``targets`` and ``ignore`` are lists, at any depth."""
    if not isinstance(scheme, Mapping):
        return scheme
    with_lists = {}
    for key, value in scheme.items():
        if key in ("targets", "ignore") and isinstance(value, str):
            with_lists[key] = [value]
        else:
            with_lists[key] = _with_lists(value)
    return with_lists


def _config(scheme: SchemeLike | None, targets: list[str] | None) -> QuantizationConfig:
    """The scheme as a config: itself, if it is one.

    Raises:
        CalibrationError: not a scheme, or ``targets`` beside targets of the scheme's own.
    """
    if isinstance(scheme, os.PathLike) or (isinstance(scheme, str) and Path(scheme).suffix):
        remedy = "give its config_groups: scheme={'config_groups': {...}, 'ignore': [...]}."
        raise CalibrationError("a scheme is not read from a file", got=scheme, expected=_EXPECTED, remedy=remedy)
    if isinstance(scheme, Mapping) and "config_groups" in scheme:
        scheme = _from_checkpoint(scheme)
    if isinstance(scheme, QuantizationConfig):
        _refuse_second_targets(targets, "the QuantizationConfig's groups")
        return scheme
    if isinstance(scheme, QuantizationScheme):
        if scheme.targets:
            _refuse_second_targets(targets, "the QuantizationScheme")
        group = scheme.model_copy(update={"targets": scheme.targets or targets or [*DEFAULT_TARGETS]})
        return QuantizationConfig(config_groups={"group_0": group})
    if isinstance(scheme, str):
        group = _preset(scheme, targets)
        return _with_followers(group, scheme)
    if scheme is not None and not isinstance(scheme, Mapping):
        raise CalibrationError("not a scheme", got=type(scheme).__name__, expected=_EXPECTED)
    if not scheme:
        raise CalibrationError(
            "the scheme is empty",
            expected="a preset name or at least one group",
            remedy="for the kv cache alone: kv_cache='FP8'.",
        )
    if set(scheme) & {*_SCHEME_FIELDS, PRESET}:  # one scheme, perhaps misspelt, rather than groups called "weights"
        if "targets" in scheme:
            _refuse_second_targets(targets, "the scheme")
        scheme_targets = scheme.get("targets") or targets or _default_targets(scheme.get(PRESET))
        group = _from_fields("the scheme", {**scheme, "targets": scheme_targets})
        return _with_followers(group, scheme.get(PRESET))
    _refuse_second_targets(targets, "the scheme's groups")
    return QuantizationConfig(config_groups={name: _group(name, value) for name, value in scheme.items()})


def _own_preset(name: Any) -> OwnPreset | None:
    """The preset of this package that has the name, in upper or lower case; None: this package has no such preset."""
    return OWN_PRESETS.get(name.upper()) if isinstance(name, str) else None


def _default_targets(preset: Any) -> list[str]:
    """The targets where the user names none.

    Args:
        preset: the name of the scheme's preset; None: it has none.
    """
    own_preset = _own_preset(preset)
    return [*(DEFAULT_TARGETS if own_preset is None else own_preset.targets)]


def _with_followers(group: QuantizationScheme, preset: Any) -> QuantizationConfig:
    """A config of one group; where its preset has followers, with a second group for the followers' outputs.

    Args:
        group: the first group. The followers' outputs are quantized like its outputs.
        preset: the name of the group's preset; None: it has none.
    """
    own_preset = _own_preset(preset)
    groups = {"group_0": group}
    if own_preset is not None and own_preset.followers and group.output_activations is not None:
        outputs = group.output_activations.model_copy(deep=True)
        groups[FOLLOWERS] = QuantizationScheme(targets=[*own_preset.followers], output_activations=outputs)
    return QuantizationConfig(config_groups=groups)


def _refuse_second_targets(targets: list[str] | None, owner: str) -> None:
    """Refuse targets given beside an ``owner`` that has targets."""
    if targets is not None:
        raise CalibrationError(
            "targets are given twice", got=f"targets={targets} beside {owner}", remedy="say it in one place."
        )


def _from_checkpoint(fields: Mapping[str, Any]) -> QuantizationConfig:
    """A config of its fields, or of a checkpoint's ``quantization_config``.

    :func:`_config` calls it for a scheme that is a dict with ``config_groups``.

    Raises:
        CalibrationError: a key that a ``QuantizationConfig`` does not have, and which compressed-tensors would leave
            out without a word; a sparsity or transform that a checkpoint states.
    """
    stated = []
    for key, value in fields.items():
        is_without_effect = key == _RELEASE or (key in _ONLY_EMPTY and not value)
        if not is_without_effect:
            stated.append(str(key))
    refuse_unknown(stated, QuantizationConfig.model_fields, "unknown key beside config_groups")
    return QuantizationConfig.model_validate(dict(fields))


def _group(name: str, value: Any) -> QuantizationScheme:
    """One group of a dict of groups: a preset with its targets, or a scheme."""
    if isinstance(value, str):
        return _preset(name, [value])
    if isinstance(value, QuantizationScheme):
        return value
    if isinstance(value, Mapping):
        return _from_fields(f"scheme group {name!r}", {"targets": [*DEFAULT_TARGETS], **value})
    if isinstance(value, Iterable):
        return _preset(name, [str(target) for target in value])
    raise CalibrationError(f"scheme group {name!r}", got=repr(value), expected="a list of targets or a dict of fields")


def _from_fields(owner: str, fields: dict[str, Any]) -> QuantizationScheme:
    """A scheme from its fields, named ``owner`` in errors; beside ``preset``, from the fields that differ from it."""
    refuse_unknown(map(str, fields), {*_SCHEME_FIELDS, PRESET}, f"{owner} has no such field")
    if PRESET not in fields:
        return QuantizationScheme.model_validate(fields)
    name = fields[PRESET]
    if not isinstance(name, str):
        raise CalibrationError(f"{owner}: preset", got=repr(name), expected="the name of a preset")
    scheme = dict(_preset(name, fields["targets"]))
    for key, value in fields.items():
        if key == PRESET:
            continue
        args = scheme[key]
        if not isinstance(value, Mapping) or args is None:
            scheme[key] = value
            continue
        merged = {**dict(args), **value}
        if "type" in value and "zp_dtype" not in value:
            del merged["zp_dtype"]  # it follows from the type
        scheme[key] = merged
    return QuantizationScheme.model_validate(scheme)


def config_groups(config: QuantizationConfig) -> list[QuantizationScheme]:
    """The schemes of a config's groups, in order.

    Called wherever groups are read or changed: while options are made, while a model is planned, and when a calibration
    ends. A preset's name in place of a group is resolved by ``QuantizationConfig`` before.
    """
    groups = list(config.config_groups.values())
    assert all(isinstance(group, QuantizationScheme) for group in groups)  # the config's class resolves presets
    return groups


def _preset(name: str, targets: list[str] | None) -> QuantizationScheme:
    """The scheme of a preset, named in upper or lower case, for ``targets``; None: the preset's default targets."""
    upper_name = name.upper()
    if upper_name not in preset_names():
        hint = likely(upper_name, preset_names())
        raise CalibrationError(f"unknown scheme {name!r}{hint}", expected=f"one of {', '.join(preset_names())}")
    targets = targets or _default_targets(upper_name)
    if upper_name in OWN_PRESETS:
        return QuantizationScheme(targets=targets, **OWN_PRESETS[upper_name].args)
    scheme: QuantizationScheme = preset_name_to_scheme(upper_name, targets)
    return scheme


def names_observer(observers: ObserversLike | Literal["auto"], base_name: str) -> bool:
    """Whether the option ``observers`` names an observer for the tensors of a base name.

    Asked before a recipe is applied, and when a session decides which parts of a recipe the model needs.
    """
    if not isinstance(observers, Mapping):
        return False
    observer = observers.get(base_name)
    if isinstance(observer, Mapping):
        return observer.get("name") is not None
    return observer is not None


def _apply_recipe(config: QuantizationConfig, recipe: Recipe, keep_weights: bool) -> None:
    """Replace the observers and roundings that the scheme names by those of a recipe.

    A tensor for which the recipe has no choice stays as it is. A choice replaces all hyperparameters of the scheme's
    observer. If a choice for weights has no rounding, the scheme's rounding is removed, too.

    Args:
        config: its groups are changed.
        recipe: the user's.
        keep_weights: leave weights alone, because the user names their observer.
    """
    for group in config_groups(config):
        choice = None if keep_weights else recipe.for_weights(group)
        if choice is not None:
            hyperparameters = dict(choice.observer)
            assert group.weights is not None  # the choice is of weights
            group.weights.observer = hyperparameters.pop("name")
            if choice.rounding is not None:
                hyperparameters[ROUNDING] = dict(choice.rounding)
            group.weights.observer_kwargs = hyperparameters
        observer = recipe.for_inputs(group.input_activations)
        if observer is not None:
            assert group.input_activations is not None  # the observer is of inputs
            hyperparameters = dict(observer)
            group.input_activations.observer = hyperparameters.pop("name")
            group.input_activations.observer_kwargs = hyperparameters


def _set_observers(config: QuantizationConfig, observers: Mapping[str, Any]) -> None:
    """Replace the observers that the scheme names by those of the option ``observers``, for each of its base names."""
    refuse_unknown(observers, BASE_NAMES, "observers are given for an unknown tensor")
    for base_name, value in observers.items():
        hyperparameters = {"name": value} if isinstance(value, str) else dict(value or {})
        name = hyperparameters.pop("name", None)
        if name is not None:
            _set_observer(config, base_name, name, hyperparameters)
        elif hyperparameters:
            raise CalibrationError(
                f"observers[{base_name!r}] has hyperparameters but no name", got=repr(hyperparameters)
            )


def _set_observer(config: QuantizationConfig, base_name: str, name: str, hyperparameters: dict[str, Any]) -> None:
    """Give one observer to all tensors of a base name whose ranges are observed."""
    observed = [args for args in _args_of(config, base_name) if args.dynamic is not True]
    if not observed:
        remedy = "choose a scheme that needs it (INT8_STATIC and FP8 calibrate inputs)."
        if base_name in ATTENTION:
            remedy = "quantize attention states (kv_cache for k and v, an attention group for q, k and v)."
        raise CalibrationError(
            f"observer {name!r} is given for {base_name}, but the scheme has nothing static to observe there",
            remedy=f"leave it out, or {remedy}",
        )
    if isinstance(config, StatesConfig) and base_name in ATTENTION:
        config.state_observers[base_name] = {"observer": name, "observer_kwargs": hyperparameters}
        return
    for args in observed:
        args.observer = name
        if ROUNDING in args.observer_kwargs:  # rounding is another step, which a new observer leaves as it is
            args.observer_kwargs = {ROUNDING: args.observer_kwargs[ROUNDING], **hyperparameters}
        else:
            args.observer_kwargs = dict(hyperparameters)


def _set_rounding(config: QuantizationConfig, rounding: RoundingLike) -> None:
    """Give the weights of all groups in a config the same rounding, in place of the one that they name."""
    weights = _args_of(config, "weight")
    if not weights:
        raise CalibrationError("rounding is given, but the scheme quantizes no weights", got=f"rounding={rounding!r}")
    for args in weights:
        args.observer_kwargs = {**args.observer_kwargs, ROUNDING: rounding}


def _refuse_impossible_bits(config: QuantizationConfig) -> None:
    """Raise a CalibrationError for numbers of bits that compressed-tensors accepts and nothing computes with.

    Above 24 bits, float32 does not hold every integer: codes would be stored that differ from those that were measured.
    """
    for base_name, args in _all_args(config):
        if not 1 <= args.num_bits <= 24:
            raise CalibrationError(f"num_bits of the {base_name}", got=args.num_bits, expected="1 to 24")


def _make_every_observer(config: QuantizationConfig) -> None:
    """Make the observer of each tensor once, so that an unknown one, or a wrong hyperparameter, is an error now."""
    for base_name, args in _all_args(config):
        if args.dynamic is not True:
            make_observer(base_name, state_args(config, args, base_name) if base_name in ATTENTION else args)


def _all_args(config: QuantizationConfig) -> Iterator[tuple[str, QuantizationArgs]]:
    """The base name and arguments of every tensor that a config quantizes; q, k and v share one arguments object."""
    for group in config_groups(config):
        if group.weights is None and quantizes_states(group):
            for _, args in scheme_args(group):
                for base_name in ATTENTION:
                    yield base_name, args
        else:
            yield from scheme_args(group)
    if config.kv_cache_scheme is not None:
        yield "k", config.kv_cache_scheme
        yield "v", config.kv_cache_scheme


def _args_of(config: QuantizationConfig, base_name: str) -> list[QuantizationArgs]:
    """The arguments of every tensor of a base name that a config quantizes."""
    args_of_tensors = []
    for name, args in _all_args(config):
        if name == base_name:
            args_of_tensors.append(args)
    return args_of_tensors


def observer_name(base_name: str, args: QuantizationArgs) -> str:
    """The name of the observer in ``args``; if they name none, ``memoryless_minmax`` for weights, else ``minmax``.

    Called when an observer is made, and for the facts of a report.
    """
    return str(args.observer or ("memoryless_minmax" if base_name == "weight" else "minmax"))


def make_observer(base_name: str, args: QuantizationArgs) -> Observer:
    """Make the observer of a tensor.

    Called once for each tensor of a scheme when options are made, so that a wrong hyperparameter is refused, and for
    each tensor of a planned module when an observation begins. Engines make one to see whether its scales are signed.

    Args:
        base_name: the tensor that it observes: ``"weight"``, ``"input"``, ``"output"``, ``"q"``, ``"k"``, ``"v"``.
        args: how the tensor is quantized; they name the observer and its hyperparameters.
    """
    observer: Observer = Observer.load_from_registry(observer_name(base_name, args), base_name=base_name, args=args)
    return observer


def has_rounding(config: QuantizationConfig) -> bool:
    """Whether the weights of any group are rounded other than each to its nearest number.

    Asked before weights are trained, which such a rounding rules out, and for the next steps that a report suggests.
    """
    return any(rounding_of(args) is not None for args in _args_of(config, "weight"))


def rounds_on_quantized_inputs(config: QuantizationConfig) -> bool:
    """Whether the weights of any group are rounded by the inputs that the quantized modules before them give.

    Asked when a session or a run layer by layer begins, because such weights are rounded one module after the other.
    """
    roundings = [rounding_of(args) for args in _args_of(config, "weight")]
    return any(rounding is not None and rounding.on_quantized_inputs for rounding in roundings)


def random_tokens_of(config: QuantizationConfig) -> float:
    """The largest share of tokens that random ones replace for the roundings of any group; 0: no rounding has any.

    Asked when a calibration prepares its batches: each runs once more with these tokens, whatever group it reaches.
    """
    shares = [0.0]
    for args in _args_of(config, "weight"):
        rounding = rounding_of(args)
        if rounding is not None:
            shares.append(rounding.random_tokens)
    return max(shares)


def _rounding_label(config: QuantizationConfig) -> str | None:
    """The rounding of a config in a few words, for :func:`label`; None: each weight becomes the nearest number.

    GPTQ is the only rounding there is (``numerics/rounding_options.py``). If it runs on quantized inputs in any group,
    the text says so.
    """
    if rounds_on_quantized_inputs(config):
        return "gptq on quantized inputs"
    return "gptq" if has_rounding(config) else None


def label(scheme: SchemeLike | None, config: QuantizationConfig) -> str:
    """A short name of a scheme for reports: the preset's name or the number formats, then kv cache and rounding.

    The property ``label`` of the options gives it to users.

    Args:
        scheme: the scheme in the form in which the user wrote it.
        config: the config that :func:`resolve_config` made of it.

    >>> scheme = {"weights": {"num_bits": 4, "group_size": 64}}
    >>> label(scheme, resolve_config(scheme))
    'int4 group 64 weights'
    """
    presets: list[str] = []
    if isinstance(scheme, str):
        presets = [scheme]
    elif isinstance(scheme, Mapping):
        presets = [scheme[PRESET]] if set(scheme) in ({PRESET}, {PRESET, "targets"}) else list(scheme)
    parts = [name.upper() for name in presets]
    if not set(parts) <= set(preset_names()) or not parts:
        parts = list(dict.fromkeys(map(describe_scheme, config_groups(config))))
    if config.kv_cache_scheme is not None:
        parts.append(f"{describe(config.kv_cache_scheme)} kv cache")
    rounding = _rounding_label(config)
    if rounding is not None:
        parts.append(rounding)
    return " + ".join(parts)


def describe_scheme(scheme: QuantizationScheme) -> str:
    """A scheme in a few words, for labels, reports and errors: ``"int8 channel weights, int8 tensor inputs"``."""
    is_of_states = scheme.weights is None and quantizes_states(scheme)
    inputs = "attention states" if is_of_states else "inputs"
    words = {"weight": "weights", "input": inputs, "output": "outputs"}
    texts = []
    for base_name, args in scheme_args(scheme):
        texts.append(f"{describe(args)} {words[base_name]}")
    return ", ".join(texts)


def describe(args: QuantizationArgs) -> str:
    """Quantization arguments in a few words, for labels, reports and errors.

    >>> describe(QuantizationArgs(num_bits=4, group_size=64, symmetric=False))
    'asymmetric int4 group 64'
    """
    words: list[str] = []
    if args.dynamic is True:
        words.append("dynamic")
    if not args.symmetric:
        words.append("asymmetric")
    words += [str(number_format(args)), QuantizationStrategy(args.strategy).value]
    if args.group_size and args.group_size > 0:
        words.append(str(args.group_size))
    return " ".join(words)


def number_format(args: QuantizationArgs | None) -> str | None:
    """The number format of a tensor, ``"int4"`` or ``"float8"``; None: full precision.

    Engines and writers compare it with the formats that they can read or write.
    """
    # The field ``type`` is an enum member if it was left at its default, and a string if it was given.
    if args is None:
        return None
    return f"{QuantizationType(args.type).value}{args.num_bits}"
