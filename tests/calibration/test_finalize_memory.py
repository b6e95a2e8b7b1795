"""How much memory finalize takes beside the model: the scales of a large model in NVFP4 are gigabytes."""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_obs import CalibrationSession

PAIRS, WIDTH, HIDDEN = 16, 1024, 1536
#: of all scales in NVFP4, in bfloat16
SCALES_BYTES = 2 * PAIRS * WIDTH * HIDDEN // 16 * 2


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations inside the ``with`` block have made or read, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._storages = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor):
                self._watch(value.untyped_storage())
        self.peak = max(self.peak, self.live)
        return output

    def _watch(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self.live += storage.nbytes()
            weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())

    def _freed(self, address: int, size: int) -> None:
        self._storages.discard(address)
        self.live -= size


def test_finalize_holds_no_second_copy_of_all_scales():
    layers = [nn.Linear(*shape, bias=False) for _ in range(PAIRS) for shape in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))]
    model = nn.Sequential(*layers).bfloat16()
    session = CalibrationSession(model, "NVFP4A16", observers={"weight": "memoryless_minmax"})
    with LiveBytes() as memory:
        session.finalize()
    # Afterwards there are ranges, scales on the modules, and the result on the host; one module takes 2 MiB meanwhile.
    assert memory.peak - memory.live < SCALES_BYTES / 2
