"""A calibrated model as a program of torch.export, for ExecuTorch and torch's own compilers.

It may import ``checkpoint`` and all below. Start reading in ``program_file.py``.
"""
