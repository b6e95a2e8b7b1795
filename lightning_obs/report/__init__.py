"""Output for people: metrics, layer errors, the closing summary, the page.

It may import ``choice`` and all below; no Lightning. Start reading in ``layer_errors.py``.
"""
