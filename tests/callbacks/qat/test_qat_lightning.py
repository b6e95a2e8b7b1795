"""QuantizationAwareTraining beside the rest of Lightning, with the bugs that ended Lightning's own callback."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_obs import CalibrationWarning, QuantizationAwareTraining, load_checkpoint, quantized
from lightning_obs.model.module_qparams import read_qparams
from tests.callbacks.qat_modules import (
    W4,
    W8,
    Language,
    Regression,
    Watch,
    language_data,
    left_behind,
    loader,
    outputs,
    quiet,
    trainer,
)
from tests.support.lightning_package import (
    EarlyStopping,
    L,
    LearningRateFinder,
    MixedPrecision,
    ModelCheckpoint,
    ModelPruning,
    WeightAveraging,
    needs_weight_averaging,
)
from tests.support.versions import checkpointing_of


@pytest.mark.parametrize("entry", ["test", "predict", "validate"])
def test_12896_a_checkpoint_is_tested_by_a_fresh_trainer(entry, tmp_path):
    """pytorch-lightning #12896: Trainer.test(ckpt_path=...) failed beside the callback."""
    module, saver = Regression(), ModelCheckpoint(tmp_path, filename="best", monitor="val_loss")
    options = {"scheme": "INT8_STATIC", "calibration_batches": 2, "train": "all"}
    trainer(QuantizationAwareTraining(**options), saver, max_epochs=1).fit(module, loader(), loader(seed=2))
    fresh = Regression()
    tr = trainer(QuantizationAwareTraining(**options))
    found = getattr(tr, entry)(fresh, loader(seed=2), ckpt_path=tmp_path / "best.ckpt")
    assert torch.equal(torch.cat(found if entry == "predict" else fresh.validated), torch.cat(module.validated))
    assert not left_behind(fresh)


def test_the_best_checkpoint_tests_with_the_metric_that_it_was_saved_for(tmp_path):
    module, saver = Regression(lr=0.1), ModelCheckpoint(tmp_path, monitor="val_loss")
    tr = trainer(QuantizationAwareTraining("INT8_STATIC", calibration_batches=2), saver, max_epochs=4)
    tr.fit(module, loader(), loader(seed=2))
    (metrics,) = tr.test(module, loader(seed=2), ckpt_path="best", verbose=False)
    assert metrics["test_loss"] == saver.best_model_score.item()


def test_testing_what_was_never_calibrated_says_so():
    module = Regression()
    with pytest.warns(CalibrationWarning, match="nothing was calibrated, the model runs in full precision"):
        found = trainer(QuantizationAwareTraining("INT8_STATIC")).predict(module, loader(seed=2))
    assert torch.equal(torch.cat(found), outputs(module))


def test_15862_7926_a_forward_with_keyword_arguments_is_trained():
    """pytorch-lightning #15862 and #7926: the callback's forward took no keyword arguments."""

    class Keywords(Regression):
        def build(self):
            return nn.ModuleDict({"a": nn.Linear(8, 16), "b": nn.Conv1d(1, 1, 3, padding=1), "c": nn.Linear(16, 2)})

        def forward(self, *, x, gain=1.0):
            hidden = self.net["b"](input=self.net["a"](input=x).unsqueeze(1)).squeeze(1)
            return self.net["c"](input=hidden.relu() * gain)

        def training_step(self, batch, batch_idx):
            return F.mse_loss(self(x=batch[0], gain=2.0), batch[1])

        def validation_step(self, batch, batch_idx):
            self(x=batch[0])

    module = Keywords()
    before = copy.deepcopy(module)
    scheme = {
        "targets": ["Linear", "Conv1d"],
        "weights": {"num_bits": 8, "strategy": "channel"},
        "input_activations": {"num_bits": 8, "strategy": "tensor"},
    }
    trainer(QuantizationAwareTraining(scheme, calibration_batches=1)).fit(module, loader(), loader())
    assert not any(torch.equal(p, q) for p, q in zip(module.parameters(), before.parameters(), strict=True))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("scheme", ["INT8_STATIC", W8])
def test_7552_a_graph_of_the_trained_module_computes_with_the_quantization(scheme):
    """pytorch-lightning #7552: a scripted module lacked the calls that quantize and dequantize."""
    module = Regression()
    trainer(QuantizationAwareTraining(scheme, calibration_batches=2)).fit(module, loader(), loader(seed=2))
    inputs = next(iter(loader(seed=2)))[0]
    with quantized(module):
        graph = torch.export.export(module.net, (inputs,)).module()
    assert torch.equal(graph(inputs), module.validated[0])
    assert not torch.equal(graph(inputs), module.net(inputs))
    plain = torch.export.export(module.net, (inputs,)).module()  # nothing of the callback is left in forward
    assert torch.equal(plain(inputs), module.net(inputs))


@pytest.mark.parametrize("order", ["before", "after"])
def test_11047_pruning_beside_it_trains_masked_quantized_weights(order, tmp_path):
    """pytorch-lightning #11047: the callback and ModelPruning could not run in one Trainer."""
    module = Regression()
    pruning = ModelPruning("l1_unstructured", parameters_to_prune=[(module.net[0], "weight")], amount=0.5)
    callback = QuantizationAwareTraining("INT8_STATIC", calibration_batches=2)
    callbacks = [callback, pruning] if order == "before" else [pruning, callback]
    saver = ModelCheckpoint(tmp_path, filename="last")
    trainer(*callbacks, saver, max_epochs=3).fit(module, loader(), loader(seed=2))
    assert not prune.is_pruned(module)
    assert (module.net[0].weight == 0).float().mean() >= 0.5
    trainer(callback).validate(module, loader(seed=2), verbose=False)
    callback.export(tmp_path / "out")
    reloaded = load_checkpoint(Regression(), tmp_path / "out")
    assert torch.equal(outputs(reloaded), torch.cat(module.validated))
    assert torch.equal(reloaded.net[0].weight == 0, module.net[0].weight.abs() < module.net[0].weight_scale / 2)
    Regression.load_from_checkpoint(tmp_path / "last.ckpt", strict=True)


@needs_weight_averaging
@pytest.mark.parametrize("order", ["before", "after"])
def test_averaged_weights_are_validated_and_exported_with_their_own_ranges(order, tmp_path):
    module = Regression(lr=0.1)
    callback = QuantizationAwareTraining("INT8_STATIC", calibration_batches=2, refresh_weights=True)
    callbacks = [callback, WeightAveraging()] if order == "before" else [WeightAveraging(), callback]
    trainer(*callbacks, max_epochs=2).fit(module, loader(), loader(seed=2))
    absmax = module.net[0].weight.detach().abs().amax(1, keepdim=True)
    torch.testing.assert_close(module.net[0].weight_scale, absmax / 127.5)
    callback.export(tmp_path / "out")
    assert torch.equal(outputs(load_checkpoint(Regression(), tmp_path / "out")), torch.cat(module.validated))


@needs_weight_averaging
def test_after_a_validation_of_averaged_weights_training_has_the_ranges_of_its_own():
    module, watch = Regression(lr=0.1), Watch()

    class Look(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 0:
                weight = pl_module.net[0].weight.detach()
                torch.testing.assert_close(pl_module.net[0].weight_scale, weight.abs().amax(1, keepdim=True) / 127.5)

    callback = QuantizationAwareTraining(W8, refresh_weights=True)
    trainer(callback, Look(), watch, WeightAveraging(), max_epochs=3).fit(module, loader(), loader(seed=2))


def test_early_stopping_ends_it_with_nothing_left_behind(tmp_path):
    module, callback = Regression(lr=0.0), QuantizationAwareTraining("INT8_STATIC", calibration_batches=1)
    tr = trainer(callback, EarlyStopping("val_loss", patience=1), max_epochs=9)
    tr.fit(module, loader(), loader(seed=2))
    assert tr.current_epoch < 9
    assert not left_behind(module)
    callback.export(tmp_path / "out")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("train", ["weights", "all"])
def test_the_learning_rate_finder_leaves_ranges_and_scales_as_they_were(order, train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module, watch = Regression(), Watch()
    callback = QuantizationAwareTraining("INT8_STATIC", train=train, calibration_batches=2)
    finder = LearningRateFinder(num_training_steps=8, update_attr=False)
    callbacks = [callback, finder] if order == "before" else [finder, callback]
    data = DataLoader(loader(count=64).dataset, batch_size=4)
    trainer(*callbacks, watch, enable_checkpointing=True).fit(module, data, loader(seed=2))
    assert finder.optimal_lr is not None
    with torch.no_grad():
        first = Regression()
        first.load_state_dict(module.state_dict())
    assert ["input_scale" in s for s in watch.starts[:3]] == [False, False, True]
    assert not left_behind(module)


def test_gradient_accumulation_is_the_gradient_of_the_mean():
    gradients = []
    for batch_size, accumulate in ((8, 1), (4, 2)):
        torch.manual_seed(0)
        module = Regression(lr=0.0)
        data = DataLoader(loader().dataset, batch_size=batch_size)

        class Look(L.Callback):
            def on_before_optimizer_step(self, trainer, pl_module, optimizer):
                gradients.append(pl_module.net[0].weight.grad.clone())

        trainer(QuantizationAwareTraining(W4), Look(), max_steps=1, accumulate_grad_batches=accumulate).fit(
            module, data, data
        )
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(reentrant):
    class Checkpointed(Regression):
        def forward(self, x):
            if not self.training:
                return super().forward(x)
            return checkpoint(self.net, x.requires_grad_(), use_reentrant=reentrant)

    runs = []
    for kind in (Regression, Checkpointed):
        torch.manual_seed(0)
        module = kind()
        callback = QuantizationAwareTraining(
            "INT8_STATIC", calibration_batches=2, observers={"input": "minmax"}, train="all"
        )
        trainer(callback).fit(module, loader(), loader(seed=2))
        runs.append((module.losses, read_qparams(module.net[2])))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(value, runs[1][1][name]) for name, value in runs[0][1].items())


def test_transformers_own_gradient_checkpointing_changes_nothing(tiny_llama, batches):
    losses = []
    for checkpointing in (False, True):
        model = tiny_llama()
        if checkpointing:
            checkpointing_of(model)()

        class Look(L.Callback):
            def on_before_backward(self, trainer, pl_module, loss):
                losses.append(loss.item())

        callback = QuantizationAwareTraining("INT8_STATIC", ignore=["lm_head"], calibration_batches=1)
        trainer(callback, Look()).fit(Language(model), language_data(batches), language_data(batches))
    assert losses[:6] == losses[6:]


@pytest.mark.slow_but_first
@quiet
@pytest.mark.parametrize(("called_before", "scheme"), [(False, "INT8_STATIC"), (True, W4)])
def test_a_compiled_model_trains_as_an_eager_one(called_before, scheme, tmp_path):
    runs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = Regression()
        if compiled:
            module.net = torch.compile(module.net, backend="eager")
            if called_before:
                module(torch.randn(4, 8)).sum().backward()
        callback = QuantizationAwareTraining(scheme, calibration_batches=2, module="net")
        trainer(callback).fit(module, loader(), loader(seed=2))
        callback.export(tmp_path / str(compiled))
        runs.append((module.losses, torch.cat(module.validated)))
        inputs = loader().dataset[:4][0]  # afterwards it is the float model again
        assert torch.equal(module(inputs), Regression.forward(module, inputs))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])


@quiet
def test_a_module_compiled_in_place_is_quantized():
    class Net(nn.Module):  # torch does not compile a Sequential in place
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 2)

        def forward(self, x):
            return self.b(self.a(x).relu())

    class Compiled(Regression):
        def build(self):
            return Net()

    module, plain = Compiled(), Compiled()
    plain.load_state_dict(module.state_dict())
    module.net.compile(backend="eager")
    module(torch.randn(4, 8)).sum().backward()
    module.zero_grad()
    for one in (module, plain):
        trainer(QuantizationAwareTraining(W4)).fit(one, loader(), loader(seed=2))
    assert module.losses == plain.losses


def test_bf16_mixed_trains_float32_weights():
    module = Regression()
    callback = QuantizationAwareTraining("INT8_STATIC", train="all", calibration_batches=1)
    trainer(callback, precision="bf16-mixed", max_epochs=20).fit(module, loader(), loader(seed=2))
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert sum(module.losses[-4:]) < sum(module.losses[:4]) / 2


def test_fp16_with_a_loss_scale_trains_float32_weights():
    module = Regression()
    callback = QuantizationAwareTraining("INT8_STATIC", train="all", calibration_batches=1)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    trainer(callback, plugins=[plugin], max_epochs=20).fit(module, loader(), loader(seed=2))
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert sum(module.losses[-4:]) < sum(module.losses[:4]) / 2


def test_asked_for_fp16_on_a_cpu_lightning_takes_bf16_and_says_so():
    module = Regression()
    callback = QuantizationAwareTraining("INT8_STATIC", calibration_batches=1)
    with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU. Using `precision='bf16-mixed'`"):
        with_trainer = trainer(callback, precision="16-mixed")
    with_trainer.fit(module, loader(), loader(seed=2))
    assert with_trainer.precision == "bf16-mixed"
    assert len(module.losses) == 8


def norm(parameters):
    return torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm().item()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_are_clipped_to_the_norm_over_weights_and_learned_scales(precision):
    before, after, scales = [], [], []

    class Look(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            before.append(norm(optimizer.param_groups[0]["params"]))

        def on_train_batch_end(self, trainer, pl_module, *_):
            (group,) = trainer.optimizers[0].param_groups
            after.append(norm(group["params"]))
            scales.append(norm(group["params"][-4:]))

    callback = QuantizationAwareTraining("INT8_STATIC", train="all", calibration_batches=1)
    trainer(callback, Look(), precision=precision, gradient_clip_val=1e-2).fit(Regression(), loader(), loader(seed=2))
    assert min(before) > 2e-2
    assert after == pytest.approx([1e-2] * 8, rel=1e-3)
    assert min(scales) > 0


def test_gradients_are_clipped_by_value_learned_scales_too():
    largest = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            (group,) = trainer.optimizers[0].param_groups
            largest.append(max(p.grad.abs().max().item() for p in group["params"][-2:]))

    callback = QuantizationAwareTraining(W4, train="all")
    options = {"gradient_clip_val": 1e-5, "gradient_clip_algorithm": "value"}
    trainer(callback, Look(), **options).fit(Regression(), loader(), loader(seed=2))
    assert largest == pytest.approx([1e-5] * 8)


@pytest.mark.parametrize("where", ["training_step", "validation_step"])
def test_an_exception_leaves_the_float_model(where):
    module = Regression()

    def fail(batch, batch_idx):
        if batch_idx == 2:
            raise RuntimeError("stop")
        return module(batch[0]).mean()

    setattr(module, where, fail)
    with pytest.raises(RuntimeError, match="stop"):
        trainer(QuantizationAwareTraining("INT8_STATIC", distill=1.0)).fit(module, loader(), loader())
    assert getattr(module, where) is fail
    delattr(module, where)
    assert not left_behind(module)
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.parametrize(
    ("refresh_weights", "is_first"), [(False, [True] * 4), (True, [True, True, False, False])], ids=["stay", "follow"]
)
def test_ranges_of_weights_stay_unless_each_of_two_validations_an_epoch_refreshes_them(refresh_weights, is_first):
    watch = Watch()
    callback = QuantizationAwareTraining(W8, refresh_weights=refresh_weights)
    trainer(callback, watch, max_epochs=1, val_check_interval=0.5).fit(Regression(), loader(), loader())
    first = watch.starts[0]["weight_scale"]
    assert [torch.equal(start["weight_scale"], first) for start in watch.starts] == is_first


def test_a_second_fit_starts_from_the_ranges_of_its_weights():
    module, callback, watch = Regression(), QuantizationAwareTraining(W8), Watch()
    trainer(callback).fit(module, loader(), loader())
    with torch.no_grad():
        module.net[0].weight.mul_(2)
    largest = module.net[0].weight.detach().abs().amax(1, keepdim=True)
    trainer(callback, watch, max_epochs=1).fit(module, loader(), loader())
    for start in watch.starts:
        torch.testing.assert_close(start["weight_scale"], largest / 127.5)


def test_frozen_weights_stay_and_others_are_trained():
    module = Regression()
    module.net[0].requires_grad_(False)
    before = copy.deepcopy(module)
    trainer(QuantizationAwareTraining("INT8_STATIC", calibration_batches=1)).fit(module, loader(), loader())
    assert torch.equal(module.net[0].weight, before.net[0].weight)
    assert not torch.equal(module.net[2].weight, before.net[2].weight)


def test_manual_optimization_works():
    class Manual(Regression):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()

    module = Manual()
    trainer(QuantizationAwareTraining("INT8_STATIC", train="all", calibration_batches=1)).fit(
        module, loader(), loader()
    )
    assert module.losses[-1] < module.losses[0]
