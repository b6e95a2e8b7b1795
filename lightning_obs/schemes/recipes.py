"""Observers and rounding under one word: ``recipe="accurate"`` for the least loss, ``recipe="fast"`` without data.

A recipe has a row for each kind of tensor whose best choice was measured (docs/evidence has the tables); all other
tensors keep what the scheme says, and what a user names in ``observers`` or ``rounding`` comes before the recipe.
``configs/recipe/`` has the same tables for the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeAlias

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy, QuantizationType

from lightning_obs.errors import CalibrationError, likely, refuse_unknown
from lightning_obs.numerics.rounding_options import RoundingOptions, with_inputs_in_full_precision


@dataclass(frozen=True)
class WeightChoice:
    """How weights of one kind are quantized: a row of a :class:`Recipe`.

    Attributes:
        observer: the ``name`` and hyperparameters of the observer that chooses the scales.
        rounding: the ``name`` and options of the rounding; None: each weight becomes the nearest number of its format.
    """

    observer: Mapping[str, Any]
    rounding: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, value: Any) -> WeightChoice:
        """The choice that a user has given: ``value`` itself, or the choice of its fields in a dict.

        :meth:`Recipe.of` calls it for each row of a recipe in a dict.

        Raises:
            CalibrationError: an unknown field, or no observer.
        """
        if isinstance(value, WeightChoice):
            return value
        _require_mapping("a recipe's weights", value, cls)
        refuse_unknown(value, _names_of(cls), "a recipe's weights have no such field")
        if "observer" not in value:
            raise CalibrationError(
                "a recipe's weights have no observer", got=dict(value), expected="observer, rounding"
            )
        return cls(**value)

    @property
    def weighs_tokens(self) -> bool:
        """Whether the observer weighs each token by how much the model's predictions depend on it.

        Asked before any data, because such weights need a model that can be run backward
        (``calibration/fitted_recipe.py``).
        """
        return bool(self.observer.get("weigh_tokens", False))

    @property
    def rounds_on_quantized_inputs(self) -> bool:
        """Whether the weight is rounded by the inputs that the quantized modules before it give.

        Asked before any data, because such a rounding needs a model that can be run block by block
        (``calibration/fitted_recipe.py``).
        """
        return self.rounding is not None and RoundingOptions.of(self.rounding).on_quantized_inputs

    def with_inputs_in_full_precision(self) -> WeightChoice:
        """The choice with a rounding by inputs in full precision in place of one on quantized inputs.

        A choice without such a rounding is returned as it is. :meth:`Recipe.without_quantized_inputs` calls this for
        each kind of weights.
        """
        if self.rounding is None or not self.rounds_on_quantized_inputs:
            return self
        return replace(self, rounding=with_inputs_in_full_precision(self.rounding))

    def without(self, *hyperparameters: str) -> WeightChoice:
        """The choice with defaults in place of these hyperparameters of its observer."""
        observer = {name: value for name, value in self.observer.items() if name not in hyperparameters}
        return replace(self, observer=observer)


@dataclass(frozen=True)
class Recipe:
    """The observers and roundings for each kind of tensor; None: the kind keeps what the scheme says.

    :meth:`of` makes it of the option ``recipe``. ``resolve_config`` applies it to the scheme when the options are made.
    Before data are read, a session may put a recipe in its place that the model can run (``without_...``).

    Attributes:
        name: the recipe's name, for messages.
        symmetric_weights: the choice for weights in integers of fewer than 8 bits without a zero point.
        asymmetric_weights: the choice for weights in integers of fewer than 8 bits with a zero point.
        nvfp4_weights: the choice for weights in four-bit floats with a global scale.
        mx_weights: the choice for weights in floats of fewer than 8 bits in groups, MX formats above all.
        integer_inputs: the observer of inputs in integers with one calibrated scale: its ``name`` and hyperparameters.
    """

    name: str
    symmetric_weights: WeightChoice | None = None
    asymmetric_weights: WeightChoice | None = None
    nvfp4_weights: WeightChoice | None = None
    mx_weights: WeightChoice | None = None
    integer_inputs: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, value: str | Mapping[str, Any] | Recipe) -> Recipe:
        """The recipe that a user has given: by its name, by its fields in a dict, or as it is.

        Called when the options are made, and again wherever they are read.

        Raises:
            CalibrationError: an unknown name or field.

        >>> Recipe.of("fast").symmetric_weights.observer
        {'name': 'memoryless_mse', 'signed': True}
        """
        if isinstance(value, Recipe):
            return value
        if isinstance(value, str):
            if value not in RECIPES:
                raise CalibrationError(
                    f"unknown recipe {value!r}{likely(value, RECIPES)}", expected=f"one of {', '.join(RECIPES)}"
                )
            return RECIPES[value]
        _require_mapping("recipe", value, cls, or_name=f"one of {', '.join(RECIPES)}, or ")
        refuse_unknown(value, _names_of(cls), "a recipe has no such field")
        if "name" not in value:
            raise CalibrationError("a recipe has no name", got=dict(value), expected=", ".join(_names_of(cls)))
        choices = dict(value)
        for name in _WEIGHTS:
            if choices.get(name) is not None:
                choices[name] = WeightChoice.of(choices[name])
        return cls(**choices)

    def for_weights(self, group: QuantizationScheme) -> WeightChoice | None:
        """The choice for the weights of a group of a scheme; None: they keep the scheme's own observer.

        ``resolve_config`` calls it when the options are made; a session asks it again for each planned module, to see
        what the recipe needs.
        """
        weights = group.weights
        if weights is None:
            return None
        if weights.num_bits >= 8:
            return None
        if weights.type == QuantizationType.FLOAT:
            return self._for_floats(weights)
        if not weights.symmetric:
            return self.asymmetric_weights
        if group.input_activations is None or self.symmetric_weights is None:
            return self.symmetric_weights
        # A kernel of vLLM for quantized inputs reads negative scales wrongly.
        return self.symmetric_weights.without("signed")

    def _for_floats(self, weights: QuantizationArgs) -> WeightChoice | None:
        """The choice for weights in floats of fewer than 8 bits."""
        if weights.strategy == QuantizationStrategy.TENSOR_GROUP:
            return self.nvfp4_weights
        return self.mx_weights if weights.strategy == QuantizationStrategy.GROUP else None

    def for_inputs(self, inputs: QuantizationArgs | None) -> Mapping[str, Any] | None:
        """The observer for the inputs of a group of a scheme; None: they keep the scheme's own.

        ``resolve_config`` calls it when the options are made. Only inputs in integers with one calibrated scale for the
        whole tensor have a choice. So inputs with ``dynamic=True`` have none: their scales are computed at each call.
        Nor have inputs with ``dynamic="local"``, whose strategy is TENSOR_GROUP.
        """
        if inputs is None or inputs.dynamic is True or inputs.type != QuantizationType.INT:
            return None
        has_one_scale = inputs.strategy == QuantizationStrategy.TENSOR
        return self.integer_inputs if has_one_scale else None

    def with_weights(self, change: Callable[[WeightChoice], WeightChoice]) -> Recipe:
        """A copy with ``change(choice)`` in place of each choice for weights; called by the ``without_...`` methods."""
        changes: dict[str, Any] = {}
        for name in _WEIGHTS:
            choice = getattr(self, name)
            if choice is not None:
                changes[name] = change(choice)
        return replace(self, **changes)

    def without_token_weights(self) -> Recipe:
        """The recipe for models that cannot be run backward: all tokens count alike.

        Called before any data: by :func:`.fitted_options` when a session is made for such a model, and by
        :func:`~lightning_obs.calibrate_layerwise` for every model, since it never runs the whole model backward.
        """
        return self.with_weights(lambda choice: choice.without("weigh_tokens"))

    def without_quantized_inputs(self) -> Recipe:
        """The recipe for models that cannot be run block by block: weights are rounded by inputs in full precision.

        Called by :func:`.fitted_options` before any data, when a session is made for such a model; by
        :meth:`.KeptRuns.give_up` of a session that finds out later; and by
        :class:`~lightning_obs.QuantizationAwareTraining` when it is made, if it trains scales.
        """
        return self.with_weights(WeightChoice.with_inputs_in_full_precision)

    def without_rounding(self) -> Recipe:
        """The recipe for weights that are trained: it chooses scales but no rounding, and all tokens count alike.

        :class:`~lightning_obs.QuantizationAwareTraining` calls it when it is made, if it trains weights.
        """
        return self.without_token_weights().with_weights(lambda choice: replace(choice, rounding=None))

    def without_data(self) -> Recipe:
        """The recipe with the choices for weights of ``fast``, which need no data.

        :func:`.fitted_options` calls this before any data, when a session is made, if the inputs of some weight cannot
        be used for rounding (a convolution's or an embedding's: the columns of such a weight are no input channels), or
        if the products of all inputs do not fit in memory.
        """
        return replace(self, **{name: getattr(RECIPES["fast"], name) for name in _WEIGHTS})

    def as_dict(self) -> dict[str, Any]:
        """All fields as plain dicts, in the form of the files in ``configs/recipe/``; tests compare the two."""
        return asdict(self)


RecipeLike: TypeAlias = str | Mapping[str, Any] | Recipe | None

#: the fields of a recipe that are choices for weights
_WEIGHTS = ("symmetric_weights", "asymmetric_weights", "nvfp4_weights", "mx_weights")
_ROUNDING = {"name": "gptq", "inputs": "quantized", "random_tokens": 0.2}

RECIPES = {
    "fast": Recipe(
        "fast",
        symmetric_weights=WeightChoice({"name": "memoryless_mse", "signed": True}),
        asymmetric_weights=WeightChoice({"name": "memoryless_mse"}),
        nvfp4_weights=WeightChoice({"name": "nvfp4_expanded_mse"}),
        mx_weights=WeightChoice({"name": "memoryless_mse"}),
    ),
    "accurate": Recipe(
        "accurate",
        symmetric_weights=WeightChoice(
            {"name": "imatrix_mse", "norm": 2.0, "signed": True, "weigh_tokens": True}, _ROUNDING
        ),
        asymmetric_weights=WeightChoice({"name": "imatrix_mse", "norm": 2.0, "weigh_tokens": True}, _ROUNDING),
        nvfp4_weights=WeightChoice({"name": "nvfp4_expanded_imatrix", "norm": 2.0, "weigh_tokens": True}, _ROUNDING),
        mx_weights=WeightChoice({"name": "imatrix_mse", "norm": 2.0, "weigh_tokens": True}, _ROUNDING),
        integer_inputs={"name": "histogram"},
    ),
}


def _names_of(owner: type) -> list[str]:
    # the names of a dataclass's fields
    return [field.name for field in fields(owner)]


def _require_mapping(name: str, value: Any, owner: type, or_name: str = "") -> None:
    """Refuse a value that is no dict; :meth:`Recipe.of` and :meth:`WeightChoice.of` call it.

    Args:
        name: what the value is, the beginning of the error.
        value: what the user has given.
        owner: the class that is made of the dict; the error names its fields.
        or_name: for the error, what the value could be instead of a dict.
    """
    if not isinstance(value, Mapping):
        raise CalibrationError(name, got=repr(value), expected=f"{or_name}a dict of {', '.join(_names_of(owner))}")
