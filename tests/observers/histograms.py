"""Histogram observers to be tested, in all their ways."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs.observers import Observer

INT8 = QuantizationArgs(num_bits=8)
INT4 = QuantizationArgs(num_bits=4)
ASYMMETRIC = QuantizationArgs(num_bits=8, symmetric=False)
FP8 = QuantizationArgs(num_bits=8, type="float")
HEADS = QuantizationArgs(num_bits=8, strategy="attn_head")
WAYS = [
    ("histogram", {"criterion": "mse"}),
    ("histogram", {"criterion": "percentile", "percentile": 99}),
    ("histogram", {"criterion": "entropy"}),
    ("percentile", {"percentile": 99}),
]
every_way = pytest.mark.parametrize(("name", "kwargs"), WAYS, ids=["mse", "percentile", "entropy", "percentile_alone"])
every_format = pytest.mark.parametrize("args", [INT8, ASYMMETRIC, FP8], ids=["int8", "int8 asymmetric", "fp8"])


def make(name: str, base_name: str = "input", args: QuantizationArgs = INT8, **kwargs) -> Observer:
    return Observer.load_from_registry(name, base_name=base_name, args=args, **kwargs)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
