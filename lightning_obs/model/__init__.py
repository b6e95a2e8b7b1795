"""One module of the user's model: its weight and how to reach it, its kind, its qparams, its checksums.

``weight.py`` is the way to a weight, over ``fsdp1.py``, ``offload.py`` and ``kinds.py``; ``mark.py`` is the record that
this package keeps on a module, and puts hooks and attributes on it for a while. The folder may import ``ranks`` and all
below. Start reading in ``module_qparams.py``, then ``weight.py``.
"""
