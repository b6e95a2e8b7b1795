"""What the user asks for: read, laid over a model, and checked before any data.

It may import ``moe`` and all below. Start reading in ``config.py`` (what can be written), then ``plan.py`` (over a
model); what is refused whatever the engine stands in ``preflight.py``.
"""
