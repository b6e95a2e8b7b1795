"""Engines of language models whose answers are a table: which schemes they load, and the hardware that runs them.

A row of the table is a :class:`Family`: schemes that the engine runs with the same kernels. An engine is a subclass of
:class:`FamilyEngine` with a table, and with rules about several modules at once (``vllm.py``). The predicates below, as
``NVFP4`` or ``INT8_TOKENS``, are the words that rows are written in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import nn
from typing_extensions import override

from lightning_obs.engines.engine import Engine, Hardware, PlannedCheckpoint
from lightning_obs.errors import CalibrationError, name_list, refuse
from lightning_obs.model.kinds import is_transformers_model, kind_of
from lightning_obs.schemes.config import describe_scheme, make_observer, number_format
from lightning_obs.schemes.planned_modules import PlannedModule

Fits: TypeAlias = "Callable[[QuantizationArgs | None], bool]"
REMEDY = (
    "choose another scheme (docs/reference/engines.md lists them), list the modules in `ignore`, or set "
    'engines="unchecked".'
)


def fits(numbers: str, *strategies: str, **fields: Any) -> Fits:
    """Make a predicate that tells whether quantization arguments fit, for a row of :class:`Family`; None never fits.

    Called when the tables of engines are made. :meth:`FamilyEngine.family_of` calls the predicates.

    Args:
        numbers: the number formats that fit, separated by spaces (``"int4 int8"``).
        *strategies: the strategies that fit.
        **fields: further fields of the arguments, each with the value that fits, or a tuple of such values.
    """
    formats = numbers.split()

    def predicate(args: QuantizationArgs | None) -> bool:
        if args is None or number_format(args) not in formats or args.strategy not in strategies:
            return False
        for name, value in fields.items():
            values = value if isinstance(value, tuple) else (value,)
            if getattr(args, name) not in values:
                return False
        return True

    return predicate


def full(args: QuantizationArgs | None) -> bool:
    """The predicate that fits tensors in full precision, for a row of :class:`Family`."""
    return args is None


def either(*choices: Fits) -> Fits:
    """A predicate that is true where any of ``choices`` is."""
    return lambda args: any(choice(args) for choice in choices)


NVFP4 = fits("float4", "tensor_group", group_size=16, symmetric=True)
MXFP4 = fits("float4", "group", group_size=32, symmetric=True)
MXFP8 = fits("float8", "group", group_size=32, scale_dtype=torch.uint8)
FP8_CHANNEL = fits("float8", "channel", symmetric=True)
FP8_TENSOR = fits("float8", "tensor", symmetric=True)
FP8_EITHER = either(FP8_CHANNEL, FP8_TENSOR)
FP8_BLOCK = fits("float8", "block", symmetric=True)
FP8_TOKENS = fits("float8", "token", dynamic=True)
FP8_GROUPS = fits("float8", "group", dynamic=True)
FP8_DYNAMIC = fits("float8", "tensor", dynamic=True)
FP8_STATIC = fits("float8", "tensor", dynamic=False, symmetric=True)
INT8_CHANNEL = fits("int8", "channel", symmetric=True)
INT8_EITHER = either(INT8_CHANNEL, fits("int8", "tensor", symmetric=True))
INT8_TOKENS = fits("int8", "token", dynamic=True)
INT8_STATIC = fits("int8", "tensor", dynamic=False)
#: inputs whose scales are computed at run time: the checkpoint holds none
DYNAMIC = fits("int4 int8 float8", "token", "tensor", "group", dynamic=True)


@dataclass(frozen=True)
class Family:
    """Schemes that an engine runs with the same kernels: a row of its table.

    The tables are in the engines' files (``vllm.py``); :class:`FamilyEngine` reads them when it is asked about a
    checkpoint.

    Attributes:
        name: a name of the schemes, for the reader of the table.
        weights: a predicate that tells whether the arguments of weights are of this family.
        inputs: a predicate that tells whether the arguments of inputs are of this family.
        linear: the hardware that runs Linear modules.
        experts: the hardware that runs experts; None: the engine refuses them.
        differs: how the engine's arithmetic differs from the scheme's, as a remark to the user; empty: it does not.
        signed: whether the engine reads negative scales of weights correctly.
    """

    name: str
    weights: Fits
    inputs: Fits
    linear: Hardware
    experts: Hardware | None = None
    differs: str = ""
    signed: bool = True


class FamilyEngine(Engine):
    """An engine of transformers' models that loads the schemes of a table; a subclass is an engine.

    ``ask_engines`` calls ``check`` and ``remarks`` before any data, and ``check`` calls ``takes`` for each module.
    """

    release: ClassVar[str]  # the engine and the version whose source the table was read from
    families: ClassVar[Sequence[Family]]  # the table, in the order in which the engine tries kernels
    stored: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)  # the kinds of modules that it loads quantized
    remarks_on_others = False  # a subclass speaks only where the checkpoint is written for it
    states: ClassVar[Hardware | None] = None  # the hardware that runs a quantized kv cache; None: it is refused

    def family_of(self, scheme: QuantizationScheme) -> Family | None:
        """The first family of the table that a scheme fits; None: it fits no family, and the engine refuses it."""
        if scheme.output_activations is not None:
            return None
        for family in self.families:
            if family.weights(scheme.weights) and family.inputs(scheme.input_activations):
                return family
        return None

    @override
    def check(self, planned: PlannedCheckpoint) -> Hardware | None:
        """The hardware that runs the whole checkpoint (:meth:`.Engine.check`); None: not known.

        Refuses models that are not of transformers, modules of kinds that the engine does not load quantized, and a
        quantized kv cache if no hardware of the engine runs one.
        """
        if not is_transformers_model(planned.model):
            kind = type(planned.model).__name__
            raise CalibrationError(f"{self.name} does not load a {kind}", expected="a model of transformers")
        kinds = " and ".join(kind.__name__ for kind in self.stored)
        of_other_kinds = []
        for target in planned.modules:
            if kind_of(target.module).stored_as not in self.stored:
                of_other_kinds.append(str(target))
        refuse(of_other_kinds, f"{self.release} loads quantized {kinds} modules, no others", remedy=REMEDY)
        if self.states is None:
            refuse(
                planned.attention_names,
                f"{self.release} does not load a quantized kv cache",
                remedy="leave the kv cache in full precision.",
            )
        return super().check(planned)

    @override
    def takes(self, target: PlannedModule, is_expert: bool) -> Hardware | None:
        """The hardware that runs one module in its scheme; :meth:`.Engine.check` calls it for each target.

        Refuses a scheme that fits no family, experts in a family that runs none, and observers with negative scales in
        a family that reads them wrongly.
        """
        if target.states:
            return self.states
        family = self.family_of(target.scheme)
        if family is None or (is_expert and family.experts is None):
            modules = "experts" if is_expert else "modules"
            raise CalibrationError(
                f"{self.release} has nothing that loads {modules} in this scheme",
                where=[target.name],
                got=describe_scheme(target.scheme),
                remedy=REMEDY,
            )
        weights = target.scheme.weights
        if not family.signed and weights is not None and make_observer("weight", weights).signed:
            raise CalibrationError(
                f"{self.release} does not read the negative scales of a weight whose inputs are quantized, too",
                where=[target.name],
                got=f"an observer with signed=True, {describe_scheme(target.scheme)}",
                remedy="set signed=False for the observer, or leave the inputs in full precision (W4A16).",
            )
        return family.experts if is_expert else family.linear

    @override
    def remarks(self, planned: PlannedCheckpoint, is_target: bool) -> Iterator[str]:
        """Yield how the engine's arithmetic differs from the scheme, and in which modules; ``ask_engines`` warns of it.

        Called once ``check`` has accepted the checkpoint.
        """
        names_by_difference: dict[str, list[str]] = {}
        for target in planned.targets:
            family = None if target.states else self.family_of(target.scheme)
            if family is not None and family.differs:
                names_by_difference.setdefault(family.differs, []).append(target.name)
        for difference, names in names_by_difference.items():
            yield f"{difference}: {name_list(names)}"
