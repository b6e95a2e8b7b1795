"""One calibration, from the hooks that feed the observers to the quantization parameters on the modules.

It may import ``engines`` and all below; no Lightning. Start reading in ``session.py``, then ``hooks.py`` (which feeds
an observer) and ``finalize.py`` (which turns its statistics into qparams).
"""
