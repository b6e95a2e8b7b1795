"""GPTQModel: GPTQ, and its corrections for what the layers before lost: GPTAQ (arXiv 2504.02692) and FOEM.

Its scales are float16. It takes a folder of a causal model that it knows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from measured_models import Encoder, Language
from torch import nn

from peers.peer import CannotQuantizeError, Peer, Scheme, format_name, quantized_linears, weight_args


@dataclass(frozen=True)
class GptqModel(Peer):
    """GPTQ with a correction.

    Attributes:
        correction: gptaq or foem; None: neither.
        options: other arguments of its ``QuantizeConfig``.
    """

    correction: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    package = "gptqmodel"

    def quantize(self, subject: Encoder | Language, scheme: Scheme) -> nn.Module:
        weights = weight_args(scheme)
        if isinstance(subject, Encoder):
            raise CannotQuantizeError("it knows causal models alone")
        if format_name(weights) != "int":
            raise CannotQuantizeError("its GPTQ is of integers")
        from gptqmodel import GPTQModel, QuantizeConfig
        from gptqmodel.quantization.config import FOEMConfig, GPTAQConfig

        corrections = {"gptaq": GPTAQConfig, "foem": FOEMConfig}
        options = {"sym": weights.symmetric, "offload_to_disk": False, **self.options}
        if self.correction is not None:
            options[self.correction] = corrections[self.correction]()
        config = QuantizeConfig(
            bits=weights.num_bits,
            group_size=weights.group_size,
            sym=weights.symmetric,
            offload_to_disk=False,
            **options,
        )
        loaded = GPTQModel.load(str(subject.folder), config, dtype=torch.float32, device=subject.device)
        loaded.quantize(subject.batches(), tokenizer=subject.tokenizer, batch_size=1)
        model = copy.deepcopy(subject.model)
        with torch.no_grad():
            for name, linear in quantized_linears(model, subject.ignore).items():
                packed = loaded.model.get_submodule(name)
                packed.post_init()
                linear.weight.copy_(packed.dequantize_weight().T)
        return model
