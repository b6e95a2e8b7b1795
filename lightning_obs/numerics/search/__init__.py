"""The range that loses least when it is quantized: the search, and how it reads values and measures errors.

It may import ``numerics``. Start reading in ``ranges.py``.
"""
