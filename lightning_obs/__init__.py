"""Observers for LLM quantization, in PyTorch Lightning.

>>> import lightning_obs
>>> sorted(set(lightning_obs.__all__) - set(dir(lightning_obs)))
[]
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_obs.calibration.options import CalibrationOptions
    from lightning_obs.calibration.result import CalibrationResult
    from lightning_obs.calibration.session import CalibrationSession
    from lightning_obs.callbacks.calibration import CalibrationCallback
    from lightning_obs.callbacks.quantization_aware_training import QuantizationAwareTraining
    from lightning_obs.checkpoint.export import export_checkpoint
    from lightning_obs.checkpoint.load import load_checkpoint
    from lightning_obs.checkpoint.packed import keep_packed
    from lightning_obs.choice.mixed_precision import mixed_precision
    from lightning_obs.choice.observer_choice import choose_observers
    from lightning_obs.choice.sensitivity import sensitivity
    from lightning_obs.choice.smoothing import SmoothedInput, smooth_inputs
    from lightning_obs.errors import CalibrationError, CalibrationWarning
    from lightning_obs.forward.linear_attention import linearize_attention
    from lightning_obs.forward.linear_recurrent import linearize_recurrent
    from lightning_obs.forward.quantized_forward import quantized
    from lightning_obs.gguf.gguf_file import export_gguf
    from lightning_obs.moe.experts import linearize_experts
    from lightning_obs.observers import Observer
    from lightning_obs.onnx.measured_file import OnnxMeasurement, measure_onnx
    from lightning_obs.onnx.onnx_file import export_onnx
    from lightning_obs.program.program_file import export_program
    from lightning_obs.streaming.checkpoint_weights import quantize_checkpoint
    from lightning_obs.streaming.layerwise import BlockRuns, calibrate_layerwise

__version__ = "0.1.0"

# Loaded on first use: an observer can be written and tested without importing lightning or transformers.
_HOME = {
    "BlockRuns": "lightning_obs.streaming.layerwise",
    "CalibrationCallback": "lightning_obs.callbacks.calibration",
    "CalibrationError": "lightning_obs.errors",
    "CalibrationWarning": "lightning_obs.errors",
    "CalibrationOptions": "lightning_obs.calibration.options",
    "CalibrationResult": "lightning_obs.calibration.result",
    "CalibrationSession": "lightning_obs.calibration.session",
    "Observer": "lightning_obs.observers",
    "OnnxMeasurement": "lightning_obs.onnx.measured_file",
    "QuantizationAwareTraining": "lightning_obs.callbacks.quantization_aware_training",
    "SmoothedInput": "lightning_obs.choice.smoothing",
    "calibrate_layerwise": "lightning_obs.streaming.layerwise",
    "choose_observers": "lightning_obs.choice.observer_choice",
    "export_checkpoint": "lightning_obs.checkpoint.export",
    "export_gguf": "lightning_obs.gguf.gguf_file",
    "export_onnx": "lightning_obs.onnx.onnx_file",
    "export_program": "lightning_obs.program.program_file",
    "keep_packed": "lightning_obs.checkpoint.packed",
    "linearize_attention": "lightning_obs.forward.linear_attention",
    "linearize_recurrent": "lightning_obs.forward.linear_recurrent",
    "linearize_experts": "lightning_obs.moe.experts",
    "load_checkpoint": "lightning_obs.checkpoint.load",
    "measure_onnx": "lightning_obs.onnx.measured_file",
    "mixed_precision": "lightning_obs.choice.mixed_precision",
    "quantize_checkpoint": "lightning_obs.streaming.checkpoint_weights",
    "quantized": "lightning_obs.forward.quantized_forward",
    "sensitivity": "lightning_obs.choice.sensitivity",
    "smooth_inputs": "lightning_obs.choice.smoothing",
}

__all__ = [
    "BlockRuns",
    "CalibrationCallback",
    "CalibrationError",
    "CalibrationOptions",
    "CalibrationResult",
    "CalibrationSession",
    "CalibrationWarning",
    "Observer",
    "OnnxMeasurement",
    "QuantizationAwareTraining",
    "SmoothedInput",
    "calibrate_layerwise",
    "choose_observers",
    "export_checkpoint",
    "export_gguf",
    "export_onnx",
    "export_program",
    "keep_packed",
    "linearize_attention",
    "linearize_experts",
    "linearize_recurrent",
    "load_checkpoint",
    "measure_onnx",
    "mixed_precision",
    "quantize_checkpoint",
    "quantized",
    "sensitivity",
    "smooth_inputs",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
