"""Models as LightningModules: of language, with one output for each sample; one of your own needs none of this."""
