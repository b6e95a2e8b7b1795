"""Loops over tensors in a CPU's memory, compiled by numba: in one pass what torch's own operations do in several.

Start reading in ``launch.py``.
"""
