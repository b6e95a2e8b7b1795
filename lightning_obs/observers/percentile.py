"""A range that leaves out the outermost share of what was observed."""

from __future__ import annotations

from typing import Any, ClassVar

from compressed_tensors.quantization import QuantizationArgs
from typing_extensions import override

from lightning_obs.observers.base import MinMaxTuple, Observer
from lightning_obs.observers.histogram import CountingObserver, percentile_of_each, require_percentile


@Observer.register("percentile")
class PercentileObserver(CountingObserver):
    """The smallest value with ``percentile`` of all at or below it, and its mirror image at the lower end.

    Exact in any partition. Exact for bfloat16; float32 and float16 are rounded to bfloat16 first, except where no
    value is cut off: then it is the exact smallest and largest value.

    On language models this can be a catastrophe: a few inputs carry values thousands of times larger than the rest,
    and the model depends on them (docs/observers.md has the numbers).

    Observes ``(N, *Q, G)``: one scale per tensor or per attention head. Ranges are ``(*Q,)``.

    Keyword Args:
        percentile (float): in percent, in (50, 100]. 99.9 cuts one value in a thousand off each end.

    Raises:
        CalibrationError: ``percentile`` outside (50, 100], or a strategy other than tensor and attn_head.

    Reference:
        Wu et al., Integer Quantization for Deep Learning Inference, 2020, arXiv:2004.09602, section 3 (there of the
        magnitudes, which for a symmetric format and symmetric data is the same).
    """

    hyperparameters: ClassVar[dict[str, Any] | None] = {"percentile": 99.99}
    percentile: float

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__(base_name, args, **observer_kwargs)
        require_percentile(self.percentile)

    @override
    def get_min_max(self) -> MinMaxTuple:
        self._require_statistics()
        return percentile_of_each(self.counts, self.min_vals, self.max_vals, self.percentile)
