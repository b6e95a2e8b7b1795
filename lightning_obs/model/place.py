"""Where one parameter or buffer of a module is: :class:`Place`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel


@dataclass(frozen=True)
class Place:
    """Where one of a module's own parameters or buffers is; by default whole on this rank.

    :func:`~lightning_obs.model.weight.place_of` makes one at each call, except for a parameter that FSDP1 has
    flattened: :mod:`.fsdp1` makes the Place of such a parameter at the start of a session or a run, and the module's
    mark keeps it. The functions for shapes and checksums, searches on several ranks and the writer of checkpoints read
    it.

    Attributes:
        shape: the shape of the whole tensor.
        first: the index, in the flattened whole, of this rank's first element. Only flat shards of FSDP1 set it; of any
            other tensor it is 0.
        groups: the groups of ranks over which the tensor is cut, one for each dimension of the device mesh that cuts
            it. Empty: this rank has the whole.
        unit: the wrapper of FSDP1 that gathers the whole; None: the tensor is not sharded by FSDP1.
    """

    shape: torch.Size
    first: int = 0
    groups: tuple[dist.ProcessGroup, ...] = ()
    unit: FullyShardedDataParallel | None = None
