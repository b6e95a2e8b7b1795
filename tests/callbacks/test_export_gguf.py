"""callback.export_gguf writes what its run has calibrated."""

import gguf
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_obs import CalibrationCallback, CalibrationError, QuantizationAwareTraining, export_gguf
from tests.callbacks.calibration_modules import trainer
from tests.support.gguf_base import tiny, write_base
from tests.support.lightning_package import L


class Language(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tiny("llama")

    def validation_step(self, batch, batch_idx):
        self.model(batch)


@pytest.mark.parametrize("make", [CalibrationCallback, QuantizationAwareTraining])
def test_a_callback_writes_a_gguf_file(make, tmp_path):
    module, callback = Language(), make("Q4_0", observers={"weight": {"name": "imatrix_mse", "signed": True}})
    base = write_base(module.model, tmp_path / "base.gguf")
    batches = DataLoader(torch.randint(3, 96, (4, 16)), batch_size=2)
    trainer(callback).validate(module, batches, verbose=False)
    file = callback.export_gguf(tmp_path / "model.gguf", base)
    types = [tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors]
    assert types.count("Q4_0") == 15
    assert export_gguf(module.model, tmp_path / "second.gguf", base).read_bytes() == file.read_bytes()
    with pytest.raises(CalibrationError, match="is already there"):
        callback.export_gguf(file, base)
    assert callback.export_gguf(file, base, overwrite=True) == file


def test_a_callback_that_has_not_run_says_so(tmp_path):
    with pytest.raises(CalibrationError, match="nothing was calibrated yet"):
        CalibrationCallback("Q4_0").export_gguf(tmp_path / "model.gguf", tmp_path / "base.gguf")
