"""A validation that was killed goes on where it was."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_obs import CalibrationCallback, CalibrationError
from lightning_obs.errors import CalibrationWarning
from tests.callbacks.calibration_modules import Plain, hooks_on, loader, trainer

SCHEME = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "strategy": "group", "group_size": 8, "symmetric": True},
    "input_activations": {"num_bits": 8, "strategy": "tensor", "symmetric": False},
}
OBSERVERS = [
    {"input": "static_minmax", "weight": "imatrix_mse"},
    {"input": "histogram", "weight": "hessian"},
    {"input": {"name": "percentile", "percentile": 99.0}, "weight": "local_hessian"},
    {"input": "normal_observer"},
    {"input": "minmax"},
]


class Dies(Plain):
    """Runs at most so many batches; with ``really`` the process is killed."""

    def __init__(self, at=None, really=False):
        torch.manual_seed(0)
        super().__init__()
        self.at, self.really, self.ran = at, really, []

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if len(self.ran) == self.at:
            if self.really:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("killed")
        self.ran.append((dataloader_idx, batch_idx))
        self.log("val_loss", self(batch[0]).pow(2).mean())


def validate(module, folder=None, loaders=None, scheme=SCHEME, every=2, **options):
    saves = {} if folder is None else {"save_every": every, "save_to": folder}
    callback = CalibrationCallback(scheme, show=False, **saves, **options)
    tr = trainer(callback)
    tr.validate(module, loader(count=28) if loaders is None else loaders, verbose=False)
    return callback


def killed(folder, at=5, **options):
    with pytest.raises(RuntimeError, match="killed"):
        validate(Dies(at), folder, **options)


def resumed(folder, **options):
    module = Dies()
    with pytest.warns(CalibrationWarning, match=r"batches were observed before.*metrics.* are of the remaining"):
        callback = validate(module, folder, **options)
    return module, callback


def require_equal(callback, other):
    mine, theirs = callback.session.qparams, other.session.qparams
    assert mine.keys() == theirs.keys() != set()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert callback.result.batches == other.result.batches
    assert callback.result.input_ranges == other.result.input_ranges


@pytest.mark.parametrize("observers", OBSERVERS, ids=lambda observers: observers["input"])
def test_a_killed_validation_goes_on_behind_its_last_save_with_the_same_qparams(tmp_path, observers):
    whole = validate(Dies(), observers=observers)
    killed(tmp_path / "saves", observers=observers)
    module, callback = resumed(tmp_path / "saves", observers=observers)
    assert module.ran == [(0, number) for number in (4, 5, 6)]
    require_equal(callback, whole)
    assert not (tmp_path / "saves").exists()


def test_it_can_be_killed_again_and_before_the_first_save_and_behind_the_last_batch(tmp_path):
    whole = validate(Dies(), rounding="gptq")
    killed(tmp_path, at=1, rounding="gptq")
    killed(tmp_path, at=3, rounding="gptq")
    with pytest.warns(CalibrationWarning, match="2 batches were observed before"):
        killed(tmp_path, at=4, every=1, rounding="gptq")

    class DiesAtTheEnd(Dies):
        def on_validation_epoch_end(self):
            raise RuntimeError("killed")

    with (
        pytest.raises(RuntimeError, match="killed"),
        pytest.warns(CalibrationWarning, match="6 batches were observed before"),
    ):
        validate(DiesAtTheEnd(), tmp_path, every=1, rounding="gptq")
    module, callback = resumed(tmp_path, rounding="gptq")
    assert module.ran == []
    require_equal(callback, whole)


@pytest.mark.slow
def test_a_process_that_is_killed_is_gone_on_with(tmp_path):
    code = (
        "from tests.callbacks.test_killed_validation import Dies, validate\n"
        f"validate(Dies(at=5, really=True), {str(tmp_path / 'saves')!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    module, callback = resumed(tmp_path / "saves")
    assert len(module.ran) == 3
    require_equal(callback, validate(Dies()))


class Batches(IterableDataset):
    """A loader that does not know its length."""

    def __iter__(self):
        yield from loader(count=28)


@pytest.mark.parametrize("kind", ["several", "stream", "max_batches", "evaluate"])
def test_whatever_the_loaders_and_options_it_goes_on_with_the_next_batch(tmp_path, kind):
    special = {"several": [loader(1, count=12), loader(2, count=12)], "stream": DataLoader(Batches(), batch_size=None)}
    loaders = special.get(kind, loader(count=28))
    options = {"max_batches": {"max_batches": 3}, "evaluate": {"evaluate": True}}.get(kind, {})
    whole = validate(Dies(), loaders=loaders, **options)
    killed(tmp_path, loaders=loaders, **options)
    module, callback = resumed(tmp_path, loaders=loaders, **options)
    expected = [(1, 1), (1, 2)] if kind == "several" else [(0, number) for number in (4, 5, 6)]
    assert module.ran[: len(expected)] == expected
    require_equal(callback, whole)


def test_a_function_that_masks_tokens_is_the_same_in_another_process(tmp_path):
    def mask():
        return lambda batch: torch.ones(len(batch[0]), 1)

    killed(tmp_path, token_mask=mask())
    module, _ = resumed(tmp_path, token_mask=mask())
    assert len(module.ran) == 3


def test_metrics_are_of_the_remaining_batches(tmp_path):
    killed(tmp_path)
    callback = CalibrationCallback(SCHEME, show=False, save_every=2, save_to=tmp_path)
    with pytest.warns(CalibrationWarning, match="4 batches were observed before"):
        found = trainer(callback).validate(Dies(), loader(count=28), verbose=False)
    rest = DataLoader(TensorDataset(loader(count=28).dataset.tensors[0][16:]), batch_size=4)
    assert found == trainer().validate(Dies(), rest, verbose=False)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loaders": loader(seed=2, count=28)}, "batch 0 of the validation is not the one that was observed before"),
        ({"loaders": loader(count=12)}, "batch 3 of the validation is not the one"),
        ({"observers": {"input": "histogram"}}, r"another scheme, other observers.*'static_minmax' -> 'histogram'"),
        ({"max_batches": 3}, r"holds the save of another run: max_batches: 'None' -> '3'.*delete"),
    ],
    ids=["data", "fewer", "observers", "max_batches"],
)
def test_what_another_run_has_saved_is_refused_and_stays(tmp_path, changed, message):
    killed(tmp_path, observers={"input": "static_minmax"})
    before, module = sorted(tmp_path.iterdir()), Dies()
    with pytest.raises(CalibrationError, match=message):
        validate(module, tmp_path, **{"observers": {"input": "static_minmax"}, **changed})
    assert sorted(tmp_path.iterdir()) == before
    assert not hooks_on(module)


def test_other_weights_and_a_damaged_file_are_refused(tmp_path):
    killed(tmp_path)
    other = Dies()
    with torch.no_grad():
        other.net[0].weight[0, 0] += 1
    with pytest.raises(CalibrationError, match="the save of another run: checksum of the weights"):
        validate(other, tmp_path)
    last = max(tmp_path.iterdir())
    last.write_bytes(last.read_bytes()[:-200])
    with pytest.raises(CalibrationError, match=r"state-4-0.pt cannot be read.*delete .* to start over"):
        validate(Dies(), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_every": 2}, "save_to is missing"),
        ({"save_to": "here"}, "save_every is missing"),
        ({"save_every": 0, "save_to": "here"}, r"save_every\. Got 0"),
        ({"save_every": 1, "save_to": "here", "observers": "auto"}, "save_every with chosen observers"),
    ],
)
def test_options_that_cannot_be_saved_by_are_refused(options, message):
    with pytest.raises(CalibrationError, match=message):
        CalibrationCallback("INT8_STATIC", **options)


def test_two_callbacks_with_one_folder_are_refused(tmp_path):
    callbacks = [CalibrationCallback(scheme, save_every=2, save_to=tmp_path) for scheme in ("FP8", "INT8_STATIC")]
    with pytest.raises(CalibrationError, match="two callbacks with one save_to"):
        trainer(*callbacks).validate(Plain(), loader(), verbose=False)
