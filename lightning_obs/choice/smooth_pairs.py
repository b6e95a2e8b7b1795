"""Find the inputs whose channels another module can divide, and the modules that do it.

Linears that read the output of a norm are one case: the norm divides in its own weight. The other is a Linear whose
output passes only through operations that keep a factor (a product, a ReLU, a sum over tokens) before it is read, as
from ``up_proj`` to ``down_proj``. No architecture is known by name: a pair is tried on the smallest module around it,
and kept if the outputs of that module stay the same bit for bit.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import _pytree as pytree

from lightning_obs.forward.calls import call_on, first_input
from lightning_obs.model.kinds import is_dispatched
from lightning_obs.model.mark import keep_hook_out
from lightning_obs.model.weight import adapters_of, in_shards


@dataclass(frozen=True)
class SmoothPair:
    """A module that can divide the channels of an input, and the Linears that read this input.

    :func:`find_pairs` makes the pairs; :func:`~lightning_obs.smooth_inputs` chooses factors for each.

    Attributes:
        producer_name: the name of the dividing module in the model.
        producer: a norm with a weight ``(C,)``, or a Linear with a weight ``(C, K)``.
        readers: by name, the Linears with weights ``(R, C)`` that read the input.
    """

    producer_name: str
    producer: nn.Module
    readers: dict[str, nn.Linear]

    @property
    def parent(self) -> str:
        """The name of the smallest module that contains the producer and all readers."""
        paths = [name.split(".")[:-1] for name in (self.producer_name, *self.readers)]
        shared = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) > 1:
                break
            shared.append(parts[0])
        return ".".join(shared)

    @torch.no_grad()
    def scale(self, factors: torch.Tensor) -> Callable[[], None]:
        """Divide the channels in the producer and multiply the columns of the readers' weights, in place.

        Called for the trial of a pair, which is then undone, and by ``smooth_inputs`` with the chosen factors.

        Powers of two change no digit of a number that stays in the range of its dtype. In float16, a number below 6e-5
        loses digits if it is divided.

        Args:
            factors: ``(C,)``, positive powers of two.

        Returns:
            A function that undoes it exactly. It keeps a copy of a weight only where scaling back would not restore it.
        """
        weight = self.producer.weight
        assert isinstance(weight, torch.Tensor)
        of_rows = (1 / factors).view(-1, *[1] * (weight.ndim - 1))
        restore = [_multiply(weight, of_rows)]
        bias = getattr(self.producer, "bias", None)
        if bias is not None:
            restore.append(_multiply(bias, 1 / factors))
        for reader in self.readers.values():
            restore.append(_multiply(reader.weight, factors))
        torch.clear_autocast_cache()  # autocast keeps copies of weights in 16 bits, which would stay as they were

        @torch.no_grad()
        def undo() -> None:
            for restore_weight in restore:
                restore_weight()
            torch.clear_autocast_cache()

        return undo


def _multiply(weight: torch.Tensor, factors: torch.Tensor) -> Callable[[], object]:
    """Multiply a weight by powers of two in place; return a function that gives it its earlier numbers again.

    :meth:`SmoothPair.scale` calls this for each weight of a pair.
    """
    factors = factors.to(weight.device, weight.dtype)
    before = weight.detach().clone()
    weight.mul_(factors)
    if torch.equal(weight / factors, before):
        return partial(weight.div_, factors)
    return partial(weight.copy_, before)


def find_pairs(model: nn.Module, quantized: Sequence[str], batch: Mapping[str, Any] | torch.Tensor) -> list[SmoothPair]:
    """Find the pairs that have at least one reader with a quantized input.

    :func:`~lightning_obs.smooth_inputs` calls this, with the model in evaluation mode. The model runs twice on the
    batch. In the second run, each module around candidates runs again, once unchanged and once for each candidate that
    is tried. Left out are modules whose weights are shared, sharded, offloaded, parametrized, packed or under adapters,
    and modules that the batch calls more than once.

    Args:
        model: its weights are the same afterwards.
        quantized: names of the Linears whose inputs will be quantized.
        batch: keyword arguments of the model, or its one tensor.
    """
    calls = _Calls(model)
    with calls:
        call_on(model, batch)
    candidates = _candidates(calls, set(quantized))
    trial = _Trial(model, candidates)
    with trial:
        call_on(model, batch)
    return trial.pairs


class _Calls:
    """Watches one forward of a model: which Linears read the output of which norm, and the order of the calls.

    :func:`find_pairs` makes one and enters it around the forward; :func:`_candidates` reads it.

    Attributes:
        modules: by name, the modules with a weight that may be scaled in place.
        order: the names of these modules, in the order of their calls.
        readers: by name of a norm, the names of the Linears that read its output itself.
        others: names of the Linears that read another tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = _modules_with_plain_weights(model)
        self.order: list[str] = []
        self.readers: dict[str, list[str]] = {}
        self.others: list[str] = []
        self._outputs_of_norms: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}  # by the id of the output
        self._hooks = ExitStack()

    def __enter__(self) -> None:
        for name, module in self.modules.items():
            hook = module.register_forward_hook(partial(self._note_call, name), with_kwargs=True)
            self._hooks.callback(keep_hook_out(module, hook))

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()

    def _note_call(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note a call of the module ``name``; the forward hook of each module calls this."""
        value = first_input(args, kwargs)
        self.order.append(name)
        if not isinstance(module, nn.Linear):
            if isinstance(output, torch.Tensor):
                self._outputs_of_norms[id(output)] = (weakref.ref(output), name)
            return
        reference, norm_name = self._outputs_of_norms.get(id(value), (None, ""))
        if reference is not None and reference() is value:  # the id of a tensor that is gone may be another's
            self.readers.setdefault(norm_name, []).append(name)
        else:
            self.others.append(name)


def is_norm(module: nn.Module) -> bool:
    """Whether a module has a weight ``(C,)`` and no modules inside, as norms have.

    Asked where modules that could divide channels are looked for.
    """
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 1 and not any(module.children())


def _modules_with_plain_weights(model: nn.Module) -> dict[str, nn.Module]:
    """The Linears and the modules with a weight vector (norms), by name, whose parameters may be scaled in place."""
    modules = dict(model.named_modules(remove_duplicate=False))
    uses: Counter[int] = Counter()
    for module in modules.values():
        uses.update(map(id, module.parameters(recurse=False)))
    plain = {}
    for name, module in modules.items():
        weight = module._parameters.get("weight")
        if type(weight) is not nn.Parameter or not weight.is_floating_point():
            continue
        is_linear = type(module) is nn.Linear
        is_shared = any(uses[id(parameter)] > 1 for parameter in module.parameters(recurse=False))
        if not (is_norm(module) or is_linear) or is_shared:
            continue
        if in_shards(module) or is_dispatched(module) or is_parametrized(module) or adapters_of(module) is not None:
            continue
        plain[name] = module
    return plain


def _candidates(calls: _Calls, quantized: set[str]) -> list[list[SmoothPair]]:
    """The pairs to try, in lists of alternatives that have the same readers; the likeliest of a list comes first.

    A norm is tried for all Linears that read its output. For a Linear that reads another tensor, the modules of the
    same parent that were called before it and have as many channels are tried, the last one first.
    """
    counts = Counter(calls.order)
    once = {name for name, count in counts.items() if count == 1}
    candidates = []
    for norm_name, readers in calls.readers.items():
        if quantized.intersection(readers) and once.issuperset([norm_name, *readers]):
            candidates.append([_pair(calls, norm_name, readers)])
    for reader in calls.others:
        if reader not in quantized or reader not in once:
            continue
        parent = reader.rpartition(".")[0]
        channels = calls.modules[reader].get_parameter("weight").shape[1]
        earlier = calls.order[: calls.order.index(reader)]
        alternatives = []
        for name in reversed(earlier):
            is_sibling = name.rpartition(".")[0] == parent
            if name in once and is_sibling and len(calls.modules[name].get_parameter("weight")) == channels:
                alternatives.append(_pair(calls, name, [reader]))
        if alternatives:
            candidates.append(alternatives)
    return candidates


def _pair(calls: _Calls, producer_name: str, reader_names: Sequence[str]) -> SmoothPair:
    """The pair of a producer and its readers, by their names; :func:`_candidates` calls this for each candidate."""
    readers: dict[str, Any] = {name: calls.modules[name] for name in reader_names}
    return SmoothPair(producer_name, calls.modules[producer_name], readers)


class _Trial:
    """Tries candidates in one forward of the model: each module around a candidate runs again, with scaled weights.

    :func:`find_pairs` makes one and enters it around the forward.

    Args:
        model: that runs.
        candidates: lists of which at most one pair is kept each.
    """

    def __init__(self, model: nn.Module, candidates: Sequence[Sequence[SmoothPair]]) -> None:
        #: by the id of a candidate that was tried, the candidate, and whether it holds in all calls so far
        self._tried: dict[int, tuple[SmoothPair, bool]] = {}
        self._candidates_of: dict[str, list[Sequence[SmoothPair]]] = {}  # by the name of the module around them
        for alternatives in candidates:
            self._candidates_of.setdefault(alternatives[0].parent, []).append(alternatives)
        self._modules = dict(model.named_modules())
        self._is_repeating = False
        self._hooks = ExitStack()

    def __enter__(self) -> None:
        for name, candidates in self._candidates_of.items():
            module = self._modules[name]
            hook = module.register_forward_hook(partial(self._try, candidates), with_kwargs=True)
            self._hooks.callback(keep_hook_out(module, hook))

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()

    @property
    def pairs(self) -> list[SmoothPair]:
        """The candidates that changed no bit of the outputs of the module around them, in any call of it."""
        return [pair for pair, holds in self._tried.values() if holds]

    def _try(
        self, candidates: Sequence[Sequence[SmoothPair]], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Repeat a call of the module around candidates, once for each, and keep the pairs that hold.

        The forward hook of the module calls this. A call that gives another output when it is repeated (random numbers,
        a cache that grows) can tell nothing.
        """
        if self._is_repeating:  # the hook of a module inside the module that is repeated
            return
        self._is_repeating = True
        try:
            if not same_tensors(module(*args, **kwargs), output):
                return
            for alternatives in candidates:
                for pair in alternatives:
                    _, held = self._tried.get(id(pair), (pair, True))
                    # The module may be called again, and a pair that this call does not reach holds in it.
                    holds = held and self._holds(pair, module, args, kwargs, output)
                    self._tried[id(pair)] = pair, holds
                    if holds:
                        break
        finally:
            self._is_repeating = False

    def _holds(self, pair: SmoothPair, module: nn.Module, args: Any, kwargs: Any, output: Any) -> bool:
        """Whether the module's output stays the same bit for bit when the pair is scaled by powers of two.

        The factors go from 1/4 to 4, over and over. Neighbouring channels have different factors, which shows whether
        channels are mixed or moved. All factors are near 1, so no value leaves the range of its dtype as a power of its
        own for each channel would make it.
        """
        channels = len(next(iter(pair.readers.values())).weight.T)
        exponents = torch.arange(channels) % 5 - 2.0  # -2, -1, 0, 1, 2, -2, ...
        undo = pair.scale(torch.exp2(exponents))
        try:
            return same_tensors(module(*args, **kwargs), output)
        finally:
            undo()


def same_tensors(output: Any, other: Any) -> bool:
    """Whether all tensors of two outputs are equal, bit for bit; False if there are none.

    Called for the outputs of a module around a candidate, and for those of the whole model at the end. NaN is equal to
    NaN: the loss of a batch without labels, or a row of attention that is masked as a whole.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    others = [leaf for leaf in pytree.tree_leaves(other) if isinstance(leaf, torch.Tensor)]
    return len(tensors) == len(others) > 0 and all(map(_same_numbers, tensors, others))


def _same_numbers(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one shape and the same numbers, or NaN at the same places."""
    if tensor.shape != other.shape:
        return False
    return torch.equal(tensor, other) or bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())
