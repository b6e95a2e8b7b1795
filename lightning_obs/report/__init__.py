"""What a person looks at and decides by: metrics, errors, sensitivity, the mixed plan, the summary, the page.

It may import ``training`` and all below; no Lightning. Start reading in ``layer_errors.py``.
"""
