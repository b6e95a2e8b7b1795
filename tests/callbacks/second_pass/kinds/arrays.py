"""Numbers, tensors, arrays, and random numbers."""

import random

import numpy as np
import torch

from tests.callbacks.second_pass.kinds.base import drain, kind, mean


def array_kinds():
    """Numbers, tensors and arrays."""

    def number(self):
        self.kept, self.calls = 0.0, 0

    def add_number(self, out):
        self.kept += float(out.sum())
        self.calls += 1

    yield "number", kind(number, add_number, lambda self: self.kept / self.calls)

    def lazy(self, out):
        if not hasattr(self, "kept"):
            self.kept = []
        self.kept.append(float(out.sum()))

    yield "attribute born in the first batch", kind(None, lazy, lambda self: mean(self.kept))

    def tensor(self):
        self.kept = torch.zeros(())

    def in_place(self, out):
        self.kept += out.detach().sum()

    yield "tensor in place", kind(tensor, in_place, lambda self: self.kept)

    def anew(self, out):
        self.kept = self.kept + out.detach().sum()

    yield "tensor anew", kind(tensor, anew, lambda self: self.kept)

    def buffer(self):
        self.register_buffer("kept", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def add_buffer(self, out):
        self.kept += out.detach().sum()
        self.calls = self.calls + 1

    yield "buffer", kind(buffer, add_buffer, lambda self: self.kept / self.calls)

    def ndarray(self):
        self.kept = np.zeros(3)

    def add_array(self, out):
        self.kept[0] += float(out.sum())

    yield "ndarray", kind(ndarray, add_array, lambda self: self.kept.sum())

    def tensors(self):
        self.kept = []

    yield (
        "list of tensors",
        kind(tensors, lambda self, out: self.kept.append(out), lambda self: torch.cat(self.kept).mean()),
    )

    def memory(self):
        self.register_buffer("bank", torch.zeros(8))
        self.at = 0

    def remember(self, out):
        self.bank[self.at % 8] = out.detach().mean()
        self.at += 1

    yield "memory bank", kind(memory, remember, lambda self: self.bank.sum())


def random_kinds():
    """Random numbers of the process and of one's own."""

    def draws(name, new, draw):
        def make(self):
            self.rng, self.kept = new(), []

        return name, kind(
            make, lambda self, out: self.kept.append(float(draw(self.rng))), lambda self: drain(self.kept)
        )

    yield draws("global torch", lambda: None, lambda _: torch.rand(()))
    yield draws("global numpy", lambda: None, lambda _: np.random.rand())
    yield draws("global random", lambda: None, lambda _: random.random())
    yield draws("numpy Generator", lambda: np.random.default_rng(3), lambda g: g.random())
    yield draws("numpy RandomState", lambda: np.random.RandomState(3), lambda g: g.rand())
    yield draws("torch Generator", lambda: torch.Generator().manual_seed(3), lambda g: torch.rand((), generator=g))
    yield draws("random.Random", lambda: random.Random(3), lambda g: g.random())
    yield draws(
        "Generator in a dict",
        lambda: {"g": torch.Generator().manual_seed(1)},
        lambda d: torch.rand((), generator=d["g"]),
    )
    yield draws(
        "two names for one Generator", lambda: [g := random.Random(3), g], lambda d: d[0].random() + d[1].random()
    )
