"""The command line, ``python -m lightning_obs``: Hydra composes ``configs/``, Lightning runs, a report is printed.

Only here are hydra and transformers' Auto classes imported. Start reading in ``main.py``, which runs a task; each task
is a class in ``tasks/``. A task that calibrates holds a ``Job`` (``job.py``): model, data, callback and Trainer, which
``from_config.py`` makes.
"""
