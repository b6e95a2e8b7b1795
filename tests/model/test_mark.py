"""A copy of a model is the user's: whenever it is made, nothing of this package is on it but scales."""

import copy
import io
import pickle
import warnings
from contextlib import contextmanager

import peft
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_obs import CalibrationSession, export_checkpoint, load_checkpoint, quantized
from lightning_obs.forward.quantized_forward import quantize_training_forward
from lightning_obs.forward.quantized_module import Switch
from lightning_obs.model.mark import is_inside_quantized, keep_hook_out, set_attributes
from lightning_obs.model.module_qparams import calibrated_modules, changed_since, get_scheme, read_qparams
from lightning_obs.report.layer_errors import measure_layer_errors
from tests.calibration.expert_blocks import INDEX, linear_block
from tests.forward.quantized_modules import EVERYTHING, Everything, calibrated, tokens
from tests.support.attention_models import attention
from tests.support.moe_models import HIDDEN

STATIC = "INT8_STATIC"
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs")


class OwnCopy(nn.Sequential):
    """Copies itself by hand, as fx.GraphModule does."""

    def __deepcopy__(self, memo):
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "old pickle": lambda model: pickle.loads(pickle.dumps(model, protocol=1)),
    "torch.save": through_torch_save,
    "AveragedModel": lambda model: AveragedModel(model).module,
    "inside another": lambda model: copy.deepcopy(nn.ModuleDict({"net": model}))["net"],
}


@contextmanager
def session(model):
    with CalibrationSession(model, EVERYTHING):
        yield
        model(tokens())


@contextmanager
def training(model):
    calibrated(model, EVERYTHING, tokens())
    undos = [
        quantize_training_forward(module, Switch(), output=get_scheme(module).output_activations is not None)
        for _, module in calibrated_modules(model)
    ]
    yield
    for undo in undos:
        undo()


@contextmanager
def inside_quantized(model):
    calibrated(model, EVERYTHING, tokens())
    with quantized(model):
        yield


@contextmanager
def quantized_in_quantized_in_a_session(model):
    calibrated(model, EVERYTHING, tokens())
    with CalibrationSession(model, EVERYTHING):
        with quantized(model), quantized(model):
            yield
        model(tokens())


PLACES = [session, training, inside_quantized, quantized_in_quantized_in_a_session]


def remains(model):
    """What stands on each module, scales aside."""
    scales = {"quantization_scheme", "quantization_status", "calibrated_checksums"}
    return {
        name: (
            {key for key in vars(module) if key not in scales} - set(read_qparams(module)),
            [len(getattr(module, table)) for table in HOOKS],
            list(module._buffers),
            sorted(module._non_persistent_buffers_set),
        )
        for name, module in model.named_modules()
    }


@pytest.mark.slow_but_first
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_but_scales_is_on_a_copy(way, place):
    model = Everything().eval()
    before = remains(model)
    with place(model):
        expected = {name: read_qparams(module) for name, module in model.named_modules()}
        copied = WAYS[way](model)
        assert remains(copied)[""] == before[""]
        assert way == "copy" or remains(copied) == before  # a shallow copy has the same children
        for name, module in copied.named_modules():
            found = read_qparams(module)
            assert all(torch.equal(found[key], value) for key, value in expected[name].items()), name
            assert found.keys() == expected[name].keys()
    assert remains(model) == before
    assert remains(copied) == before


@pytest.mark.parametrize("way", [way for way in WAYS if way != "copy"])
def test_what_a_copy_reads_is_not_observed(way):
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(8, 16)
    with CalibrationSession(model, STATIC) as calibration:
        model(data)
        WAYS[way](model)(100 * data)
    assert calibration.result.batches == 1
    torch.testing.assert_close(model[0].input_scale, data.abs().max().reshape(1) / 127.5)


def test_a_class_that_copies_itself_copies_nothing_of_ours():
    torch.manual_seed(0)
    model, data = OwnCopy(nn.Linear(16, 4)), torch.randn(8, 16)
    before = remains(model)
    with CalibrationSession(model, STATIC):
        model(data)
        copied = copy.deepcopy(model)
        copied(100 * data)
        assert remains(copied) == before
    torch.testing.assert_close(model[0].input_scale, data.abs().max().reshape(1) / 127.5)


def test_a_copy_needs_no_token_mask():
    class Masked(nn.Linear):
        def forward(self, x, mask=None):
            return super().forward(x)

    model = nn.ModuleDict({"net": Masked(4, 4)})["net"]
    with CalibrationSession(model, STATIC, token_mask="mask"):
        model(torch.ones(2, 3, 4), mask=torch.ones(2, 3))
        copy.deepcopy(model)(torch.ones(2, 3, 4))


@pytest.mark.parametrize("place", PLACES)
def test_a_pickle_names_nothing_of_this_package(place):
    model = Everything().eval()
    with place(model):
        assert b"lightning_obs" not in pickle.dumps(model.conv)
        assert b"lightning_obs" not in pickle.dumps(model.linear)


@pytest.mark.parametrize("place", PLACES[1:])
def test_a_copy_of_a_quantized_model_runs_in_full_precision_until_it_is_asked_not_to(place):
    model, plain = Everything().eval(), Everything().eval()
    plain.load_state_dict(model.state_dict())
    with place(model), torch.no_grad():
        copied = copy.deepcopy(model)
        assert torch.equal(copied(tokens()), plain(tokens()))
        with quantized(copied):
            assert not torch.equal(copied(tokens()), plain(tokens()))
            changed = copied(tokens())
    with quantized(model), torch.no_grad():
        assert torch.equal(model(tokens()), changed)


def test_quantizing_a_copy_inside_a_session_leaves_the_session_alone():
    model, data = nn.Sequential(nn.Linear(16, 16)), torch.randn(8, 16)
    calibrated(model, STATIC, data)
    with CalibrationSession(model, STATIC) as calibration:
        copied = copy.deepcopy(model)
        with quantized(copied):
            copied(100 * data)
            assert not is_inside_quantized(model[0])
            model(data)
    assert calibration.result.batches == 1
    torch.testing.assert_close(model[0].input_scale, data.abs().max().reshape(1) / 127.5)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_loaded_checkpoint_stays_quantized_wherever_it_is_made(way, tmp_path):
    model = calibrated(Everything().eval(), EVERYTHING, tokens())
    loaded = load_checkpoint(Everything(), export_checkpoint(model, tmp_path / "out")).eval()
    with torch.no_grad():
        expected = loaded(tokens())
        with quantized(loaded):
            copied = WAYS[way](loaded)
        assert torch.equal(copied(tokens()), expected)
        assert remains(copied) == remains(loaded)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("scheme", [{"scheme": attention()}, {"scheme": None, "kv_cache": "FP8"}], ids=["qkv", "kv"])
@pytest.mark.parametrize("place", ["session", "quantized"])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "copy"])
def test_a_copy_has_its_own_attention(way, place, scheme, tiny_llama, batches):
    model = tiny_llama()
    expected = model(**batches[0]).logits
    before = remains(model)

    def check():
        copied = WAYS[way](model)
        assert remains(copied) == before
        assert {m.config._attn_implementation for m in copied.modules() if hasattr(m, "config")} == {"sdpa"}
        assert len({id(m.config) for m in copied.modules() if hasattr(m, "config")}) == 1
        assert torch.equal(copied(**batches[0]).logits, expected)
        return copied

    with CalibrationSession(model, **scheme):
        model(**batches[0])
        if place == "session":
            copied = check()
    if place == "quantized":
        with quantized(model):
            copied = check()
    assert torch.equal(copied(**batches[0]).logits, expected)
    assert remains(model) == before


def test_a_copy_of_experts_under_calibration_runs_by_itself():
    block = linear_block()
    before = remains(block)
    with CalibrationSession(block, STATIC, targets=["re:experts.*proj$"], calibrate_all_experts=True):
        x = torch.randn(2, 4, HIDDEN)
        block(x, INDEX)
        copied = copy.deepcopy(block)
        assert remains(copied) == before
        copied(1000 * x, INDEX)
    assert max(float(m.input_scale) for _, m in calibrated_modules(block)) < 1


def test_a_model_is_copied_while_its_layer_errors_are_measured():
    model, data, copies = nn.Sequential(nn.Linear(16, 16)), torch.randn(8, 16), []
    calibrated(model, STATIC, data)
    before = remains(model)
    handle = model.register_forward_hook(lambda *_: copies.append(copy.deepcopy(model[0])))
    measure_layer_errors(model, [data])
    handle.remove()
    assert remains(copies[0]) == remains(model[0])
    assert remains(model) == before


def test_a_module_that_holds_its_session_is_copied_with_a_session_of_its_own():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 4))

    holder, data = Holder(), torch.randn(8, 16)
    holder.session = CalibrationSession(holder.net, STATIC)
    with holder.session:
        holder.net(data)
        copied = copy.deepcopy(holder)
        assert not copied.session.is_attached
    with copied.session:
        copied.net(10 * data)
    torch.testing.assert_close(copied.net[0].input_scale, 10 * holder.net[0].input_scale)


@pytest.fixture
def adapted():
    """A calibrated model whose first layer has LoRA adapters, and inputs of it."""
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["0"], r=4, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said by peft's imports
        wrapper = peft.get_peft_model(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), config)
    model, data = wrapper.get_base_model().eval(), torch.randn(4, 8)
    with CalibrationSession(model, "INT8_STATIC"):
        model(data)
    return model, data


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("copy", "AveragedModel")])
def test_a_copy_of_a_base_layer_is_made_without_its_adapters(way, adapted):
    base_layer = adapted[0][0].base_layer
    copied = WAYS[way](base_layer)
    assert not any(isinstance(value, nn.Module) for value in vars(copied).values())
    assert b"lora" not in pickle.dumps(base_layer)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "copy"])
def test_a_copy_of_a_model_with_adapters_runs_quantized_with_its_own(way, adapted):
    model, data = adapted
    copied = WAYS[way](model)
    with torch.no_grad(), quantized(model), quantized(copied):
        expected = model(data)
        assert torch.equal(copied(data), expected)
    with torch.no_grad():
        copied[0].lora_A["default"].weight.add_(1)
    assert changed_since(copied) == ["0.base_layer.weight", "0.lora_A.default.weight"]
    assert changed_since(model) == []


def test_hooks_of_others_are_copied_and_can_be_removed_afterwards():
    model = nn.Linear(4, 4)
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    undo = keep_hook_out(model, model.register_forward_hook(lambda *_: calls.append(2)))
    other = model.register_forward_pre_hook(lambda *_: calls.append(3))
    copied = copy.deepcopy(model)
    copied(torch.ones(1, 4))
    assert calls == [3, 1]
    undo()
    handle.remove()
    other.remove()
    assert remains(model) == remains(nn.Linear(4, 4))


def test_attributes_that_are_taken_back_in_any_order_leave_what_was_there():
    model = nn.Linear(4, 4)
    model.forward = first = lambda x: x
    one, two, three = (set_attributes(model, forward=value, label=value) for value in (lambda x: x + 1, "b", "c"))
    assert copy.copy(model).forward is first
    two()
    assert model.label == "c"
    three()
    assert model.forward(1) == 2
    one()
    assert model.forward is first
    assert "label" not in vars(model)
    assert "__reduce_ex__" not in vars(model)
