"""Pure functions on tensors: values of each scale, ranges to quantization parameters, range searches, counts, rounding.

This folder imports nothing of the package but ``errors`` and ``packages``. Observers, calibration, the quantized
forward, fine-tuning, export and the report call it. Start reading in ``qparams.py``.
"""

from lightning_obs.numerics.qparams import QParamsDict, compute_global_scale, compute_qparams, flatten_for_calibration

__all__ = ["QParamsDict", "compute_global_scale", "compute_qparams", "flatten_for_calibration"]
