"""A calibrated model's state dict as a checkpoint holds it, wherever its weights lie.

One module after the other is compressed (:mod:`.entries`) into a state dict of its own:
the model is not touched, and never held twice.

Where weights are sharded over ranks, rank 0 is the one that keeps the result. Under FSDP2 each rank compresses the rows
that it has, and what is gathered, one module at a time, is compressed already (:mod:`.compressed_rows`). A
weight that cannot be compressed by rows is gathered first, and so is every unit of FSDP1, whose ranks hold pieces of
flat tensors. The other ranks hold one module or unit at a time, besides their own compressed rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lightning_obs.checkpoint.compressed_rows import compress_rows, gather_rows, rows_per_scale
from lightning_obs.checkpoint.entries import compress_entries
from lightning_obs.errors import CalibrationError, sendable
from lightning_obs.model.lora import adapters_of
from lightning_obs.model.qparams import get_scheme, quantized_states, read_qparams
from lightning_obs.model.sharding import by_unit, is_sharded, unit_of, whole_tensor, whole_unit
from lightning_obs.model.weight import full_weight
from lightning_obs.ranks.collectives import gather_objects


def compressed_state_dict(model: nn.Module, keep: bool = True) -> dict[str, torch.Tensor]:
    """The model's state dict with every calibrated module's entries compressed.

    Args:
        model: on every rank, if its weights are sharded.
        keep: whether this rank wants it; otherwise it only helps to gather, and gets nothing.
    """
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    state = {name: value.detach() if is_sharded(value) else whole_tensor(value) for name, value in state.items()}
    # A module used under two names has its entries under both.
    places = [(f"{name}." if name else "", module) for name, module in model.named_modules(remove_duplicate=False)]
    prefixes = {module: prefix for prefix, module in reversed(places)}
    rows = _compressed_rows(prefixes)
    stored: dict[nn.Module, dict[str, torch.Tensor]] = {}
    tied: dict[int, torch.Tensor] = {}
    failure: Exception | None = None
    for modules in by_unit(module for _, module in places):  # in an order that is the same on every rank
        with whole_unit(modules[0]):
            for module in dict.fromkeys(modules):
                own = _own_entries(module, prefixes[module], state)
                sharded = unit_of(module) is not None or any(map(is_sharded, own.values()))
                if module in rows:
                    entries = rows.pop(module) | {key: value for key, value in own.items() if key != "weight"}
                    stored[module] = {key: _kept(gather_rows(value), keep) for key, value in entries.items()}
                elif _is_compressible(module):
                    own = {key: whole_tensor(value) for key, value in own.items()}
                    try:
                        stored[module] = _compressed(module, own, sharded) if keep and failure is None else {}
                    except Exception as error:  # the other ranks go on gathering
                        if not sharded:
                            raise
                        failure = error
                elif adapters_of(module) is not None:
                    stored[module] = own
                elif sharded:
                    stored[module] = {key: _on_host(module, key, value, keep, tied) for key, value in own.items()}
    if failure is not None:
        raise failure
    for prefix, module in places if keep else ():
        if get_scheme(module) is not None and quantized_states(module):
            state.update({prefix + key: value for key, value in read_qparams(module).items()})
        if _is_compressible(module):
            for key in _own_entries(module, prefix, state):
                del state[prefix + key]
        state.update({prefix + key: value for key, value in stored.get(module, {}).items()})
    return state if keep else {}


@torch.no_grad()
def compressed_bytes(module: nn.Module) -> int:
    """How many bytes the weight of a calibrated module and its quantization parameters take in a checkpoint."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    own = {"weight": weight.detach()}
    if _is_compressible(module):
        own = _compressed(module, own, sharded=False)
    return sum(value.nbytes for value in own.values())


def _is_compressible(module: nn.Module) -> bool:
    """Whether the module's entries are compressed: it was calibrated, and is no attention module."""
    return get_scheme(module) is not None and not quantized_states(module)


def _own_entries(module: nn.Module, prefix: str, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The module's own parameters and buffers that are in the state dict: what FSDP1 shards as it is now."""
    unit = unit_of(module)
    flat = {} if unit is None else unit.shapes[module]
    merged = {} if adapters_of(module) is None else {"weight": full_weight(module)}
    keys = [*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))]
    own = {
        key: getattr(module, key).detach() if key in flat else state[prefix + key]
        for key in keys
        if prefix + key in state
    }
    return own | {key: value.detach() for key, value in merged.items() if value is not None}


def _compressed(module: nn.Module, own: dict[str, torch.Tensor], sharded: bool) -> dict[str, torch.Tensor]:
    scheme = get_scheme(module)
    assert scheme is not None
    entries = compress_entries(module, own | read_qparams(module), scheme)
    return {key: value.to("cpu", copy=True) for key, value in entries.items()} if sharded else entries


def _on_host(
    module: nn.Module, key: str, value: torch.Tensor, keep: bool, tied: dict[int, torch.Tensor]
) -> torch.Tensor:
    """A whole copy of a sharded tensor; tied ones stay one tensor, and are gathered once."""
    owner = id(getattr(module, key))
    if owner not in tied:
        tied[owner] = _kept(whole_tensor(value), keep)
    return tied[owner]


def _kept(whole: torch.Tensor, keep: bool) -> torch.Tensor:
    return whole.to("cpu", copy=True) if keep else whole.new_empty(0)


def _compressed_rows(prefixes: Mapping[nn.Module, str]) -> dict[nn.Module, dict[str, torch.Tensor]]:
    """Compress this rank's rows of every weight that can be compressed so.

    Raises:
        CalibrationError: on every rank alike, what went wrong on one.
    """
    by_rows = {module: prefix for module, prefix in prefixes.items() if rows_per_scale(module) is not None}
    if not by_rows:
        return {}
    failure: CalibrationError | None = None
    compressed: dict[nn.Module, dict[str, torch.Tensor]] = {}
    for module, prefix in by_rows.items():
        try:
            compressed[module] = compress_rows(module)
        except Exception as error:  # the other ranks wait for this one
            failure = sendable(error, (prefix.rstrip("."), "weight"))
            failure.__cause__ = error
            break
    first = next((error for error in gather_objects(failure) if error is not None), None)
    if first is not None:
        raise first from failure
    return compressed
