"""The layout of lightning-hydra-template: the callback is a config, `callbacks/calibration.yaml`."""

from pathlib import Path

import hydra
import torch

from lightning_obs import load_checkpoint, quantized
from tests.clients.hydra_template.src.train import train
from tests.clients.row import Row

CONFIGS = Path(__file__).parent / "hydra_template" / "configs"
row = Row("lightning-hydra-template")


def run(*words):
    """As `python src/train.py <words>`."""
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = hydra.compose("train", [f"output_dir={row.folder}", *words])
    return config, train(config)


# gallery: begin
config, made = run("callbacks=calibration")
row.fit(made["callbacks"]["calibration"])
folder = made["callbacks"]["calibration"].export("digits-int8")
loaded = load_checkpoint(hydra.utils.instantiate(config.model), folder).eval()
# gallery: end
row.export(made["callbacks"]["calibration"], folder)
model = made["model"].eval()
batch, _ = next(iter(made["datamodule"].val_dataloader()))
with torch.no_grad():
    original = model(batch)
    with quantized(model):
        row.reload(loaded(batch), model(batch), original)

# gallery: begin
last = made["callbacks"]["model_checkpoint"].last_model_path
_, trained = run("callbacks=fine_tuning")
row.qat(trained["callbacks"]["fine_tuning"])
_, resumed = run("callbacks=calibration", "trainer.max_epochs=3", f"ckpt_path={last}")
# gallery: end
row.resume(resumed["callbacks"]["calibration"])
