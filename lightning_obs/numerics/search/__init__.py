"""Search the range whose quantization error is least: the search, and how it reads values and measures errors.

Observers call ``ranges.search_range``, or ``descent.descend`` for whole Hessians. This folder imports ``numerics``.
Start reading in ``ranges.py``.
"""
