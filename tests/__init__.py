"""Tests; `conftest.py` says what they have in common."""
