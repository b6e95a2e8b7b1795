"""The quantized forward of a module or a model, attention included, and how a model is called.

It may import ``model`` and all below. Start reading in ``quantized_forward.py``.
"""
