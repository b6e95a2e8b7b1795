"""What tasks that choose before they calibrate have in common.

The choice becomes the job's scheme, and is written as a config of the group ``scheme``, so that a later run takes it as
it takes any other: ``--config-dir <output folder>/configs scheme=plan``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationConfig
from omegaconf import OmegaConf
from typing_extensions import override

from lightning_obs.app.job import make_trainer, plain
from lightning_obs.app.tasks.calibrate import Calibrate
from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.errors import CalibrationError
from lightning_obs.files.write import write_text


class ChoosingTask(Calibrate):
    """Calibrates what it chose by measurement on the calibration batches, on one device."""

    @property
    def candidates(self) -> dict[str, Any]:
        """As ``task.candidates`` has them."""
        return plain(self.config.task.candidates) or {}

    @override
    def check_task(self) -> None:
        """Refuse several devices."""
        if self.job.trainer.world_size > 1:
            raise CalibrationError(
                f"task={self.config.task.name} runs on one device",
                got=f"{self.job.trainer.world_size} devices",
                remedy="choose with trainer.devices=1, then calibrate with what it wrote (scheme=plan).",
            )

    def calibration_batches(self) -> list[dict[str, Any]]:
        """All of them, as the model takes them."""
        device = self.job.trainer.strategy.root_device
        self.job.module.to(device)
        return [dict(self.job.inputs(batch, device)) for batch in self.job.data.val_dataloader()]

    def calibrate_with(self, options: CalibrationOptions) -> None:
        """Replace the callback by one with these options."""
        callback = self.make_callback(options)
        self.job = replace(self.job, callback=callback, trainer=make_trainer(self.config, callback))

    def write_scheme(self, config: QuantizationConfig, headline: str) -> Path:
        """Write the choice as a config for a later run; its path."""
        folder = Path(self.config.output_dir)
        path = folder / "configs" / "scheme" / "plan.yaml"
        scheme = config.model_dump(mode="json", include={"config_groups", "ignore"}, exclude_none=True)
        head = f"# {headline}\n#   python -m lightning_obs --config-dir {folder / 'configs'} scheme=plan\n"
        write_text(path, head + OmegaConf.to_yaml(OmegaConf.create(scheme)))
        return path
