"""Files appear under their name whole or not at all; damaged input is named.

It imports ``errors.py`` alone. Start reading in ``write.py``.
"""
