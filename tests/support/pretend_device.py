"""An accelerator without hardware: tensors say ``pretend:0`` or ``pretend:1`` and hold real values on the CPU.

What goes wrong on a GPU can be seen without one. An operation that mixes devices fails as CUDA's does, and everything
that makes a GPU wait is counted by the line of the package that asked for it: launches, bytes moved, values read back
by the host, uploads. It runs on torch's PrivateUse1, the place of a backend of one's own, in Python.

How. A tensor is a wrapper without memory whose ``values`` lie on the CPU. An operation on wrappers comes to
``__torch_dispatch__``; a factory, which has no wrapper among its arguments, to the fallback of PrivateUse1. Both run
the CPU's operation on the values. So results have the CPU's bits wherever the same operations run, which the compiled
loops of the CPU are not.

A device is registered for the life of a process: torch then starts a thread for its backward passes, and may not be
forked any more. So tests that import this run in processes of their own (``tests/test_accelerator.py``).
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME, COUNT = "pretend", 2
aten = torch.ops.aten

# The host waits for their result, whose size only the device knows, or which is a number of Python.
_WAITED_FOR = {
    "_local_scalar_dense", "_linalg_check_errors", "_linalg_eigh", "_unique", "_unique2", "bincount", "equal",
    "masked_select", "nonzero", "repeat_interleave", "unique_consecutive", "unique_dim",
}  # fmt: skip
# These take tensors of several devices: copies, and an index on the host.
_MAY_MIX = {"copy_", "_to_copy", "index", "index_put", "index_put_", "lift_fresh"}
# A number on the host is one for elementwise operations, and no tensor to join with others.
_ALL_ON_ONE = {"cat", "stack"}
_NO_LAUNCH = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
# The fallback of PrivateUse1 does not get these: torch makes an empty tensor and resizes it, or calls them where Python
# is not to be asked.
_FACTORIES = (
    "arange", "arange.start", "arange.start_step", "copy_", "empty.memory_format", "empty_strided", "eye", "eye.m",
    "linspace", "tril_indices", "triu_indices",
)  # fmt: skip
_IN_HALF_PRECISION = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")


@dataclass
class Counts:
    """What the device was asked to do, each by line of the package (``observers/mse.py:12``), or ``outside`` of it.

    ``moved`` is in bytes: every operation reads what it is given and writes its result.
    """

    launches: collections.Counter[str] = field(default_factory=collections.Counter)
    moved: collections.Counter[str] = field(default_factory=collections.Counter)
    reads: collections.Counter[str] = field(default_factory=collections.Counter)
    uploads: collections.Counter[str] = field(default_factory=collections.Counter)

    def of_package(self) -> tuple[int, int, int]:
        """Launches, bytes moved, and reads by the host that the package asked for."""
        return tuple(each.total() - each["outside"] for each in (self.launches, self.moved, self.reads))

    def __str__(self) -> str:
        lines = []
        for name, counter in vars(self).items():
            most = ", ".join(f"{count} {place}" for place, count in counter.most_common(8))
            lines.append(f"{name} {counter.total()}: {most}")
        return "\n".join(lines)


_counting: list[Counts] = []


@contextmanager
def counting() -> Iterator[Counts]:
    """Count what is asked of the device in the ``with`` block."""
    counts = Counts()
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting[:] = [one for one in _counting if one is not counts]


def _count(**numbers: int) -> None:
    if not _counting:
        return
    frame, place = sys._getframe(2), "outside"
    while frame is not None:
        file = frame.f_code.co_filename
        if "/lightning_obs/" in file and "site-packages" not in file.rpartition("/lightning_obs/")[2]:
            place = f"{file.rpartition('/lightning_obs/')[2]}:{frame.f_lineno}"
            break
        frame = frame.f_back
    for counts in _counting:
        for name, number in numbers.items():
            getattr(counts, name)[place] += number


class PretendTensor(torch.Tensor):
    """A tensor on the pretend device, with its values on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, index: int = 0):
        like = {"strides": values.stride(), "storage_offset": values.storage_offset(), "dtype": values.dtype}
        where = torch.device(NAME, index)
        return torch.Tensor._make_wrapper_subclass(cls, values.size(), **like, device=where, requires_grad=False)

    def __init__(self, values: torch.Tensor, index: int = 0):
        self.values = values

    def tolist(self):
        return self.detach().cpu().tolist()

    def __repr__(self) -> str:
        return f"PretendTensor({self.values}, device='{self.device}')"

    @property
    def data(self) -> PretendTensor:
        return self.detach()

    @data.setter
    def data(self, other: PretendTensor) -> None:
        if not isinstance(other, PretendTensor) or _kind(other) != _kind(self):
            raise RuntimeError("the data of a PretendTensor are replaced by those of its shape, dtype and device only")
        self.values = other.values

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copied = PretendTensor(self.values.clone(), self.device.index).requires_grad_(self.requires_grad)
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, self.requires_grad)
            copied.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("values", "_is_param")})
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return _rebuild, (self.detach().cpu(), self.device.index, self.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _execute(func, args, kwargs or {})


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _rebuild(values: torch.Tensor, index: int, requires_grad: bool) -> torch.Tensor:
    return values.to(torch.device(NAME, index)).requires_grad_(requires_grad)


def _execute(func, args, kwargs):
    name = func._schema.name.partition("::")[2]
    if func is torch.ops.aten.to.dtype_layout and torch.device(kwargs["device"]) != args[0].device:
        # In inference mode nothing takes it apart.
        name, func = "_to_copy", torch.ops.aten._to_copy.default
        kwargs = {key: value for key, value in kwargs.items() if key != "copy"}
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    ours = [one for one in tensors if isinstance(one, PretendTensor)]
    _refuse_mixed_devices(name, tensors, ours)
    asked = kwargs.get("device")
    device = torch.device(asked) if asked is not None else ours[0].device
    if name in ("_to_copy", "copy_"):
        return _copy(name, func, args, kwargs, device)
    plain, options = tree_map(_values, (args, {k: x for k, x in kwargs.items() if k != "pin_memory"}))
    if asked is not None and device.type == NAME:
        options["device"] = torch.device("cpu")
    places = args[1] if name in ("index", "index_put", "index_put_") else ()
    masked = any(isinstance(one, PretendTensor) and one.dtype in (torch.bool, torch.uint8) for one in places)
    if ours and (name in _WAITED_FOR or masked):
        _count(reads=1)
    result = func(*plain, **options)
    if device.type != NAME:
        return result
    return _wrapped(name, result, ours, kwargs.get("out"), device.index or 0)


def _wrapped(name, result, ours, out, index):
    """The result on the device; what is fresh memory, or was written to in place, was a launch."""
    made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
    known = {id(one.values): one for one in ours}
    for one in made:
        if id(one) in known and known[id(one)].shape != one.shape:
            raise NotImplementedError(f"{name} changes the shape of a PretendTensor in place")
    memory = {one.values.untyped_storage().data_ptr() for one in ours}
    written = [one for one in made if id(one) in known or one.untyped_storage().data_ptr() not in memory]
    if (written or not made) and name not in _NO_LAUNCH:
        read = sum(_bytes(one.values) for one in ours if one is not out)
        _count(launches=1, moved=read + sum(map(_bytes, written)))

    def wrap(one):
        if not isinstance(one, torch.Tensor) or id(one) in known:
            return known.get(id(one), one)
        # A view of a tensor that is none of inference mode is none either.
        is_view = not any(one is other for other in written)
        apart = is_view and not any(each.is_inference() for each in ours)
        with torch.inference_mode(torch.is_inference_mode_enabled() and not apart):
            return PretendTensor(one, index)

    return tree_map(wrap, result)


def _copy(name, func, args, kwargs, device):
    """Copies are what crosses from one device to another."""
    source = args[0] if name == "_to_copy" else args[1]
    target = device if name == "_to_copy" else args[0].device
    plain, options = tree_map(_values, (args, {k: x for k, x in kwargs.items() if k not in ("device", "pin_memory")}))
    result = func(*plain, **options)
    if target.type == "meta":
        return result.to("meta")
    if target.type != NAME:
        _count(reads=1)
    else:
        _count(launches=1, moved=_bytes(result) + _bytes(_values(source)))
        if not isinstance(source, PretendTensor):
            _count(uploads=1)
    if name == "copy_":
        return args[0]
    return PretendTensor(result, target.index or 0) if target.type == NAME else result


def _refuse_mixed_devices(name, tensors, ours) -> None:
    devices = {one.device for one in ours}
    devices |= {
        one.device for one in tensors if not isinstance(one, PretendTensor) and (one.dim() or name in _ALL_ON_ONE)
    }
    if ours and len(devices) > 1 and name not in _MAY_MIX:
        found = " and ".join(sorted(map(str, devices)))
        shapes = [tuple(one.shape) for one in tensors]
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {found} ({name}, {shapes})")


def _values(one):
    return one.values if isinstance(one, PretendTensor) else one


def _bytes(values: torch.Tensor) -> int:
    sizes = (size for size, stride in zip(values.shape, values.stride(), strict=True) if stride)
    count = values.element_size() if values.numel() else 0
    for size in sizes:
        count *= size
    return count


# ---------------------------------------------------------------------- what torch expects of a backend


class _Module(_DummyBackendModule):
    """``torch.pretend``. Random numbers are the CPU's."""

    def device_count(self) -> int:
        return COUNT

    def set_device(self, device) -> None:
        pass

    def synchronize(self, device=None) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device=None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state, device=None) -> None:
        torch.set_rng_state(state)


def _in_half_precision(op):
    """As CUDA's autocast: floating arguments are cast, then the operation is called below autocast."""

    def call(*args, **kwargs):
        to = torch.get_autocast_dtype(NAME)

        def cast(one):
            narrow = isinstance(one, torch.Tensor) and one.dtype in (torch.float32, torch.float16, torch.bfloat16)
            return one.to(to) if narrow else one

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return op(*tree_map(cast, args), **kwargs)

    return call


class _Generator(torch.Generator):
    """A generator of the device is one of the CPU, so both draw the same."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu" if torch.device(device).type == NAME else device)


def _register() -> list[torch.library.Library]:
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(lambda op, *args, **kwargs: _execute(op, args, kwargs), "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    some = torch.library.Library("aten", "IMPL")
    for name in _FACTORIES:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        some.impl(name, lambda *args, op=op, **kwargs: _execute(op, args, kwargs), "PrivateUse1")
    for name in _IN_HALF_PRECISION:
        some.impl(name, _in_half_precision(getattr(aten, name)), "AutocastPrivateUse1")
    # Memory of the host is as good as any other for this device.
    some.impl("_pin_memory", lambda self, device=None: self.clone(), "CPU")
    torch.Generator = _Generator
    return [everything, some]


_libraries = _register()
DEVICE, OTHER = torch.device(NAME, 0), torch.device(NAME, 1)


def on_device(thing, device: torch.device = DEVICE):
    """Tensors of a nest, or a module in place, on the device."""
    if isinstance(thing, nn.Module):
        return thing.to(device)
    return tree_map(lambda one: one.to(device) if isinstance(one, torch.Tensor) else one, thing)


def on_cpu(thing):
    """The values of a nest as they are, which counts as no read."""
    return tree_map(_values, thing)
