"""The causal language model of the command line as a LightningModule, and its loader of transformers models."""
