"""A weight that rests as the bytes of a compressed-tensors checkpoint, and is decompressed where it is read.

A base model under LoRA adapters is frozen: its packed bytes are all that training needs to keep. :class:`PackedWeight`
takes the place of a Linear's parameter. It has the shape, dtype and device of the weight that it stands for, so peft,
Lightning and the functions of :mod:`.weight` see a Linear as any other. ``F.linear`` decompresses it, by
compressed-tensors' own function, for the length of the product and once more in the backward. Any other operation that
reads it decompresses it as well; none can write to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from lightning_obs.errors import CalibrationError
from lightning_obs.numerics.fake_quantize import fake_quantize, fake_quantize_dynamic
from lightning_obs.numerics.qparams import SCHEME_FIELDS, keep_range_readable, no_upload, rows_per_scale, tile_size

_aten = torch.ops.aten
#: elements that a CPU decompresses at once: compressed-tensors takes up to 20 bytes for each of them meanwhile
_ELEMENTS_AT_ONCE = 1 << 19
_MERGE_REMEDY = (
    "save the adapters by themselves (model.save_pretrained(folder) of peft), which vLLM serves beside the base; or "
    "calibrate the model with its adapters and export it, which merges them layer by layer."
)


class PackedWeight(torch.Tensor):
    """A frozen weight ``(R, C)`` that is kept as a checkpoint stores it.

    :func:`~lightning_obs.keep_packed` makes one for each quantized Linear of a loaded checkpoint. ``F.linear(input,
    weight, bias)`` also quantizes input and output where the scheme says so, with gradients, as engines that run the
    checkpoint do.

    Args:
        tensors: the tensors that the checkpoint stores of the module, by compressed-tensors' names: ``weight_packed``
            or ``weight``, scales, zero points, also those of activations; without ``weight_shape``. They are not
            copied.
        scheme: how the module is quantized, with its format.
        shape: ``(R, C)``.
        dtype: the dtype of the decompressed weight.
    """

    scheme: QuantizationScheme
    #: names of the stored tensors, each of which is an attribute: torch moves and traces them by these
    stored_names: tuple[str, ...]

    @staticmethod
    def __new__(
        cls, tensors: Mapping[str, torch.Tensor], scheme: QuantizationScheme, shape: Iterable[int], dtype: torch.dtype
    ) -> PackedWeight:
        """See the class."""
        device = next(iter(tensors.values())).device
        packed: PackedWeight = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device, requires_grad=False
        )
        packed.scheme = scheme
        packed.stored_names = tuple(tensors)
        for name, tensor in tensors.items():
            setattr(packed, name, tensor)
        return packed

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, format={self.scheme.format})"

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The stored tensors by name."""
        return {name: getattr(self, name) for name in self.stored_names}

    @property
    def packed_bytes(self) -> int:
        """The bytes that the packed weight takes in memory, for users who measure it.

        ``nbytes`` counts the bytes of the decompressed weight.
        """
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @torch.no_grad()
    def dequantize(self) -> torch.Tensor:
        """Decompress the weight: a new plain tensor ``(R, C)`` in the weight's dtype.

        Called for each product, in its forward and in its backward, and for any other operation that reads the weight.
        """
        compressor = BaseCompressor.get_value_from_registry(CompressionFormat(self.scheme.format).value)
        if self.device.type == "meta":
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        height = self._rows_at_once()
        if height >= len(self):
            return self._rows(compressor, 0, len(self)).to(self.dtype)
        weight = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for start in range(0, len(self), height):
            stop = min(start + height, len(self))
            weight[start:stop] = self._rows(compressor, start, stop)
        return weight

    def _rows_at_once(self) -> int:
        """How many rows are decompressed at a time: all of a small weight, and of one whose zero points are packed."""
        args = self.scheme.weights
        assert args is not None
        zero_point = self.tensors.get("weight_zero_point")
        if zero_point is not None and zero_point.dtype == torch.int32:  # one int32 holds those of several rows
            return len(self)
        per_scale = rows_per_scale(args) or 1  # None: one scale for all rows, which may be cut anywhere
        elements = tile_size(self.device, on_cpu=_ELEMENTS_AT_ONCE)
        return max(1, elements // self.shape[1] // per_scale) * per_scale

    def _rows(self, compressor: Any, start: int, stop: int) -> torch.Tensor:
        """The decompressed rows from ``start`` to ``stop``, in the dtype that compressed-tensors gives."""
        args = self.scheme.weights
        assert args is not None
        per_scale = rows_per_scale(args)
        entries: dict[str, Any] = {"weight_shape": torch.Size((stop - start, self.shape[1]))}
        for name, tensor in self.tensors.items():
            height: int | None = None  # rows of the weight for each row of the tensor; None: the tensor is taken whole
            if name in ("weight", "weight_packed"):
                height = 1
            elif name in ("weight_scale", "weight_zero_point") and stop - start < len(self):
                height = per_scale
            entries[name] = tensor if height is None else tensor[start // height : -(-stop // height)]
        # compressed-tensors makes small tensors here. `no_upload`: the host does not wait for their upload.
        # `keep_range_readable`: the ends of the format's range, which compressed-tensors keeps for the process, are not
        # made in inference mode, where gradients could never use them.
        with no_upload(self.device):
            keep_range_readable(args, self.device)
            weight: torch.Tensor = compressor.decompress(entries, self.scheme)["weight"]
        return weight

    def quantize_activation(self, value: torch.Tensor, base_name: str) -> torch.Tensor:
        """Quantize and dequantize an input or output as the checkpoint says, with gradients.

        Called before and after each product; returns ``value`` itself where the scheme does not quantize it.

        Args:
            value: the input ``(..., C)``, or the output ``(..., R)``.
            base_name: ``"input"`` or ``"output"``.
        """
        args = getattr(self.scheme, SCHEME_FIELDS[base_name])
        if args is None:
            return value
        global_scale = self.tensors.get(f"{base_name}_global_scale")
        if args.dynamic:
            quantized = fake_quantize_dynamic(value, args, global_scale=global_scale)
        else:
            scale = self.tensors[f"{base_name}_scale"]
            zero_point = self.tensors.get(f"{base_name}_zero_point")
            quantized = fake_quantize(value, scale, zero_point, args, global_scale=global_scale)
        return quantized.to(value.dtype)

    # ------------------------------------------------------------------ operations of torch

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # copy.deepcopy, pickle and torch.save call this. The weight is written as its plain tensors. Lightning loads a
        # checkpoint with a function as map_location, which torch's own rebuilding of such a subclass refuses.
        is_parameter = isinstance(self, nn.Parameter)
        scheme = self.scheme.model_dump(mode="json")
        return unpickled, (self.tensors, scheme, tuple(self.shape), self.dtype, is_parameter)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        # torch.compile takes the weight apart into its stored tensors here, and rebuilds it by __tensor_unflatten__.
        return list(self.stored_names), (self.scheme, self.dtype)

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> PackedWeight:
        scheme, dtype = context
        return PackedWeight(tensors, scheme, size, dtype)

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None) -> PackedWeight:
        """A packed weight whose stored tensors are ``change`` of these."""
        tensors = {name: change(tensor) for name, tensor in self.tensors.items()}
        return PackedWeight(tensors, self.scheme, self.shape, dtype or self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch calls this for every function of torch that is given a packed weight.
        kwargs = kwargs or {}
        if func is F.linear and isinstance(args[1] if len(args) > 1 else kwargs["weight"], PackedWeight):
            return _linear(*args, **kwargs)
        # torch's own method would make a PackedWeight, without scheme and stored tensors, of each decompressed result.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # torch calls this for every operation below autograd. The operations that are named here keep the weight
        # packed; all others get it decompressed, and may not write to it.
        kwargs = kwargs or {}
        if func in (_aten.detach.default, _aten.alias.default):
            return args[0]._with(lambda tensor: tensor)
        if func is _aten.clone.default:
            return args[0]._with(torch.clone)
        if func is _aten._to_copy.default:
            return _converted(args[0], **kwargs)
        if func is _aten.copy_.default and isinstance(args[0], PackedWeight):
            return _copied(args[0], args[1])
        _refuse_writing(func, args, kwargs)
        args, kwargs = tree_map_only(PackedWeight, PackedWeight.dequantize, (args, kwargs))
        return func(*args, **kwargs)


def unpickled(
    tensors: dict[str, torch.Tensor],
    scheme: dict[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    is_parameter: bool,
) -> PackedWeight:
    """Make a packed weight of the values that its pickle holds.

    ``pickle`` and ``torch.load`` call it, because ``PackedWeight.__reduce_ex__`` names it; ``keep_packed`` allows that
    for ``weights_only=True``.

    Args:
        tensors: the stored tensors by name.
        scheme: the scheme's fields, as plain values.
        shape: ``(R, C)``.
        dtype: the dtype of the decompressed weight.
        is_parameter: whether the pickled weight was an ``nn.Parameter``; the result is one, too, and is frozen.
    """
    weight = PackedWeight(tensors, QuantizationScheme.model_validate(scheme), shape, dtype)
    if not is_parameter:
        return weight
    parameter: Any = nn.Parameter(weight, requires_grad=False)
    return parameter


def dense(weight: torch.Tensor) -> torch.Tensor:
    """The weight as a plain tensor: decompressed if it is packed, else the weight itself.

    Called when a tensor is copied into a packed weight, for the tensor that is copied.
    """
    return weight.dequantize() if isinstance(weight, PackedWeight) else weight


def has_packed(model: nn.Module) -> bool:
    """Whether any weight of the model is packed; the command line asks before it adds adapters."""
    return any(isinstance(parameter, PackedWeight) for parameter in model.parameters())


def _converted(
    weight: PackedWeight, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> torch.Tensor:
    """``weight.to(dtype, device)``. The stored tensors keep their dtypes: ``dtype`` is of the decompressed weight.

    On the meta device there is nothing to decompress, so the result is a plain meta tensor there, and elsewhere a
    packed weight. Other arguments of ``to`` (``non_blocking``, ``memory_format``) are not followed: the copies are
    made at once, in the layout of the checkpoint.
    """
    if device is not None and torch.device(device).type == "meta":
        return torch.empty(weight.shape, dtype=dtype or weight.dtype, device="meta")
    return weight._with(lambda tensor: tensor.to(device, copy=True), dtype)


def _copied(weight: PackedWeight, source: torch.Tensor) -> PackedWeight:
    """``weight.copy_(source)``: copy another packed weight; a dense source must have the weight's values already.

    Loading a state dict copies a packed weight. DDP copies dense weights of the first rank to all ranks when it begins.
    """
    if isinstance(source, PackedWeight) and source.tensors.keys() == weight.tensors.keys():
        for name, tensor in weight.tensors.items():
            tensor.copy_(source.tensors[name])
        return weight
    if not torch.equal(weight.dequantize(), dense(source).to(weight.device, weight.dtype)):
        raise CalibrationError("a packed weight cannot take other values", remedy=_MERGE_REMEDY)
    return weight


def _refuse_writing(func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise a CalibrationError for an operation that writes to a packed weight, or splits it as FSDP2 does.

    ``PackedWeight.__torch_dispatch__`` calls this before it decompresses the packed weights among the arguments: the
    operation would write to the decompressed copy, and the packed weight would silently stay as it was.

    Args:
        func: the operation; its schema says which arguments it writes to.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call, with ``out``.
    """
    if func is _aten.split.Tensor:
        raise CalibrationError(
            "a packed weight cannot be cut into shards",
            got="FSDP2, or another operation that splits the weight",
            remedy="DDP, or one device: every rank holds the packed bytes.",
        )
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and isinstance(value, PackedWeight):
            raise CalibrationError(
                "a packed weight cannot be changed in place, so adapters cannot be merged into it",
                got=str(func),
                remedy=_MERGE_REMEDY,
            )


# ---------------------------------------------------------------------- the product


def _linear(input: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear`` with a packed weight, and activations quantized as its checkpoint says."""
    if weight.requires_grad:
        raise CalibrationError(
            "packed weights cannot be trained",
            remedy="freeze them (model.requires_grad_(False)) and train adapters, or load the checkpoint with "
            "CompressedTensorsConfig(dequantize=True).",
        )
    quantized = weight.quantize_activation(input, "input")
    output: torch.Tensor
    if torch.is_grad_enabled():
        output = _PackedLinear.apply(quantized, weight, bias)
    else:
        output = F.linear(quantized, weight.dequantize(), bias)
    return weight.quantize_activation(output, "output")


class _PackedLinear(torch.autograd.Function):
    """The product with a packed weight, which is decompressed once more in the backward.

    So no decompressed weight stays in memory between the two.
    """

    @staticmethod
    def forward(input: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(input, weight.dequantize(), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        input, weight, bias = inputs
        ctx.input_dtype = input.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        # Not the parameter itself: model.to() swaps a parameter of this class for the moved one (swap_tensors), and
        # torch refuses the swap while a graph refers to the parameter.
        ctx.save_for_backward(weight.detach())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        needs_input, _, needs_bias = ctx.needs_input_grad
        input_grad = bias_grad = None
        if needs_input:
            product = grad @ weight.dequantize().to(grad.dtype)  # autocast has computed in the dtype of the output
            input_grad = product.to(ctx.input_dtype)
        if needs_bias:
            bias_grad = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
        return input_grad, None, bias_grad
