"""The questions that every inference engine answers, and the registry of engines.

An engine is asked before data are read: which modules it takes, on which hardware, which modules it fuses, and by which
names it looks modules up in a checkpoint's config. ``reload="name"`` chooses the engine that a checkpoint is for: its
refusal is an error. Every other engine's answer is reported at the end of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from torch import nn

from lightning_obs.errors import CalibrationError, require_choice, warn
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.moe.experts import linear_experts
from lightning_obs.schemes.planned_modules import PlannedModule

FusedSets = Sequence[Sequence[str]]

#: attribute names, under one parent, of the modules that inference engines multiply as one matrix
FUSED_SETS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)


@dataclass(frozen=True)
class Hardware:
    """The hardware that runs a checkpoint."""

    cuda: int | None = None  # least compute capability, times ten; None: no kernel for CUDA
    cpu: str = ""  # other hardware: "CPU", "CPU with AMX", "Apple silicon"; empty: none
    last: int | None = None  # the greatest compute capability, times ten; None: any

    def __str__(self) -> str:
        until = " or newer" if self.last is None else f" to {self.last / 10:.1f}" * (self.last != self.cuda)
        cuda = "" if self.cuda is None else f"CUDA {self.cuda / 10:.1f}{until}"
        return ", ".join(filter(None, (self.cpu, cuda))) or "no hardware"

    def and_(self, other: Hardware) -> Hardware:
        """The hardware that runs both."""
        both = None if self.cuda is None or other.cuda is None else max(self.cuda, other.cuda)
        last = min((each.last for each in (self, other) if each.last is not None), default=None)
        if both is None or (last is not None and last < both):
            both = last = None
        return Hardware(both, max(self.cpu, other.cpu, key=len) if self.cpu and other.cpu else "", last)


@dataclass(frozen=True)
class Verdict:
    """An engine's answer about a checkpoint that is not written yet."""

    loads: bool  # whether the engine loads it and gives the calibrated model
    text: str = ""  # the hardware that runs it, if known; or why the engine does not load it
    what: str = ""  # the reason in one clause, without modules and remedy; empty if the engine loads it


@dataclass(frozen=True)
class PlannedCheckpoint:
    """A checkpoint to be written: the model, its modules that will be quantized, and the user's own fused sets."""

    model: nn.Module
    targets: list[PlannedModule]
    own_sets: FusedSets = ()


class Engine:
    """An inference engine. The base class takes every checkpoint: ``reload="unchecked"``."""

    name: ClassVar[str] = "unchecked"  # as people write it; the key of the engine's verdict
    #: attribute names, under one parent, of modules that are one matrix there: they share global scales and one scheme
    fused_sets: ClassVar[FusedSets] = FUSED_SETS
    listed: ClassVar[bool] = True  # whether a run reports the verdict even where ``reload`` names another engine

    @staticmethod
    def register(reload: str) -> Callable[[type[_E]], type[_E]]:
        """Make an engine known as ``reload="name"``."""

        def add(engine: type[_E]) -> type[_E]:
            ENGINES[reload] = engine()
            return engine

        return add

    def takes(self, target: PlannedModule, is_expert: bool) -> Hardware | None:
        """The hardware that runs one module in its scheme; None: not known.

        Raises:
            CalibrationError: the engine does not take the module, and why.
        """
        return None

    def check(self, planned: PlannedCheckpoint) -> Hardware | None:
        """The hardware that runs the whole checkpoint; None: not known. A subclass adds rules about several modules.

        Raises:
            CalibrationError: the engine does not take the checkpoint, and why.
        """
        inside = tuple(f"{name}." for name in linear_experts(planned.model))
        found: Hardware | None = None
        for target in planned.targets:
            runs = self.takes(target, target.name.startswith(inside))
            found = found.and_(runs) if found and runs else found or runs
        return found

    def remarks(self, planned: PlannedCheckpoint, chosen: bool) -> Iterator[str]:
        """Remarks for the user, each of which becomes a CalibrationWarning.

        ``chosen``: ``reload`` names this engine, which takes the checkpoint.
        """
        return iter(())

    def config_names(self, model: nn.Module, names: list[str]) -> dict[str, str]:
        """The name by which the engine looks up each module in a checkpoint's quantization config."""
        return {name: name for name in names}

    def matches_class(self, model: nn.Module, module: nn.Module) -> bool:
        """Whether the engine's module has the class by which the config targets it; else the config must name it."""
        return True


_E = TypeVar("_E", bound=Engine)
#: every engine but the base class, by its name in ``reload``
ENGINES: dict[str, Engine] = {}


def engine_of(reload: str, option: str = "reload") -> Engine:
    """The engine that ``reload`` names, or another option.

    Raises:
        CalibrationError: there is none.
    """
    known = {**ENGINES, "unchecked": Engine()}
    require_choice(option, reload, known)
    return known[reload]


def ask_engines(planned: PlannedCheckpoint, chosen: Engine, also: Collection[Engine] = ()) -> dict[str, Verdict]:
    """Ask every engine once: the verdict of each by its name.

    A model that is not of transformers has no verdicts: only the chosen engine is asked about it.
    ``also``: further engines that have to take the checkpoint.

    Raises:
        CalibrationError: the chosen engine, which the checkpoint is for, does not take it, or one of ``also``.
    """
    runs = chosen.check(planned)
    if runs == Hardware():
        warn(f"{chosen.name} loads the checkpoint, but no hardware has kernels for all of its schemes")
    verdicts: dict[str, Verdict] = {}
    for engine in ENGINES.values():
        for text in engine.remarks(planned, engine is chosen):
            warn(text)
        if engine in also or (engine.listed and is_transformers_model(planned.model)):
            try:
                found = runs if engine is chosen else engine.check(planned)
                verdicts[engine.name] = Verdict(True, str(found or ""))
            except CalibrationError as error:
                if engine in also:
                    raise
                verdicts[engine.name] = Verdict(False, str(error), error.what)
    return verdicts
