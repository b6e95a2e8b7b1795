"""Observers of tests of the contract: built-in ones by name, one of a user's; and any tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import strategies as st

from lightning_obs.observers import Observer

INT8 = QuantizationArgs(num_bits=8)
MEMORYLESS = ["memoryless_minmax", "memoryless_mse", "nvfp4_expanded_mse"]
#: every built-in observer, as users write it
BUILT_IN_NAMES = sorted(
    name.replace("-", "_")
    for name in Observer.registered_names()
    if Observer.get_value_from_registry(name).__module__.startswith("lightning_obs.")
)
#: those that take formats of integers and of floats; lattice refuses all but weights in integers
NAMES = [name for name in BUILT_IN_NAMES if name != "lattice"]
#: those of weights that want the module's inputs
OF_INPUTS = {name for name in NAMES if Observer.get_value_from_registry(name).needs_inputs}
#: where a range's width is still a number, with room for the mean and two deviations
LARGEST = {torch.float32: 1e37, torch.bfloat16: 1e37, torch.float16: 3e4}
BUILT_IN = [*MEMORYLESS[:2], "static_minmax", "minmax", "mse"]


def make(name: str, base_name: str = "input", args: QuantizationArgs = INT8, **kwargs) -> Observer:
    return Observer.load_from_registry(name, base_name=base_name, args=args, **kwargs)


class Largest(Observer):
    """A user's observer with a statistic of its own, that started in the constructor."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._largest = torch.zeros(1)
        self._seen = []

    def update_statistics_from_observed(self, observed):
        self._largest.clamp_(min=observed.abs().max())
        self._seen.append(len(observed))

    @property
    def has_statistics(self):
        return bool(self._seen)

    def get_min_max(self):
        return -self._largest, self._largest


# ---------------------------------------------------------------------- any tensors


@st.composite
def tensors(draw, dtypes=(torch.float32, torch.bfloat16, torch.float16)):
    """An activation of any shape, with at least one value."""
    dtype = draw(st.sampled_from(dtypes))
    shape = (*draw(st.lists(st.integers(1, 3), max_size=3)), draw(st.integers(1, 6)))
    info, count = torch.finfo(dtype), math.prod(shape)
    kind = draw(st.sampled_from(["any", "equal", "zeros", "denormal", "huge", "negative", "positive", "one outlier"]))
    low, high = {
        "denormal": (-info.tiny, info.tiny),
        "negative": (-100.0, -0.5),
        "positive": (0.5, 100.0),
        "one outlier": (-0.5, 0.5),
        "huge": (-1.0, 1.0),
    }.get(kind, (-100.0, 100.0))
    unit = st.floats(low, high)
    if kind in ("equal", "zeros"):
        values = [0.0 if kind == "zeros" else draw(unit)] * count
    else:
        values = draw(st.lists(unit, min_size=count, max_size=count))
    if kind == "huge":
        values = [value * LARGEST[dtype] for value in values]
    if kind == "one outlier":
        values[0] = 1000.0
    return torch.tensor(values, dtype=torch.float64).to(dtype).reshape(shape)


@st.composite
def two_tensors(draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Two activations of one dtype."""
    first = draw(tensors())
    return first, draw(tensors([first.dtype]))


class Range(NamedTuple):
    """A range of one scale, and by how much rounding may move its ends."""

    low: float
    high: float
    rounding: float

    def share_inside(self, x: torch.Tensor) -> float:
        """The share of some values that lie in the range, as wide as rounding may make it."""
        is_inside = (x.double() >= self.low - self.rounding) & (x.double() <= self.high + self.rounding)
        return is_inside.double().mean().item()

    def is_scaled(self, x: torch.Tensor, least: float, most: float) -> bool:
        """Whether each end is that of some values, times a factor from ``least`` to ``most``, up to rounding."""
        for end, full in ((self.low, x.min().item()), (self.high, x.max().item())):
            smallest = least * abs(full) - self.rounding
            largest = most * abs(full) + self.rounding
            if end * full < 0 or not smallest <= abs(end) <= largest:
                return False
        return True

    def is_between(self, first: torch.Tensor, second: torch.Tensor, least: float = 1) -> bool:
        """Whether each end lies between those of two tensors, of which each is shrunk to ``least`` at most."""
        for end, ends in (
            (self.low, [first.min().item(), second.min().item()]),
            (self.high, [first.max().item(), second.max().item()]),
        ):
            ends += [least * full for full in ends]
            if not min(ends) - self.rounding <= end <= max(ends) + self.rounding:
                return False
        return True


def range_of(observer: Observer, *values: torch.Tensor) -> Range:
    """The range of an observer that sees some tensors of one dtype."""
    for value in values:
        observer(value)
    low, high = (end.item() for end in observer.get_min_max())
    info = torch.finfo(values[0].dtype)
    largest = max(value.double().abs().max().item() for value in values)
    return Range(low, high, 4 * info.eps * largest + info.smallest_normal)
