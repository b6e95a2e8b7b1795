"""benchmarks/accuracy/unquantized_model.py: weights off their lattice, by seed."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

FILE = Path(__file__).parents[2] / "benchmarks" / "accuracy" / "unquantized_model.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("unquantized_model", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class OnLattice(nn.Module):
    """Blocks of 32 weights with 16 values and a minimum of their own, as Q4_1 holds them; a head."""

    def __init__(self):
        super().__init__()
        self.fc, self.lm_head = nn.Linear(64, 8, bias=False), nn.Linear(8, 4, bias=False)
        levels = torch.arange(16.0).repeat(8, 2, 2)
        with torch.no_grad():
            self.fc.weight.copy_((0.01 * torch.rand(8, 2, 1) * levels - 0.1 * torch.rand(8, 2, 1)).view(8, 64))


def test_each_weight_moves_by_up_to_half_a_step_and_no_two_stay_equal(script):
    model = OnLattice()
    before, head = model.fc.weight.detach().clone(), model.lm_head.weight.detach().clone()
    torch.manual_seed(1)
    (weight,) = script.take_off_lattice(model)
    assert weight is model.fc.weight
    blocks = before.view(8, 2, 32)
    step = (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / 15
    moved = ((weight - before).view(8, 2, 32) / step).detach()
    assert moved.abs().max() <= 0.5001
    assert moved.std() == pytest.approx(12**-0.5, rel=0.1)
    assert weight[0, :32].unique().numel() == 32
    assert torch.equal(model.lm_head.weight, head)


def test_the_same_seed_gives_the_same_weights(script):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(OnLattice())
        script.take_off_lattice(models[-1])
    assert torch.equal(models[0].fc.weight, models[1].fc.weight)


@pytest.mark.slow
def test_a_model_that_did_not_become_good_is_not_kept(script, tmp_path, monkeypatch, tiny):
    monkeypatch.setattr(script, "load_pretrained", lambda **_: tiny)
    monkeypatch.setattr(script, "STEPS", 2)
    monkeypatch.setattr(script, "WARM_UP", 1)
    with pytest.raises(SystemExit, match=r"above 16\.0, so nothing was written"):
        script.make(tmp_path / "model")
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr(script, "PERPLEXITY", float("inf"))
    script.make(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.fixture
def tiny(tmp_path_factory):
    """A tiny model and its tokenizer."""
    from lightning_obs.app.models.pretrained import load_pretrained
    from tests.support.tiny_model import save_tiny_llama

    return load_pretrained(save_tiny_llama(tmp_path_factory.mktemp("tiny")))
