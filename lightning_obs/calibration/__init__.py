"""One calibration, from the hooks that feed the observers to the quantization parameters on the modules.

It may import ``engines`` and all below; no Lightning. Start reading in ``session.py``, then ``observation.py`` (the
record that the session holds), ``hooks.py`` (which fills it), ``finalize.py`` (which turns it into qparams) and
``result.py`` (what people and reports get).
"""
