"""llm-compressor's GPTQModifier and AWQModifier.

Both give a model that compressed-tensors quantizes at each forward, which is measured as it is. AWQ folds its scales
into norms and weights before: of a model whose norms feed more than linear layers, an encoder's, it can fold few.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from measured_models import Encoder, Language
from torch import nn
from torch.utils.data import DataLoader

from peers.peer import CannotQuantizeError, Peer, Scheme, weight_args


@dataclass(frozen=True)
class Modifier(Peer):
    """A modifier with an observer of weights.

    Attributes:
        modifier: name of its class.
        observer: of weights, by name.
        options: other arguments of the class.
    """

    modifier: str
    observer: str = "memoryless_minmax"
    options: Mapping[str, Any] = field(default_factory=dict)
    package = "llmcompressor"

    def quantize(self, subject: Encoder | Language, scheme: Scheme) -> nn.Module:
        from llmcompressor import oneshot
        from loguru import logger

        logger.remove()
        model = copy.deepcopy(subject.model)
        batches = subject.batches()
        if self.modifier == "AWQModifier":
            if isinstance(subject, Encoder):
                raise CannotQuantizeError("its mappings name layers of decoders")
            if subject.device == "cpu":
                raise CannotQuantizeError("it needs an accelerator")
            batches = [{**batch, "attention_mask": torch.ones_like(batch["input_ids"])} for batch in batches]
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
            oneshot(
                model=model,
                dataset=DataLoader(batches, batch_size=None),
                recipe=self._recipe(subject.ignore, scheme),
                pipeline=subject.pipeline,
                processor=subject.tokenizer,
            )
        return model

    def _recipe(self, ignore: tuple[str, ...], scheme: Scheme) -> Any:
        from llmcompressor.modifiers.awq import AWQModifier
        from llmcompressor.modifiers.gptq import GPTQModifier

        modifiers = {"AWQModifier": AWQModifier, "GPTQModifier": GPTQModifier}
        if isinstance(scheme, str):
            group = preset_name_to_scheme(scheme, ["Linear"])
        else:
            group = QuantizationScheme(targets=["Linear"], weights=weight_args(scheme))
        group.weights.observer = self.observer
        return modifiers[self.modifier](ignore=list(ignore), config_groups={"group_0": group}, **self.options)
