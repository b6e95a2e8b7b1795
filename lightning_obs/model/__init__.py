"""What is done to a module of the user's, and undone: qparams on it, its quantized forward, its shards, its experts.

It may import ``distributed`` and all below. Start reading in ``qparams.py``.
"""
