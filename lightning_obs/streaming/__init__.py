"""Quantize a checkpoint from files to files: the whole model is never in memory.

It may import ``onnx`` and all below; no Lightning. Start reading in ``checkpoint_weights.py`` (weights alone, one fused
set at a time), then ``layerwise.py`` (with data, one block of a decoder at a time); both read through ``source.py``.
"""
