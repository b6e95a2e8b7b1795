"""What decides: the loss that each scheme costs each layer, the plan within a budget, observers by measurement.

It may import ``fine_tuning`` and all below; no Lightning. Start reading in ``sensitivity.py``; the
method is in ``divergence.py``.
"""
