"""Reduce statistics over ranks, in a number of collectives that does not depend on a rank's data.

Calibration calls it at the end of an observation. This folder imports ``observers`` and the folders below. Start
reading in ``sync.py``.
"""
