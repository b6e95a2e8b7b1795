"""Intel's auto-round: sign steps on rounding and ranges, block by block, against the block's own output (SignRound,
arXiv 2309.05516).

``auto-round`` has its default number of iterations and rate; ``light`` and ``best`` have those of the recipes of its
command line. The calibration text is ours: 16 blocks of 512 tokens in place of its 128 of 2,048. It computes in its
default bfloat16 on a GPU, and in float32 on a CPU.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from measured_models import Batch, Encoder, Language
from torch import nn
from torch.nn import functional as F

from peers.peer import Peer, Scheme, format_name, weight_args, with_weights_of

#: the data type and group size of its schemes, by our name of the format
DATA_TYPES = {"int": "int", "nvfp4": "nv_fp", "mxfp4": "mx_fp"}


@dataclass(frozen=True)
class AutoRound(Peer):
    """auto-round with a number of iterations.

    Attributes:
        iterations: for each block.
        batch_size: samples in one iteration.
        options: other arguments of its class ``AutoRound``.
    """

    iterations: int
    batch_size: int = 8
    options: Mapping[str, Any] = field(default_factory=dict)
    package = "auto_round"

    def quantize(self, subject: Encoder | Language, scheme: Scheme) -> nn.Module:
        from auto_round import AutoRound as Package

        logging.getLogger("autoround").setLevel(logging.ERROR)
        weights = weight_args(scheme)
        data_type = DATA_TYPES[format_name(weights)]
        samples = samples_of(subject.batches())
        length = samples[0]["input_ids"].shape[1]
        compressor = Package(
            copy.deepcopy(subject.model),
            tokenizer=subject.tokenizer,
            scheme={
                "bits": weights.num_bits,
                "group_size": weights.group_size,
                "sym": weights.symmetric,
                "data_type": data_type,
                "act_bits": 16,
            },
            dataset=samples,
            nsamples=len(samples),
            seqlen=length,
            iters=self.iterations,
            batch_size=self.batch_size,
            device_map=subject.device,
            amp=subject.device != "cpu",
            enable_torch_compile=False,
            **self.options,
        )
        result = compressor.quantize()
        quantized = result[0] if isinstance(result, tuple) else result
        return with_weights_of(quantized, subject, weights)


def samples_of(batches: list[Batch]) -> list[Batch]:
    """Samples of one row each, padded to one length, as it wants them."""
    length = max(batch["input_ids"].shape[1] for batch in batches)
    samples = []
    for batch in batches:
        for index in range(len(batch["input_ids"])):
            sample = {name: values[index : index + 1] for name, values in batch.items()}
            missing = length - sample["input_ids"].shape[1]
            samples.append({name: F.pad(values, (0, missing)) for name, values in sample.items()})
    return samples
