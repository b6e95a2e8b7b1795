"""What a peer is: a package that quantizes the same weights, on the same data and to the same bytes, in its own way."""

from __future__ import annotations

import copy
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, preset_name_to_scheme
from measured_models import Encoder, Language
from torch import nn

#: a preset's name, or the arguments of weights
Scheme: TypeAlias = str | Mapping[str, Any]


class CannotQuantizeError(Exception):
    """A peer does not quantize such a model, or to such a format; the text says why."""


class Peer(ABC):
    """One way of another package to quantize weights, with its settings.

    Attributes:
        package: its name in an import.
    """

    package: str

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    @abstractmethod
    def quantize(self, subject: Encoder | Language, scheme: Scheme) -> nn.Module:
        """Quantize the linear layers that ours quantizes.

        Args:
            subject: its model, which stays as it is, and the batches to calibrate on.
            scheme: of the weights.

        Returns:
            A model whose forward computes with the weights that a checkpoint of the peer stands for, in float32.

        Raises:
            CannotQuantizeError: it cannot.
        """


def weight_args(scheme: Scheme) -> QuantizationArgs:
    """The format of weights that a scheme names."""
    if isinstance(scheme, str):
        return preset_name_to_scheme(scheme, ["Linear"]).weights
    return QuantizationArgs(**scheme["weights"])


def format_name(args: QuantizationArgs) -> str:
    """int, nvfp4 or mxfp4: the formats that peers are asked for.

    Raises:
        CannotQuantizeError: it is none of them.
    """
    if args.type == "int":
        return "int"
    if args.strategy == QuantizationStrategy.TENSOR_GROUP:
        return "nvfp4"
    if args.scale_dtype == torch.uint8:
        return "mxfp4"
    raise CannotQuantizeError(f"no peer was asked for weights such as {args}")


def quantized_linears(model: nn.Module, ignore: tuple[str, ...]) -> dict[str, nn.Linear]:
    """The linear layers, by name, but those whose name is in ``ignore`` or that a pattern ``re:`` of it matches."""
    from compressed_tensors.utils import match_named_modules

    return dict(match_named_modules(model, ["Linear"], ignore))


def with_weights_of(quantized: nn.Module, subject: Encoder | Language, args: QuantizationArgs) -> nn.Module:
    """A copy of the subject's model with the dequantized weights of another one's linear layers.

    Raises:
        ValueError: a group has more values than its bits can tell apart, so it is not quantized as it was asked.
    """
    model = copy.deepcopy(subject.model)
    with torch.no_grad():
        for name, linear in quantized_linears(model, subject.ignore).items():
            weight = quantized.get_submodule(name).weight
            groups = weight[:16].reshape(-1, args.group_size)
            most = max(len(group.unique()) for group in groups)
            if most > 2**args.num_bits:
                raise ValueError(f"{name}: a group of {args.num_bits} bits has {most} values")
            linear.weight.copy_(weight)
    return model
