"""Whole models on a device: calibration, autocast, training, export, peak memory."""

import warnings

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_obs import (
    CalibrationCallback,
    CalibrationSession,
    QuantizationAwareTraining,
    export_checkpoint,
    load_checkpoint,
    quantized,
)
from lightning_obs.observers import Observer
from lightning_obs.report.layer_errors import measure_layer_errors
from tests.callbacks import qat_modules
from tests.callbacks.calibration_modules import Plain, loader, trainer
from tests.forward.quantized_modules import calibrated, train_quantized, two_layers
from tests.gpu.test_observers import no_waiting
from tests.numerics.fake_quantize_cases import quiet

WEIGHTS_ONLY = ["W4A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16"]


def llama(dtype=torch.bfloat16, layers=2):
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=layers, **sizes)).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # not the buffers, which loading leaves in float32
    return model


def batches(device, count=2):
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 128, (2, 32), generator=generator) for _ in range(count)]
    return [{"input_ids": each.to(device), "use_cache": False} for each in ids]


@torch.no_grad()
def calibrate(device, scheme, dtype=torch.bfloat16, **options):
    model = llama(dtype).to(device)
    with CalibrationSession(model, scheme, ignore=["lm_head"], **options) as session:
        for batch in batches(device) if session.needs_data else ():
            model(**batch)
    return session


@pytest.mark.parametrize("scheme", WEIGHTS_ONLY)
def test_weights_have_the_cpus_qparams_and_an_export_its_bytes(device, scheme, tmp_path):
    expected, found = calibrate("cpu", scheme), calibrate(device, scheme)
    for name, value in expected.qparams.items():
        assert torch.equal(found.qparams[name].float(), value.float()), name
    assert found.model.model.layers[0].mlp.up_proj.weight_scale.device.type == device.type
    folders = (export_checkpoint(each.model, tmp_path / str(n)) for n, each in enumerate((expected, found)))
    one, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one)


@pytest.mark.parametrize("scheme", ["INT8_STATIC", "FP8"])
def test_ranges_of_activations_are_near_the_cpus(device, scheme):
    expected, found = (calibrate(where, scheme, torch.float32) for where in ("cpu", device))
    assert found.result.input_ranges.keys() == expected.result.input_ranges.keys()
    for name, ends in expected.result.input_ranges.items():
        assert found.result.input_ranges[name] == pytest.approx(ends, rel=1e-3, abs=1e-4), name


def test_the_kv_cache_is_calibrated_and_generated_with(device):
    session = calibrate(device, "FP8", kv_cache="FP8_HEAD")
    assert session.model.model.layers[0].self_attn.k_scale.device.type == device.type
    with quantized(session.model), torch.no_grad():
        written = session.model.generate(batches(device)[0]["input_ids"], max_new_tokens=3, do_sample=False)
    assert written.shape == (2, 35)


def test_the_host_waits_for_nothing_in_a_batch_of_a_session(device):
    model = llama().to(device)
    with torch.no_grad(), CalibrationSession(model, "INT8_STATIC", ignore=["lm_head"]) as session:
        model.model.layers[0].mlp(torch.randn(1, 8, 128, dtype=torch.bfloat16, device=device))  # imports and tables
        with no_waiting(device):
            for _ in range(2):
                model.model.layers[0].mlp(torch.randn(1, 8, 128, dtype=torch.bfloat16, device=device))
        model(**batches(device)[0])
    assert session.result.input_ranges


@pytest.mark.parametrize(
    "rounding", [None, "gptq", {"name": "gptq", "inputs": "quantized"}], ids=["nearest", "gptq", "on quantized inputs"]
)
def test_what_a_layer_loses_is_what_it_loses_on_the_cpu(device, rounding):
    options = {"observers": {"weight": "hessian"}, "rounding": rounding} if rounding else {}
    found = []
    for where in ("cpu", device):
        model = calibrate(where, {"weights": {"num_bits": 4, "group_size": 32}}, torch.float32, **options).model
        found.append({error.name: error.sqnr for error in measure_layer_errors(model, batches(where))})
    assert found[1] == pytest.approx(found[0], abs=0.5)


def test_a_trainer_calibrates_where_it_runs_the_model_under_autocast(device):
    def calibrated_on(accelerator):
        torch.manual_seed(0)
        callback = CalibrationCallback("INT8_STATIC", show=False)
        run = trainer(callback, accelerator=accelerator, devices=1, precision="bf16-mixed")
        run.validate(Plain(), loader(), verbose=False)
        return callback.result.qparams

    found = calibrated_on({"cpu": "cpu", "cuda": "gpu"}[device.type])
    for name, value in calibrated_on("cpu").items():
        torch.testing.assert_close(found[name], value, rtol=0.02, atol=0)


def test_a_state_of_the_device_is_restored_on_the_cpu(device):
    session = calibrate(device, "INT8_STATIC")
    restored = CalibrationSession(llama(), "INT8_STATIC", ignore=["lm_head"])
    restored.load_state_dict(session.state_dict())
    assert all(torch.equal(restored.qparams[name].cpu(), value.cpu()) for name, value in session.qparams.items())


def test_an_exported_model_loads_on_the_device_and_answers_as_the_calibrated_one(device, tmp_path):
    session = calibrate(device, "W4A16")
    loaded = load_checkpoint(llama().to(device), export_checkpoint(session.model, tmp_path / "out"))
    with quantized(session.model), torch.no_grad():
        expected = session.model(**batches(device)[0]).logits
    with quantized(loaded), torch.no_grad():
        assert torch.equal(loaded(**batches(device)[0]).logits, expected)


# ---------------------------------------------------------------------- training


def fit(device, **options):
    torch.manual_seed(0)
    callback = QuantizationAwareTraining("INT8_STATIC", calibration_batches=1, **options)
    module = qat_modules.Regression()
    accelerator = {"cpu": "cpu", "cuda": "gpu"}[device.type]
    run = qat_modules.trainer(callback, accelerator=accelerator, devices=1, limit_val_batches=0)
    run.fit(module, qat_modules.loader(), qat_modules.loader())
    return module.losses


@pytest.mark.parametrize("train", ["weights", "all"])
def test_training_through_the_quantization_has_the_cpus_losses(device, train):
    assert fit(device, train=train) == pytest.approx(fit(torch.device("cpu"), train=train), rel=0.02)


@quiet
@pytest.mark.parametrize("scheme", ["INT8_STATIC", "W4A16", "NVFP4"])
def test_a_compiled_training_step_has_the_eager_gradients(device, scheme):
    x = torch.randn(2, 3, 128, device=device)
    model = calibrated(two_layers().to(device), scheme, x, engines="unchecked")
    train_quantized(model)
    torch.compiler.reset()
    gradients = []
    for run in (model, torch.compile(model, backend="inductor" if device.type == "cuda" else "aot_eager")):
        model.zero_grad()
        run(x).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for eager, compiled in zip(*gradients, strict=True):
        assert (compiled - eager).norm() <= 0.02 * eager.norm()  # a fused step may round an input to the next level


# ---------------------------------------------------------------------- several devices


def test_a_model_on_two_devices_is_calibrated_where_each_layer_lies(two_devices):
    accelerate = pytest.importorskip("accelerate")
    first, second = map(str, two_devices)
    layers = {"model.layers.0": first, "model.layers.1": second}
    places = {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": second, "lm_head": second}
    model = accelerate.dispatch_model(llama(), places | layers, main_device=first, force_hooks=True)
    with torch.no_grad(), CalibrationSession(model, "INT8_STATIC", ignore=["lm_head"]) as session:
        for batch in batches(two_devices[0]):
            model(**batch)
    found = [layer.mlp.up_proj.weight_scale.device for layer in model.model.layers]
    assert found == list(two_devices)
    expected = calibrate("cpu", "INT8_STATIC").qparams
    for name, value in session.qparams.items():
        torch.testing.assert_close(value, expected[name], rtol=0.02, atol=0)


def test_a_teacher_stays_on_the_device_where_it_lies(two_devices):
    teacher = qat_modules.Regression().to(two_devices[1])
    losses = fit(two_devices[0], distill=1.0, teacher=teacher)
    assert all(loss == loss for loss in losses)
    assert {parameter.device for parameter in teacher.parameters()} == {two_devices[1]}


# ---------------------------------------------------------------------- memory


def peak(device, work):
    """Most bytes on the device at once in ``work``, above what it held before; a CPU's are not counted."""
    if device.type != "cuda":
        work()
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(
    ("name", "for_each_error"),
    [
        ("memoryless_minmax", 0),
        ("memoryless_mse", 4),
    ],  # all errors of a search are kept until it is known where it ends
)
def test_observing_a_weight_takes_no_more_memory_for_more_rows_but_for_its_errors(device, name, for_each_error):
    args = QuantizationArgs(num_bits=4, group_size=128)
    rows, taken = (8192 if device.type == "cuda" else 64), []
    for times in (1, 4):
        weight = torch.randn(rows * times, 4096, dtype=torch.bfloat16, device=device)
        observer = Observer.load_from_registry(name, base_name="weight", args=args)
        taken.append(peak(device, lambda o=observer, w=weight: o(w)))
    scales, candidates = 3 * rows * 4096 // 128, 20
    assert taken[1] <= taken[0] + scales * (candidates * for_each_error + 64)  # ranges and indices


def test_a_calibration_adds_little_to_what_the_model_takes(device):
    model, batch = llama().to(device), batches(device)[0]
    session = CalibrationSession(model, "INT8_STATIC", ignore=["lm_head"], observers={"input": "histogram"})

    def run():
        session.attach()
        with torch.no_grad():
            model(**batch)
        session.finalize()

    assert peak(device, run) < 2**28  # 14 histograms of half a megabyte, tiles
    assert session.result.batches == 1


def test_a_network_of_ones_own_layers_is_quantized_on_the_device(device):
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)).to(device)
    x = torch.randn(2, 4, 8, device=device)
    schemes = {"targets": ["Linear", "Conv1d"], "weights": {"num_bits": 8, "strategy": "channel"}}
    with torch.no_grad():
        plain = model(x)
        CalibrationSession(model, schemes).finalize()
        with quantized(model):
            assert 0 < (model(x) - plain).abs().max() < 0.1


def waits(device, layers):
    """How often the host waits in ``finalize()`` of a model of so many layers."""
    model = llama(layers=layers).to(device)
    session = CalibrationSession(model, "INT8_STATIC", ignore=["lm_head"], observers={"weight": "memoryless_mse"})
    session.attach()
    with torch.no_grad():
        model(**batches(device)[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        session.finalize()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(each.message) for each in caught)


def test_the_host_waits_as_often_for_three_layers_as_for_one(device):
    waits(device, 1)  # tables are made once
    assert waits(device, 3) == waits(device, 1)
