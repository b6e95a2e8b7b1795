"""The options of a calibration, as one dataclass that checks its fields when it is made.

The session, both callbacks, the functions that choose schemes, and the command line take these options, or their fields
as keyword arguments, and pass them on as one object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from inspect import Parameter, signature
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from compressed_tensors.quantization import QuantizationConfig
from typing_extensions import TypedDict, Unpack

from lightning_obs.engines.engine import Engine, engine_of
from lightning_obs.errors import CalibrationError, refuse_unknown, require_bool, require_choice
from lightning_obs.schemes.attention_states import KVCacheLike
from lightning_obs.schemes.config import (
    ObserversLike,
    RoundingLike,
    SchemeLike,
    as_names,
    label,
    names_observer,
    resolve_config,
)
from lightning_obs.schemes.planned_modules import check_own_sets
from lightning_obs.schemes.recipes import Recipe, RecipeLike

OnMissing: TypeAlias = Literal["error", "warn", "siblings"]
#: the fields that say which modules are quantized and how they are observed; ``config`` is made of them
_OF_SCHEME = ("targets", "ignore", "observers", "kv_cache", "rounding", "recipe")
_Taker = TypeVar("_Taker", bound=Callable[..., Any])


class OptionKeywords(TypedDict, total=False):
    """The fields of :class:`CalibrationOptions`, as the type of ``**options`` for type checkers and editors.

    The session, the callbacks, and the functions that choose schemes or quantize files annotate ``**options`` with it.
    """

    targets: str | Sequence[str] | None
    ignore: str | Sequence[str]
    observers: ObserversLike | Literal["auto"]
    kv_cache: KVCacheLike
    on_missing: OnMissing
    engines: str | Sequence[str]
    calibrate_all_experts: bool
    fused_sets: Sequence[Sequence[str]]
    join_fused_scales: bool
    rounding: RoundingLike
    recipe: RecipeLike


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of a calibration: which modules to quantize, how to observe them, which engines will load the result.

    Args:
        scheme: preset name (``"FP8"``, ``"INT8_STATIC"``, ``"W4A16"``...), dict, or ``QuantizationConfig``
            (:func:`~lightning_obs.schemes.config.resolve_config`). None with ``kv_cache``, for the cache alone.
        targets: the modules to quantize, if the scheme does not say (default: every Linear).
        ignore: modules not to quantize: names, class names, ``re:`` patterns. Names are relative to the calibrated
            module: ``"lm_head"``, not ``"model.lm_head"``, where a LightningModule's ``model`` is of transformers. A
            Linear that shares the weight of an Embedding is left out unless a target names it.
        observers: the observer of each base name (weight, input, output; q, k, v):
            ``{"input": "minmax", "weight": {"name": ..., <hyperparameter>: ...}}``. Default: the scheme's observers; if
            the scheme names none, ``memoryless_minmax`` for weights and ``minmax`` for everything else. ``minmax`` is a
            moving average over batches; ``static_minmax`` is the range of all data. ``"auto"``:
            :class:`~lightning_obs.CalibrationCallback` chooses the observers by measurement.
        kv_cache: quantize k and v of every attention module (transformers models): ``"FP8"`` (one scale per layer for
            k and one for v), ``"FP8_HEAD"`` (one per head), a dict or ``QuantizationArgs``. With ``scheme=None``
            nothing else is quantized.
        on_missing: what to do if no data reached a module. ``"error"`` raises. ``"warn"`` leaves the module in full
            precision, with a warning. ``"siblings"`` quantizes an expert without tokens: its weights without inputs,
            its activations with the range of the layer's other experts; for a module that is no expert it raises. In
            the validation of a ``trainer.fit``, which an error would end, ``"error"`` acts as ``"warn"``.
        engines: the engines that will load the checkpoint: ``"transformers"`` (``from_pretrained``, the default),
            ``"dequantize"`` (``CompressedTensorsConfig(dequantize=True)``), ``"vllm"``, ``"sglang"``, ``"llama.cpp"``,
            the name of an engine of your own, or ``"unchecked"``; or a list of these, ``["vllm", "sglang"]``. The
            checkpoint is written for the first engine, and a warning says where this engine computes a scheme
            differently. A checkpoint that any of the engines would refuse is an error before the data; the functions
            that choose schemes leave such candidates out.
        calibrate_all_experts: let every expert observe all tokens of its layer. Outputs do not change. Off: an expert
            observes the tokens that the router sends to it.
        fused_sets: names of modules, under one parent, that your engine fuses, in addition to
            :data:`~lightning_obs.engines.engine.FUSED_SETS`: ``[["a_proj", "b_proj"]]``. Modules of a set share their
            global scales and must have one scheme. A name that is also in a set of the engine belongs to your set.
        join_fused_scales: let modules that vLLM fuses (q, k, v; gate, up; ``fused_sets``) share their scales per
            tensor, too. vLLM rounds the weights of static FP8 a second time, with the widest scale of the set; with
            joined scales the weights are rounded once, with that scale. Off, as in llm-compressor: each module has its
            own scale.
        rounding: ``"gptq"``, or ``{"name": "gptq", "act_order": ..., "damping": ...}``: once the scales of weights are
            chosen, round the weights so that the modules' outputs change least, not each weight to the nearest number
            (:func:`~lightning_obs.numerics.rounding.round_by_hessian`). It needs data, and gathers the Hessian of each
            module's inputs (4 bytes for each pair of channels), with ``weigh_tokens`` also the products of the
            gradients at its outputs. The model's weights do not change; a module gets the integers beside its scale.
            With ``"inputs": "quantized"``, the Hessian is that of the inputs that the quantized modules before the
            module give: the model's calls are kept (2 GiB at most), and run again block by block. With these inputs,
            ``"correction"`` (default: 0.5) is the share of their errors that the rounding makes up for, and
            ``"random_tokens"`` (default: 0) the share of each batch's tokens that random ones replace in a second run
            (:class:`~lightning_obs.numerics.rounding_options.RoundingOptions`). None: as the scheme says of each
            group, beside the hyperparameters of its observer (``{"name": "hessian", "rounding": "gptq"}``); if it says
            nothing, to the nearest number.
        recipe: observers and rounding under one word (docs/guide/observers.md): ``"accurate"``, which lost least in
            measurements, and needs data and memory for products of inputs; ``"fast"``, which chooses weights without
            data; or the fields of a :class:`~lightning_obs.schemes.recipes.Recipe`. Tensors for which the recipe has no
            choice stay as the scheme says; ``observers`` and ``rounding`` take precedence over it. What a model cannot
            run is left out, with a warning before any data. That a model cannot run block by block, as a rounding on
            quantized inputs needs, may show only once the data have run; the warning then comes at their end. A fit
            that trains the weights uses the recipe's scales without its rounding.

    Attributes:
        config: the one ``QuantizationConfig`` that follows from scheme, targets, ignore, observers, kv_cache, rounding
            and recipe.

    Raises:
        CalibrationError: an unknown scheme, field, observer or choice, or whatever else is wrong without a model.

    Examples:
        >>> CalibrationOptions("FP8", ignore="lm_head").label
        'FP8'
        >>> CalibrationOptions("FP8", on_missing="stop")
        Traceback (most recent call last):
        lightning_obs.errors.CalibrationError: on_missing. Got 'stop', expected 'error', 'warn', 'siblings'.
    """

    scheme: SchemeLike | None
    _: KW_ONLY
    targets: str | Sequence[str] | None = None
    ignore: str | Sequence[str] = ()
    observers: ObserversLike | Literal["auto"] = None
    kv_cache: KVCacheLike = None
    on_missing: OnMissing = "error"
    engines: str | Sequence[str] = ()
    calibrate_all_experts: bool = False
    fused_sets: Sequence[Sequence[str]] = ()
    join_fused_scales: bool = False
    rounding: RoundingLike = None
    recipe: RecipeLike = None
    config: QuantizationConfig = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Turn all fields into plain dicts, lists and names, check them, and make ``config``."""
        for name in ("scheme", *self.names(type(self))):
            value = _plain(getattr(self, name))
            is_unset = name == "targets" and value is None
            if name in ("targets", "ignore", "engines") and not is_unset:
                value = _names(name, value)
            object.__setattr__(self, name, value)
        require_choice("on_missing", self.on_missing, get_args(OnMissing))
        require_bool(calibrate_all_experts=self.calibrate_all_experts, join_fused_scales=self.join_fused_scales)
        for name in self.engines:
            engine_of(name)
        if self.fused_sets != ():
            check_own_sets(self.fused_sets)
        fields_of_scheme = {name: getattr(self, name) for name in _OF_SCHEME}
        object.__setattr__(self, "config", resolve_config(self.scheme, **fields_of_scheme))

    @classmethod
    def of(
        cls, scheme: SchemeLike | CalibrationOptions | None, **changes: Unpack[OptionKeywords]
    ) -> CalibrationOptions:
        """Make options from a scheme and fields, or from options and the fields in which the new ones differ.

        The constructors and functions with ``**options`` call this with what the user gave them.
        """
        refuse_unknown(changes, cls.names(cls))
        if not isinstance(scheme, CalibrationOptions):
            return cls(scheme, **changes)
        return replace(scheme, **changes) if changes else scheme  # checked when it was made

    @staticmethod
    def names(owner: type) -> list[str]:
        """Names of the keyword-only arguments of the constructors of ``owner`` and its bases.

        For ``CalibrationOptions`` these are all fields except ``scheme``. Callables with ``**options`` use the names to
        refuse unknown keywords.
        """
        names: dict[str, None] = {}
        for base in owner.__mro__:
            if "__init__" not in vars(base):
                continue
            for parameter in signature(vars(base)["__init__"]).parameters.values():
                if parameter.kind is Parameter.KEYWORD_ONLY:
                    names[parameter.name] = None
        return list(names)

    @property
    def label(self) -> str:
        """Short name of scheme and rounding: ``FP8``.

        Read when a session, a callback or a result is made, which keep it for messages and reports.
        """
        return label(self.scheme, self.config)

    @property
    def beside_scheme(self) -> dict[str, Any]:
        """The fields that are no part of the config (engines, ``on_missing``, ...), by name.

        Read to make other options with another scheme (:meth:`with_config`, ``choose_observers``, and the command
        line's choice of a scheme), and by ``streaming/finished_blocks.py`` to compare a run with a killed one.
        """
        return {name: getattr(self, name) for name in self.names(type(self)) if name not in _OF_SCHEME}

    def with_config(self, config: QuantizationConfig) -> CalibrationOptions:
        """These options with a complete config in place of scheme, targets, observers and the like.

        The kv cache of these options stays if ``config`` has none. Called by ``AutoObservers`` and the command line
        once a config was chosen by measurement, and when such a choice is loaded from a checkpoint.
        """
        config = config.model_copy(update={"kv_cache_scheme": config.kv_cache_scheme or self.config.kv_cache_scheme})
        return CalibrationOptions(config, **self.beside_scheme)

    @property
    def names_weight_observer(self) -> bool:
        """Whether the user names an observer for weights, which a recipe then does not replace.

        Asked when a recipe is fitted to the model (:mod:`.fitted_recipe`), and when a :class:`.TokenWeights` is made.
        """
        return names_observer(self.observers, "weight")

    @property
    def rounding_is_of_recipe(self) -> bool:
        """Whether a recipe, and not the user, says how weights are rounded.

        Asked where a rounding on quantized inputs cannot be done (:mod:`.kept_runs`, :mod:`.kept_calls`,
        :mod:`.quantized_inputs`): a recipe then does without; if the user has named the rounding, it is an error.
        """
        return self.recipe is not None and self.rounding is None and not self.names_weight_observer

    def with_recipe(self, change: Callable[[Recipe], Recipe]) -> CalibrationOptions:
        """These options with ``change(recipe)`` as their recipe; the same options if they have no recipe.

        Called to remove a part of a recipe that cannot be used: by ``QuantizationAwareTraining`` (the rounding if it
        trains weights, quantized inputs if it trains scales), by ``calibrate_layerwise`` (token weights), and by
        :meth:`.KeptRuns.give_up` (quantized inputs).
        """
        return self if self.recipe is None else replace(self, recipe=change(Recipe.of(self.recipe)))

    @property
    def engine(self) -> Engine:
        """The first of ``engines``, for which the checkpoint is written; "transformers" if none is named.

        Asked when an observation begins: the engine's fused sets shape the plan.
        """
        return engine_of(self.engines[0] if self.engines else "transformers")

    @property
    def further_engines(self) -> list[Engine]:
        """The other ``engines``, which must accept the checkpoint, too; asked when an observation begins."""
        return [engine_of(name) for name in self.engines[1:]]


def takes_keywords_of(source: Callable[..., Any]) -> Callable[[_Taker], _Taker]:
    """Decorate a callable with ``**options``: its signature then shows the keyword arguments of ``source``.

    ``help``, notebooks and LightningCLI read names and defaults there. Type checkers and editors read the ``Unpack``
    annotation instead.

    Args:
        source: a callable with keyword-only arguments, such as :class:`CalibrationOptions`.
    """

    def decorated(taker: _Taker) -> _Taker:
        """Set ``__signature__`` of the callable, and return it."""
        written = signature(taker, eval_str=True)
        parameters = []
        for parameter in written.parameters.values():
            if parameter.kind is not Parameter.VAR_KEYWORD:
                parameters.append(parameter)
        for parameter in signature(source, eval_str=True).parameters.values():
            if parameter.kind is Parameter.KEYWORD_ONLY:
                parameters.append(parameter)
        taker.__signature__ = written.replace(parameters=parameters)  # type: ignore[attr-defined]
        return taker

    return decorated


def _names(option: str, value: Any) -> list[str]:
    """The value of an option as a list of names: a name gives a list of one. A CalibrationError for anything else."""
    names: list[Any] = as_names(value) if isinstance(value, Iterable) else [None]
    if not all(isinstance(name, str) for name in names):
        raise CalibrationError(option, got=repr(value), expected="a name, or a list of names")
    return names


def _plain(value: Any) -> Any:
    """Turn nested mappings and sequences of configuration libraries (OmegaConf) into dicts and lists.

    All other values, strings and tuples are returned as they are.
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, tuple)):
        return [_plain(item) for item in value]
    return value
