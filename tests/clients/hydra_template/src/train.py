"""The project's entry point: everything is made from the config."""

import hydra
import lightning as L


def train(cfg):
    """Fit the model of a config; returns what was made of it, by name."""
    L.seed_everything(cfg.seed)
    datamodule = hydra.utils.instantiate(cfg.data)
    model = hydra.utils.instantiate(cfg.model)
    callbacks = {name: hydra.utils.instantiate(callback) for name, callback in cfg.callbacks.items()}
    trainer = hydra.utils.instantiate(cfg.trainer, callbacks=list(callbacks.values()))
    trainer.fit(model=model, datamodule=datamodule, ckpt_path=cfg.ckpt_path, weights_only=False)
    return {"datamodule": datamodule, "model": model, "callbacks": callbacks, "trainer": trainer}


@hydra.main(version_base="1.3", config_path="../configs", config_name="train")
def main(cfg):
    train(cfg)


if __name__ == "__main__":
    main()
