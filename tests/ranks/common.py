"""What tests of the sync share. Each `on_*` function runs on every rank, in a process of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_obs.errors import CalibrationError
from lightning_obs.observers import Observer

INT8 = QuantizationArgs(num_bits=8, symmetric=False)
EXACT = ["static_minmax", "histogram", "percentile"]


def make(name, args=INT8, base_name="input", **kwargs):
    return Observer.load_from_registry(name, base_name=base_name, args=args, **kwargs)


def batches(count, dtype=torch.float32, seed=0):
    """Batches that differ in scale, so that each matters to some end of the range."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(3, 32, generator=generator) * (1 + i % 5) + i % 3 - 1).to(dtype) for i in range(count)]


def statistics(observer):
    return {n: v for n, v in vars(observer).items() if isinstance(v, torch.Tensor)}


def counting(collectives):
    """The same collectives, and how often each is called with how many elements."""
    calls, elements = Counter(), Counter()

    def reduce(tensor, op):
        calls[op, tensor.dtype] += 1
        elements[op, tensor.dtype] += tensor.numel()
        assert tensor.is_contiguous()
        assert tensor.dim() == 1
        return collectives.reduce(tensor, op)

    def gather_object(thing):
        calls["gather"] += 1
        return collectives.gather_object(thing)

    return replace(collectives, reduce=reduce, gather_object=gather_object), calls, elements


def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except CalibrationError as error:
        return str(error)
    return None
