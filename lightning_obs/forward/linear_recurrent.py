"""The weights of ``nn.LSTM`` and ``nn.GRU`` as modules, which a scheme can target.

torch passes all weights of such a layer to one operation, which computes every step. :func:`linearize_recurrent` gives
each weight a module of its own (:class:`~lightning_obs.model.kinds.LoneWeight`), which returns the weight, quantized
where the layer runs quantized. The layer reads them before it calls the same operation. A file stores integers, and the
products stay in float: they are steps inside the operation, which no module sees. A loop of Linears over the steps
would show them, and was 2 to 26 times as slow as the operation (``benchmarks/engines/recurrent.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_obs.errors import refuse
from lightning_obs.forward.linear_attention import split_as_stored
from lightning_obs.model.kinds import LoneWeight, inside_transformers, is_dispatched
from lightning_obs.model.weight import in_shards


class LinearRecurrent(nn.RNNBase):
    """A recurrent layer whose weights are modules.

    :func:`linearize_recurrent` turns an ``nn.LSTM`` or ``nn.GRU`` into a subclass of this class in place. A
    ``state_dict`` of the original layer can be loaded.

    Attributes:
        kind: the class that the layer had.
    """

    kind: type[nn.RNNBase]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what ``kind`` computes, with the weights that the modules return now.

        torch calls it when the layer is called. ``kind`` documents the arguments.
        """
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._flat_weights = []  # or they would stay in memory, dequantized and with their graph

    def _update_flat_weights(self) -> None:
        """Read the weights; ``forward`` of torch's class calls this first, and passes ``_flat_weights`` on."""
        weights = []
        for name in self._flat_weights_names:
            weight = getattr(self, name)
            weights.append(weight() if isinstance(weight, LoneWeight) else weight)
        self._flat_weights = weights

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).copy()
        state.pop("_flat_weight_refs", None)
        state["_flat_weights"] = []
        return state

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _without_state, (self.kind,), self.__getstate__()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Rename the weights of the original layer to those of the modules, in place; then load them.

        ``load_state_dict`` calls this for each module. Weights that have the modules' names already stay.
        """
        for name in self._flat_weights_names:
            value = state_dict.pop(prefix + name, None)
            if value is None:
                continue
            is_module = name in self._modules
            state_dict[f"{prefix}{name}.weight" if is_module else prefix + name] = value
        super()._load_from_state_dict(state_dict, prefix, *args)


#: by class of layers, the class of those whose weights are modules; one for each, so that copies have the same
_LINEAR_CLASSES: dict[type[nn.RNNBase], type[LinearRecurrent]] = {}


def _linear_class(kind: type[nn.RNNBase]) -> type[LinearRecurrent]:
    """The subclass of ``kind`` and :class:`LinearRecurrent`, made on first use."""
    if kind not in _LINEAR_CLASSES:
        _LINEAR_CLASSES[kind] = type(f"Linear{kind.__name__}", (LinearRecurrent, kind), {"kind": kind})
    return _LINEAR_CLASSES[kind]


def _without_state(kind: type[nn.RNNBase]) -> LinearRecurrent:
    """A layer without attributes; ``pickle`` and ``copy`` call this first, and then set the layer's state.

    The classes of :data:`_LINEAR_CLASSES` are in no module, so pickle cannot find them by name.
    """
    linear_class = _linear_class(kind)
    return linear_class.__new__(linear_class)


def linearize_recurrent(model: nn.Module) -> list[str]:
    """Give every weight of ``nn.LSTM`` and ``nn.GRU`` a module of its own, so that it can be quantized.

    Outputs stay the same bit for bit, and the operation that computes them as well: files become smaller, not faster.
    The weights are targets like those of Linears, under their names (``lstm.weight_ih_l0``); biases stay in float, and
    so do the inputs and products, whatever the scheme says of activations. A ``state_dict`` has ``weight_ih_l0.weight``
    in place of ``weight_ih_l0``; a ``state_dict`` from before can be loaded. Each layer stays the object that it was,
    with its hooks. Call it before you make optimizers. Layers inside transformers models are left as they are.
    Subclasses of ``nn.LSTM`` and ``nn.GRU`` are changed, too. A subclass whose own code reads ``weight_ih_l0`` as a
    tensor would then fail in its forward; nothing checks for such code.

    Args:
        model: changed in place.

    Returns:
        Names of the layers that were changed.

    Raises:
        CalibrationError: weights are sharded, offloaded or parametrized. Nothing is changed then.

    Examples:
        >>> model = nn.ModuleDict({"lstm": nn.LSTM(8, 16), "head": nn.Linear(16, 1)})
        >>> linearize_recurrent(model)
        ['lstm']
        >>> model["lstm"].weight_hh_l0
        LoneWeight(in_features=16, out_features=64, bias=False)
    """
    layers = _plain_layers(model)
    refuse(
        [name for name, layer in layers.items() if _has_other_parameters(layer)],
        "the weights of a recurrent layer are sharded, offloaded or parametrized, and cannot be taken apart",
        expected="plain parameters",
        remedy="call linearize_recurrent when the model is built, before it is distributed.",
    )
    for layer in layers.values():
        _split(layer)
    return list(layers)


def linearize_stored_recurrent(model: nn.Module, stored_names: Iterable[str]) -> Callable[[], None]:
    """Linearize the recurrent layers that are linearized in a checkpoint; called by ``load_checkpoint``.

    Args:
        model: freshly built.
        stored_names: names of the tensors in the checkpoint.

    Returns:
        A function that undoes it.
    """
    return split_as_stored(_plain_layers(model), "weight_ih_l0", stored_names, _split)


def _plain_layers(model: nn.Module) -> dict[str, nn.RNNBase]:
    """The layers that can be linearized, by name: not linearized yet, and not inside a transformers model."""
    of_transformers = inside_transformers(model)
    layers = {}
    for name, module in model.named_modules():
        is_plain = isinstance(module, (nn.LSTM, nn.GRU)) and not isinstance(module, LinearRecurrent)
        if is_plain and module not in of_transformers:
            layers[name] = module
    return layers


def _has_other_parameters(layer: nn.RNNBase) -> bool:
    """Whether a layer's parameters are sharded, offloaded or computed from others; then it cannot be linearized."""
    return in_shards(layer) or is_dispatched(layer) or is_parametrized(layer)


def _split(layer: nn.RNNBase) -> Callable[[], None]:
    """Make a :class:`LinearRecurrent` of a layer; returns a function that undoes it."""
    attributes = vars(layer)
    before = {name: dict(attributes[name]) for name in ("_parameters", "_modules")}
    kind = type(layer)
    for name in layer._flat_weights_names:
        if name.startswith("weight_"):
            weight = layer._parameters.pop(name)
            assert weight is not None
            layer.add_module(name, LoneWeight.of(weight).train(layer.training))
    layer.__class__ = _linear_class(kind)
    layer._flat_weights = []

    def undo() -> None:
        layer.__class__ = kind
        attributes.update(before)
        layer._init_flat_weights()

    return undo
