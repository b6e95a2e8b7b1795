"""The user's request: read, laid over a model, and checked before any data.

It may import ``moe`` and all below. Start reading in ``config.py`` (the user's scheme), then ``build_plan.py`` (over a
model, with refusals that hold for every engine).
"""
