"""Padding that no ``token_mask`` takes out is said, once."""

import warnings

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationSession
from lightning_obs.errors import CalibrationWarning

SAID = r"attention_mask masks 3 of 8 tokens.*token_mask='attention_mask'"
PADDED = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, attention_mask=None):
        return self.fc(x)


def session(**options):
    return CalibrationSession(Encoder(), "INT8_STATIC", **options)


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float])
def test_it_is_said_once_in_a_session(by_name, dtype):
    calibration, mask = session(), PADDED.to(dtype)
    x = torch.ones(2, 4, 4)

    def run():
        return calibration.model(x, attention_mask=mask) if by_name else calibration.model(x, mask)

    with calibration:
        with pytest.warns(CalibrationWarning, match=SAID) as given:
            run()
        run()  # a warning would be an error
    assert given[0].filename == __file__


@pytest.mark.parametrize("mask", [torch.ones(2, 4), torch.zeros(2, 1, 4, 4), torch.zeros(2, 4, 4), None, "sdpa"])
def test_what_masks_no_token_is_no_padding(mask):
    with warnings.catch_warnings(), session() as calibration:
        warnings.simplefilter("error")
        calibration.model(torch.ones(2, 4, 4), attention_mask=mask)


def test_nothing_is_said_where_the_mask_is_used():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with session(token_mask="attention_mask") as calibration:
            calibration.model(torch.ones(2, 4, 4), attention_mask=PADDED)
        with session() as calibration:
            calibration.mask_tokens(PADDED)
            calibration.model(torch.ones(2, 4, 4), attention_mask=PADDED)


def test_nothing_is_said_where_nothing_is_observed():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibration = CalibrationSession(Encoder(), "W8A8")
        calibration.attach()
        calibration.model(torch.ones(2, 4, 4), attention_mask=PADDED)
        calibration.detach()
        with session() as calibration:
            with calibration.paused():
                calibration.model(torch.ones(2, 4, 4), attention_mask=PADDED)
            calibration.model(torch.ones(2, 4, 4))
