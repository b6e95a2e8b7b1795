"""Compiled loops over tensors: one pass over memory in place of several operations of torch.

numba compiles them for a CPU (``loops.py``, called by ``launch.py``, where to start reading), Triton for a GPU
(``gpu_loops.py``, called by ``numerics/on_gpu.py``). The loop of the range search on a CPU is in ``search/``.
"""
