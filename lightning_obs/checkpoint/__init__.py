"""A calibrated model as a compressed-tensors checkpoint, and back into a plain module.

It may import ``calibration`` and all below. Start reading in ``export.py``.
"""
