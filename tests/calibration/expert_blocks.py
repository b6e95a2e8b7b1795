"""Blocks of experts whose router is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_obs import linearize_experts
from tests.support.moe_models import ListBlock, StackedBlock, by_hand

#: expert 3 gets no token, expert 2 one

INDEX = torch.tensor([[0, 1]] * 5 + [[1, 2]] + [[0, 1]] * 2)


def linear_block() -> nn.Module:
    block = StackedBlock()
    linearize_experts(block)
    return block.eval()


def list_block() -> nn.Module:
    return ListBlock().eval()


BLOCKS = pytest.mark.parametrize("make", [linear_block, list_block], ids=["linearized", "ModuleList"])


def routed(index: torch.Tensor, expert: int) -> torch.Tensor:
    return (index == expert).any(-1)


def assert_ranges(found, block, expert, tokens):
    for projection, expected in by_hand(block, expert, tokens).items():
        assert found[f"experts.{expert}.{projection}"] == pytest.approx(expected, rel=1e-6), (expert, projection)
