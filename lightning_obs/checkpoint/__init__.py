"""A calibrated model as a compressed-tensors checkpoint, and back into a plain module.

It may import ``calibration`` and all below. Start reading in ``export.py``, then ``entries.py`` (which tensors are
stored, under which names, and how one weight is compressed); ``load.py`` is the way back.
"""
