"""The projections of ``nn.MultiheadAttention`` as Linear modules, which a scheme can target.

torch keeps the projections of queries, keys and values in one parameter (``in_proj_weight``: 3 x rows, columns), and
multiplies by it and by ``out_proj`` without calling a module, so there is nothing to observe or to quantize.
:func:`linearize_attention` gives every such module Linears of its own: ``q_proj``, ``k_proj``, ``v_proj`` and
``out_proj``. The module stays the same object, of a subclass with the same forward. The user calls it, because the
``state_dict`` has other keys afterwards; ``load_checkpoint`` does it by itself.

The price is the fused operation of ``nn.TransformerEncoderLayer`` in evaluation, which reads ``in_proj_weight``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from lightning_obs.errors import refuse
from lightning_obs.forward.eager import unfuse_for_good
from lightning_obs.model.kinds import inside_transformers, is_dispatched
from lightning_obs.model.weight import in_shards

_Module = TypeVar("_Module", bound=nn.Module)

#: the Linears of queries, keys and values, in the order of their rows in ``in_proj_weight``
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class LinearAttention(nn.MultiheadAttention):
    """An ``nn.MultiheadAttention`` whose projections are Linears.

    :func:`linearize_attention` turns an ``nn.MultiheadAttention`` into this class in place. A ``state_dict`` of the
    original module can be loaded.
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute what ``nn.MultiheadAttention`` does, which documents the arguments.

        The Linears are called with ``(batch, tokens, channels)``, whatever ``batch_first`` says. ``is_causal`` is a
        hint about ``attn_mask``, and is not needed here.
        """
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        is_batched = query.dim() == 3
        query, key, value = self._batch_first(is_batched, query, key, value)
        queries = self.q_proj(query)
        keys = self._with_added_keys(self.k_proj(key), self.bias_k)
        values = self._with_added_keys(self.v_proj(value), self.bias_v)
        added = keys.shape[1] - key.shape[1]
        mask = self._mask(attn_mask, key_padding_mask, queries, added)
        dropout = self.dropout if self.training else 0.0
        heads = [projected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for projected in (queries, keys, values)]
        weights = None
        if need_weights:
            output, weights = _attend(heads, mask, dropout)
            if average_attn_weights:
                weights = weights.mean(1)
            weights = weights if is_batched else weights.squeeze(0)
        else:
            output = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], mask, dropout)
        output = self.out_proj(output.transpose(1, 2).flatten(2))
        if not is_batched:
            return output.squeeze(0), weights
        return (output if self.batch_first else output.transpose(0, 1)), weights

    def _batch_first(self, is_batched: bool, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """The ``inputs`` query, key and value as ``(batch, tokens, channels)``; called first by :meth:`forward`.

        A tensor that is passed as several of query, key and value stays one tensor, so that observers measure it once.
        ``is_batched`` is False for inputs ``(tokens, channels)`` of one sample.
        """
        turned: dict[int, torch.Tensor] = {}
        for value in inputs:
            if not is_batched:
                turned[id(value)] = value.unsqueeze(0)
            else:
                turned[id(value)] = value if self.batch_first else value.transpose(0, 1)
        return [turned[id(value)] for value in inputs]

    def _with_added_keys(self, projected: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Keys or values ``(batch, tokens, channels)``, and behind them the tokens that the options of the module add.

        These are a learned ``bias`` (``add_bias_kv``) and a token of zeros (``add_zero_attn``).
        """
        shape = (len(projected), 1, projected.shape[-1])
        parts = [projected]
        if bias is not None:
            parts.append(bias.expand(shape))
        if self.add_zero_attn:
            parts.append(projected.new_zeros(shape))
        return torch.cat(parts, 1) if len(parts) > 1 else projected

    def _mask(
        self,
        attn_mask: torch.Tensor | None,
        key_padding_mask: torch.Tensor | None,
        queries: torch.Tensor,
        added: int,
    ) -> torch.Tensor | None:
        """The sum of both masks, which is added to the scores ``(batch, heads, queries, keys)``; None without a mask.

        Args:
            attn_mask: ``(queries, keys)`` or ``(batch * heads, queries, keys)``: numbers to add, or True for a key that
                is not seen.
            key_padding_mask: ``(batch, keys)``, or ``(keys,)`` of one sample.
            queries: the projected queries; their dtype and batch size are read.
            added: how many keys the module has added, which all queries see.
        """
        masks = []
        if attn_mask is not None:
            shape = (1, 1) if attn_mask.dim() == 2 else (len(queries), self.num_heads)
            masks.append(_to_add(attn_mask, queries.dtype).view(*shape, *attn_mask.shape[-2:]))
        if key_padding_mask is not None:
            masks.append(_to_add(key_padding_mask, queries.dtype).view(len(queries), 1, 1, -1))
        if not masks:
            return None
        return F.pad(sum(masks[1:], masks[0]), (0, added))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Split the tensors of an ``nn.MultiheadAttention`` into those of the Linears, in place; then load them.

        ``load_state_dict`` calls this for each module. Tensors that have the Linears' names already stay.
        """
        for suffix, joined in (("weight", "in_proj_weight"), ("bias", "in_proj_bias")):
            value = state_dict.pop(prefix + joined, None)
            if value is not None:
                for name, rows in zip(_PROJECTIONS, value.chunk(3), strict=True):
                    state_dict[f"{prefix}{name}.{suffix}"] = rows
        for name in _PROJECTIONS:
            value = state_dict.pop(f"{prefix}{name}_weight", None)
            if value is not None:
                state_dict[f"{prefix}{name}.weight"] = value
        super()._load_from_state_dict(state_dict, prefix, *args)


def _to_add(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as numbers to add to scores: minus infinity where a mask of booleans is True."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


def _attend(
    heads: Sequence[torch.Tensor], mask: torch.Tensor | None, dropout: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention together with its weights; :meth:`LinearAttention.forward` calls it if the weights are asked for.

    Args:
        heads: queries, keys and values, each ``(batch, heads, tokens, channels)``.
        mask: what to add to the scores; None: nothing.
        dropout: share of the weights that is dropped.

    Returns:
        The output ``(batch, heads, queries, channels)``, and the weights ``(batch, heads, queries, keys)``.
    """
    queries, keys, values = heads
    scores = (queries * queries.shape[-1] ** -0.5) @ keys.transpose(-2, -1)
    if mask is not None:
        scores = scores + mask
    weights = F.dropout(scores.softmax(-1), dropout, dropout > 0)
    return weights @ values, weights


# ---------------------------------------------------------------------- into Linears


def linearize_attention(model: nn.Module) -> list[str]:
    """Give every ``nn.MultiheadAttention`` a Linear for each projection, so that its weights can be quantized.

    Outputs stay the same up to the order of floating point operations, with all arguments of its forward. A
    ``state_dict`` has ``q_proj.weight``, ``k_proj.weight`` and ``v_proj.weight`` in place of ``in_proj_weight``, and
    biases likewise; a ``state_dict`` from before can be loaded. Each module stays the object that it was, with its
    hooks; dtype, device, ``requires_grad`` and training mode are kept. Weights are copied one module at a time. Call it
    before you make optimizers.

    Left as they are: subclasses, and modules inside transformers models, whose checkpoints have ``in_proj_weight``.

    Args:
        model: changed in place.

    Returns:
        Names of the modules that were changed.

    Raises:
        CalibrationError: weights are sharded, offloaded or parametrized, or quantized already. Nothing is changed then.

    Examples:
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> linearize_attention(layer)
        ['self_attn']
        >>> layer.self_attn.q_proj
        Linear(in_features=8, out_features=8, bias=True)
    """
    modules = _joined_attention(model)
    for name, module in modules.items():
        _require_plain_parameters(name, module)
    for module in modules.values():
        _split(module)
    if modules:
        unfuse_for_good(model)
    return list(modules)


def linearize_stored(model: nn.Module, stored_names: Iterable[str]) -> Callable[[], None]:
    """Linearize the attention modules that are linearized in a checkpoint; called by ``load_checkpoint``.

    Args:
        model: freshly built.
        stored_names: names of the tensors in the checkpoint.

    Returns:
        A function that undoes it.
    """
    return split_as_stored(_joined_attention(model), "q_proj", stored_names, _split)


def split_as_stored(
    modules: Mapping[str, _Module],
    part_name: str,
    stored_names: Iterable[str],
    split: Callable[[_Module], Callable[[], None]],
) -> Callable[[], None]:
    """Split the modules that were split when the checkpoint was written.

    :func:`linearize_stored` and ``linearize_stored_recurrent`` call it before ``load_checkpoint`` loads tensors.

    Args:
        modules: modules that can be split, by name.
        part_name: name of a part that only a split module has (``"q_proj"``): a module is split if the checkpoint has
            a tensor of this part.
        stored_names: names of the tensors in the checkpoint.
        split: splits a module, and returns a function that undoes the split.

    Returns:
        A function that undoes all splits.
    """
    names = [f".{stored_name}" for stored_name in stored_names]  # they may begin with a module around this one
    with ExitStack() as stack:
        for name, module in modules.items():
            part = f".{name}.{part_name}." if name else f".{part_name}."
            if any(part in stored_name for stored_name in names):
                stack.callback(split(module))
        return stack.pop_all().close


def _joined_attention(model: nn.Module) -> dict[str, nn.MultiheadAttention]:
    """The attention modules that can be linearized, by name: no subclasses, and none inside a transformers model."""
    of_transformers = inside_transformers(model)
    modules = {}
    for name, module in model.named_modules():
        if type(module) is nn.MultiheadAttention and module not in of_transformers:
            modules[name] = module
    return modules


def _require_plain_parameters(name: str, module: nn.MultiheadAttention) -> None:
    """Raise a CalibrationError for parameters that are sharded, offloaded, parametrized or quantized."""
    parts = [module, module.out_proj]
    is_elsewhere = any(in_shards(part) or is_dispatched(part) for part in parts)
    is_computed = any(is_parametrized(part) for part in parts)
    is_quantized = hasattr(module.out_proj, "quantization_scheme")
    refuse(
        [name] if is_elsewhere or is_computed or is_quantized else [],
        "the weights of nn.MultiheadAttention are sharded, offloaded, parametrized or quantized, and cannot be taken "
        "apart",
        expected="plain parameters",
        remedy="call linearize_attention when the model is built, before it is distributed or calibrated.",
    )


def _split(module: nn.MultiheadAttention) -> Callable[[], None]:
    """Make a :class:`LinearAttention` of a module; returns a function that undoes it.

    :func:`linearize_attention` calls this for each module, and ``load_checkpoint`` through :func:`linearize_stored`.
    ``out_proj`` is replaced by a plain Linear with the same parameters: torch's is of a subclass of Linear
    (``NonDynamicallyQuantizableLinear``), which a scheme for ``Linear`` does not target. torch has never called it, so
    hooks on it, which are not taken over, have never run.
    """
    attributes = vars(module)
    before = {name: dict(attributes[name]) for name in ("_parameters", "_modules")}
    weights = _rows_of_projections(module)
    biases: Sequence[nn.Parameter | None] = (None, None, None)
    if module.in_proj_bias is not None:
        biases = _thirds(module.in_proj_bias)
    out_proj: nn.Linear = module.out_proj
    del module.out_proj
    for name, weight, bias in zip(_PROJECTIONS, weights, biases, strict=True):
        module.add_module(name, _linear(weight, bias, module.training))
    module.add_module("out_proj", _linear(out_proj.weight, out_proj.bias, module.training))
    for name in ("in_proj_weight", "in_proj_bias", *(f"{name}_weight" for name in _PROJECTIONS)):
        module.register_parameter(name, None)
    module.__class__ = LinearAttention

    def undo() -> None:
        module.__class__ = nn.MultiheadAttention
        attributes.update(before)

    return undo


def _rows_of_projections(module: nn.MultiheadAttention) -> list[nn.Parameter]:
    """The weights of queries, keys and values; copies, where the module has them in one parameter."""
    if module.in_proj_weight is not None:
        return _thirds(module.in_proj_weight)
    weights = []
    for name in _PROJECTIONS:
        weight = getattr(module, f"{name}_weight")
        assert isinstance(weight, nn.Parameter)
        weights.append(weight)
    return weights


def _thirds(joined: nn.Parameter) -> list[nn.Parameter]:
    """The three parts of a parameter's rows, each a parameter of its own."""
    parts = []
    for rows in joined.detach().chunk(3):
        parts.append(nn.Parameter(rows.clone(), joined.requires_grad))
    return parts


def _linear(weight: Any, bias: nn.Parameter | None, training: bool) -> nn.Linear:
    """A Linear that has these very parameters, in training or evaluation mode as ``training`` says."""
    rows, columns = weight.shape
    layer = nn.Linear(columns, rows, bias is not None, device="meta", dtype=weight.dtype)
    layer.weight = weight
    if bias is not None:
        layer.bias = bias
    return layer.train(training)
