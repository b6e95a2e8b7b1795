"""CalibrationCallback(evaluate=True): what validation_step logs, of the quantized model."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics.regression import MeanAbsoluteError

from lightning_obs import CalibrationCallback, CalibrationError, quantized
from lightning_obs.callbacks import quantized_validation
from lightning_obs.errors import CalibrationWarning
from tests.callbacks.calibration_modules import Plain, hooks_on, loader, trainer
from tests.support.lightning_package import EarlyStopping, L, ModelCheckpoint, WeightAveraging, needs_weight_averaging

W2 = {"weights": {"num_bits": 2, "group_size": 8}, "input_activations": {"num_bits": 4, "dynamic": False}}


class Rich(Plain):
    """Logs in every way there is: a tensor, metrics, a collection, and a mean of its own list at the end."""

    def __init__(self):
        super().__init__()
        self.mse, self.outputs, self.noise = MeanSquaredError(), [], []
        self.both = MetricCollection({"mae": MeanAbsoluteError(), "mean": MeanMetric()})
        self.total = torch.zeros(())
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def validation_step(self, batch, batch_idx):
        out = self(batch[0])[:, 0]
        target = batch[0][:, 0].contiguous()
        self.log("val_loss", out.pow(2).mean(), on_step=True, on_epoch=True, prog_bar=True)
        self.mse(out, target)
        self.log("val/mse", self.mse)
        self.both["mae"].update(out, target)
        self.both["mean"].update(out)
        self.log_dict(self.both)
        self.outputs.append(out)
        self.noise.append(torch.rand(()))
        self.total += out.sum()
        self.seen += 1
        self.log("seen", self.seen.float(), reduce_fx="max")

    def on_validation_epoch_end(self):
        self.log("val_max", torch.cat(self.outputs).max())
        self.log("val_total", self.total)
        self.log("val_noise", torch.stack(self.noise).mean())
        self.outputs.clear()
        self.noise.clear()
        self.total.zero_()


NAMES = {"val_loss", "val/mse", "mae", "mean", "seen", "val_max", "val_total", "val_noise"}


def numbers(metrics):
    return {name: float(value) for name, value in metrics.items()}


def values(run):
    """What the user sees of a run: metrics of the callbacks, the progress bar and the logger."""
    return [numbers(m) for m in (run.callback_metrics, run.progress_bar_metrics, run.logged_metrics)]


def validated(module, *callbacks):
    run = trainer(*callbacks)
    run.validate(module, loader(), verbose=False)
    return numbers(run.callback_metrics)


def test_validate_gives_each_value_a_second_time_as_quantized_would_log_it():
    torch.manual_seed(0)
    module = Rich()
    reference = copy.deepcopy(module)
    found = validated(module, CalibrationCallback(W2, evaluate=True))
    plain = validated(copy.deepcopy(reference))
    validated(reference, CalibrationCallback(W2))
    reference.seen.zero_()
    with quantized(reference):
        expected = validated(reference)
    for name in NAMES - {"val_noise"}:
        assert found[f"{name}_quantized"] == pytest.approx(expected[name], rel=1e-6), name
        assert found[name] == plain[name], name
    assert found["val_loss_quantized"] != found["val_loss"]


def test_noise_in_a_step_is_the_same_noise_in_both_passes():
    torch.manual_seed(0)
    (found,) = trainer(CalibrationCallback(W2, evaluate=True)).validate(Rich(), loader(), verbose=False)
    assert found["val_noise_quantized"] == found["val_noise"]


class Trained(Rich):
    """Draws random numbers in training, and keeps what it saw."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def training_step(self, batch, batch_idx):
        self.drawn.append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)


class Hooks(L.Callback):
    """Every validation hook of callbacks, in order."""

    def __init__(self):
        self.calls = []

    def on_validation_start(self, *_):
        self.calls.append("start")

    def on_validation_batch_end(self, *_):
        self.calls.append("batch")

    def on_validation_epoch_end(self, *_):
        self.calls.append("epoch_end")

    def on_validation_end(self, *_):
        self.calls.append("end")


def fitted(tmp_path, evaluate):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    data = DataLoader(loader().dataset, batch_size=4, shuffle=True, generator=generator)
    module, hooks = Trained(), Hooks()
    checkpoint = ModelCheckpoint(tmp_path / str(evaluate), monitor="val_loss", save_top_k=2)
    stop = EarlyStopping("val_loss", patience=1)
    run = trainer(
        stop, CalibrationCallback(W2, evaluate=evaluate), hooks, checkpoint, max_epochs=3, enable_checkpointing=True
    )
    run.fit(module, loader(seed=2), data)
    return module, hooks, checkpoint, stop, run, generator


@pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled")
def test_a_fit_with_a_second_pass_is_the_fit_without_it(tmp_path):
    module, hooks, checkpoint, stop, run, generator = fitted(tmp_path, True)
    plain = fitted(tmp_path, False)
    assert module.drawn == plain[0].drawn
    assert all(
        torch.equal(a, b) for a, b in zip(module.state_dict().values(), plain[0].state_dict().values(), strict=True)
    )
    assert int(module.seen) == int(plain[0].seen)
    assert hooks.calls == plain[1].calls
    assert [p.rpartition("/")[2] for p in checkpoint.best_k_models] == [
        p.rpartition("/")[2] for p in plain[2].best_k_models
    ]
    assert checkpoint.best_model_score == plain[2].best_model_score
    assert stop.state_dict() == plain[3].state_dict()
    assert torch.equal(generator.get_state(), plain[5].get_state())
    progress = [r.fit_loop.epoch_loop.val_loop.batch_progress.state_dict() for r in (run, plain[4])]
    assert progress[0] == progress[1]
    for with_it, without in zip(values(run), values(plain[4]), strict=True):
        assert {name: value for name, value in with_it.items() if "_quantized" not in name} == without
    assert not hooks_on(module)


@pytest.mark.parametrize("early", [True, False])
def test_checkpoints_and_early_stopping_can_monitor_the_quantized_metric(tmp_path, early):
    callback = CalibrationCallback(W2, evaluate=True)
    stop = EarlyStopping("val_loss_quantized", patience=5)
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss_quantized", filename="{epoch}-{val_loss_quantized:.4f}")
    order = [stop, callback, checkpoint] if early else [callback, checkpoint, stop]
    run = trainer(*order, max_epochs=2, enable_checkpointing=True)
    run.fit(Plain(), loader(), loader())
    assert checkpoint.best_model_score == stop.best_score
    assert run.callback_metrics["val_loss_quantized"] != run.callback_metrics["val_loss"]
    assert f"val_loss_quantized={float(checkpoint.best_model_score):.4f}" in checkpoint.best_model_path


def test_a_share_runs_the_first_batches_only():
    torch.manual_seed(0)
    module, calls = Plain(), []
    module.net.register_forward_pre_hook(lambda m, args: calls.append(args[0]))
    trainer(CalibrationCallback(W2, evaluate=0.5)).validate(module, loader(), verbose=False)
    assert len(calls) == 4 + 2
    assert torch.equal(calls[4], calls[0])


class Stream(torch.utils.data.IterableDataset):
    """The samples of the loader, without a length."""

    def __iter__(self):
        return iter(loader().dataset.tensors[0])


def test_a_share_of_a_loader_without_a_length_is_refused():
    data = DataLoader(Stream(), batch_size=4)
    module = Plain()
    module.validation_step = lambda batch, batch_idx: module(batch)
    with pytest.raises(CalibrationError, match=r"a loader does not know it.*evaluate=0\.5.*limit_val_batches"):
        trainer(CalibrationCallback(W2, evaluate=0.5)).validate(module, data, verbose=False)


def test_a_test_whose_loader_has_no_length_is_refused_with_the_limit_of_tests():
    module = Plain()
    module.test_step = lambda batch, batch_idx: module(batch)
    run = trainer(CalibrationCallback(W2, evaluate=0.5))
    run.validate(module, loader(), verbose=False)
    with pytest.raises(CalibrationError, match=r"a loader does not know it.*Trainer\(limit_test_batches=<number>\)"):
        run.test(module, DataLoader(Stream(), batch_size=4), verbose=False)


def test_several_schemes_have_metrics_of_their_own():
    first, second = CalibrationCallback(W2, evaluate=True), CalibrationCallback("INT8_STATIC", evaluate=True)
    [found] = trainer(first, second).validate(Plain(), loader(), verbose=False)
    twins = [found[f"val_loss_quantized/{callback.label}"] for callback in (first, second)]
    assert [callback.metrics["val_loss"][1] for callback in (first, second)] == pytest.approx(twins)
    assert twins[0] != twins[1]


def test_several_loaders_keep_their_numbers_at_the_end():
    module = Plain()
    module.validation_step = lambda batch, batch_idx, dataloader_idx=0: module.log(
        "loss", module(batch[0]).pow(2).mean()
    )
    found = trainer(CalibrationCallback(W2, evaluate=True)).validate(module, [loader(1), loader(2)], verbose=False)
    assert [{name for name in of_loader if name.startswith("loss")} for of_loader in found] == [
        {f"loss/dataloader_idx_{at}", f"loss_quantized/dataloader_idx_{at}"} for at in (0, 1)
    ]


@pytest.mark.parametrize("empty_at", [0, 1, 2])
@pytest.mark.filterwarnings("ignore:Total length of `DataLoader` across ranks is zero")
def test_a_loader_without_batches_leaves_the_numbers_of_the_others_in_place(empty_at):
    module = Plain()
    module.validation_step = lambda batch, batch_idx, dataloader_idx=0: module.log(
        "loss", module(batch[0]).pow(2).mean()
    )
    loaders = [loader(1), loader(2)]
    loaders.insert(empty_at, DataLoader([]))
    logged = trainer(CalibrationCallback(W2, evaluate=True)).validate(module, loaders, verbose=False)
    names = [{name for name in of_loader if name.startswith("loss")} for of_loader in logged]
    with_batches = [index for index in range(3) if index != empty_at]
    assert [of_loader for of_loader in names if of_loader] == [
        {f"loss/dataloader_idx_{index}", f"loss_quantized/dataloader_idx_{index}"} for index in with_batches
    ]


def test_a_step_that_logs_nothing_is_told():
    module = Plain()
    module.validation_step = lambda batch, batch_idx: module(batch[0])
    with pytest.warns(CalibrationWarning, match="logs no metric for the epoch"):
        trainer(CalibrationCallback(W2, evaluate=True)).validate(module, loader(), verbose=False)


@needs_weight_averaging
def test_averaged_weights_are_what_is_measured():
    module, seen = Plain(), []

    class Look(L.Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            with torch.no_grad(), quantized(pl_module):
                x = loader().dataset.tensors[0]
                seen.append(float(pl_module(x).pow(2).mean()))

    run = trainer(
        CalibrationCallback(W2, evaluate=True), Look(), WeightAveraging(), max_epochs=2, num_sanity_val_steps=0
    )
    run.fit(module, loader(), loader())
    assert float(run.callback_metrics["val_loss_quantized"]) == pytest.approx(seen[-1], rel=1e-5)


def test_an_error_in_the_second_pass_leaves_nothing_behind():
    class Fails(Plain):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.calls += 1
            if "forward" in vars(self.net[0]):
                raise RuntimeError("stop")

    module = Fails()
    run = trainer(callback := CalibrationCallback(W2, evaluate=True))
    with pytest.raises(RuntimeError, match="stop"):
        run.validate(module, loader(), verbose=False)
    assert run.callbacks[0] is callback
    assert module.calls == 4
    assert not hooks_on(module)
    assert not any("forward" in vars(m) for m in module.modules())


@pytest.mark.parametrize(("evaluate", "match"), [(-0.5, "Got -0.5"), (3, "Got 3, expected True")])
def test_a_share_outside_zero_to_one_is_refused(evaluate, match):
    with pytest.raises(CalibrationError, match=match):
        CalibrationCallback(W2, evaluate=evaluate)


# ---------------------------------------------------------------------- kept batches


def test_batches_that_do_not_fit_are_left_out_and_told(monkeypatch):
    monkeypatch.setattr(quantized_validation, "KEPT_BYTES", 500)  # a batch has 4 x 8 floats: 128 bytes
    module = Plain()
    with pytest.warns(
        CalibrationWarning, match=r"on 3 of 4 batches, the first of each loader.*0\.0 GiB for kept batches are full"
    ):
        found = validated(module, CalibrationCallback(W2, evaluate=True, show=False))
    with torch.no_grad(), quantized(module):
        expected = float(module(loader().dataset.tensors[0][:12]).pow(2).mean())
    assert found["val_loss_quantized"] == pytest.approx(expected, rel=1e-5)


def test_each_loader_has_its_share_of_the_memory(monkeypatch):
    monkeypatch.setattr(quantized_validation, "KEPT_BYTES", 600)
    module = Plain()
    module.validation_step = lambda batch, batch_idx, dataloader_idx=0: module.log(
        "loss", module(batch[0]).pow(2).mean()
    )
    with pytest.warns(CalibrationWarning, match="on 4 of 8 batches"):
        found = trainer(CalibrationCallback(W2, evaluate=True)).validate(module, [loader(1), loader(2)], verbose=False)
    assert {"loss_quantized/dataloader_idx_0", "loss_quantized/dataloader_idx_1"} <= set().union(*found)


def test_without_memory_for_a_batch_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(quantized_validation, "KEPT_BYTES", 8)
    with pytest.warns(CalibrationWarning, match="on 0 of 4 batches"):
        found = validated(Plain(), CalibrationCallback(W2, evaluate=True))
    assert set(found) == {"val_loss"}


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_a_step_that_fetches_its_batches_itself_is_refused_before_the_first():
    class Fetches(Plain):
        def validation_step(self, dataloader_iter):
            pass

    with pytest.raises(CalibrationError, match=r"Got validation_step\(dataloader_iter\).*leave evaluate out"):
        trainer(CalibrationCallback(W2, evaluate=True), max_epochs=1).fit(Fetches(), loader(), loader())
