"""Where one parameter or buffer of a module is: :class:`Place`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel


@dataclass(frozen=True)
class Place:
    """Where one of a module's own parameters or buffers is; by default whole on this rank."""

    #: the shape of the whole tensor
    shape: torch.Size
    #: the index, in the flattened whole, of the first element on this rank; other than 0 in flat shards of FSDP1 only
    first: int = 0
    #: groups of ranks whose parts add up to the whole; empty: this rank has the whole
    groups: tuple[dist.ProcessGroup, ...] = ()
    #: the wrapper of FSDP1 that gathers the whole
    unit: FullyShardedDataParallel | None = None
