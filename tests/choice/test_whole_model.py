"""The divergence of a whole quantized model's predictions from the unquantized model's."""

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationSession
from lightning_obs.choice.whole_model import whole_divergences
from lightning_obs.model.module_qparams import calibration_of, clear_qparams


class Tagger(nn.Module):
    """A token's logits depend on that token alone, so padding changes no other."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, input_ids, attention_mask=None):
        return self.head(self.embedding(input_ids))


def calibrated(model, scheme):
    with CalibrationSession(model, scheme, ignore="embedding"):
        pass
    calibration = {module: values for module, values in calibration_of(model).items() if "weight_scale" in values}
    for module in calibration:
        clear_qparams(module)
    return calibration


INT2 = {"weights": {"num_bits": 2, "strategy": "channel"}}


def test_positions_that_a_mask_leaves_out_do_not_count():
    model = Tagger()
    calibration = calibrated(model, INT2)
    ids = torch.randint(16, (2, 12))
    (expected,) = whole_divergences(model, [{"input_ids": ids}], [calibration])
    padded = torch.cat([ids, torch.randint(16, (2, 5))], dim=1)
    mask = torch.cat([torch.ones(2, 12), torch.zeros(2, 5)], dim=1).long()
    (masked,) = whole_divergences(model, [{"input_ids": padded, "attention_mask": mask}], [calibration])
    (unmasked,) = whole_divergences(model, [{"input_ids": padded}], [calibration])
    assert masked == pytest.approx(expected, rel=1e-5)
    assert unmasked != pytest.approx(expected, rel=1e-3)
    assert expected > 1e-4


def test_a_calibration_without_modules_is_the_unquantized_model():
    model = Tagger()
    batches = [{"input_ids": torch.randint(16, (2, 12))} for _ in range(2)]
    plain, quantized = whole_divergences(model, batches, [{}, calibrated(model, INT2)])
    assert plain == 0
    assert quantized > 0
    assert not hasattr(model.head, "weight_scale")


def test_no_session_observes_the_runs():
    model = Tagger()
    scheme = {**INT2, "input_activations": {"num_bits": 8, "strategy": "tensor", "dynamic": False}}
    with CalibrationSession(model, scheme, ignore="embedding") as session:
        model(torch.full((1, 4), 3))
        whole_divergences(model, [{"input_ids": torch.randint(16, (2, 12))}], [{}])
    low, high = session.observers["head", "input"].get_min_max()
    token = model.embedding.weight[3].detach()
    assert (float(low), float(high)) == (float(token.min()), float(token.max()))
