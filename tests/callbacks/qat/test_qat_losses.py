"""What QuantizationAwareTraining may add to the loss and to the optimizer: learned scales and distillation."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_obs import CalibrationError, QuantizationAwareTraining, quantized
from lightning_obs.model.module_qparams import read_qparams
from tests.callbacks.qat_modules import (
    W4,
    Classifier,
    Language,
    Regression,
    Watch,
    language_data,
    left_behind,
    loader,
    trainer,
)
from tests.support.lightning_package import L


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (nn.Unflatten(1, (4, 2, 2)), r"distill reads logits whose last dimension.*\(4, 4, 2, 2\)"),
        (nn.Flatten(0), r"measured on logits. Got a torch.float32 tensor of shape \(64,\)"),
    ],
    ids=["pixels", "vector"],
)
def test_distillation_refuses_logits_whose_classes_are_not_last(head, message):
    class Outputs(Regression):
        def build(self):
            return nn.Sequential(nn.Linear(8, 16), head)

        def training_step(self, batch, batch_idx):
            return self(batch[0]).square().mean()

    callback = QuantizationAwareTraining(W4, distill=1.0, module="net", calibration_batches=1)
    with pytest.raises(CalibrationError, match=message):
        trainer(callback).fit(Outputs(), loader(), loader())


@pytest.mark.parametrize("scheme", ["INT8_STATIC", "FP8", W4])
def test_learned_scales_are_trained_and_stay_positive(scheme):
    module, watch = Regression(), Watch()
    callback = QuantizationAwareTraining(scheme, train="all", calibration_batches=1)
    trainer(callback, watch, max_epochs=3).fit(module, loader(), loader())
    first, last = watch.scales[1], read_qparams(module.net[0])
    assert first.keys() == last.keys()
    assert all((last[name] > 0).all() and not torch.equal(first[name], last[name]) for name in first)


def test_learned_scales_join_the_optimizer_and_its_schedule():
    class Scheduled(Regression):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)]

    module = Scheduled()
    callback = QuantizationAwareTraining("INT8_STATIC", train="all", calibration_batches=1)
    tr = trainer(callback, gradient_clip_val=0.1, accumulate_grad_batches=2)
    tr.fit(module, loader(), loader())
    (group,) = tr.optimizers[0].param_groups
    assert len(group["params"]) == len(list(module.parameters())) + 4
    assert len(tr.optimizers[0].state) == len(group["params"])
    tr = trainer(callback)
    tr.fit(module, loader(), loader())  # once more: they join the new optimizer, once
    assert len(tr.optimizers[0].param_groups[0]["params"]) == len(list(module.parameters())) + 4


def test_a_scheme_without_a_scale_to_learn_is_refused(tiny_llama, batches):
    callback = QuantizationAwareTraining("NVFP4", ignore=["lm_head"], train="all")
    with pytest.raises(CalibrationError, match=r"no scale of this scheme can be learned.*train=.weights."):
        trainer(callback).fit(Language(tiny_llama(torch.bfloat16)), language_data(batches), language_data(batches))


@pytest.mark.parametrize("teacher", [None, "frozen"])
def test_distillation_adds_the_weighted_divergence_to_the_loss(teacher):
    module, totals = Classifier(lr=0.0), []
    frozen = Classifier() if teacher else None

    class Look(L.Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            totals.append(loss.item())

    callback = QuantizationAwareTraining(W4, distill=3.0, teacher=frozen)
    trainer(callback, Look(), max_epochs=1).fit(module, loader(), loader())
    for (x, y), total in zip(loader(), totals, strict=True):
        with torch.no_grad():
            p = ((frozen or module)(x)).double().softmax(-1)
            with quantized(module):
                out = module(x)
            q = out.double().softmax(-1)
        expected = F.cross_entropy(out, y.argmax(-1)) + 3.0 * (p * (p / q).log()).sum(-1).mean()
        assert total == pytest.approx(float(expected), rel=1e-5)
    assert not left_behind(module)


def test_the_original_teaches_as_it_was_before_training_also_when_a_fit_goes_on(tmp_path):
    original = Classifier(lr=0.1)
    differences = []

    class Look(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.inputs = batch[0]

        @torch.no_grad()
        def on_before_backward(self, trainer, pl_module, loss):
            p = original(self.inputs).softmax(-1)
            q = pl_module(self.inputs).softmax(-1)
            differences.append(abs(float((p * (p / q).log()).sum(-1).mean()) - loss.item()))

    checkpoint = None
    for steps in (4, 8):
        module = copy.deepcopy(original)
        callback = QuantizationAwareTraining(W4, distill="only", teacher="original")
        run = trainer(callback, Look(), max_epochs=4, max_steps=steps)
        run.fit(module, loader(), loader(), ckpt_path=checkpoint)
        checkpoint = tmp_path / "c.ckpt"
        run.save_checkpoint(checkpoint)
        assert not torch.equal(module.net[0].weight, original.net[0].weight)
    assert len(differences) == 8
    assert max(differences) < 1e-5


def test_the_teacher_runs_in_evaluation_mode_without_gradient_and_unobserved():
    class Dropping(Classifier):
        def build(self):
            return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 2))

    seen = []
    for distill in (0.0, 1.0):
        torch.manual_seed(0)
        module = Dropping(lr=0.0)
        callback = QuantizationAwareTraining("INT8_STATIC", distill=distill, calibration_batches=4)
        trainer(callback, max_epochs=1, limit_val_batches=0).fit(module, loader(), loader())
        assert all(m.training for m in module.net.modules())
        seen.append((module.losses, callback.result.measurements, module.net[1].num_batches_tracked.item()))
    assert seen[0] == seen[1]


def test_distillation_under_accumulation_is_the_gradient_of_the_mean():
    gradients = []
    for batch_size, accumulate in ((8, 1), (4, 2)):
        torch.manual_seed(0)
        module = Classifier(lr=0.0)
        data = DataLoader(loader().dataset, batch_size=batch_size)

        class Look(L.Callback):
            def on_before_optimizer_step(self, trainer, pl_module, optimizer):
                gradients.append(pl_module.net[0].weight.grad.clone())

        callback = QuantizationAwareTraining(W4, distill=2.0)
        trainer(callback, Look(), max_steps=1, accumulate_grad_batches=accumulate).fit(module, data, data)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_training_step_that_calls_another_module_is_told_how_to_name_it():
    class Around(Classifier):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1].argmax(-1))

    with pytest.raises(CalibrationError, match=r"did not call Around.*module="):
        trainer(QuantizationAwareTraining(W4, distill=1.0)).fit(Around(), loader(), loader())
    trainer(QuantizationAwareTraining(W4, distill=1.0, module="net")).fit(Around(), loader(), loader())


def test_distillation_under_manual_optimization_is_refused():
    module = Classifier()
    module.automatic_optimization = False
    with pytest.raises(CalibrationError, match="distill needs automatic optimization"):
        trainer(QuantizationAwareTraining(W4, distill=1.0)).fit(module, loader(), loader())


def test_distillation_of_a_language_model_leaves_padding_out(tiny_llama, batches):
    rows = [{**b, "attention_mask": torch.ones_like(b["input_ids"])} for b in batches]
    for row in rows:
        row["attention_mask"][:, 10:] = 0
    totals = []

    class Look(L.Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            totals.append(loss.item())

    class Zero(Language):
        def training_step(self, batch, batch_idx):
            return 0.0 * super().training_step(batch, batch_idx)

    module = Zero(tiny_llama())
    callback = QuantizationAwareTraining("W4A16", ignore=["lm_head"], distill=1.0, token_mask="attention_mask")
    trainer(callback, Look(), max_steps=1).fit(module, language_data(rows), language_data(rows))
    model, row = tiny_llama(), rows[0]
    with torch.no_grad():
        p = model(**row).logits.double().log_softmax(-1)[:, :10]
    check = QuantizationAwareTraining("W4A16", ignore=["lm_head"])
    with check.prepare(trainer(), Language(model)):
        pass
    with torch.no_grad(), quantized(model):
        q = model(**row).logits.double().log_softmax(-1)[:, :10]
    assert totals[0] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)


# ---------------------------------------------------------------------- copies of the logits


class LogitsMade(TorchDispatchMode):
    """Counts the tensors of a shape that operations make, without views of others and results in place."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = [tensor.untyped_storage().data_ptr() for tensor in tensors_in([args, kwargs])]
        result = function(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            is_of_shape = tensor.shape[-1:] == self.shape[-1:] and tensor.numel() == self.shape.numel()
            if is_of_shape and tensor.untyped_storage().data_ptr() not in known:
                self.count += 1
        return result


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


class CountLogits(L.Callback):
    """Counts the tensors of the logits' shape that one training step makes, forward and backward."""

    def __init__(self, shape):
        self.mode = LogitsMade(torch.Size(shape))

    def on_train_batch_start(self, *_):
        self.mode.__enter__()

    def on_train_batch_end(self, *_):
        self.mode.__exit__(None, None, None)


class Unlabelled(Language):
    def training_step(self, batch, batch_idx):
        return self.model(**batch).logits[0, 0, 0].detach()


def logits_made(module, batch, **options):
    count = CountLogits((*batch["input_ids"].shape, module.model.config.vocab_size))
    callbacks = [count]
    if options:
        callbacks.append(QuantizationAwareTraining("W4A16", ignore=["lm_head"], **options))
    data = language_data([batch])
    trainer(*callbacks, max_steps=1, limit_val_batches=0).fit(module, data, data)
    return count.mode.count


def with_160_classes(model):
    """More than the model has channels, so that logits have a shape of their own."""
    model.resize_token_embeddings(160)
    return model


def test_distillation_makes_one_tensor_of_the_logits_size_its_gradient(tiny_llama, batches, monkeypatch):
    monkeypatch.setattr("lightning_obs.numerics.divergence._CPU_BLOCK", (8, 64))
    batch = batches[0]
    plain = logits_made(Language(with_160_classes(tiny_llama())), batch)
    # Autograd adds it to the loss's gradient in place, but not while operations are counted.
    assert logits_made(Language(with_160_classes(tiny_llama())), batch, distill=1.0) == plain + 2
    module = Unlabelled(with_160_classes(tiny_llama()))
    assert logits_made(module, batch, distill="only") == 2  # the model's own, and the gradient
    teacher = with_160_classes(tiny_llama())
    assert logits_made(module, batch, distill="only", teacher=teacher) == 2


@pytest.mark.slow_but_first
@pytest.mark.parametrize("change", ["scaled", "in place", "reshaped", "hooked"])
def test_a_teacher_that_does_more_than_its_head_is_run_whole(change, tiny_llama, batches):
    """What its logits are then is seen in the loss: the student's weights are the teacher's, but for the change."""
    losses = []

    class Look(L.Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            losses.append(loss.item())

    def changed(output):
        logits = output.logits
        if change == "scaled":
            logits = 3 * logits
        elif change == "in place":
            logits.mul_(3)
        elif change == "reshaped":
            logits = 3 * logits.view(2, 16, 160)
        output.logits = logits
        return output

    teacher = with_160_classes(tiny_llama())
    model = copy.deepcopy(teacher)
    if change == "hooked":
        teacher.lm_head.register_forward_hook(lambda module, args, output: 3 * output)
    else:
        forward = teacher.forward
        teacher.forward = lambda **kwargs: changed(forward(**kwargs))
    module = Unlabelled(copy.deepcopy(model))
    callback = QuantizationAwareTraining("W8A16", ignore=["lm_head"], distill="only", teacher=teacher)
    data = language_data(batches[:1])
    trainer(callback, Look(), max_steps=1, limit_val_batches=0).fit(module, data, data)
    with torch.no_grad():
        log_q = model(**batches[0]).logits.double().log_softmax(-1)
        log_p = (3 * model(**batches[0]).logits.double()).log_softmax(-1)
    expected = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    assert losses[0] == pytest.approx(expected, rel=0.05)
