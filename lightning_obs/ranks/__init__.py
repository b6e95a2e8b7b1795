"""Reduce statistics over ranks, in a number of collectives that does not depend on a rank's data.

Calibration calls it at the end of an observation. It may import ``observers`` and all below.
Start reading in ``sync.py``.
"""
