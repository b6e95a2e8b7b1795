"""What is written appears under its name whole or not at all; what is read and damaged is named.

It imports ``errors.py`` alone. Start reading in ``write.py``.
"""
