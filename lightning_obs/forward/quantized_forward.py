"""Run modules through fake quantization: calibrated ones inside :func:`quantized`, and a model in training.

A module's ``forward`` is replaced, on the instance, by one that quantizes and dequantizes input, weight and output with
gradients (:mod:`.quantized_module`), in validation as in training; its numbers equal compressed-tensors' and the
exported checkpoint's bit for bit. ``state_dict``, ``parameters()`` and ``buffers()`` of the model do not change.

Unlike compressed-tensors' own forward, it never writes to the parameter, it quantizes every
module with a weight matrix (convolutions and transformers' Conv1D too), and a tensor whose range is not known yet
passes unquantized. Attention states are quantized where compressed-tensors' hooked modules read them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from threading import Lock, get_ident
from typing import Any

from compressed_tensors.quantization import set_forward_quantized
from compressed_tensors.utils.helpers import patch_attrs
from torch import nn

from lightning_obs.errors import CalibrationError, warn
from lightning_obs.forward.attention import find_owner, hooked_attention, register_state_change
from lightning_obs.forward.eager import run_eagerly, unfused
from lightning_obs.forward.quantized_module import (
    FORWARD_STATE,
    Quantization,
    Switch,
    WeightCache,
    Writer,
    fake_quantize_state,
    linear_forward,
    module_forward,
    quantization_of,
    quantize_output,
)
from lightning_obs.model.mark import keep_hook_out, make_mark, mark_of, set_attributes
from lightning_obs.model.module_qparams import (
    calibrated_modules,
    move_qparams,
    not_ready,
    quantized_states,
    read_qparams,
)
from lightning_obs.model.offload import is_offloaded
from lightning_obs.model.weight import adapters_of
from lightning_obs.numerics.fake_quantize import learned_scale

#: held while :func:`unobserved` compares the threads in blocks of a model with its own, and notes its own
_claiming = Lock()

# ---------------------------------------------------------------------- entering and leaving


@contextmanager
def quantized(model: nn.Module) -> Iterator[nn.Module]:
    """Run a calibrated model through fake quantization inside the ``with`` block.

    Weights and activations of calibrated modules are quantized and dequantized at each forward, so outputs are the
    exported checkpoint's. Where a scheme quantizes input, weight and output of a module to int8, its bias is rounded as
    well: engines add it to sums of integers. Weights are not changed; LoRA adapters beside a weight are a part of it.
    Blocks nest. No calibration observes calls inside, so ``validation_step`` can log a metric of the quantized model. A
    copy that is made inside has the scales and runs in full precision, until it is run in a block of its own.

    A :class:`CalibrationWarning` says that nothing was calibrated, so that the model runs in full precision, or which
    parameters have changed since, so that these are not the numbers of a checkpoint. Where weights are sharded, all
    ranks must enter the block.

    Raises:
        CalibrationError: another thread is in a block of the same modules.

    Examples:
        >>> import torch
        >>> from lightning_obs import CalibrationSession
        >>> model = nn.Sequential(nn.Linear(4, 4, bias=False))
        >>> _ = nn.init.constant_(model[0].weight, 0.3)
        >>> with CalibrationSession(model, "W8A8"):
        ...     pass
        >>> with quantized(model):
        ...     _ = model(torch.ones(1, 4))
    """
    problem = not_ready(model)
    if problem is not None:
        warn(f"quantized() gives other numbers than a checkpoint would: {problem}")
    with unobserved(model), ExitStack() as stack:
        states_by_owner: dict[nn.Module, dict[nn.Module, tuple[str, ...]]] = {}
        for _, module in list(calibrated_modules(model)):
            states = quantized_states(module)
            if states:
                owner = find_owner(model, module)
                states_by_owner.setdefault(owner, {})[module] = states
            else:
                stack.callback(quantize_forward(module))
        for owner, states_by_module in states_by_owner.items():
            stack.enter_context(fake_quantized_states(owner, states_by_module, Switch()))
        stack.enter_context(run_eagerly())
        stack.enter_context(unfused(model))
        yield model


def weights_kept(model: nn.Module) -> AbstractContextManager[None]:
    """For a ``with`` block inside :func:`quantized`, in which each weight is quantized once, at its first forward.

    For a model that runs often: one that generates, in a user's code, or a block of a streamed model that runs on all
    batches (``streaming/layerwise.py`` enters it).
    The quantized weights take as much memory again as the weights, which may not change inside the block. Offloaded
    weights are quantized at each forward, so that their memory is free in between.
    """
    quantizations = []
    for _, module in calibrated_modules(model):
        if FORWARD_STATE in vars(module) and not is_offloaded(module):
            quantizations.append(quantization_of(module))
    return patch_attrs(quantizations, "weight_cache", [WeightCache() for _ in quantizations])


@contextmanager
def unobserved(model: nn.Module) -> Iterator[None]:
    """For the ``with`` block of :func:`quantized`: no observer sees calls of the model's modules.

    The mark of each module (:mod:`lightning_obs.model.mark`) notes the thread; hooks of observers read it, and leave
    out the module's calls. Another thread that enters such a block of the same modules meanwhile gets a
    CalibrationError.
    """
    thread = get_ident()
    modules = list(model.modules())
    with _claiming:
        for module in modules:
            if _threads_of(module) - {thread}:
                raise CalibrationError(
                    f"another thread runs {type(model).__name__}, or a part of it, quantized",
                    remedy="enter quantized() once, around all threads that run the model.",
                )
        for module in modules:
            make_mark(module).quantizing_threads.append(thread)
    try:
        yield
    finally:
        with _claiming:
            for module in modules:
                mark = make_mark(module)
                mark.quantizing_threads.remove(thread)
                mark.remove_if_empty()


def _threads_of(module: nn.Module) -> set[int]:
    """The ids of the threads that are in :func:`quantized` blocks of a module now."""
    mark = mark_of(module)
    return set() if mark is None else set(mark.quantizing_threads)


def quantize_forward(module: nn.Module, *, writer: Writer | None = None) -> Callable[[], None]:
    """Let a calibrated module, but no copy of it, run quantized.

    :func:`quantized` calls this for each module. So do, for single modules, measured layer errors and divergences and
    the rounding on quantized inputs; and ``tracing.written_by``, with a writer, when a file is traced.

    Args:
        module: calibrated, without quantized attention states.
        writer: quantizes and dequantizes in place of the functions of ``numerics``, also a weight that is on the grid
            already (ONNX nodes, for instance); None: those functions.

    Returns:
        A function that undoes it.
    """
    move_qparams(module)
    attributes = _quantized_attributes(module, Switch(writer=writer))
    with ExitStack() as stack:
        stack.callback(set_attributes(module, **attributes))
        stack.callback(_run_merged(module))
        return stack.pop_all().close


def quantize_for_good(module: nn.Module, *, trainable: bool) -> None:
    """Let a module of a loaded checkpoint run quantized from now on; its copies and pickles run quantized, too.

    ``load_checkpoint`` calls this for each module, after it has written the module's quantization parameters.

    Args:
        module: has quantization parameters, which become buffers.
        trainable: False: a gradient for its weight is an error.
    """
    for name, value in read_qparams(module).items():
        delattr(module, name)
        module.register_buffer(name, value, persistent=False)
    vars(module).update(_quantized_attributes(module, Switch(), trainable))


def quantize_training_forward(module: nn.Module, switch: Switch, *, output: bool = False) -> Callable[[], None]:
    """Let a module train through fake quantization, as soon as it has qparams.

    Called for each planned module without attention states when `QuantizationAwareTraining` begins to quantize the
    model (``fine_tuning/quantized_training.py``).

    Args:
        module: planned, calibrated or not.
        switch: turns weights and activations on and off, at any time.
        output: the scheme quantizes the output. A forward hook does it, so that an observer's hook can see the output
            before.

    Returns:
        A function that undoes it.
    """
    move_qparams(module)
    attributes = _quantized_attributes(module, switch, output_by_hook=output)
    with ExitStack() as stack:
        stack.callback(set_attributes(module, **attributes))
        stack.callback(_run_merged(module))
        if output:
            hook = module.register_forward_hook(lambda module, args, output: quantize_output(module, output))
            stack.callback(keep_hook_out(module, hook))
        return stack.pop_all().close


def _run_merged(module: nn.Module) -> Callable[[], None]:
    """Let a LoRA layer around a module that runs quantized call only that module, without adding its adapters.

    The adapters are a part of the module's weight already (:func:`weight_in_use`), and the module's hooks see the
    merged layer. Without a LoRA layer none is looked for later (:func:`adapters_in_use`). The layer's forward stays if
    the layer runs another module than this one: a twin of :mod:`lightning_obs.choice.divergence` is a copy of the
    module that the layer runs.

    Returns:
        A function that undoes it.
    """
    adapters = adapters_of(module)
    quantization_of(module).may_have_adapters = adapters is not None
    if adapters is None or adapters.base_layer is not module:
        return lambda: None
    return set_attributes(adapters, forward=module.__call__)


@contextmanager
def fake_quantized_states(
    model: nn.Module, states: Mapping[nn.Module, Collection[str]], switch: Switch
) -> Iterator[None]:
    """For a ``with`` block in which attention modules read fake-quantized states, with gradients.

    :func:`quantized` enters it, and ``fine_tuning/quantized_training.py`` for as long as a fit quantizes the model.

    Args:
        model: a model of transformers.
        states: which of q, k, v to quantize in each attention module; each is quantized once its range is known.
        switch: turns them on and off with the other activations.
    """
    with ExitStack() as stack:
        stack.enter_context(hooked_attention(model, states))
        for module, names in states.items():
            move_qparams(module)
            quantization = Quantization(switch)
            stack.callback(set_attributes(module, **{FORWARD_STATE: quantization}))
            for name in names:
                change = partial(fake_quantize_state, module, name, quantization)
                stack.callback(register_state_change(module, name, change))
        yield


def set_learned_scale(module: nn.Module, base_name: str, *of_scale: Any) -> None:
    """Let a module in training compute one of its scales at each forward, with a gradient to what is learned.

    ``fine_tuning/learned_scales.py`` calls this whenever calibration has written scales.

    Args:
        module: runs quantized by :func:`quantize_training_forward`, until that is undone.
        base_name: the tensor whose scale it is.
        of_scale: arguments of :func:`learned_scale`.
    """
    quantization: Quantization = getattr(module, FORWARD_STATE)
    quantization.learned_scales[base_name] = partial(learned_scale, *of_scale)


def _quantized_attributes(
    module: nn.Module, switch: Switch, trainable: bool = True, output_by_hook: bool = False
) -> dict[str, Any]:
    """The attributes to set on a module so that it runs quantized: a :class:`Quantization` and a forward that reads it.

    The three functions that let a module run quantized call it: inside a block, for good, or in training.

    Args:
        module: planned or calibrated.
        switch: turns weights and activations on and off.
        trainable: False: a gradient for its weight is an error.
        output_by_hook: True: a forward hook quantizes the output, and the forward leaves it as it is.
    """
    # accelerate's hook is around the forward, and has the weight there only while that runs.
    attribute = "_old_forward" if "_hf_hook" in vars(module) else "forward"
    outer: Quantization | None = vars(module).get(FORWARD_STATE)
    if outer is None:
        original_forward = _original_forward(module, vars(module).get(attribute))
    else:  # in a block around this one the module runs quantized already: quantizing twice is not the same
        original_forward = outer.original_forward
        trainable = trainable and outer.trainable
        output_by_hook = output_by_hook or outer.output_by_hook
    is_plain_linear = original_forward is None and type(module).forward is nn.Linear.forward
    function: Callable[..., Any] = linear_forward if is_plain_linear else module_forward
    forward = partial(function, module)  # a bound method would not pickle...
    vars(forward)["__func__"] = function  # ...but compressed-tensors looks for its function
    quantization = Quantization(
        switch, original_forward, output_by_hook, is_plain_linear=is_plain_linear, trainable=trainable
    )
    return {FORWARD_STATE: quantization, attribute: forward}


def _original_forward(module: nn.Module, forward: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The forward that the user or another library has set on an instance, to be called inside the quantized one.

    Args:
        module: the instance.
        forward: the forward that is set on the instance; None: none is set.

    Returns:
        None where the class's own forward can be called: none is set, it is the class's, or it is compressed-tensors'
        quantized one, which calls the class's.
    """
    if forward is None or getattr(forward, "__func__", None) is type(module).forward:
        return None
    if getattr(forward, "__code__", forward) in set_forward_quantized.__code__.co_consts:
        return None  # compressed-tensors' quantized forward runs the class's
    return forward
