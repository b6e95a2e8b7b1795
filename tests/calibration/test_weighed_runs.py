"""``weigh_tokens`` leaves the user's run as it was, reads logits of every layout, and adds up in any partition."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from transformers import DynamicCache

from lightning_obs import CalibrationError, CalibrationSession
from tests.calibration.test_token_weights import IGNORE, INT4, Reader, inputs, observed
from tests.support.rank_processes import run_ranks


def observers(weigh=True):
    return {"weight": {"name": "imatrix_mse", "weigh_tokens": weigh}}


def sums(model, calls, name="inner", **options):
    return observed(model, calls, observers(), **options).observers[name, "weight"].input_squares


def refused(model, x, message):
    session = CalibrationSession(model, INT4, observers=observers())
    with pytest.raises(CalibrationError, match=message), session, torch.no_grad():
        model(x)


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 * float(expected.max()))


# ---------------------------------------------------------------------- the user's run


@pytest.mark.filterwarnings("ignore:.*fitted weights have larger errors")  # a few tokens of an untrained model
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cache_is_filled_once_and_generated_text_stays(mode, tiny_llama):
    found = []
    for weigh in (False, True):
        torch.manual_seed(1)
        model, ids = tiny_llama(), torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(0))
        session = CalibrationSession(model, INT4, observers=observers(weigh), ignore=IGNORE)
        with session, mode():
            cache = DynamicCache()
            logits = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split([6, 3], dim=1)]
            mask = torch.ones_like(ids)
            text = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=True, pad_token_id=0)
        found.append([*logits, text, torch.tensor(cache.get_seq_length())])
    assert all(map(torch.equal, *found))


class OnHiddenStates(nn.Module):
    """A head reads a hidden state, as the projector of a vision-language model does."""

    def __init__(self, model):
        super().__init__()
        self.backbone = model.model
        self.head = nn.Linear(model.config.hidden_size, 16)

    def forward(self, ids):
        return self.head(self.backbone(ids, output_hidden_states=True).hidden_states[-1])


def test_the_copy_has_the_hidden_states_that_the_model_reads(tiny_llama):
    ids = torch.randint(0, 100, (3, 2, 9), generator=torch.Generator().manual_seed(0))
    session = observed(OnHiddenStates(tiny_llama()), [{"ids": part} for part in ids], observers())
    assert session.batches == 3
    assert session.observation.observers["head", "weight"].input_squares.sum() > 0


class Stateful(nn.Module):
    """Dropout and batch norm in training, counters in a buffer, an attribute and a generator of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.head = nn.Linear(32, 16), nn.BatchNorm1d(8), nn.Linear(16, 5)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.seen, self.generator = [], torch.Generator().manual_seed(7)

    def forward(self, x):
        self.calls += 1
        self.seen.append(float(x.sum()))
        noise = torch.rand(x.shape[-1], generator=self.generator) + np.random.rand() + random.random()
        hidden = self.drop(self.norm(self.inner(x * noise)))
        return {"logits": self.head(hidden) + len(self.seen) + self.calls}


def trace(weigh):
    """All that a user can see of some calls."""
    model, hooked = Stateful(), []
    random.seed(0), np.random.seed(0), torch.manual_seed(1)
    model.inner.register_forward_hook(lambda *_: hooked.append("inner"))
    model.register_forward_hook(lambda *_: hooked.append("model"))
    model.head.register_full_backward_hook(lambda *_: hooked.append("backward"))
    model.inner.bias.requires_grad_(False)
    with CalibrationSession(model, INT4, observers=observers(weigh)) as session:
        outputs = [model(x)["logits"].detach() for x in inputs().split(2)]
    assert weigh == bool(session.observation.weighed_modules)
    gradients = [parameter.grad for parameter in model.parameters()]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    generators = [torch.get_rng_state(), model.generator.get_state()]
    tensors = [*outputs, *(buffer.clone() for buffer in model.buffers()), *generators]
    modes = [module.training for module in model.modules()]
    return tensors, [hooked, gradients, flags, modes, model.seen, random.getstate(), np.random.rand()]


def test_outputs_random_numbers_buffers_counters_hooks_and_modes_are_those_of_a_run_without():
    (tensors, values), (expected_tensors, expected_values) = trace(True), trace(False)
    assert all(map(torch.equal, tensors, expected_tensors))
    assert values == expected_values


def test_pruned_and_normalized_weights_are_computed_in_the_copy_too():
    class Normed(Reader):
        def __init__(self):
            super().__init__(half=False)
            prune.random_unstructured(self.head, "weight", 0.5)
            weight_norm(self.head, "bias", dim=None)

    model, plain = Normed(), Reader(half=False)
    with torch.no_grad():
        plain.head.weight.copy_(model.head.weight_orig * model.head.weight_mask)
        plain.head.bias.copy_(model.head.bias)
        model.head.weight.mul_(3)  # stale, until the hook computes it anew
    same(sums(model, [{"x": inputs()}], ignore=["head"]), sums(plain, [{"x": inputs()}], ignore=["head"]))


def test_a_hook_of_the_user_s_that_changes_what_is_predicted_is_refused():
    model = Reader(half=False).eval()
    model.inner.register_forward_hook(lambda module, args, output: output * 5)
    refused(model, inputs(), r"the copy predicts something else than the model: Reader.*leave out weigh_tokens")


def test_a_model_that_cannot_be_copied_is_refused_and_the_part_is_named():
    model = Reader()
    model.inner.lock = threading.Lock()
    refused(model, inputs(), r"cannot be copied: inner\.lock.*__deepcopy__.*leave out\s+weigh_tokens")
    refused(Reader(), (row for row in inputs()), r"cannot be copied: the arguments of the call")


# ---------------------------------------------------------------------- layouts of logits


class Segmenter(nn.Module):
    """``(batch, 12, 10, 32)`` to a class for each pixel: a Linear, a convolution, enlarged, in a layout of choice."""

    def __init__(self, layout="channels first", classes=5):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head, self.layout = nn.Linear(32, 16), nn.Conv2d(16, classes, 1), layout

    def forward(self, x):
        logits = self.head(self.inner(x).tanh().movedim(-1, 1))
        if self.layout == "channels last":
            return {"logits": logits.movedim(1, -1)}
        if self.layout == "tokens":
            return {"logits": logits.flatten(2).transpose(1, 2)}
        if self.layout == "channels first, flat":
            return {"logits": logits.flatten(2)}
        return {"logits": logits}


PIXELS = torch.randn(4, 12, 10, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layout", ["channels first", "channels last", "channels first, flat"])
def test_classes_are_found_in_any_layout(layout):
    found, expected = (sums(Segmenter(each), [{"x": PIXELS}]) for each in (layout, "tokens"))
    same(found, expected)


def test_enlarged_logits_are_read_by_class():
    class Enlarged(Segmenter):
        def forward(self, x):
            logits = nn.functional.interpolate(super().forward(x)["logits"], scale_factor=2)
            return {"logits": logits if self.layout == "channels first" else logits.movedim(1, -1).flatten(1, 2)}

    found, expected = (sums(Enlarged(each), [{"x": PIXELS}]) for each in ("channels first", "rows of pixels"))
    same(found, expected)


def test_a_vocabulary_is_found_where_there_are_as_many_tokens_and_a_head_without_a_layer():
    class Tied(Reader):
        def forward(self, x):
            return {"logits": self.inner(x).tanh() @ self.head.weight.T}

    x = torch.randn(3, 16, 32)  # as many tokens as the last layer has outputs
    same(sums(Tied(), [{"x": x}], ignore=["head"]), sums(Tied(), [{"x": each[None]} for each in x], ignore=["head"]))
    hidden = Tied().inner(x).tanh()
    assert hidden.shape[1] == hidden.shape[2]


def test_logits_whose_classes_cannot_be_told_are_refused():
    class Unfolded(Segmenter):
        def forward(self, x):
            return {"logits": super().forward(x)["logits"].unfold(1, 5, 1).expand(-1, 5, -1, -1, -1)}

    refused(Unfolded(), PIXELS, r"which dimension of the logits holds the classes.*of shape \(4, 5, 12, 10, 5\)")


# ---------------------------------------------------------------------- any partition


class Classifier(nn.Module):
    """A class for each sample, from the mean of its tokens that count."""

    def __init__(self, classes=2):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(32, 16), nn.Linear(16, classes)
        self.register_buffer("words", torch.randn(50, 32))

    def forward(self, x, attention_mask=None):
        hidden = self.inner(self.words[x] if x.ndim == 2 else x).tanh()
        mask = torch.ones(hidden.shape[:2]) if attention_mask is None else attention_mask
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return {"logits": 3 * self.head(mean)}


def texts(count=12):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
    return [torch.randint(1, 50, (length,), generator=generator) for length in lengths]


def padded(rows, side):
    """A batch of texts, padded on the left or on the right to its longest."""
    length = max(map(len, rows))
    pad = [(length - len(row), 0) if side == "left" else (0, length - len(row)) for row in rows]
    ids = torch.stack([nn.functional.pad(row, each) for row, each in zip(rows, pad, strict=True)])
    mask = torch.stack([nn.functional.pad(torch.ones_like(row), each) for row, each in zip(rows, pad, strict=True)])
    return ids, mask


def batches_of(rows, size):
    return [rows[start : start + size] for start in range(0, len(rows), size)]


@pytest.mark.parametrize("classes", [2, 7])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_sums_of_a_classifier_do_not_depend_on_the_batches(size, classes):
    x = torch.randn(12, 4, 32, generator=torch.Generator().manual_seed(2))
    together = sums(Classifier(classes), [{"x": x}])
    same(sums(Classifier(classes), [{"x": part} for part in x.split(size)]), together)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(4))
    same(sums(Classifier(classes), [{"x": part} for part in x[order].split(size)]), together)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_sums_of_a_classifier_of_texts_do_not_depend_on_the_padding(size, side):
    found = []
    for each in (size, 12):
        calls = [padded(rows, side) for rows in batches_of(texts(), each)]
        model = Classifier()
        found.append(sums(model, [{"x": x, "attention_mask": m} for x, m in calls], token_mask="attention_mask"))
    same(*found)


def test_samples_of_a_classifier_have_signs_of_their_own():
    """With the same signs for all, a half of the models would count uncertain samples as nothing."""
    x = torch.randn(256, 4, 32, generator=torch.Generator().manual_seed(2))
    model = Classifier()
    hidden = model.inner(x)
    logits = 3 * model.head(hidden.tanh().mean(1))
    p = logits.softmax(-1)
    exact = torch.zeros(256)
    for label in range(2):
        (gradient,) = torch.autograd.grad(logits.log_softmax(-1)[:, label].sum(), hidden, retain_graph=True)
        exact += p[:, label].detach() * gradient.square().sum((1, 2))
    expected = float((exact[:, None, None] / 4 * x.square()).sum())
    assert float(sums(model, [{"x": x}]).sum()) == pytest.approx(expected, rel=0.15)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("size", [1, 5])
def test_the_sums_of_padded_text_do_not_depend_on_the_batches(size, side, tiny_llama):
    found, name = [], "model.layers.0.mlp.down_proj"
    for each in (size, 12):
        calls = [padded(rows, side) for rows in batches_of(texts(), each)]
        batches = [{"input_ids": ids, "attention_mask": mask, "use_cache": False} for ids, mask in calls]
        found.append(sums(tiny_llama(), batches, name, token_mask="attention_mask", ignore=IGNORE))
    same(*found)


def on_ranks(rank, ranks):
    from lightning_obs.ranks.collectives import Collectives

    x = torch.randn(12, 4, 32, generator=torch.Generator().manual_seed(2))
    session = CalibrationSession(Classifier(), INT4, observers=observers(), collectives=Collectives.of_group())
    with session, torch.no_grad():
        session.model(x[rank::ranks])
    return session.observers["inner", "weight"].input_squares


@pytest.mark.slow
def test_two_ranks_have_the_sums_of_a_classifier_that_one_has():
    x = torch.randn(12, 4, 32, generator=torch.Generator().manual_seed(2))
    for found in run_ranks(on_ranks, 2, 2):
        same(found, sums(Classifier(), [{"x": x}]))
