"""Ranges and scales of a model while it is trained: when they are observed, refreshed, learned and saved.

It may import ``streaming`` and all below; no Lightning. Start reading in ``quantized_training.py``.
"""
