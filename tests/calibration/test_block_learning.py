"""Rounding that is learned block by block: less loss than its start, and nothing else of a run is changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationError, CalibrationSession, export_checkpoint, load_checkpoint, quantized
from lightning_obs.ranks.collectives import Collectives
from tests.calibration.common import hooks
from tests.support.rank_processes import run_ranks

GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 16}
SCHEMES = {
    "int4": {"weights": GROUPS},
    "int4, zero points": {"weights": GROUPS | {"symmetric": False}},
    "nvfp4": "NVFP4A16",
    "int4 weights, int8 inputs": {"weights": GROUPS, "input_activations": {"num_bits": 8, "strategy": "tensor"}},
}
GPTQ = {"name": "gptq", "damping": 0.1, "inputs": "quantized"}
LEARNED = {"name": "learned", "damping": 0.1, "steps": 40, "learning_rate": 0.006}
OPTIONS = {"observers": {"weight": "memoryless_mse"}, "engines": "unchecked"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(32, 8)).to(dtype)


def batches(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(8, 32, generator=generator)
    return [(torch.randn(4, 16, 8, generator=generator) @ mixed).to(dtype) for _ in range(6)]


def calibrated(model: nn.Module, rounding, scheme="int4", data=None, **options) -> CalibrationSession:
    data = batches(next(model.parameters()).dtype) if data is None else data
    with CalibrationSession(model, SCHEMES[scheme], rounding=rounding, **OPTIONS, **options) as session:
        for batch in data:
            model(batch)
    return session


def lost(model: nn.Module) -> float:
    data = torch.cat(batches(next(model.parameters()).dtype))
    with torch.no_grad():
        expected = model[0](data)
        with quantized(model):
            return float((model[0](data) - expected).norm() / expected.norm())


def needs_data(scheme: str, rounding) -> bool:
    return rounding is not None or "inputs" in scheme


@pytest.mark.parametrize("scheme", SCHEMES)
def test_learned_rounding_loses_less_than_the_nearest_numbers_and_than_its_start(scheme):
    model = net()
    losses = []
    for rounding in (None, GPTQ, LEARNED):
        calibrated(model, rounding, scheme, batches() if needs_data(scheme, rounding) else [])
        losses.append(lost(model))
    nearest, start, learned = losses
    assert start < nearest
    if scheme == "nvfp4":  # float8 scales are too far apart for these steps
        assert learned <= start
    else:
        assert learned < 0.95 * start


def test_weights_gradients_random_numbers_and_hooks_of_the_user_stay():
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_numbers = torch.get_rng_state()
    session = calibrated(model, LEARNED)
    first = model[0][0].up.weight_scale
    assert torch.equal(torch.get_rng_state(), random_numbers)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert hooks(model) == 0
    assert session.label.endswith("learned rounding")
    assert torch.equal(session.qparams["0.0.up.weight_scale"], first)
    calibrated(model, LEARNED)
    assert torch.equal(model[0][0].up.weight_scale, first)


@pytest.mark.parametrize("scheme", ["int4", "nvfp4"])
def test_a_checkpoint_and_a_resumed_run_have_the_learned_scales(scheme, tmp_path):
    model = net(torch.bfloat16)
    session = calibrated(model, LEARNED, scheme)
    data = batches(torch.bfloat16)[0]
    with quantized(model), torch.no_grad():
        expected = model(data)
    export_checkpoint(model, tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(load_checkpoint(net(torch.bfloat16), tmp_path / "out")(data), expected)
    resumed = net(torch.bfloat16)
    CalibrationSession(resumed, SCHEMES[scheme], rounding=LEARNED, **OPTIONS).load_state_dict(session.state_dict())
    with quantized(resumed), torch.no_grad():
        assert torch.equal(resumed(data), expected)


def on_a_rank(rank: int, shared: bool):
    model = net()
    data = batches() if shared else batches()[rank::2]
    calibrated(model, LEARNED | {"samples": 8}, data=data, collectives=Collectives.of_group())
    return model[0][1].down.weight_rounded, model[0][1].down.weight_scale


@pytest.mark.parametrize("shared", [True, False])
def test_all_ranks_end_with_the_same_scales(shared):
    first, second = run_ranks(on_a_rank, 2, shared)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    if shared:  # each rank draws half of the samples of a step
        model = net()
        calibrated(model, LEARNED | {"samples": 4})
        assert torch.equal(model[0][1].down.weight_rounded, first[0])
        assert torch.equal(model[0][1].down.weight_scale, first[1])


@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"steps": True}, {"samples": 1.5}, {"learning_rate": -1}, {"inputs": "full_precision"}]
)
def test_wrong_options_are_refused_before_any_data(options):
    with pytest.raises(CalibrationError, match="'name': 'learned', 'steps': 50"):
        CalibrationSession(net(), "W4A16", rounding=LEARNED | options)


def test_scales_that_cannot_move_are_refused_before_any_data():
    options = {"rounding": LEARNED, "engines": "unchecked"}
    session = CalibrationSession(net(), "MXFP4A16", **options)
    with pytest.raises(CalibrationError, match=r"powers of two.*'inputs': 'quantized'"):
        session.attach()
