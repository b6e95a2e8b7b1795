from __future__ import annotations

import pytest
import torch

from tests.support.moe_models import HIDDEN


@pytest.fixture
def x():
    return torch.randn(2, 4, HIDDEN)
