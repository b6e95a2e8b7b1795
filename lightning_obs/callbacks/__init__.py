"""Lightning's hooks, each a few lines over the folders below.

Only here (in ``lightning_package.py``) and in ``app`` is lightning imported. Start reading in ``calibration.py``.
"""

from lightning_obs.callbacks.calibration import CalibrationCallback
from lightning_obs.callbacks.quantization_aware_training import QuantizationAwareTraining

__all__ = ["CalibrationCallback", "QuantizationAwareTraining"]
