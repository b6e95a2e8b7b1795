"""The questions that every inference engine answers, and the registry of engines.

An engine is asked before data are read: which modules it takes, on which hardware, which modules it fuses, and by which
names it looks modules up in a checkpoint's config. ``engines=["vllm", "sglang"]`` names the engines that will load a
checkpoint: it is written for the first one, and a refusal by any of them is an error. The answers of all others are
reported at the end of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from torch import nn

from lightning_obs.errors import CalibrationError, require_choice, warn
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.moe.experts import linear_experts
from lightning_obs.schemes.planned_modules import PlannedModule, scheme_identity

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


#: hardware other than NVIDIA GPUs, each entry a part of the one before
_OTHER_HARDWARE = ("any hardware", "CPU", "CPU with AMX")


@dataclass(frozen=True)
class Hardware:
    """The hardware that runs a module or a checkpoint: an engine's answer to :meth:`Engine.takes` and ``check``.

    NVIDIA GPUs are told apart by their compute capability. ``str()`` is the text that users read: ``"CPU, CUDA
    capability 7.5 or newer"``.
    """

    cuda: int | None = None  # the smallest compute capability, times ten (89: Ada, 8.9); None: no kernel for CUDA
    cpu: str = ""  # other hardware, one of _OTHER_HARDWARE; empty: none
    last: int | None = None  # the largest compute capability, times ten; None: no upper limit

    def __str__(self) -> str:
        kinds = [self.cpu] if self.cpu else []
        if self.cuda is not None:
            kinds.append(f"CUDA capability {self.cuda / 10:.1f}{self._upper_end()}")
        return ", ".join(kinds) or "no hardware"

    def _upper_end(self) -> str:
        """The text behind the smallest compute capability: ``" or newer"``, ``" to 9.0"``, or nothing."""
        if self.last is None:
            return " or newer"
        if self.last == self.cuda:
            return ""
        return f" to {self.last / 10:.1f}"

    def and_(self, second: Hardware) -> Hardware:
        """The hardware that runs both what ``self`` runs and what ``second`` runs.

        :meth:`Engine.check` calls it for one module after the other.
        """
        cpu = ""
        if self.cpu and second.cpu:
            cpu = max(self.cpu, second.cpu, key=_OTHER_HARDWARE.index)
        if self.cuda is None or second.cuda is None:
            return Hardware(None, cpu)
        cuda = max(self.cuda, second.cuda)
        if self.last is None or second.last is None:
            last = self.last if second.last is None else second.last
        else:
            last = min(self.last, second.last)
        if last is not None and last < cuda:
            return Hardware(None, cpu)
        return Hardware(cuda, cpu, last)


@dataclass(frozen=True)
class Verdict:
    """An engine's answer about a checkpoint that is not written yet.

    :func:`ask_engines` makes it before any data. The summary of the plan and the last lines of a run show it.
    """

    loads: bool  # whether the engine loads the checkpoint, with the numbers of the calibrated model
    text: str = ""  # if it loads the checkpoint: the hardware that runs it, or nothing; else the whole error message
    what: str = ""  # if it does not load the checkpoint: the reason in one clause, without module names and remedy


@dataclass(frozen=True)
class PlannedCheckpoint:
    """A checkpoint that will be written, for the questions to engines.

    ``Observation.of_model`` makes one before any data, for each session; :func:`~lightning_obs.sensitivity` makes one
    for each candidate and engine. The engines read it.

    Attributes:
        model: the module that is calibrated; it holds the targets.
        targets: the modules that will be quantized.
        own_sets: the option ``fused_sets``, attribute names under one parent, beside those of the engine. In sessions
            of ``sensitivity`` the option also has the sets of the first engine.
    """

    model: nn.Module
    targets: list[PlannedModule]
    own_sets: FusedSets = ()

    @property
    def modules(self) -> list[PlannedModule]:
        """The targets without attention modules whose states (q, k, v) are quantized."""
        return [target for target in self.targets if not target.states]

    @property
    def attention_names(self) -> list[str]:
        """The names of attention modules whose states are quantized."""
        return [target.name for target in self.targets if target.states]

    @property
    def target_names(self) -> set[str]:
        """The names of all targets, attention modules among them."""
        return {target.name for target in self.targets}

    @property
    def has_several_schemes(self) -> bool:
        """Whether the checkpoint's config would have several groups."""
        identities = {scheme_identity(target.scheme) for target in self.targets}
        return len(identities) > 1


class Engine:
    """An inference engine. The base class takes every checkpoint: ``engines="unchecked"``.

    An engine that takes schemes by a table is a :class:`~lightning_obs.engines.families.FamilyEngine`.
    :func:`ask_engines` calls ``check`` and ``remarks`` before any data; ``check`` calls ``takes`` for each module.
    ``config_names`` and ``matches_class`` are called while a checkpoint's config is written (``checkpoint/export.py``).
    """

    name: ClassVar[str] = "unchecked"  # as people write it; the key of the engine's verdict
    #: attribute names, under one parent, of modules that the engine multiplies as one matrix: the modules of a set have
    #: one scheme and one global scale
    fused_sets: ClassVar[FusedSets] = FUSED_SETS
    #: whether :meth:`remarks` are also asked for where the checkpoint is written for another engine
    remarks_on_others: ClassVar[bool] = True
    listed: ClassVar[bool] = True  # whether a run reports the verdict even where ``engines`` does not name the engine

    @staticmethod
    def register(name: str) -> Callable[[type[_E]], type[_E]]:
        """A decorator for a subclass: it makes one object of the class and puts it into :data:`ENGINES` under ``name``.

        ``engines=[name]`` then stands for that object.
        """

        def add(engine: type[_E]) -> type[_E]:
            ENGINES[name] = engine()
            return engine

        return add

    def takes(self, target: PlannedModule, is_expert: bool) -> Hardware | None:
        """The hardware that runs one module in its scheme; None: not known.

        :meth:`check` calls it for each target.

        Args:
            target: the module and its scheme.
            is_expert: whether it belongs to one of several experts.

        Raises:
            CalibrationError: the engine does not take the module, and why.
        """
        return None

    def check(self, planned: PlannedCheckpoint) -> Hardware | None:
        """The hardware that runs the whole checkpoint; None: not known. A subclass adds rules about several modules.

        :func:`ask_engines` calls it before any data; :func:`~lightning_obs.sensitivity` calls it for each candidate.

        Raises:
            CalibrationError: the engine does not take the checkpoint, and why.
        """
        expert_prefixes = tuple(f"{name}." for name in linear_experts(planned.model))
        hardware: Hardware | None = None
        for target in planned.targets:
            is_expert = target.name.startswith(expert_prefixes)
            hardware_of_target = self.takes(target, is_expert)
            if hardware is None:
                hardware = hardware_of_target
            elif hardware_of_target is not None:
                hardware = hardware.and_(hardware_of_target)
        return hardware

    def remarks(self, planned: PlannedCheckpoint, is_target: bool) -> Iterator[str]:
        """Texts that :func:`ask_engines` shows as warnings: what this engine would refuse, or compute differently.

        "Differently" means with other arithmetic than the scheme asks for. A remark is no error, since another engine
        may load the checkpoint.

        Args:
            planned: the checkpoint.
            is_target: whether it is written for this engine, whose :meth:`check` has accepted it.
        """
        return iter(())

    def config_names(self, model: nn.Module, names: list[str]) -> dict[str, str]:
        """By module name, the name under which the engine looks the module up in a checkpoint's quantization config.

        An export of a model of transformers asks every registered engine while it writes the config, whichever engine
        it is written for: the config lists modules under the names of all engines. In this class each module has its
        own name.
        """
        return {name: name for name in names}

    def matches_class(self, model: nn.Module, module: nn.Module) -> bool:
        """Whether the config may target a module by its class; asked while an export writes the config.

        False: the engine has a module of another class in its place, so the config has to list the module's name.
        """
        return True


_E = TypeVar("_E", bound=Engine)
#: every engine but the base class, by its name in ``engines``
ENGINES: dict[str, Engine] = {}


def engine_of(name: str) -> Engine:
    """The engine of this name, as the option ``engines`` has it.

    :class:`~lightning_obs.CalibrationOptions` calls it when it is made, to check ``engines``, and whenever its
    properties ``engine`` and ``further_engines`` are read. :func:`~lightning_obs.sensitivity` calls it for its own
    ``engines``.

    Raises:
        CalibrationError: there is no engine of this name.
    """
    engines = {**ENGINES, "unchecked": Engine()}
    require_choice("engines", name, engines)
    return engines[name]


def ask_engines(
    planned: PlannedCheckpoint, target: Engine, further_engines: Collection[Engine] = ()
) -> dict[str, Verdict]:
    """Ask the engines whether they load a checkpoint, and show their remarks as warnings.

    ``Observation.of_model`` calls it once the modules of a session are planned, before any data. About a model that is
    not of transformers, only the target and the further engines are asked.

    Args:
        planned: the checkpoint.
        target: the engine that the checkpoint is written for.
        further_engines: the engines that the user has named after the first one; they must take the checkpoint, too.
            The target is among them if the user has named it twice.

    Returns:
        The verdict of each engine that a run reports, by the engine's name.

    Raises:
        CalibrationError: the target, or one of the further engines, does not take the checkpoint.
    """
    hardware = target.check(planned)
    if hardware == Hardware():
        warn(f"{target.name} loads the checkpoint, but no hardware has kernels for all of its schemes")
    verdicts: dict[str, Verdict] = {}
    in_transformers = is_transformers_model(planned.model)
    for engine in ENGINES.values():
        if engine is target or (in_transformers and engine.remarks_on_others):
            for text in engine.remarks(planned, engine is target):
                warn(text)
        is_reported = in_transformers and engine.listed
        if engine is target and (engine in further_engines or is_reported):
            verdicts[engine.name] = Verdict(True, str(hardware or ""))
        elif engine in further_engines:
            verdicts[engine.name] = Verdict(True, str(engine.check(planned) or ""))
        elif is_reported:
            verdicts[engine.name] = _verdict(engine, planned)
    return verdicts


def _verdict(engine: Engine, planned: PlannedCheckpoint) -> Verdict:
    """The verdict of an engine that the user has not named; an error of its check becomes part of the verdict."""
    try:
        hardware = engine.check(planned)
    except CalibrationError as error:
        return Verdict(False, str(error), error.what)
    return Verdict(True, str(hardware or ""))
