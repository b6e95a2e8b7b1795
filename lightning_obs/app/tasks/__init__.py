"""The tasks of the command line: a class for each, named by ``task._target_``; start in ``task.py``."""
