"""Let torch's encoder layers call their modules.

In evaluation, without gradients, ``nn.TransformerEncoderLayer`` computes in one fused operation. It reads the weights
of its Linears and does not call them, so that no hook sees their data and their quantized forward does not run; and
``nn.TransformerEncoder`` packs a padded batch into a nested tensor for it, which nothing else takes. Both ask an
attribute of their own first, which is switched off here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from lightning_obs.model.mark import set_attributes


@contextmanager
def unfused(model: nn.Module) -> Iterator[None]:
    """For a ``with`` block in which encoder layers of a model call their modules, as in training.

    Entered wherever modules are observed or run quantized for a while; copies of the model are not changed.
    """
    with ExitStack() as stack:
        for module in model.modules():
            attributes = _switched_off(module)
            if attributes:
                stack.callback(set_attributes(module, **attributes))
        yield


def unfuse_for_good(model: nn.Module) -> None:
    """Let encoder layers of a model, and of its copies, call their modules from now on.

    Called for models whose modules were replaced, or run quantized for good.
    """
    for module in model.modules():
        vars(module).update(_switched_off(module))


def _switched_off(module: nn.Module) -> dict[str, Any]:
    """The attributes that keep a module from computing fused, with their values; empty for any other module."""
    if isinstance(module, nn.TransformerEncoderLayer):
        return {"activation_relu_or_gelu": 0}
    if isinstance(module, nn.TransformerEncoder):
        return {"use_nested_tensor": False}
    return {}
