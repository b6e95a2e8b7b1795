"""What the user asks for: read, laid over a model, and checked before any data.

It may import ``moe`` and all below. Start reading in ``config.py`` (the user's scheme), then ``build_plan.py`` (over a
model, with what is refused whatever the engine).
"""
