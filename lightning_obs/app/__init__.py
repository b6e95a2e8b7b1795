"""The command line, ``python -m lightning_obs``: Hydra composes ``configs/``, Lightning runs, a report is printed.

It may import every folder below it; only here are hydra and transformers' Auto classes imported. Start reading in
``main.py``; each task is a class in ``tasks/``.
"""
