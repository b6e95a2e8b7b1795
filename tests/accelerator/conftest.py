"""These files run only where they are named: ``pytest tests/accelerator/test_observers.py``.

Each registers a device for its whole process (:mod:`tests.support.pretend_device`), which other tests are to be
without; ``tests/test_accelerator.py`` runs them in a process of their own.
"""

collect_ignore_glob = ["*.py"]
