"""Decisions by measurement: the loss of each scheme in each layer, the plan within a budget, observers.

It may import ``fine_tuning`` and all below; no Lightning. Start reading in ``sensitivity.py``; the
method is in ``divergence.py``.
"""
