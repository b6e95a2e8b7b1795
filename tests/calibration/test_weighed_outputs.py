"""``weigh_tokens`` of models without logits: tokens count as the numbers of the output depend on them."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from transformers import BertConfig, BertModel

from lightning_obs import CalibrationCallback, CalibrationError, CalibrationSession
from lightning_obs.calibration.probe_signs import ProbeSigns
from lightning_obs.errors import CalibrationWarning
from tests.calibration.test_token_weights import INT4, observed
from tests.calibration.test_weighed_runs import batches_of, padded, same, sums, texts
from tests.callbacks.calibration_modules import trainer

X = torch.randn(12, 8, 32, generator=torch.Generator().manual_seed(1))


class Trunk(nn.Module):
    """``inner``, and an output of choice from its hidden states ``(batch, tokens, 16)``."""

    def __init__(self, output):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.output = nn.Linear(32, 16), output

    def forward(self, x):
        return self.output(self.inner(x).tanh())


def regression(hidden):
    return hidden.mean(1)[:, 0]


def embedding(hidden):
    return hidden.mean(1)


def images(hidden):
    return hidden.unflatten(1, (2, 4)).movedim(-1, 1)


def boxes_and_scores(hidden):
    return {"boxes": 640 * hidden[..., :4], "scores": hidden[..., 4:5].sigmoid(), "labels": hidden.argmax(-1)}


def levels(hidden):
    return [hidden[:, :4], (hidden[:, 4:], hidden.mean(1))]


def detections(hidden):
    return [{"boxes": 640 * rows[:, :4], "scores": rows[:, 5]} for rows in hidden]


def weighed_by_hand(gradient):
    """``input_squares`` of ``inner`` from the gradient ``(batch, tokens, 16)`` at its output."""
    weights = gradient.double().square().sum(-1)
    return torch.einsum("bt,bti->i", weights, X.double().square())


def test_a_token_counts_the_squared_gradient_of_the_output_times_random_signs():
    model = Trunk(lambda hidden: hidden * torch.arange(1.0, 17))
    hidden = model.inner(X)
    output = model.output(hidden.tanh())
    signs = ProbeSigns().of_call(output, None, (X,), {}, by_sample=True).float()
    (gradient,) = torch.autograd.grad(output, hidden, signs)
    same(sums(model, [{"x": X}]).double(), weighed_by_hand(gradient))


def test_samples_of_whole_numbers_in_float64_get_different_signs():
    x = torch.randint(0, 3, (64, 16), generator=torch.Generator().manual_seed(3)).double()
    signs = ProbeSigns().of_call(torch.zeros(64, 32), None, (x,), {})
    assert len(signs.unique(dim=0)) > 60


def test_the_sums_estimate_the_change_of_the_output():
    """Of an embedding: the sum over all its numbers, which one probe estimates sample by sample."""
    x = torch.randn(512, 8, 32, generator=torch.Generator().manual_seed(2))
    model = Trunk(embedding)
    hidden = model.inner(x)
    output = embedding(hidden.tanh())
    expected = 0.0
    for channel in range(16):
        (gradient,) = torch.autograd.grad(output[:, channel].sum(), hidden, retain_graph=True)
        expected += float((gradient.square().sum(-1, keepdim=True) * x.square()).sum())
    assert float(sums(model, [{"x": x}]).sum()) == pytest.approx(expected, rel=0.05)


def test_of_several_tensors_large_numbers_count_by_their_size_in_a_sample():
    """Boxes in pixels do not drown scores: their probe is divided by the root mean square of a sample's numbers."""
    model = Trunk(boxes_and_scores)
    hidden = model.inner(X)
    output = model.output(hidden.tanh())
    boxes, scores = output["boxes"], output["scores"]
    size = boxes.detach().square().mean((1, 2), keepdim=True).sqrt()
    assert float(size.min()) > 1
    signs = ProbeSigns()
    probes = [signs.of_call(boxes, None, (X,), {}, by_sample=True) / size]
    probes.append(signs.of_call(scores, None, (X,), {}, number=1, by_sample=True).float())
    (gradient,) = torch.autograd.grad((boxes, scores), hidden, probes)
    same(sums(model, [{"x": X}]).double(), weighed_by_hand(gradient))


@pytest.mark.parametrize("output", [regression, embedding, images, boxes_and_scores, levels, detections])
def test_the_sums_do_not_depend_on_the_batches(output):
    together = sums(Trunk(output), [{"x": X}])
    assert float(together.min()) > 0
    order = torch.randperm(12, generator=torch.Generator().manual_seed(4))
    same(sums(Trunk(output), [{"x": part} for part in X.split(5)]), together)
    same(sums(Trunk(output), [{"x": part} for part in X[order].split(1)]), together)


def bert(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertModel(BertConfig(vocab_size=50, **sizes), **options).eval()


def test_the_sums_of_an_encoder_do_not_depend_on_the_padding():
    found = []
    for size in (1, 12):
        calls = [padded(part, "right") for part in batches_of(texts(), size)]
        batches = [{"input_ids": ids, "attention_mask": mask} for ids, mask in calls]
        name = "encoder.layer.0.attention.self.query"
        found.append(sums(bert(), batches, name, token_mask="attention_mask"))
    same(*found)


def test_the_recipe_weighs_the_tokens_of_an_encoder_with_its_pooler():
    model = bert()
    with CalibrationSession(model, INT4, recipe="accurate") as session:
        model(torch.arange(24).view(2, 12))
        weighed = {name for (name, base), observer in session.data_observers.items() if base == "weight"}
        assert {"pooler.dense", "encoder.layer.0.output.dense"} <= weighed
    assert all(hasattr(target.module, "weight_rounded") for target in session.plan.targets)


# ---------------------------------------------------------------------- outputs that no gradient leads from


def test_an_output_without_a_gradient_is_refused():
    model = Trunk(lambda hidden: hidden.argmax(-1))
    with pytest.raises(CalibrationError, match=r"no gradient leads from it to a module.*leave out weigh_tokens"):
        observed(model, [{"x": X}])


def test_under_a_recipe_all_tokens_count_alike_where_no_gradient_leads_from_the_output():
    model = Trunk(lambda hidden: hidden.argmax(-1))
    session = CalibrationSession(model, INT4, recipe="accurate", rounding="gptq")
    with (
        pytest.warns(CalibrationWarning, match=r"all tokens count alike in inner: .*no gradient leads from it"),
        session,
    ):
        model(X)
    assert hasattr(model.inner, "weight_rounded")
    assert int(session.observers["inner", "weight"].input_count) == 12 * 8


class Parts(L.LightningModule):
    """Its step calls a part, not the module itself."""

    def __init__(self):
        super().__init__()
        self.net = Trunk(embedding)

    def forward(self, x):
        return self.net(x)

    def validation_step(self, batch, _):
        self.log("loss", self.net(batch).square().mean())


def test_under_a_recipe_all_tokens_count_alike_where_the_steps_call_parts_of_the_module():
    callback = CalibrationCallback(INT4, recipe="accurate", rounding="gptq")
    module = Parts()
    with pytest.warns(CalibrationWarning, match=r"count alike in net\.inner: no gradient reached it.*module=\.\.\."):
        trainer(callback).validate(module, DataLoader(X.split(4), batch_size=None), verbose=False)
    assert hasattr(module.net.inner, "weight_rounded")
    callback = CalibrationCallback(INT4, recipe="accurate", rounding="gptq", module="net")
    trainer(callback).validate(module, DataLoader(X.split(4), batch_size=None), verbose=False)


class Whole(Parts):
    """Its step calls the module itself, which holds a metric."""

    def __init__(self):
        super().__init__()
        self.metric = MeanMetric()

    def validation_step(self, batch, _):
        self.metric.update(self(batch).square().mean())
        self.log("loss", self.metric)


def test_a_recipe_weighs_the_tokens_of_a_lightning_module_whose_steps_call_it():
    module = Whole()
    callback = CalibrationCallback(INT4, recipe="accurate", rounding="gptq")
    trainer(callback).validate(module, DataLoader(X.split(4), batch_size=None), verbose=False)
    squares = callback.session.observers["net.inner", "weight"].input_squares
    expected = sums(Trunk(embedding), [{"x": part} for part in X.split(4)])
    same(squares.float(), expected.float())
