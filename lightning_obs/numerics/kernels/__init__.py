"""Loops over tensors in a CPU's memory, compiled by numba: one pass in place of several operations of torch.

Start reading in ``launch.py``.
"""
