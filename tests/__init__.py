"""What tests and the ranks that they start have in common."""

from functools import cache

from lightning.fabric.utilities import registry

# A Trainer reads the metadata of every installed package, which takes longer than the rest of its constructor.
registry.entry_points = cache(registry.entry_points)
