"""Lightning callbacks."""

from lightning_obs.callbacks.calibration import CalibrationCallback
from lightning_obs.callbacks.qat import QuantizationAwareTraining

__all__ = ["CalibrationCallback", "QuantizationAwareTraining"]
