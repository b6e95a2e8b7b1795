"""What follows a calibration, or is built on one, on the pretend device: the CPU's bits, and what it asks for."""

import copy

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from safetensors.torch import load_file
from torch.utils.data import DataLoader, IterableDataset

from lightning_obs import (
    BlockRuns,
    CalibrationCallback,
    CalibrationSession,
    QuantizationAwareTraining,
    calibrate_layerwise,
    choose_observers,
    export_checkpoint,
    sensitivity,
)
from lightning_obs.numerics.rounding import round_by_hessian
from lightning_obs.report.layer_errors import known_layer_errors, measure_layer_errors
from tests.accelerator.budgets import USES
from tests.accelerator.common import assert_same_bits, llama, on_trainer_device, token_batches
from tests.callbacks import qat_modules
from tests.callbacks.calibration_modules import Plain, loader, trainer
from tests.support.pretend_device import DEVICE, OTHER, PretendTensor, counting, on_cpu, on_device


def calibrated(device="cpu", scheme="INT8_STATIC", layers=2, **options):
    model = llama(layers).to(device)
    with CalibrationSession(model, scheme, ignore=["lm_head"], **options) as session, torch.no_grad():
        for ids in token_batches():
            model(input_ids=ids.to(device), use_cache=False)
    return session


def batches_on(device, count):
    return [{"input_ids": ids.to(device), "use_cache": False} for ids in token_batches(count)]


def held(name, counts):
    USES[name].holds(counts, name)


def test_layer_errors_are_the_cpus():
    expected = measure_layer_errors(calibrated().model, batches_on("cpu", 1))
    model = calibrated(DEVICE).model
    with counting() as counts:
        found = measure_layer_errors(model, batches_on(DEVICE, 1))
    assert [error.name for error in found] == [error.name for error in expected]
    # Sums are of tiles, which are larger on an accelerator.
    assert [error.sqnr for error in found] == pytest.approx([error.sqnr for error in expected], rel=1e-5)
    assert [error.clipped for error in found] == [error.clipped for error in expected]
    held("layer errors of one batch", counts)


def test_layer_errors_without_data_are_the_cpus():
    options = {"observers": {"input": "histogram"}}
    sessions = calibrated(**options), calibrated(DEVICE, **options)
    expected = known_layer_errors(sessions[0].model, sessions[0].observation.input_counts)
    with counting() as counts:
        found = known_layer_errors(sessions[1].model, sessions[1].observation.input_counts)
    assert {error.name: error.sqnr for error in found} == pytest.approx(
        {error.name: error.sqnr for error in expected}, rel=1e-5
    )
    held("layer errors without data", counts)


def test_sensitivities_read_nothing_in_a_batch_but_what_the_model_reads():
    def measure(batches):
        model = llama().to(DEVICE)
        with counting() as counts:
            found = sensitivity(model, batches_on(DEVICE, batches), ["INT8_STATIC", "W4A16"], ignore=["lm_head"])
        assert all(0 < loss < 1 for losses in found.layers.values() for loss in losses.values())
        return counts.reads.total()

    with counting() as of_model, torch.no_grad():
        llama().to(DEVICE)(**batches_on(DEVICE, 1)[0])
    assert measure(2) - measure(1) == 2 * of_model.reads.total()  # to calibrate, and to measure


def test_layer_by_layer_an_embedding_looks_up_its_rows_for_the_device(tmp_path):
    llama().save_pretrained(tmp_path / "source")
    batches, found = [{"input_ids": ids} for ids in token_batches()], []
    for device in ("cpu", DEVICE):
        out, options = tmp_path / str(len(found)), {"ignore": ["lm_head"], "runs": BlockRuns(device=device)}
        calibrate_layerwise(tmp_path / "source", batches, "INT8_STATIC", out, **options)
        found.append({name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()})
    assert_same_bits(*found)


def test_neither_layer_errors_nor_an_export_read_more_of_more_modules(tmp_path):
    def reads(layers):
        model = calibrated(DEVICE, layers=layers).model
        with counting() as counts:
            measure_layer_errors(model, batches_on(DEVICE, 1))
            known_layer_errors(model, {})
            export_checkpoint(model, tmp_path / str(layers))
        return counts.reads.total()

    assert reads(1) == reads(3)


def test_observers_by_measurement_are_the_cpus():
    def choose(device):
        candidates = {"input": ["minmax", "histogram"]}
        return choose_observers(
            llama().to(device), batches_on(device, 4), "INT8_STATIC", candidates, ignore=["lm_head"]
        )

    # Losses are not the CPU's: its backward in bfloat16 has kernels of its own.
    assert choose(DEVICE).observers == choose("cpu").observers


@pytest.mark.filterwarnings("ignore:.*needs no data")
@pytest.mark.parametrize("scheme", ["INT8_STATIC", "W4A16", "NVFP4"])
def test_an_export_has_the_cpus_bytes(tmp_path, scheme):
    expected = export_checkpoint(calibrated(scheme=scheme).model, tmp_path / "cpu")
    model = calibrated(DEVICE, scheme).model
    with counting() as counts:
        found = export_checkpoint(model, tmp_path / "device")
    assert_same_bits(*(load_file(folder / "model.safetensors") for folder in (found, expected)))
    assert (found / "config.json").read_text() == (expected / "config.json").read_text()
    if scheme == "INT8_STATIC":
        held("export", counts)


def test_a_state_of_the_device_is_restored_on_the_cpu_and_back():
    state = calibrated(DEVICE).state_dict()
    for device in ("cpu", DEVICE):
        session = CalibrationSession(llama().to(device), "INT8_STATIC", ignore=["lm_head"])
        with counting() as counts:
            session.load_state_dict(state)
        assert_same_bits(session.qparams, state["qparams"])
        assert session.model.model.layers[0].mlp.up_proj.weight_scale.device == torch.device(device)
        state = session.state_dict()
    held("restoring a state", counts)


def test_the_callback_calibrates_where_lightning_runs_the_model_under_autocast():
    def validate(device, **options):
        torch.manual_seed(0)
        callback = CalibrationCallback("INT8_STATIC", show=False)
        precision = MixedPrecision("bf16-mixed", device=device)
        trainer(callback, plugins=[precision], **options).validate(Plain(), loader(), verbose=False)
        return callback.result.qparams

    assert_same_bits(validate("pretend", **on_trainer_device()), validate("cpu"))


class Padded(Plain):
    """Sequences ``(batch, tokens, 8)``; tokens that do not count are far out of the range of the others."""

    def validation_step(self, batch, batch_idx):
        self(batch["x"])


class Reversed(Padded):
    """Changes batches on the device."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {name: value.flip(1) for name, value in batch.items()}


def padded(batches):
    torch.manual_seed(0)
    data = [{"x": torch.randn(5, 8), "mask": torch.tensor([1, 1, 1, 0, i % 2])} for i in range(2 * batches)]
    for one in data:
        one["x"][one["mask"] == 0] = 1000.0
    return DataLoader(data, batch_size=2)


@pytest.mark.parametrize("sized", [True, False])
def test_a_token_mask_is_read_before_lightning_moves_the_batch(sized):
    class Unsized(IterableDataset):
        def __iter__(self):
            yield from padded(self.batches)

    def validate(batches, module=Padded, make_options=on_trainer_device, **more):
        Unsized.batches = batches
        data = padded(batches) if sized else DataLoader(Unsized(), batch_size=None)
        torch.manual_seed(0)
        callback = CalibrationCallback("INT8_STATIC", token_mask="mask", show=False, **more)
        with counting() as counts:
            trainer(callback, **make_options()).validate(module(), data, verbose=False)
        return callback.result, counts.of_package()[2]

    (found, few), (_, many) = validate(2), validate(4)
    assert few == many  # none in a batch
    assert_same_bits(found.qparams, validate(2, make_options=dict)[0].qparams)
    assert found.input_ranges["net.0"][1] < 10
    assert_same_bits(validate(4, max_batches=2)[0].qparams, found.qparams)
    changed, reads = validate(2, Reversed)
    assert changed.input_ranges["net.0"][1] < 10
    assert reads == few + 2  # the mask of the loader is not the mask of the batch


def test_batches_on_the_host_are_let_go_when_a_validation_fails():
    class Failing(Callback):
        def on_validation_batch_start(self, *_):
            assert callback.batches._on_host.keys() == {(0, 0)}
            raise RuntimeError("the user's own")

    callback = CalibrationCallback("INT8_STATIC", token_mask="mask", show=False)
    with pytest.raises(RuntimeError, match="the user's own"):
        trainer(Failing(), callback, **on_trainer_device()).validate(Padded(), padded(2), verbose=False)
    assert not callback.batches._on_host


def fit(callback, **options):
    torch.manual_seed(0)
    module = qat_modules.Regression()
    run = qat_modules.trainer(callback, max_epochs=2, limit_val_batches=0, **options)
    run.fit(module, qat_modules.loader(), qat_modules.loader())
    return module, callback


def test_training_with_learned_scales_has_the_cpus_bits():
    def learning():
        return QuantizationAwareTraining("INT8_STATIC", train="all", calibration_batches=1)

    expected, of_cpu = fit(learning())
    found, of_device = fit(learning(), **on_trainer_device())
    assert found.losses == expected.losses
    assert_same_bits({n: p.detach() for n, p in found.named_parameters()}, dict(expected.named_parameters()))
    assert_same_bits(of_device.session.qparams, of_cpu.session.qparams)


def test_a_teacher_may_lie_on_another_device_than_the_model():
    def distilling(device):
        torch.manual_seed(7)
        teacher = on_device(qat_modules.Regression(), device)
        callback = QuantizationAwareTraining("INT8_STATIC", distill=1.0, teacher=teacher, calibration_batches=1)
        return teacher, callback

    _, callback_of_cpu = distilling("cpu")
    expected, _ = fit(callback_of_cpu)
    other_teacher, callback = distilling(OTHER)
    beside_other, _ = fit(callback, **on_trainer_device())
    assert beside_other.losses == expected.losses
    assert {parameter.device for parameter in other_teacher.parameters()} == {OTHER}
    cpu_teacher, callback = distilling("cpu")
    beside_moved, _ = fit(callback, **on_trainer_device())
    assert beside_moved.losses == expected.losses
    assert {parameter.device for parameter in cpu_teacher.parameters()} == {DEVICE}


def test_a_copy_of_a_calibrated_model_is_on_the_device():
    model = copy.deepcopy(calibrated(DEVICE).model)
    scale = model.model.layers[0].mlp.up_proj.weight_scale
    assert isinstance(scale, PretendTensor)
    assert on_cpu(scale).isfinite().all()


def test_rounding_by_inputs_and_outputs_has_the_bits_of_the_cpu():
    torch.manual_seed(0)
    args, weight = QuantizationArgs(num_bits=4, strategy="group", group_size=32), torch.randn(160, 96)
    moments = [rows.T @ rows for rows in (torch.randn(512, 96), torch.randn(512, 160))]
    qparams = {"scale": torch.rand(160, 3) / 4 + 0.1}
    expected = round_by_hessian(weight, qparams, args, *moments)
    given = on_device((weight, qparams, args, *moments))
    with counting() as counts:
        found = round_by_hessian(*given)
    assert counts.reads.total() == 2  # whether a factor failed, of both
    assert torch.equal(on_cpu(found), expected)


def test_weighed_tokens_have_the_cpus_sums_and_a_batch_is_read_by_the_model_alone():
    observers = {"weight": {"name": "hessian", "weigh_tokens": True}}
    found = {}
    for device in (torch.device("cpu"), DEVICE):
        model = llama(1).float().to(device)
        session = CalibrationSession(model, "W4A16", ignore=["lm_head"], observers=observers, rounding="gptq")
        with session, torch.no_grad(), counting() as counts:
            for ids in token_batches():
                model(input_ids=ids.to(device), use_cache=False)
            found[device] = {key: observer.input_hessian for key, observer in session.data_observers.items()}
            reads = counts.reads.total()
    for key, expected in found[torch.device("cpu")].items():
        sums = on_cpu(found[DEVICE][key])
        torch.testing.assert_close(sums, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    # transformers looks at the mask, in each of two calls; the first call is compared with the copy's
    assert reads == 2 * len(token_batches()) + 1
    assert all(on_cpu(weight).any() for name, weight in session.qparams.items() if "rounded" in name)
