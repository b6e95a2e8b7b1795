"""A module of the user's: its weight and where it rests, qparams on it, wrappers and adapters around it, checksums.

It may import ``ranks`` and all below. Start reading in ``module_qparams.py``.
"""
