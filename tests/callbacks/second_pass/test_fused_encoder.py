"""A padded batch of ``nn.TransformerEncoder`` in a test with ``evaluate``: both passes call the layers one by one."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_obs import CalibrationCallback
from tests.support.lightning_package import L


class Padded(L.LightningModule):
    """Logs the mean of all outputs, padding included."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x, mask):
        return self.encoder(x, src_key_padding_mask=mask)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self(*batch).square().mean())

    test_step = validation_step


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_test_compares_both_models_on_one_path():
    torch.manual_seed(0)
    x, mask = torch.randn(4, 6, 16), torch.zeros(4, 6, dtype=torch.bool)
    mask[1, 3:] = True
    loader = DataLoader(list(zip(x, mask, strict=True)), batch_size=2)
    callback = CalibrationCallback("INT8_STATIC", targets=["re:.*linear[12]"], evaluate=True, show=False)
    trainer = L.Trainer(
        callbacks=[callback], logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        enable_checkpointing=False,
    )  # fmt: skip
    module = Padded()
    [validated] = trainer.validate(module, loader, verbose=False)
    [tested] = trainer.test(module, loader, verbose=False)
    assert tested == validated
    assert tested["loss_quantized"] == pytest.approx(tested["loss"], rel=0.01)
    assert module.encoder.use_nested_tensor
