"""Offloaded models give what the same model gives in memory, bit for bit: qparams, quantized outputs, checkpoints."""

import shutil
from functools import cache
from weakref import WeakSet

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import remove_hook_from_submodules
from lightning.fabric import Fabric
from torch import nn
from transformers import AutoModelForCausalLM

from lightning_obs import (
    CalibrationError,
    CalibrationSession,
    CalibrationWarning,
    choose_observers,
    export_checkpoint,
    export_onnx,
    linearize_experts,
    load_checkpoint,
    quantized,
    sensitivity,
)
from lightning_obs.forward.quantized_forward import weights_kept
from lightning_obs.model.module_qparams import changed_since
from lightning_obs.model.offload import at_rest, device_of, is_offloaded
from lightning_obs.model.weight import held, model_bytes, onloaded
from lightning_obs.report.layer_errors import known_layer_errors, measure_layer_errors
from tests.support.moe_models import tiny_moe
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
from tests.support.tiny_model import save_tiny_llama
from tests.support.versions import converted_weights

W4 = {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
SCHEMES = {
    "FP8": ("FP8", {}),
    "W4A16 mse": (W4, {"observers": {"weight": "memoryless_mse"}}),
    "W4A16 rounded": (W4, {"rounding": "gptq"}),
    "NVFP4": ("NVFP4", {}),
    "kv cache": ("FP8", {"kv_cache": "FP8"}),
    "INT8": ("INT8_STATIC", {}),
    "FP8_DYNAMIC": ("FP8_DYNAMIC", {}),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("source"), torch.bfloat16)


def calibrated(model, scheme="FP8", call=None, **options):
    with CalibrationSession(model, scheme, ignore=["lm_head"], **options) as session, torch.no_grad():
        for seed in range(2 * session.needs_data):
            (call or model)(tokens(seed))
    return session


def run(model, name, folder):
    """Qparams, outputs, errors of layers and files."""
    scheme, options = SCHEMES[name]
    with torch.no_grad():
        plain = model(tokens()).logits
        session = calibrated(model, scheme, **options)
        with quantized(model):
            rounded = model(tokens()).logits
        assert torch.equal(model(tokens()).logits, plain)
    errors = [(e.name, e.sqnr, e.weight and e.weight.sqnr) for e in measure_layer_errors(model, [tokens()])]
    export_checkpoint(model, folder)
    return session.qparams, {"plain": plain, "quantized": rounded}, errors, digests(folder)


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    return cache(lambda name: run(in_memory(source, source), name, tmp_path_factory.mktemp("expected") / "out"))


@at_rest()
def where(model):
    return {
        name: value.device for name, value in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    }


@at_rest()
def trained_in(model):
    return {name for name, value in model.named_parameters(remove_duplicate=False) if value.requires_grad}


PAIRS = [
    (device_map_disk, "FP8"),
    (device_map_split, "W4A16 mse"),
    (on_cpu, "NVFP4"),
    (blocks_on_cpu, "FP8"),
    (on_disk, "kv cache"),
    (compressed_tensors_disk, "FP8"),
    (compressed_tensors_cpu, "W4A16 rounded"),
    (device_map_disk, "kv cache"),
    (compressed_tensors_disk, "NVFP4"),
    (on_disk, "W4A16 rounded"),
    (device_map_split, "INT8"),
    (compressed_tensors_disk, "kv cache"),
    (on_cpu, "FP8_DYNAMIC"),
]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("way", "scheme"), PAIRS, ids=lambda value: getattr(value, "__name__", value))
def test_an_offloaded_model_gives_what_it_gives_in_memory(way, scheme, source, expected, tmp_path):
    model = way(source, tmp_path)
    assert any(map(is_offloaded, model.modules()))
    before = where(model)
    qparams, logits, errors, files = run(model, scheme, tmp_path / "out")
    wanted = expected(scheme)
    assert equal(qparams, wanted[0])
    assert equal(logits, wanted[1])
    assert errors == wanted[2]
    assert files == wanted[3]
    assert where(model) == before


@pytest.mark.slow_but_first
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_saved_calibration_is_taken_up_by_an_offloaded_model(way, source, tmp_path):
    state = calibrated(in_memory(source, tmp_path)).state_dict()
    model = way(source, tmp_path)
    session = CalibrationSession(model, "FP8", ignore=["lm_head"])
    session.load_state_dict(state)
    assert equal(session.qparams, state["qparams"])
    assert not any(value.is_meta for value in session.qparams.values())
    assert changed_since(model) == []
    export_checkpoint(model, tmp_path / "out")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_tied_weights_are_recognized_wherever_they_rest(way, has_run, source, tmp_path):
    model = way(source, tmp_path)
    if has_run:
        with torch.no_grad():
            model(tokens())
    assert CalibrationSession(model, "FP8").plan.left_out == {"lm_head": "tied to model.embed_tokens"}
    with pytest.raises(CalibrationError, match=r"shares its weight with model.embed_tokens \(tied\).*lm_head"):
        CalibrationSession(model, "FP8", targets=["lm_head"])
    whole = in_memory(source, tmp_path)
    parameters = sum(parameter.nbytes for parameter in whole.parameters())
    assert model_bytes(model) - sum(b.nbytes for b in model.buffers()) == parameters


def test_a_weight_that_changes_where_it_rests_is_found(source, tmp_path):
    model = on_cpu(source, tmp_path)
    calibrated(model)
    assert changed_since(model) == []
    projection = model.model.layers[1].mlp.up_proj
    projection._hf_hook.weights_map["weight"][0, 0] += 1.0
    assert changed_since(model) == ["model.layers.1.mlp.up_proj.weight"]
    with pytest.warns(CalibrationWarning, match=r"changed since.*up_proj"), quantized(model):
        pass
    with pytest.raises(CalibrationError, match="have changed since"):
        export_checkpoint(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_loaded_whole_again_keeps_its_calibration(source, tmp_path, expected):
    model = on_cpu(source, tmp_path)
    calibrated(model)
    remove_hook_from_submodules(model)
    assert not any(map(is_offloaded, model.modules()))
    model.tie_weights()
    with torch.no_grad(), quantized(model):
        assert torch.equal(model(tokens()).logits, expected("FP8")[1]["quantized"])


@pytest.mark.parametrize("way", [device_map_disk, blocks_on_cpu, compressed_tensors_disk], ids=lambda way: way.__name__)
def test_weights_come_in_for_a_block_and_go(way, source, tmp_path):
    model, whole = way(source, tmp_path), in_memory(source, tmp_path)
    calibrated(model)
    name = "model.layers.0.mlp.up_proj"
    module, wanted = model.get_submodule(name), whole.get_submodule(name).weight
    with onloaded(module):
        with held(module) as matrix:
            assert torch.equal(matrix, wanted)
        assert torch.equal(module.weight, wanted)  # the inner block did not take it away
    assert is_offloaded(module)
    assert device_of(model) == torch.device("cpu")
    with pytest.raises(ValueError, match="of the user"), held(module):
        raise ValueError("of the user")
    assert is_offloaded(module)
    [error] = [e for e in known_layer_errors(model, {}) if e.name == name]
    assert error.weight.sqnr > 20


def test_generating_keeps_no_weights_of_an_offloaded_model(source, tmp_path):
    model = on_disk(source, tmp_path)
    calibrated(model)
    projection = model.model.layers[0].mlp.up_proj
    with torch.no_grad(), quantized(model), weights_kept(model):
        model(tokens())
        assert projection.quantized_forward.weight_cache is None


@pytest.mark.slow_but_first
@converted_weights
@pytest.mark.parametrize("way", [on_disk, compressed_tensors_cpu], ids=lambda way: way.__name__)
def test_experts_are_linearized_and_then_offloaded(way, tmp_path):
    found = []
    for offload in (False, True):
        torch.manual_seed(0)
        model = tiny_moe("mixtral").eval()
        linearize_experts(model)
        if offload and way is on_disk:
            disk_offload(model, tmp_path / "dat", execution_device="cpu")
        elif offload:
            from compressed_tensors.offload import set_onload_device

            set_onload_device(model, "cpu")
        options = {"ignore": ["lm_head", "re:.*gate$"], "calibrate_all_experts": True, "engines": "unchecked"}
        with CalibrationSession(model, "FP8", **options) as session, torch.no_grad():
            model(tokens() % 128)
        folder = export_checkpoint(model, tmp_path / f"out{offload}")
        found.append((session.qparams, digests(folder)))
    assert equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@converted_weights
@pytest.mark.parametrize("dispatch", [cpu_offload, "compressed-tensors"])
def test_experts_in_one_parameter_are_not_taken_apart_where_they_are_offloaded(dispatch):
    from compressed_tensors.offload import set_onload_device

    model = tiny_moe("mixtral")
    cpu_offload(model, execution_device="cpu") if dispatch is cpu_offload else set_onload_device(model, "cpu")
    with pytest.raises(CalibrationError, match=r"offloaded, and cannot be taken apart.*Remedy: load the model"):
        linearize_experts(model)


def test_a_module_with_convolutions_that_is_offloaded_is_calibrated_and_shipped(tmp_path):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()

    x, files = torch.randn(2, 3, 8, 8), []
    for name, model in (("whole", build()), ("offloaded", cpu_offload(build(), "cpu", offload_buffers=True))):
        with CalibrationSession(model, "INT8_STATIC", targets=["Linear", "Conv2d"]), torch.no_grad():
            model(x)
        with torch.no_grad(), quantized(model):
            expected = model(x)
        files.append(digests(export_checkpoint(model, tmp_path / name)))
    assert files[0] == files[1]
    assert torch.equal(load_checkpoint(build(), tmp_path / "offloaded")(x), expected)
    with pytest.raises(CalibrationError, match="cannot be loaded into a model that is offloaded"):
        load_checkpoint(model, tmp_path / "offloaded")
    with pytest.raises(CalibrationError, match="sharded over ranks, or offloaded"):
        export_onnx(model, tmp_path / "model.onnx", x)


CANDIDATES = {"FP8": "FP8", "W4A16": {"scheme": W4, "observers": {"weight": "hessian"}, "rounding": "gptq"}}


@pytest.fixture(scope="module")
def measured(source):
    return cache(lambda batches: sensitivity(in_memory(source, source), batches, CANDIDATES, **MEASURED))


MEASURED = {"ignore": ["lm_head"], "calibration": [tokens(1)]}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_sensitivities_of_an_offloaded_model_are_those_in_memory(way, source, measured, tmp_path):
    model = way(source, tmp_path)
    model.model.embed_tokens.requires_grad_(False)
    before, trained = where(model), trained_in(model)
    for batches in ((tokens(),), None):
        found, expected = sensitivity(model, batches, CANDIDATES, **MEASURED), measured(batches)
        assert (found.layers, found.groups) == (expected.layers, expected.groups)
    assert where(model) == before
    assert trained_in(model) == trained


def test_a_sensitivity_keeps_no_weights_of_an_offloaded_model(source, tmp_path):
    """Autograd would, of each module that ran, until backward has reached it."""
    model, here, seen = on_disk(source, tmp_path), WeakSet(), []
    for module in map(model.get_submodule, ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")):
        hook = module._hf_hook

        def bring_in(module, *args, before=hook.pre_forward, **kwargs):
            seen.append(len(here))
            found = before(module, *args, **kwargs)
            here.add(module.weight)
            return found

        hook.pre_forward = bring_in
    before = where(model)
    sensitivity(model, [tokens()], ["W8A8"], ignore=["lm_head"])
    assert seen
    assert not any(seen)
    assert where(model) == before


def test_observers_of_an_offloaded_model_are_chosen_as_in_memory(source, tmp_path):
    batches, candidates = [tokens(seed) for seed in range(4)], {"weight": ["memoryless_mse", "imatrix_mse"]}
    found = [
        choose_observers(way(source, tmp_path), batches, W4, candidates, ignore=["lm_head"])
        for way in (in_memory, device_map_split)
    ]
    assert found[0].observers == found[1].observers
    assert found[0].losses == found[1].losses


def test_a_model_in_fabric_that_moves_nothing(source, tmp_path, expected):
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model = fabric.setup(device_map_disk(source, tmp_path), move_to_device=False)
    session = calibrated(model)
    assert equal(session.qparams, expected("FP8")[0])
    assert digests(export_checkpoint(model, tmp_path / "out")) == expected("FP8")[3]


@pytest.mark.parametrize("way", [device_map_disk, on_disk, compressed_tensors_disk])
def test_offloaded_weights_whose_files_are_gone_are_named_and_nothing_is_written(way, source, tmp_path):
    copied = shutil.copytree(source, tmp_path / "copied")
    model = way(copied, tmp_path / "offloaded")
    calibrated(model, "FP8_DYNAMIC")
    for folder in (copied, tmp_path / "offloaded"):
        shutil.rmtree(folder, ignore_errors=True)
    with pytest.raises(CalibrationError, match=r"offloaded weights cannot be read: .*Got FileNotFoundError: .*Remedy"):
        export_checkpoint(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_exported_from_disk_loads_with_equal_outputs(source, expected, tmp_path):
    model = compressed_tensors_disk(source, tmp_path)
    calibrated(model)
    export_checkpoint(model, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, expected("FP8")[1]["quantized"])
