"""What a person looks at and decides by: each layer's error and sensitivity, the mixed plan, the closing summary.

It may import ``training`` and all below; no Lightning. Start reading in ``layer_errors.py``.
"""
