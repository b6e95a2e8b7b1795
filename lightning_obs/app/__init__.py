"""The command line: ``python -m lightning_obs``. Hydra composes ``configs/``, Lightning runs."""
