"""What the command line does with a config: a class for each task, named by ``task._target_``; start in ``task.py``."""
