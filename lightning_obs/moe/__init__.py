"""Experts of mixture models as one Linear each.

It may import ``forward`` and all below. Start reading in ``experts.py``.
"""
