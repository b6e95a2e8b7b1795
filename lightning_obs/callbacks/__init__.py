"""Lightning callbacks."""

from lightning_obs.callbacks.calibration import CalibrationCallback

__all__ = ["CalibrationCallback"]
