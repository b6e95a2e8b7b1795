"""NVIDIA's Model Optimizer: AWQ, scales by the Hessian of a group, and GPTQ.

It gives a model with quantizers in its layers, which is measured as it is. The factors of its AWQ are multiplied onto
inputs: ours and the other peers' have none.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compressed_tensors.quantization import QuantizationArgs
from measured_models import Encoder, Language
from torch import nn

from peers.peer import CannotQuantizeError, Peer, Scheme, format_name, quantized_linears, weight_args


@dataclass(frozen=True)
class ModelOptimizer(Peer):
    """One algorithm of its ``quantize``.

    Attributes:
        method: name of the algorithm.
        options: of the algorithm.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    package = "modelopt"

    def quantize(self, subject: Encoder | Language, scheme: Scheme) -> nn.Module:
        import modelopt.torch.quantization as mtq

        model = copy.deepcopy(subject.model)
        weights = weight_args(scheme)
        if format_name(weights) == "nvfp4" and subject.device == "cpu":
            raise CannotQuantizeError("its static NVFP4 needs Triton")
        options = dict(self.options)
        if self.method == "local_hessian":
            options["block_size"] = weights.group_size
            options["fp8_scale_sweep"] = format_name(weights) == "nvfp4"
        if self.method == "gptq":
            options["layerwise"] = {"enable": isinstance(subject, Language)}  # it finds the layers of decoders
        quantizers: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
        for name in quantized_linears(model, subject.ignore):
            quantizers.append({"quantizer_name": f"{name}.weight_quantizer", "cfg": self._format(weights)})
        config = {"quant_cfg": quantizers, "algorithm": {"method": self.method, **options}}
        return mtq.quantize(model, config, subject.calibrate)

    def _format(self, weights: QuantizationArgs) -> dict[str, Any]:
        match format_name(weights):
            case "nvfp4":
                return {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "static", "scale_bits": (4, 3)}}
            case "mxfp4":
                if self.method not in ("max", "awq_lite"):
                    raise CannotQuantizeError("its scales of MXFP4 follow from the largest value")
                return {"num_bits": (2, 1), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}}
        return {"num_bits": weights.num_bits, "block_sizes": {-1: weights.group_size}}
