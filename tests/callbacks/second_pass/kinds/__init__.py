"""Kinds of LightningModules and of loaders, for tests that nothing of a run changes."""
