"""benchmarks/accuracy/peers: what other packages are asked for, and what is taken from them. None of them is needed."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import nn

FOLDER = Path(__file__).parents[2] / "benchmarks" / "accuracy"


@pytest.fixture
def peers(monkeypatch):
    """The package of the benchmark."""
    monkeypatch.syspath_prepend(FOLDER)
    import peers

    return peers


class TwoLinears(nn.Module):
    """Two linear layers of 64 inputs."""

    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(64, 16), nn.Linear(64, 16)


def rounded(model, levels):
    """Round the weights of ``fc`` to this many values."""
    with torch.no_grad():
        weight = model.fc.weight
        step = (weight.max() - weight.min()) / (levels - 1)
        weight.copy_(((weight - weight.min()) / step).round() * step)


@pytest.mark.parametrize(
    ("scheme", "name"),
    [({"weights": {"num_bits": 3, "group_size": 32}}, "int"), ("NVFP4A16", "nvfp4"), ("MXFP4A16", "mxfp4")],
)
def test_a_format_is_named_for_peers(peers, scheme, name):
    from peers.peer import format_name, weight_args

    assert format_name(weight_args(scheme)) == name


def test_a_format_that_no_peer_was_asked_for_is_refused(peers):
    from peers.peer import format_name, weight_args

    with pytest.raises(peers.CannotQuantizeError, match="no peer was asked"):
        format_name(weight_args("FP8"))


def test_a_peers_weights_are_measured_in_the_layers_that_ours_quantizes(peers):
    from peers.peer import with_weights_of

    subject = SimpleNamespace(model=TwoLinears(), ignore=("head",))
    quantized = TwoLinears()
    rounded(quantized, levels=16)
    model = with_weights_of(quantized, subject, QuantizationArgs(num_bits=4, group_size=32))
    assert torch.equal(model.fc.weight, quantized.fc.weight)
    assert torch.equal(model.head.weight, subject.model.head.weight)
    assert not torch.equal(model.fc.weight, subject.model.fc.weight)


def test_weights_with_more_values_than_their_bits_tell_apart_are_refused(peers):
    from peers.peer import with_weights_of

    subject = SimpleNamespace(model=TwoLinears(), ignore=("head",))
    quantized = TwoLinears()
    rounded(quantized, levels=16)
    with pytest.raises(ValueError, match="fc: a group of 3 bits has"):
        with_weights_of(quantized, subject, QuantizationArgs(num_bits=3, group_size=64))


def test_samples_of_auto_round_are_rows_of_one_length(peers):
    from peers.auto_round import samples_of

    long, short = torch.arange(1, 9).view(2, 4), torch.arange(1, 4).view(1, 3)
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in (long, short)]
    samples = samples_of(batches)
    assert [sample["input_ids"].tolist() for sample in samples] == [[[1, 2, 3, 4]], [[5, 6, 7, 8]], [[1, 2, 3, 0]]]
    assert samples[-1]["attention_mask"].tolist() == [[1, 1, 1, 0]]


@pytest.mark.slow
def test_a_peer_has_a_row_and_one_that_cannot_quantize_says_why(peers, tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    pytest.importorskip("lm_eval")
    import accuracy

    from tests.support.tiny_model import save_tiny_llama

    class Unchanged(peers.Peer):
        package = "torch"

        def quantize(self, subject, scheme):
            return subject.model

    class Refusing(Unchanged):
        def quantize(self, subject, scheme):
            raise peers.CannotQuantizeError("its layers are round")

    save_tiny_llama(tmp_path / "tiny")
    monkeypatch.setitem(peers.PEERS, "unchanged", Unchanged())
    monkeypatch.setitem(peers.PEERS, "refusing", Refusing())
    options = ["--model", str(tmp_path / "tiny"), "--group", "16", "--batches", "1", "--eval-batches", "1", "--rows"]
    monkeypatch.setattr(sys, "argv", ["accuracy.py", *options, "--peers", "unchanged", "refusing"])
    assert accuracy.main() == 0
    printed = capsys.readouterr().out
    assert "| `unchanged` | 0.0000 ± nan / 0.0000 ± nan |" in printed
    assert "| `refusing` | not measured: its layers are round |" in printed
