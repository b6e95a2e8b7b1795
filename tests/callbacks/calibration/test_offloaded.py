"""The callbacks with offloaded models, the user's code unchanged: Lightning moves nothing that is dispatched."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_obs import CalibrationCallback, CalibrationError, CalibrationSession, QuantizationAwareTraining
from lightning_obs.model.offload import is_offloaded
from tests.callbacks.calibration_modules import trainer
from tests.support.lightning_package import L
from tests.support.lightning_ranks import like_torchrun
from tests.support.lightning_ranks import trainer as on_ranks
from tests.support.offloaded import (
    WAYS,
    blocks_on_cpu,
    compressed_tensors_cpu,
    compressed_tensors_disk,
    device_map_disk,
    device_map_split,
    digests,
    equal,
    in_memory,
    on_cpu,
    on_disk,
    tokens,
)
from tests.support.rank_processes import run_ranks
from tests.support.tiny_model import save_tiny_llama
from tests.support.versions import needs_release


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("source"), torch.bfloat16)


class Language(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        return self.model(batch, labels=batch).loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(batch, labels=batch).loss)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Late(Language):
    """The model is loaded and dispatched in configure_model."""

    def __init__(self, make):
        L.LightningModule.__init__(self)
        self.make = make

    def configure_model(self):
        if not hasattr(self, "model"):
            self.model = self.make()


def batches():
    return DataLoader([tokens(seed) for seed in range(3)], batch_size=None)


def validated(module, kind, folder, **options):
    """What a validation gives: qparams, metrics, layer errors, files."""
    callback = kind("FP8", ignore=["lm_head"], export_to=folder, **options)
    run = trainer(callback)
    run.validate(module, batches(), verbose=False)
    assert not {"_apply", "__reduce_ex__"} & vars(module).keys()
    assert "teardown" not in vars(run.strategy)
    errors = [(e.name, e.sqnr, e.weight.sqnr) for e in callback.layer_errors([tokens()])]
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    return callback.session.qparams, metrics, errors, digests(folder)


OF_CALLBACKS = {
    "calibration": (CalibrationCallback, {"show": False, "log": False, "evaluate": True}),
    "training": (QuantizationAwareTraining, {"log": False}),
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("kind", "way", "late"),
    [
        ("calibration", device_map_disk, False),
        ("calibration", device_map_split, True),
        ("calibration", on_cpu, False),
        ("calibration", blocks_on_cpu, True),
        ("calibration", on_disk, True),
        ("calibration", compressed_tensors_disk, False),
        ("calibration", compressed_tensors_cpu, True),
        ("training", device_map_disk, True),
        ("training", on_cpu, False),
        ("training", compressed_tensors_disk, False),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_validation_of_an_offloaded_model_gives_what_it_gives_in_memory(kind, way, late, source, tmp_path):
    callback, options = OF_CALLBACKS[kind]
    expected = validated(Language(in_memory(source, tmp_path)), callback, tmp_path / "expected", **options)
    module = Late(lambda: way(source, tmp_path)) if late else Language(way(source, tmp_path))
    found = validated(module, callback, tmp_path / "found", **options)
    assert equal(found[0], expected[0])
    assert found[1:] == expected[1:]
    if kind == "calibration":
        assert found[1]["val_loss_quantized"] != found[1]["val_loss"]
    assert any(map(is_offloaded, module.model.modules()))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_run_that_ends_with_an_error_leaves_the_model_offloaded_and_nothing_behind(way, source, tmp_path):
    class Failing(Language):
        def validation_step(self, batch, batch_idx):
            raise KeyError("of the user")

    module = Failing(way(source, tmp_path))
    with pytest.raises(KeyError, match="of the user"):
        trainer(CalibrationCallback("FP8", ignore=["lm_head"])).validate(module, batches(), verbose=False)
    assert any(map(is_offloaded, module.model.modules()))
    assert "_apply" not in vars(module)
    assert not any("_apply" in vars(inner) for inner in module.modules())
    with torch.no_grad():
        assert torch.equal(module.model(tokens()).logits, in_memory(source, tmp_path)(tokens()).logits)


def test_two_callbacks_leave_the_model_where_it_is(source, tmp_path):
    module = Language(on_disk(source, tmp_path))
    two = [CalibrationCallback(scheme, ignore=["lm_head"], show=False) for scheme in ("FP8", "INT8_STATIC")]
    run = trainer(*two)
    run.validate(module, batches(), verbose=False)
    assert all(callback.result is not None for callback in two)
    assert "_apply" not in vars(module)
    assert "teardown" not in vars(run.strategy)
    assert module.model.lm_head.weight.is_meta


def test_a_cast_of_an_offloaded_model_is_an_error(source, tmp_path):
    module = Language(on_disk(source, tmp_path))
    with pytest.raises(CalibrationError, match=r"cannot be cast.*Got torch.float16 for torch.bfloat16.*dtype="):
        trainer(CalibrationCallback("FP8", ignore=["lm_head"]), precision="16-true").validate(module, batches())


def test_a_calibration_is_saved_and_taken_up_with_another_way_of_offloading(source, tmp_path):
    callback = CalibrationCallback("FP8", ignore=["lm_head"], show=False)
    trainer(callback).validate(Language(device_map_disk(source, tmp_path)), batches(), verbose=False)
    state = copy.deepcopy(callback.state_dict())
    resumed = CalibrationCallback("FP8", ignore=["lm_head"], show=False)
    resumed.load_state_dict(state)
    module = Language(compressed_tensors_disk(source, tmp_path))
    resumed.prepare(trainer(resumed), module)
    assert equal(resumed.session.qparams, callback.session.qparams)
    assert digests(resumed.export(tmp_path / "b")) == digests(callback.export(tmp_path / "a"))


def test_weights_that_are_offloaded_cannot_be_trained(source, tmp_path):
    module = Language(device_map_split(source, tmp_path))
    callback = QuantizationAwareTraining("FP8", ignore=["lm_head"])
    with pytest.raises(CalibrationError, match=r"offloaded weights cannot be trained: model.norm|layers"):
        trainer(callback, max_steps=1).fit(module, batches(), batches())
    assert "_apply" not in vars(module)


@pytest.mark.filterwarnings(
    "ignore:.*updates below half the distance between its numbers are lost"
)  # the model is in bfloat16
def test_weights_in_memory_are_trained_beside_offloaded_ones_that_run_quantized(source, tmp_path):
    found = []
    for way in (in_memory, device_map_split):
        model = way(source, tmp_path)
        model.train().requires_grad_(False)
        model.model.embed_tokens.weight.requires_grad_(True)  # in memory, as the split has it
        callback = QuantizationAwareTraining("FP8", ignore=["lm_head"], calibration_batches=1, sanity_check=True)
        run = trainer(callback, max_steps=2, num_sanity_val_steps=1)
        run.fit(Language(model), batches(), batches())
        found.append((callback.session.qparams, model.model.embed_tokens.weight.detach().clone()))
    assert equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][1], in_memory(source, tmp_path).model.embed_tokens.weight)


def test_a_session_and_a_callback_give_the_same_qparams(source, tmp_path):
    model = on_cpu(source, tmp_path)
    with CalibrationSession(model, "FP8", ignore=["lm_head"]) as session, torch.no_grad():
        for batch in batches():
            model(batch)
    callback = CalibrationCallback("FP8", ignore=["lm_head"], show=False)
    trainer(callback).validate(Language(on_cpu(source, tmp_path)), batches(), verbose=False)
    assert equal(callback.session.qparams, session.qparams)


def on_share(rank, ranks, source, folder):
    """This rank's batches, of a model that this rank has dispatched for itself."""
    like_torchrun(rank, ranks)
    data = DataLoader([tokens(seed)[0] for seed in range(4)], batch_size=1)
    found = []
    for number, way in enumerate([device_map_disk, blocks_on_cpu, compressed_tensors_disk]):
        out = folder / f"{ranks} ranks {number}"
        callback = CalibrationCallback("FP8", ignore=["lm_head"], show=False, export_to=out)
        own = folder / f"rank {rank} of {ranks}, {number}"
        own.mkdir()
        on_ranks(callback, ranks=ranks).validate(Language(way(source, own)), data, verbose=False)
        found.append((callback.session.qparams, callback.result.ranks, digests(out)))
    return found


@needs_release("compressed-tensors", "0.20", "in a process group, a model offloaded to disk asks for an accelerator")
def test_ranks_that_have_each_dispatched_the_model_agree_on_the_qparams_of_one(source, tmp_path):
    [alone] = run_ranks(on_share, 1, 1, source, tmp_path)
    for found in run_ranks(on_share, 2, 2, source, tmp_path):
        for one, (expected, _, files) in zip(found, alone, strict=True):
            assert one[1] == 2
            assert equal(one[0], expected)
            assert one[2] == files
