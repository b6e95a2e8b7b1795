"""The clients import packages that only `.venv-clients` has: pytest collects the tests beside them, and no client."""

collect_ignore_glob = ["*_client.py"]
collect_ignore = ["hydra_template"]
