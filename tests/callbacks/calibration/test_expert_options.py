"""What CalibrationCallback hands on for models with experts."""

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_obs import CalibrationCallback, CalibrationError, linearize_experts
from tests.support.lightning_package import L
from tests.support.moe_models import EXPERTS, tiny_moe
from tests.support.versions import converted_weights

pytestmark = converted_weights


class MixtureOfExperts(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tiny_moe("qwen3_moe")
        linearize_experts(self.model)

    def validation_step(self, batch, batch_idx):
        self.log("mean_logit", self.model(batch).logits.mean())


def validate(callback):
    trainer = L.Trainer(
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    module = MixtureOfExperts()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 128, (4, 16), generator=generator)
    return module, trainer.validate(module, DataLoader(tokens, batch_size=2), verbose=False)


def test_all_experts_are_calibrated_and_metrics_keep_their_values():
    torch.manual_seed(0)
    _, without = validate(L.Callback())
    callback = CalibrationCallback("FP8", ignore="lm_head", engines="dequantize", calibrate_all_experts=True)
    torch.manual_seed(0)
    module, with_callback = validate(callback)
    assert with_callback == without
    ranges = {callback.result.input_ranges[f"model.layers.1.mlp.experts.{i}.up_proj"] for i in range(EXPERTS)}
    assert len(ranges) == 1
    assert sum(callback.result.expert_tokens["model.layers.1.mlp.experts"]) == 2 * 4 * 16
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_a_wrong_fused_set_is_found_where_it_was_written():
    with pytest.raises(CalibrationError, match="not a fused set"):
        CalibrationCallback("FP8", fused_sets=[["alone"]])
