"""Tests; `conftest.py` and `support/fixtures.py` say what they have in common."""
