"""Observers of tests of the contract: built-in ones by name, and one of a user's."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs.observers import Observer

INT8 = QuantizationArgs(num_bits=8)
MEMORYLESS = ["memoryless_minmax", "memoryless_mse", "nvfp4_expanded_mse"]
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
