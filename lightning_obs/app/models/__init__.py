"""Models as LightningModules: causal, encoder and decoder, encoder, timm; one of your own needs none of this."""
