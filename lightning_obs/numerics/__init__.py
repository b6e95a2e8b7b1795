"""Pure functions on tensors: reshape to observations, ranges to quantization parameters, errors, counts.

They import nothing of the package but ``errors`` and ``packages``. Start reading in ``qparams.py``.
"""

from lightning_obs.numerics.qparams import QParamsDict, compute_global_scale, compute_qparams, flatten_for_calibration

__all__ = ["QParamsDict", "compute_global_scale", "compute_qparams", "flatten_for_calibration"]
