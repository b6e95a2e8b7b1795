"""Which rows of an activation are padding, or of samples that a sampler repeated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationSession
from lightning_obs.errors import CalibrationError
from tests.calibration.common import input_scale

WEIGHTED = {"weights": {"num_bits": 4, "strategy": "channel", "observer": "imatrix_mse"}}


def padded(batches):
    """Input ids with junk where the mask is zero, and the mask."""
    ids = batches[0]["input_ids"].clone()
    mask = torch.ones_like(ids)
    for row in range(len(ids)):
        mask[row, ids.shape[1] - row - 1 :] = 0
    return ids, mask


@pytest.mark.parametrize("observer", ["static_minmax", "histogram", "minmax", "normal_observer"])
def test_masked_tokens_reach_no_observer(mlp, observer):
    x, mask = torch.randn(2, 3, 16), torch.tensor([[1, 1, 0], [1, 0, 0]])
    x[mask == 0] = 1e6
    masked = CalibrationSession(mlp, "INT8_STATIC", observers={"input": observer})
    with masked:
        masked.mask_tokens(mask)
        mlp(x)
    first, second = mlp.fc1.input_scale.item(), mlp.fc2.input_scale.item()
    with CalibrationSession(mlp, "INT8_STATIC", observers={"input": observer}):
        mlp(x[mask.bool()])
    assert first == mlp.fc1.input_scale.item()
    assert second == pytest.approx(mlp.fc2.input_scale.item(), rel=1e-6)  # another shape, another order of sums


def test_the_mask_is_read_from_the_model_s_call(tiny_llama, batches):
    ids, mask = padded(batches)
    model = tiny_llama()
    session = CalibrationSession(model, "INT8_STATIC", ignore="lm_head", token_mask="attention_mask")
    seen = []
    with session:
        handle = model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        model(input_ids=ids, attention_mask=mask)
        handle.remove()
    kept = seen[0][mask.bool()]
    assert session.result.input_ranges["model.layers.0.mlp.down_proj"] == (kept.min().item(), kept.max().item())
    assert seen[0].abs().max() >= kept.abs().max()


def test_importance_is_of_the_tokens_that_count(mlp):
    x, mask = torch.randn(2, 3, 16), torch.tensor([[1, 1, 1], [1, 0, 0]])
    session = CalibrationSession(mlp, WEIGHTED)
    with session:
        session.mask_tokens(mask)
        mlp(x)
    observer = session.observers["fc1", "weight"]
    assert observer.input_count.item() == 4
    assert torch.allclose(observer.input_squares, x[mask.bool()].double().square().sum(0), rtol=1e-6)


def test_a_call_without_its_mask_is_an_error(tiny_llama, batches):
    model = tiny_llama()
    session = CalibrationSession(model, "INT8_STATIC", ignore="lm_head", token_mask="attention_mask")
    with pytest.raises(CalibrationError, match="token_mask='attention_mask' was not given"), session:
        model(**batches[0])


def test_rows_that_cannot_be_told_apart_are_an_error(mlp):
    session = CalibrationSession(mlp, "INT8_STATIC")
    session.attach()
    session.mask_tokens(torch.ones(2, 3))
    with pytest.raises(CalibrationError, match=r"which rows are padding.*\(5, .*\(2, 3\)"):
        mlp(torch.randn(5, 16))
    session.detach()


def test_a_mask_of_four_dimensions_is_refused(mlp):
    session = CalibrationSession(mlp, "INT8_STATIC")
    with pytest.raises(CalibrationError, match=r"not a token mask.*\(2, 1, 3, 3\)"), session:
        session.mask_tokens(torch.ones(2, 1, 3, 3))


class Layout(nn.Module):
    """Linear modules that read a batch ``(B, T, C)`` in another layout."""

    def __init__(self, change):
        super().__init__()
        self.fc, self.change = nn.Linear(8, 8), change

    def forward(self, x):
        return self.fc(self.change(x))


UNCERTAIN = {
    "time first": lambda x: x.transpose(0, 1),
    "time first, flattened": lambda x: x.transpose(0, 1).flatten(0, 1),
    "flattened": lambda x: x.flatten(0, 1),
    "routed rows, twice the batch": lambda x: x.flatten(0, 1)[torch.tensor([9, 1, 2, 3, 4, 5, 6, 7])],
}


@pytest.mark.parametrize("layout", UNCERTAIN)
@pytest.mark.parametrize(
    "mask",
    [torch.tensor([True, True, True, False]), torch.tensor([[1, 1, 1, 1]] * 3 + [[1, 1, 1, 0]])],
    ids=["B", "BT"],
)
def test_rows_of_which_the_shape_does_not_say_whose_they_are_are_an_error(layout, mask):
    model = Layout(UNCERTAIN[layout])
    session = CalibrationSession(model, "INT8_STATIC", observers={"input": "percentile"})
    session.attach()
    session.mask_tokens(mask)
    with pytest.raises(CalibrationError, match=r"cannot be told from the shape: fc\. Got an activation"):
        model(torch.randn(4, 4, 8))
    session.detach()


@pytest.mark.parametrize("layout", UNCERTAIN)
def test_any_layout_is_observed_whole_where_all_samples_count(layout):
    x, model = torch.randn(4, 4, 8), Layout(UNCERTAIN[layout])
    session = CalibrationSession(model, "INT8_STATIC")
    with session:
        session.mask_tokens(torch.ones(4))
        model(x)
    assert torch.equal(model.fc.input_scale, input_scale(model.change(x)))


def test_as_many_samples_as_tokens_are_told_apart_by_an_earlier_batch():
    x, mask = torch.randn(4, 4, 8), torch.ones(4, 4)
    mask[1, 2:] = 0
    x[mask == 0] = 1e6
    model = Layout(lambda x: x)
    session = CalibrationSession(model, "INT8_STATIC")
    with session:
        session.mask_tokens(torch.ones(2, 4))
        model(x[2:])
        session.mask_tokens(mask)
        model(x)
    assert torch.equal(model.fc.input_scale, input_scale(x[mask.bool()]))


def test_rows_that_were_not_one_for_each_sample_before_are_not_taken_for_samples():
    model = Layout(lambda x: x.flatten(0, 1)[: 4 if len(x) == 4 else 3])
    session = CalibrationSession(model, "INT8_STATIC")
    session.attach()
    session.mask_tokens(torch.ones(2))
    model(torch.randn(2, 4, 8))
    session.mask_tokens(torch.tensor([1, 1, 1, 0]))
    with pytest.raises(CalibrationError, match="repeated cannot be told"):
        model(torch.randn(4, 4, 8))
    session.detach()
