"""Choose a scheme for each layer, so that the model loses least within a budget of bits.

The loss of a plan is the sum of the estimated losses of its layers (:mod:`.sensitivity`), since second-order effects of
small independent errors add up. With one binary variable for each group of modules and each scheme, the best choice
within a linear budget is a multiple-choice knapsack, which HiGHS solves (``scipy.optimize.milp``). A *group* is the
modules that must have one scheme, because engines fuse them. Sizes are bytes in the checkpoint, scales included.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, TypeAlias

import numpy as np
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from torch import nn
from typing_extensions import Unpack

from lightning_obs.calibration.options import CalibrationOptions, OptionKeywords, takes_keywords_of
from lightning_obs.choice.sensitivity import Batches, Group, Schemes, Sensitivity, sensitivity
from lightning_obs.errors import CalibrationError, refuse, require_at_least
from lightning_obs.packages import import_package
from lightning_obs.schemes.planned_modules import scheme_identity

#: bits per weight as a number, or bytes as text (``"90 MB"``); None: no limit
Budget: TypeAlias = float | str | None
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class MixedPlan:
    """A scheme for each module, with the size and the estimated loss; made by :func:`plan_of`.

    :func:`choose_schemes` and :func:`frontier` return plans. The command line (``app/tasks/choosing.py``) reports them,
    and calibrates with the config of the chosen plan.

    Attributes:
        schemes: by module name, the name of the scheme.
        loss: the sum of the groups' estimated losses, in the unit that :attr:`Sensitivity.method` names.
        size: bytes of the modules' weights and scales in a checkpoint.
        weights: how many numbers the weights of these modules have.
        config: a config with a group for each scheme that was chosen, to be used as the scheme of a calibration. None
            if nothing is quantized.
    """

    schemes: dict[str, str]
    loss: float
    size: int
    weights: int
    config: QuantizationConfig | None

    @property
    def bits(self) -> float:
        """Bits per weight on average, scales included; for :meth:`row` and the command line's label of a plan."""
        bits = 8 * self.size
        return bits / self.weights

    @property
    def counts(self) -> dict[str, int]:
        """How many modules have each scheme, by name of the scheme; for :meth:`row` and the command line's tables."""
        return dict(Counter(self.schemes.values()))

    def row(self, name: str = "") -> dict[str, Any]:
        """The plan as a dict, a point in the report's picture of the frontier.

        The command line calls it for every plan in this picture, before it writes the report.

        Args:
            name: the scheme, for a plan with one scheme for all modules; empty for mixed plans.
        """
        return {
            "name": name,
            "bits_per_weight": self.bits,
            "bytes": self.size,
            "loss": self.loss,
            "modules": self.counts,
        }


@takes_keywords_of(CalibrationOptions)
def mixed_precision(
    model: nn.Module,
    batches: Batches | None,
    schemes: Schemes,
    budget: Budget = None,
    *,
    at_most: Mapping[str, float] | None = None,
    calibration: Batches | None = None,
    seed: int = 0,
    **options: Unpack[OptionKeywords],
) -> QuantizationConfig:
    """Choose one of several schemes for each layer, so that the model's predictions change least within a budget.

    Users call it before a calibration, with the result as its scheme. It is :func:`~lightning_obs.sensitivity` followed
    by :func:`choose_schemes`. Call these two functions yourself, as the command line does, to see the estimated losses,
    to try several budgets, or for the frontier.

    Args:
        model: a module whose output is logits; it is not changed.
        batches: batches to measure on, and to calibrate the candidates that need data. None: the errors of the weights
            decide, without data.
        schemes: the candidates: names of presets, or ``{name: scheme}``; None is full precision. A scheme may be a dict
            of ``scheme``, ``observers``, ``rounding``... (see :func:`~lightning_obs.sensitivity`).
        budget: bits per weight on average over all modules that the candidates target, scales included (``4.5``), or
            bytes (``"90 MB"``); None: no limit.
        at_most: by name of a scheme, the largest share of the weights that may have it (``{"W8A8": 0.1}``).
        calibration: batches for candidates that observe data; default: ``batches``.
        seed: the seed of the random signs with which losses are estimated.
        **options: fields of :class:`~lightning_obs.CalibrationOptions` (``ignore``, ``targets``, ``fused_sets``...).
            ``engines=["vllm", "llama.cpp"]``: the plan is one that all of them take.

    Returns:
        A config with one group for each scheme that was chosen; modules in full precision are in its ``ignore``.

    Raises:
        CalibrationError: a budget below the size of the smallest candidates, or an unreadable budget; all modules are
            best left in full precision; scipy is not installed; errors of :func:`~lightning_obs.sensitivity`.

    Examples:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        >>> small, large = ({"weights": {"num_bits": bits, "strategy": "channel"}} for bits in (4, 8))
        >>> config = mixed_precision(model, [torch.randn(8, 64)], {"int4": small, "int8": large}, budget=5.5)
        >>> {name: group.targets for name, group in config.config_groups.items()}
        {'int4': ['0'], 'int8': ['2']}
    """
    require_solver()  # before anything is measured
    measured = sensitivity(model, batches, schemes, calibration=calibration, seed=seed, **options)
    plan = choose_schemes(measured, budget, at_most=at_most)
    if plan.config is None:
        raise CalibrationError(
            "every module is best left in full precision",
            got=f"budget {budget}",
            remedy="give a smaller budget, or leave full precision out of the candidates.",
        )
    return plan.config


def choose_schemes(
    measured: Sensitivity, budget: Budget = None, *, at_most: Mapping[str, float] | None = None
) -> MixedPlan:
    """Return the plan with the least estimated loss within a budget.

    Called after :func:`.sensitivity`: by :func:`mixed_precision`, by the command line (``app/tasks/choosing.py``), by
    users, and without a budget by :func:`frontier`.

    Args:
        measured: losses and sizes of all groups and candidates.
        budget: bits per weight on average, or bytes (``"90 MB"``), as for :func:`mixed_precision`; None: no limit.
        at_most: by name of a scheme, the largest share of the weights that may have it.

    Raises:
        CalibrationError: nothing fits the budget; an unknown scheme in ``at_most``, or a share outside [0, 1].
    """
    shares: dict[str, float] = {}
    for name, share in (at_most or {}).items():
        shares[name] = float(share)
    _require_shares(shares, measured.candidates)
    _require_finite_losses(measured)
    limit = None if budget is None else budget_in_bytes(budget, measured.weights)
    plan = _solve(measured, limit, shares)
    if plan is None:
        raise CalibrationError(
            "no choice of schemes fits the budget",
            got=f"budget {budget}" + (f", at_most {dict(at_most)}" if at_most else ""),
            expected=f"at least {8 * measured.least / measured.weights:.4g} bits per weight, {measured.least} bytes",
            remedy="give a larger budget, or add a smaller scheme to the candidates.",
        )
    return plan


def _require_shares(shares: Mapping[str, float], candidates: Sequence[str]) -> None:
    """Raise a CalibrationError for shares (``at_most``) of unknown schemes, or outside [0, 1]."""
    unknown = sorted(set(shares) - set(candidates))
    refuse(unknown, "at_most names no candidate", expected=", ".join(candidates))
    outside = []
    for name, share in shares.items():
        if not 0 <= share <= 1:
            outside.append(f"{name} ({share:g})")
    refuse(outside, "at_most takes shares of the weights, 0 to 1")


def _require_finite_losses(measured: Sensitivity) -> None:
    """Raise a CalibrationError for losses that are not finite, since the solver cannot compare them."""
    overflowing: list[str] = []
    for group in measured.groups:
        for scheme in measured.candidates:
            if not isfinite(group.losses[scheme]):
                overflowing.append(f"{group.names[0]} ({scheme})")
    refuse(
        overflowing,
        "estimated losses are not finite",
        remedy="leave these modules out, or these candidates: the quantized layer overflows.",
    )


def plan_of(measured: Sensitivity, schemes: str | Mapping[str, str]) -> MixedPlan:
    """Make the plan that follows from a scheme for all modules, or from a scheme for each module.

    :func:`_solve` calls it with the solver's solution. The command line calls it with each single scheme, for its
    picture.

    Args:
        measured: losses and sizes of all groups and candidates.
        schemes: the name of one scheme, or the scheme's name by module name.

    Raises:
        CalibrationError: no candidate of that name; no scheme, or two, for the modules of a group.
    """
    scheme_names: dict[str, str] = {}
    loss = 0.0
    size = 0
    for group in measured.groups:
        scheme_name = _scheme_of_group(group, schemes, measured.candidates)
        scheme_names |= dict.fromkeys(group.names, scheme_name)
        loss += group.losses[scheme_name]
        size += group.sizes[scheme_name]
    modules: dict[str, tuple[str, QuantizationScheme | None]] = {}
    for module_name, scheme_name in scheme_names.items():
        scheme = measured.schemes.get(scheme_name, {}).get(module_name)
        modules[module_name] = scheme_name, scheme
    config = config_of(modules, measured.ignore)
    return MixedPlan(schemes=scheme_names, loss=loss, size=size, weights=measured.weights, config=config)


def _scheme_of_group(group: Group, schemes: str | Mapping[str, str], candidates: Sequence[str]) -> str:
    """The name of the scheme that ``schemes`` gives to the modules of a group; a CalibrationError if not one scheme."""
    if isinstance(schemes, str):
        names: list[str | None] = [schemes]
    else:
        names = list(dict.fromkeys(map(schemes.get, group.names)))
    name = names[0]
    if len(names) > 1 or name is None or name not in candidates:
        raise CalibrationError(
            "no scheme for modules",
            where=group.names,
            got=" and ".join(map(repr, names)),
            expected=f"one of {', '.join(candidates)} for all of them",
        )
    return name


def frontier(measured: Sensitivity, points: int = 16, *, at_most: Mapping[str, float] | None = None) -> list[MixedPlan]:
    """Return the best plan for each of several budgets, smallest first.

    Budgets go from the smallest possible size to the size of the best plan without a budget. The command line
    (``app/tasks/choosing.py``) calls it for its table and picture.

    Args:
        measured: losses and sizes of all groups and candidates.
        points: how many budgets to try, evenly spaced. A plan that is best for several budgets is returned once.
        at_most: by name of a scheme, the largest share of the weights that may have it.
    """
    require_at_least(1, points=points)
    best = choose_schemes(measured, at_most=at_most)
    largest = max(best.size, measured.least)
    budgets = np.linspace(measured.least, largest, max(2, points))
    plans: dict[tuple[str, ...], MixedPlan] = {}
    for size in budgets:
        limit = int(np.ceil(size))
        plan = _solve(measured, limit, at_most or {})
        if plan is not None:
            schemes = tuple(plan.schemes.values())
            plans[schemes] = plan
    return list(plans.values())


def budget_in_bytes(budget: float | str, weights: int) -> int:
    """Convert a budget to bytes; a CalibrationError if it cannot be read.

    Called by :func:`choose_schemes`, and by the command line to refuse a wrong budget before it loads the model.

    Args:
        budget: bits per weight, or text with a unit of bytes.
        weights: the number of weights to which bits per weight refer.

    >>> budget_in_bytes(4.5, weights=1000), budget_in_bytes("90 MB", weights=1000), budget_in_bytes("1KiB", weights=1)
    (562, 90000000, 1024)
    """
    units = "|".join(_UNITS)
    pattern = rf"(\d+\.?\d*|\.\d+)\s*({units})?"
    text = str(budget).strip()
    match = re.fullmatch(pattern, text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        expected = "bits per weight (4.5), or bytes ('90 MB', '80 MiB')"
        raise CalibrationError("budget", got=repr(budget), expected=expected)
    number = float(match[1])
    unit = match[2]
    if unit:
        bytes_of_unit = _UNITS[unit.upper()]
        return int(number * bytes_of_unit)
    bits = number * weights
    return int(bits / 8)


# ---------------------------------------------------------------------- the knapsack


def require_solver() -> None:
    """Raise a :class:`CalibrationError` if scipy, which solves the knapsack, is not installed.

    Called before anything is measured, by :func:`mixed_precision` and by the command line (``app/tasks/choosing.py``),
    and by :func:`_solve` for users who measured on their own.
    """
    import_package("scipy.optimize", "a choice of schemes within a budget")


def _solve(measured: Sensitivity, limit: int | None, shares: Mapping[str, float]) -> MixedPlan | None:
    """The plan with the least loss within a limit in bytes; None if nothing fits.

    Args:
        measured: losses and sizes of all groups and candidates.
        limit: bytes; None: no limit.
        shares: by scheme, the largest share of the weights that may have it.
    """
    if measured.alone:
        return _best_single_scheme(measured, limit, shares)
    require_solver()
    from scipy.optimize import Bounds, milp

    candidates = measured.candidates
    count = len(candidates)
    losses = _flat([group.losses for group in measured.groups], candidates)
    sizes = _flat([group.sizes for group in measured.groups], candidates)
    # Losses are divided by their mean, because HiGHS' tolerances are absolute. Among equal losses, the small term for
    # the size prefers the smaller candidate. HiGHS stops once a plan's cost is proven to be within 0.01 % of the least
    # (mip_rel_gap).
    mean_loss = max(losses.mean(), np.finfo(float).tiny)
    largest_size = max(sizes.max(), 1.0)
    cost = losses / mean_loss + 1e-6 * sizes / largest_size
    constraints = _constraints(measured, sizes, limit, shares)
    with _silent_solver():
        solution = milp(
            cost, integrality=1, bounds=Bounds(0, 1), constraints=constraints, options={"mip_rel_gap": 1e-4}
        )
    if solution.x is None:
        return None
    scheme_names: dict[str, str] = {}
    numbers = solution.x.reshape(-1, count).argmax(1)
    for group, number in zip(measured.groups, numbers, strict=True):
        scheme_names |= dict.fromkeys(group.names, candidates[number])
    return plan_of(measured, scheme_names)


def _best_single_scheme(measured: Sensitivity, limit: int | None, shares: Mapping[str, float]) -> MixedPlan | None:
    """The best plan that uses one scheme and full precision, for engines that read only one scheme.

    Full precision is in ``measured.candidates`` if the user offers it, but never in ``measured.schemes``. For each
    scheme, the best plan is computed with the shares of all other schemes at 0, so full precision stays possible in it.
    :func:`_solve`, whose arguments it takes, calls it if ``measured.alone`` is set.
    """
    mixed = replace(measured, alone=False)
    best: MixedPlan | None = None
    for scheme_name in measured.schemes:
        shares_of_one = {**shares, **dict.fromkeys(measured.schemes, 0.0)}
        shares_of_one[scheme_name] = shares.get(scheme_name, 1.0)
        plan = _solve(mixed, limit, shares_of_one)
        if plan is not None and (best is None or plan.loss < best.loss):
            best = plan
    return best


def _flat(rows: Sequence[Mapping[str, float]], candidates: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The numbers of all binary variables, ``(groups * candidates,)``: all candidates of the first group come first.

    Args:
        rows: for each group, a number by name of the candidate.
        candidates: names of the candidates, in the order of the columns.
    """
    table = np.empty((len(rows), len(candidates)))
    for row, numbers in enumerate(rows):
        for column, name in enumerate(candidates):
            table[row, column] = numbers[name]
    return table.ravel()


def _constraints(measured: Sensitivity, sizes: Any, limit: int | None, shares: Mapping[str, float]) -> list[Any]:
    """The solver's linear constraints: one scheme for each group, the limit in bytes, each scheme's share of weights.

    Args:
        measured: the numbers of weights and the names of the candidates.
        sizes: the bytes of each binary variable (:func:`_flat`).
        limit: bytes; None: no limit.
        shares: by scheme, the largest share of the weights that may have it.
    """
    from scipy.optimize import LinearConstraint
    from scipy.sparse import coo_array

    candidates = measured.candidates
    count = len(candidates)
    variables = np.arange(len(sizes), dtype=np.int32)  # up to scipy 1.14, HiGHS takes no 64-bit indices
    group_numbers = variables // count
    candidate_numbers = variables % count
    ones = np.ones(len(sizes))
    schemes_of_group = coo_array((ones, (group_numbers, variables)))
    constraints = [LinearConstraint(schemes_of_group, 1, 1)]
    if limit is not None:
        bytes_per_weight = sizes[None] / measured.weights
        constraints.append(LinearConstraint(bytes_per_weight, ub=limit / measured.weights))
    weights_of_groups = [float(group.weights) for group in measured.groups]
    weights = np.repeat(weights_of_groups, count)
    for scheme_name, share in shares.items():
        number = candidates.index(scheme_name)
        has_scheme = candidate_numbers == number
        weights_of_scheme = np.where(has_scheme, weights, 0.0)
        share_of_scheme = weights_of_scheme[None] / measured.weights
        constraints.append(LinearConstraint(share_of_scheme, ub=share))
    return constraints


@contextmanager
def _silent_solver() -> Iterator[None]:
    """Send the process's standard output to ``/dev/null`` inside the ``with`` block.

    HiGHS prints some lines from C++ whatever its options say (``transformNewIntegerFeas...``).
    """
    libc = ctypes.CDLL(None)
    libc.fflush(None)  # so that earlier output, which C may still buffer, is not dropped
    terminal = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        libc.fflush(None)
        os.dup2(terminal, 1)
        os.close(terminal)
        os.close(nowhere)


def config_of(
    modules: Mapping[str, tuple[str, QuantizationScheme | None]], ignore: Sequence[str]
) -> QuantizationConfig | None:
    """A config with one group for each different pair of label and scheme; None if no module has a scheme.

    Called by :func:`plan_of`, with the candidate's name as the label, and by :mod:`.observer_choice`, whose labels name
    the chosen observers. Groups of one label with different schemes are told apart by a number behind the label.

    Args:
        modules: by module name, a label and the module's scheme; None: the module stays in full precision.
        ignore: names and patterns of further modules that stay in full precision.
    """
    groups: dict[tuple[str, str], QuantizationScheme] = {}
    unquantized = []
    for module, (name, scheme) in modules.items():
        if scheme is None:
            unquantized.append(module)
            continue
        key = name, scheme_identity(scheme)
        if key not in groups:
            groups[key] = scheme.model_copy(deep=True, update={"targets": []})
        groups[key].targets.append(module)
    if not groups:
        return None
    groups_of_name: Counter[str] = Counter()
    for name, _ in groups:
        groups_of_name[name] += 1
    config_groups: dict[str, QuantizationScheme] = {}
    for number, ((name, _), scheme) in enumerate(groups.items()):
        label = name
        if groups_of_name[name] > 1:
            label = f"{name}_{number}"
            while label in groups_of_name:  # the label of another group
                label = f"{label}_{number}"
        config_groups[label] = scheme
    return QuantizationConfig(config_groups=config_groups, ignore=[*ignore, *unquantized])
