"""Divergence and agreement of predictions, against torchmetrics."""

import pytest
import torch
from torch import nn
from torchmetrics import KLDivergence

from lightning_obs.ranks.collectives import Collectives
from lightning_obs.report.predictions import Predictions
from tests.support.rank_processes import run_ranks

#: said by torchmetrics 1.4
pytestmark = pytest.mark.filterwarnings("ignore:The input order and naming in metric `KLDivergence`")


class Head(nn.Module):
    """Gives its inputs out as logits."""

    def forward(self, logits, attention_mask=None):
        return {"logits": logits}


def compared(original, quantized, limit=1e9, collectives=None, **arguments):
    model, predictions = Head(), Predictions(limit)
    with predictions.kept(model):
        for logits in original:
            model(logits, **arguments)
    with predictions.compared(model) as comparison:
        for logits in quantized:
            model(logits, **arguments)
    assert not model._forward_hooks
    return comparison.reduced(collectives or Collectives())


def test_the_divergence_is_that_of_torchmetrics_over_all_calls():
    original, quantized = torch.randn(2, 3, 40, 11).mul(3).unbind(), torch.randn(2, 3, 40, 11).unbind()
    oracle = KLDivergence(log_prob=True)
    for p, q in zip(original, quantized, strict=True):
        oracle.update(*(x.flatten(0, 1).log_softmax(-1) for x in (p, q)))
    found = compared(original, quantized)
    assert found.divergence == pytest.approx(float(oracle.compute()), rel=1e-5)
    same = torch.stack(original).argmax(-1) == torch.stack(quantized).argmax(-1)
    assert (found.agreement, found.positions) == (pytest.approx(float(same.float().mean())), 240)


def test_classes_of_pixels_are_compared_by_pixel():
    class Segmenter(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Conv2d(3, 5, 1)

        def forward(self, x):
            return {"logits": self.head(x)}

    model, x, predictions = Segmenter(), torch.randn(2, 3, 6, 4), Predictions()
    with predictions.kept(model), torch.no_grad():
        before = model(x)["logits"]
    with torch.no_grad():
        model.head.weight.mul_(1.5)
    with predictions.compared(model) as comparison, torch.no_grad():
        after = model(x)["logits"]
    found = comparison.reduced(Collectives())
    oracle = KLDivergence(log_prob=True)
    oracle.update(*(y.movedim(1, -1).flatten(0, 2).log_softmax(-1) for y in (before, after)))
    agreement = float((before.argmax(1) == after.argmax(1)).float().mean())
    assert found.divergence == pytest.approx(float(oracle.compute()), rel=1e-5)
    assert (found.agreement, found.positions) == (pytest.approx(agreement), 2 * 6 * 4)


def test_equal_predictions_diverge_by_nothing_also_where_a_class_is_impossible():
    logits = torch.randn(2, 5, 7)
    logits[..., 3] = -torch.inf
    found = compared([logits], [logits])
    assert (found.divergence, found.agreement) == (0.0, 1.0)


def test_padding_does_not_count():
    original, mask = torch.randn(2, 4, 6), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    quantized = original.clone()
    quantized[mask == 0] += 100 * torch.randn(3, 6)
    found = compared([original], [quantized], attention_mask=mask)
    assert (found.divergence, found.positions) == (0.0, 5)


def test_as_many_calls_are_compared_as_fit_and_nan_is_not_hidden():
    logits = torch.randn(4, 1, 2, 8)
    found = compared(logits, logits + 1, limit=3 * 64)
    assert (found.positions, found.agreement) == (6, 1.0)
    assert compared(logits, logits, limit=63) is None
    broken = logits.clone()
    broken[2, 0, 0, 0] = torch.nan
    assert compared(logits, broken).divergence != compared(logits, broken).divergence


@pytest.mark.parametrize("shape", [(3, 1), (5,)])
def test_what_is_no_choice_between_classes_is_not_compared(shape):
    assert compared([torch.randn(shape)], [torch.randn(shape)]) is None


def test_calls_are_matched_by_batch_and_order():
    model, predictions, logits = Head(), Predictions(), torch.randn(4, 1, 2, 8)
    with predictions.kept(model):
        for number, each in enumerate(logits):
            predictions.batch = number // 2
            model(each)
    with predictions.compared(model) as comparison:
        predictions.batch = 1
        model(logits[2])
        model(logits[3])
        model(logits[0])  # a third call, which the first pass did not make
    found = comparison.reduced(Collectives())
    assert (found.positions, found.divergence) == (4, 0.0)


def on_rank(rank):
    torch.manual_seed(0)
    original, quantized = torch.randn(2, 6, 1, 9)
    mine = slice(0, 2) if rank == 0 else slice(2, 6)  # ranks have other numbers of batches
    return compared(original[mine], quantized[mine], collectives=Collectives.of_group())


def test_the_numbers_of_all_ranks_are_those_of_one_device():
    torch.manual_seed(0)
    alone = compared(*torch.randn(2, 6, 1, 9))
    for found in run_ranks(on_rank, 2):
        assert (found.agreement, found.positions) == (alone.agreement, 6)
        assert found.divergence == pytest.approx(alone.divergence, rel=1e-6)
