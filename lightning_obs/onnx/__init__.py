"""A calibrated model as an ONNX file.

It may import ``checkpoint`` and all below. Start reading in ``onnx_file.py``.
"""
