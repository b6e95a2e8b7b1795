"""Run a calibrated model through fake quantization.

Linear, Embedding and attention states run compressed-tensors' own quantized forward. Other modules that have a weight
matrix (convolutions, transformers' Conv1D) are fake-quantized here, with compressed-tensors' arithmetic on the weight
seen as a matrix.

While a module runs quantized, its parameters are buffers that ``state_dict`` leaves out, so that they follow the model
to a device (Lightning moves it there inside the ``with`` block); otherwise they are plain attributes (see ``modules``).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStatus, forward_quantize, set_forward_quantized
from torch import nn

from lightning_obs.model.attention import find_owner, hooked_attention
from lightning_obs.model.calls import replace_input
from lightning_obs.model.compile_stance import run_eagerly
from lightning_obs.model.kinds import compressible_type
from lightning_obs.model.lora import refuse_unmerged
from lightning_obs.model.qparams import calibrated_modules, get_scheme, quantized_states, read_qparams, scheme_args
from lightning_obs.model.weights import from_matrix, weight_matrix


@contextmanager
def quantized(model: nn.Module) -> Iterator[nn.Module]:
    """Run a calibrated model through fake quantization inside the ``with`` block.

    Weights and activations of calibrated modules are quantized and dequantized at each forward by compressed-tensors'
    own functions, so what comes out is what the exported checkpoint gives. Weights are not changed. Blocks nest; the
    forward of every module is back as it was afterwards, also after an exception.

    >>> from lightning_obs import CalibrationSession
    >>> model = nn.Sequential(nn.Linear(4, 4, bias=False))
    >>> _ = nn.init.constant_(model[0].weight, 0.3)
    >>> with CalibrationSession(model, "W8A8"):
    ...     pass
    >>> with quantized(model):
    ...     _ = model(torch.ones(1, 4))
    """
    refuse_unmerged(model, "quantized()")
    with ExitStack() as stack:
        attention: dict[nn.Module, dict[nn.Module, tuple[str, ...]]] = {}
        for _, module in list(calibrated_modules(model)):
            if states := quantized_states(module):
                attention.setdefault(find_owner(model, module), {})[module] = states
                stack.callback(_unregister_qparams, module, _register_qparams(module))
            else:
                stack.callback(quantize_forward(module))
        for owner, modules in attention.items():
            stack.enter_context(hooked_attention(owner, modules, quantize=True))
        stack.enter_context(run_eagerly())
        yield model


def quantize_forward(module: nn.Module) -> Callable[[], None]:
    """Replace a calibrated module's forward by its fake-quantized one, and return what undoes it."""
    before = vars(module).get("forward")
    became_buffers = _register_qparams(module)
    if not hasattr(module.forward, "__func__"):  # a torch.compile'd or otherwise wrapped callable
        vars(module).pop("forward", None)
    if compressible_type(module) is not None:
        set_forward_quantized(module)
    elif not getattr(module.forward, "quantizes", False):  # quantizing twice is not the same for dynamic ranges
        module.forward = types.MethodType(_quantized_forward(module.forward), module)

    def undo() -> None:
        vars(module).pop("forward", None)
        if before is not None:
            module.forward = before
        _unregister_qparams(module, became_buffers)

    return undo


def _register_qparams(module: nn.Module) -> list[str]:
    with torch.inference_mode(False):
        plain = {name: value for name, value in read_qparams(module).items() if name not in module._buffers}
    for name, value in plain.items():
        delattr(module, name)
        module.register_buffer(name, value, persistent=False)
    return list(plain)


def _unregister_qparams(module: nn.Module, names: list[str]) -> None:
    for name in names:
        value = module._buffers.get(name)
        if value is not None:  # calibrated anew meanwhile: a plain attribute already
            delattr(module, name)
            setattr(module, name, value)


def _quantized_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    def quantized_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        scheme = get_scheme(self)
        if scheme is None:
            return forward(*args, **kwargs)
        if scheme.input_activations is not None:
            args, kwargs = replace_input(args, kwargs, lambda x: fake_quantize(self, x, "input"))
        weight = getattr(self, "weight", None)
        if scheme.weights is None or not isinstance(weight, torch.Tensor):
            output = forward(*args, **kwargs)
        else:
            original = weight.data
            try:
                weight.data = fake_quantized_weight(self)
                output = forward(*args, **kwargs)
            finally:
                weight.data = original
        if scheme.output_activations is not None and isinstance(output, torch.Tensor):
            output = fake_quantize(self, output, "output")
        return output

    quantized_forward.quantizes = True  # type: ignore[attr-defined]
    return quantized_forward


def fake_quantize(module: nn.Module, value: torch.Tensor, base_name: str) -> torch.Tensor:
    """Quantize and dequantize one tensor with the module's parameters. Shapes as compressed-tensors expects them."""
    scheme = get_scheme(module)
    args = None if scheme is None else dict(scheme_args(scheme)).get(base_name)
    if args is None or value.numel() == 0:
        return value
    # forward_quantize reads the status; modules of our own have none.
    had_status = hasattr(module, "quantization_status")
    if not had_status:
        module.quantization_status = QuantizationStatus.FROZEN
    try:
        return forward_quantize(module, value, base_name, args)
    finally:
        if not had_status:
            del module.quantization_status


def fake_quantized_weight(module: nn.Module) -> torch.Tensor:
    """The weight after quantize and dequantize, in its own shape."""
    weight = getattr(module, "weight", None)
    matrix = weight_matrix(module)
    assert isinstance(weight, torch.Tensor)  # preflight refused the module otherwise
    assert matrix is not None
    return from_matrix(module, fake_quantize(module, matrix, "weight"), weight.shape).contiguous()
