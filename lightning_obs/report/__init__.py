"""What a person looks at: metrics, each layer's error, the closing summary, the page.

It may import ``training`` and all below; no Lightning. Start reading in ``layer_errors.py``.
"""
