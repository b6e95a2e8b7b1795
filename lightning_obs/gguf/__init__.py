"""A calibrated model as a GGUF file for llama.cpp.

It may import ``checkpoint`` and all below. Start reading in ``gguf_file.py``.
"""
