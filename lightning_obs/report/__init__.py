"""What a person looks at: each layer's error, the closing summary.

It may import ``training`` and all below; no Lightning. Start reading in ``layer_errors.py``.
"""
