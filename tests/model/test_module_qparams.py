from __future__ import annotations

import copy
from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus
from torch import nn
from torch.nn import functional as F

from lightning_obs import CalibrationError, CalibrationSession, export_checkpoint, quantized
from lightning_obs.errors import CalibrationWarning
from lightning_obs.forward.calls import first_input, replace_input
from lightning_obs.forward.quantized_module import quantized_weight
from lightning_obs.model.kinds import kind_of
from lightning_obs.model.module_qparams import (
    calibrated_modules,
    changed_since,
    checksums,
    clear_qparams,
    get_scheme,
    read_qparams,
    write_qparams,
)
from lightning_obs.model.module_qparams import checksum as checksum_of_part
from lightning_obs.model.weight import matrix_shape, whole_matrix

INT8_STATIC = {
    "weights": {"num_bits": 8, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "observer": "static_minmax"},
}
INT4_WEIGHTS = {"weights": {"num_bits": 4, "strategy": "channel"}}


def calibrate(model, scheme, *inputs, **options):
    with CalibrationSession(model, scheme, **options) as session:
        for x in inputs:
            model(x)
    return session


def int8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).round().clamp(-128, 127) * scale


# ---------------------------------------------------------------------- the weight as a matrix


def conv1d_of_transformers() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(6, 4)


WITH_MATRIX = {
    "Linear": (lambda: nn.Linear(4, 6), (6, 4)),
    "Embedding": (lambda: nn.Embedding(6, 4), (6, 4)),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3), (6, 12)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3), (6, 36)),
    "grouped Conv2d": (lambda: nn.Conv2d(4, 6, 3, groups=2), (6, 18)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, 3), (6, 36)),
    "Conv1D of transformers": (conv1d_of_transformers, (6, 4)),
}


@pytest.mark.parametrize("kind", WITH_MATRIX)
def test_a_weight_is_a_matrix_of_output_channels(kind):
    make, shape = WITH_MATRIX[kind]
    assert whole_matrix(make()).shape == shape


@pytest.mark.parametrize("module", [nn.ReLU(), nn.LayerNorm(4), nn.ConvTranspose2d(4, 4, 3, groups=2)])
def test_a_module_without_output_channels_has_no_matrix(module):
    assert matrix_shape(module) is None


@pytest.mark.parametrize("kind", WITH_MATRIX)
def test_each_output_channel_is_quantized_with_its_own_scale(kind):
    module = WITH_MATRIX[kind][0]()
    calibrate(nn.Sequential(module), INT4_WEIGHTS, targets="0")
    axis = 1 if kind in ("ConvTranspose2d", "Conv1D of transformers") else 0
    weight = module.weight.detach().movedim(axis, 0)
    scale = (weight.flatten(1).abs().amax(1) / 7.5).reshape(-1, *[1] * (weight.ndim - 1))
    expected = (weight / scale).round().clamp(-8, 7) * scale
    torch.testing.assert_close(quantized_weight(module), expected.movedim(0, axis))


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.Linear(2, 2), nn.Linear),
        (nn.Embedding(2, 2), nn.Embedding),
        (nn.modules.linear.NonDynamicallyQuantizableLinear(2, 2), nn.Linear),
        (nn.Conv2d(2, 2, 1), None),
        (nn.ReLU(), None),
    ],
)
def test_compressed_tensors_holds_linear_and_embedding(module, kind):
    assert kind_of(module).stored_as is kind


# ---------------------------------------------------------------------- qparams on modules


@pytest.fixture(params=["holdable", "own"])
def calibrated(request, mlp, cnn):
    """A calibrated model, its calibrated module (one that compressed-tensors holds, one it does not), an input."""
    if request.param == "holdable":
        x = torch.randn(4, 16)
        calibrate(mlp, INT8_STATIC, x, targets="fc1")
        return mlp, mlp.fc1, x
    x = torch.randn(2, 3, 8, 8)
    calibrate(cnn, INT8_STATIC, x, targets="Conv2d")
    return cnn, cnn.conv, x


def test_qparams_are_neither_parameters_nor_buffers_nor_state(calibrated):
    model, module, _ = calibrated
    fresh = type(model)()
    assert set(read_qparams(module)) == {"weight_scale", "input_scale"}
    assert list(model.state_dict()) == list(fresh.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in fresh.named_parameters()]
    assert list(model.named_buffers()) == []
    model.load_state_dict(fresh.state_dict(), strict=True)


def test_writing_changes_neither_weights_nor_outputs(mlp):
    x, before = torch.randn(4, 16), {k: v.clone() for k, v in mlp.state_dict().items()}
    output = mlp(x)
    calibrate(mlp, INT8_STATIC, x)
    assert all(torch.equal(v, before[k]) for k, v in mlp.state_dict().items())
    assert torch.equal(mlp(x), output)
    assert "forward" not in vars(mlp.fc1)


def test_clearing_leaves_nothing(calibrated):
    model, module, _ = calibrated
    fresh = set(vars(type(module)(1, 1, 1)))
    clear_qparams(module)
    assert set(vars(module)) == fresh
    assert get_scheme(module) is None
    assert list(calibrated_modules(model)) == []


def test_what_was_written_before_is_replaced(mlp):
    calibrate(mlp, INT8_STATIC, torch.randn(4, 16))
    calibrate(mlp, INT4_WEIGHTS)
    assert set(read_qparams(mlp.fc1)) == {"weight_scale"}
    assert get_scheme(mlp.fc1).weights.num_bits == 4


def test_modules_do_not_share_a_scheme_nor_a_tensor(mlp):
    scheme = QuantizationScheme(targets=["Linear"], **INT4_WEIGHTS)
    scale = torch.ones(8, 1)
    for module in (mlp.fc1, mlp.fc2):
        write_qparams(module, scheme, {"weight_scale": scale})
    assert get_scheme(mlp.fc1) is not get_scheme(mlp.fc2)
    assert scheme.format is None
    scale.zero_()
    assert (mlp.fc1.weight_scale == 1).all()


def test_a_scale_takes_the_dtype_of_the_weight_and_a_global_scale_stays_fp32(mlp):
    mlp.bfloat16()
    scheme = QuantizationScheme(targets=["Linear"], **INT4_WEIGHTS)
    qparams = {"weight_scale": torch.ones(32, 1), "weight_global_scale": torch.ones(1)}
    write_qparams(mlp.fc1, scheme, {**qparams, "weight_zero_point": torch.ones(32, 1, dtype=torch.int8)})
    assert {name: value.dtype for name, value in read_qparams(mlp.fc1).items()} == {
        "weight_scale": torch.bfloat16,
        "weight_zero_point": torch.int8,
        "weight_global_scale": torch.float32,
    }


def test_moving_a_calibrated_model_to_bfloat16_does_not_round_its_global_scales():
    model = nn.Sequential(nn.Linear(32, 32))
    calibrate(model, "NVFP4", torch.randn(4, 32), engines="unchecked")
    before = {name: value.clone() for name, value in read_qparams(model[0]).items() if "global" in name}
    model.to(torch.bfloat16)
    assert set(before) == {"weight_global_scale", "input_global_scale"}
    for name, value in before.items():
        assert getattr(model[0], name).dtype == torch.float32
        assert torch.equal(getattr(model[0], name), value)
        assert value.bfloat16() != value


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_calibrated_modules_are_found_once_each(mlp, copied):
    model = nn.ModuleDict({"a": mlp, "b": mlp})
    calibrate(model, INT4_WEIGHTS, targets="re:.*fc1")
    assert [name for name, _ in calibrated_modules(copied(model))] == ["a.fc1"]


# ---------------------------------------------------------------------- running quantized


def test_quantized_linear_is_the_hand_calculation(mlp):
    x = torch.randn(4, 16)
    calibrate(mlp, INT8_STATIC, x, targets="fc1")
    weight_scale = mlp.fc1.weight.detach().abs().amax(1, keepdim=True) / 127.5
    hidden = F.linear(int8(x, x.abs().max() / 127.5), int8(mlp.fc1.weight, weight_scale), mlp.fc1.bias)
    with quantized(mlp) as model:
        torch.testing.assert_close(model(x), mlp.fc2(hidden.relu()))
    assert not torch.equal(mlp(x), mlp.fc2(hidden.relu()))


def test_quantized_convolution_is_the_hand_calculation(cnn):
    x = torch.randn(2, 3, 8, 8)
    calibrate(cnn, INT8_STATIC, x, targets="Conv2d")
    scale = cnn.conv.weight.detach().abs().amax((1, 2, 3), keepdim=True) / 127.5
    maps = F.conv2d(int8(x, x.abs().max() / 127.5), int8(cnn.conv.weight, scale), cnn.conv.bias, padding=1)
    with quantized(cnn):
        torch.testing.assert_close(cnn(x), cnn.head(maps.relu().mean((-2, -1))))


def test_quantized_conv1d_of_transformers_is_the_hand_calculation():
    model = nn.Sequential(conv1d_of_transformers())
    x = torch.randn(3, 4)
    calibrate(model, INT8_STATIC, x, targets="Conv1D")
    scale = model[0].weight.detach().abs().amax(0, keepdim=True) / 127.5
    with quantized(model):
        torch.testing.assert_close(
            model(x), int8(x, x.abs().max() / 127.5) @ int8(model[0].weight, scale) + model[0].bias
        )


def test_output_activations_are_quantized(cnn):
    x = torch.randn(2, 3, 8, 8)
    before = cnn.conv(x)
    scheme = {"output_activations": {"num_bits": 8, "observer": "static_minmax"}}
    calibrate(cnn, scheme, x, targets=["Conv2d", "Linear"])
    with quantized(cnn):
        torch.testing.assert_close(cnn.conv(x), int8(before, before.abs().max() / 127.5))


def test_weights_are_back_after_each_quantized_forward(calibrated):
    model, module, x = calibrated
    before = module.weight.clone()
    with quantized(model):
        model(x)
        assert torch.equal(module.weight, before)


@pytest.mark.parametrize("own_forward", [False, True])
def test_the_forward_is_back_after_the_block(calibrated, own_forward):
    model, module, x = calibrated
    if own_forward:
        module.forward = type(module).forward.__get__(module)
    before, output = vars(module).get("forward"), model(x)
    with quantized(model):
        assert not torch.equal(model(x), output)
    assert vars(module).get("forward") is before
    assert torch.equal(model(x), output)


def test_the_forward_is_back_after_an_exception(calibrated):
    model, module, _ = calibrated
    with pytest.raises(RuntimeError, match="stop"), quantized(model):
        raise RuntimeError("stop")
    assert "forward" not in vars(module)


@pytest.mark.parametrize("scheme", [INT8_STATIC, {"input_activations": {"num_bits": 4, "dynamic": True}}])
@pytest.mark.parametrize("target", ["Conv2d", "Linear"])
@pytest.mark.filterwarnings("ignore:.* stay in full precision")
def test_quantized_blocks_nest(cnn, scheme, target):
    x = torch.randn(2, 3, 8, 8)
    plain = cnn(x)
    calibrate(cnn, scheme, *([x] if scheme is INT8_STATIC else []), targets=target)
    with quantized(cnn):
        once = cnn(x)
        with quantized(cnn):
            assert torch.equal(cnn(x), once)
        assert torch.equal(cnn(x), once)
    assert torch.equal(cnn(x), plain)


def test_a_model_that_was_not_calibrated_runs_as_it_is_and_that_is_said(mlp):
    x = torch.randn(4, 16)
    expected = mlp(x)
    block = ExitStack()
    with pytest.warns(CalibrationWarning, match="checkpoint would: MLP was not calibrated, it is in full precision"):
        block.enter_context(quantized(mlp))
    with block:
        assert torch.equal(mlp(x), expected)
        assert "forward" not in vars(mlp.fc1)


def test_scales_that_are_older_than_the_weights_are_told(mlp):
    calibrate(mlp, INT8_STATIC, torch.randn(4, 16))
    with quantized(mlp):
        pass
    with torch.no_grad():
        mlp.fc2.weight *= 2
    with (
        pytest.warns(
            CalibrationWarning,
            match=r"1 parameters and buffers have changed since .*: fc2\.weight",
        ),
        quantized(mlp),
    ):
        pass


def test_a_graph_that_was_compiled_before_runs_quantized(mlp):
    x = torch.randn(4, 16)
    compiled = torch.compile(mlp, backend="eager")
    plain = compiled(x)
    calibrate(mlp, INT4_WEIGHTS)
    with quantized(mlp):
        expected = mlp(x)
        assert torch.equal(compiled(x), expected)
    assert not torch.equal(plain, expected)
    assert torch.equal(compiled(x), plain)


def test_an_empty_input_runs_quantized(calibrated):
    model, _, x = calibrated
    with quantized(model):
        assert len(model(x[:0])) == 0


@pytest.mark.parametrize("module", [nn.Linear(4, 6), nn.Conv2d(4, 6, 1)], ids=["Linear", "Conv2d"])
def test_gradients_pass_straight_through_quantized_weights(module):
    model = nn.Sequential(module)
    calibrate(model, INT4_WEIGHTS, targets="0")
    x = torch.randn(2, 4) if isinstance(module, nn.Linear) else torch.randn(2, 4, 3, 3)
    plain = torch.autograd.grad(model(x).sum(), module.weight)
    with quantized(model):
        torch.testing.assert_close(torch.autograd.grad(model(x).sum(), module.weight), plain)


def test_the_status_tells_compressed_tensors_that_scales_are_final(mlp):
    calibrate(mlp, INT4_WEIGHTS)
    assert mlp.fc1.quantization_status == QuantizationStatus.FROZEN


# ---------------------------------------------------------------------- the input of a call


A, B = torch.zeros(1), torch.ones(1)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [((A, B), {}, A), ((None, B), {}, B), ((), {"x": 3, "y": B}, B), ((A,), {"x": B}, A), ((3,), {}, None)],
)
def test_the_input_is_the_first_tensor_of_a_call(args, kwargs, expected):
    assert first_input(args, kwargs) is expected
    new_args, new_kwargs = replace_input(args, kwargs, lambda x: x + 5)
    if expected is None:
        assert (new_args, new_kwargs) == (args, kwargs)
    else:
        assert first_input(new_args, new_kwargs) == expected + 5
        assert list(new_kwargs) == list(kwargs)


@pytest.mark.parametrize("scheme", ["INT8_STATIC", "NVFP4"])
def test_qparams_follow_a_model_that_moves_before_and_inside_the_block(mlp, scheme):
    mlp.to(torch.bfloat16)
    with CalibrationSession(mlp, scheme):
        mlp(torch.randn(4, 16, dtype=torch.bfloat16))
    kept = {name: value.clone() for name, value in read_qparams(mlp.fc1).items()}
    assert kept
    with quantized(mlp):
        mlp.to("meta")  # stands for another device
        assert {value.device.type for value in read_qparams(mlp.fc1).values()} == {"meta"}
        mlp(torch.randn(4, 16, dtype=torch.bfloat16, device="meta"))
        assert not any("scale" in key for key in mlp.state_dict())
    assert {name: vars(mlp.fc1)[name].device.type for name in kept} == dict.fromkeys(kept, "meta")
    assert not list(mlp.buffers())  # plain attributes again


def test_a_loaded_checkpoint_follows_to_another_device(mlp, tmp_path):
    from lightning_obs import export_checkpoint, load_checkpoint

    with CalibrationSession(mlp, "INT8_STATIC"):
        mlp(torch.randn(4, 16))
    loaded = load_checkpoint(type(mlp)(), export_checkpoint(mlp, tmp_path / "out"))
    loaded.to("meta")
    assert loaded.fc1.input_scale.device.type == "meta"


def checksum(value):
    holder = nn.Module()
    holder.register_buffer("value", value)
    return checksums([(holder, "value")])[0]


def negated_upper_lanes(weight):
    weight[:, 3::4] *= -1


def swapped_rows(weight):
    weight[[0, 5]] = weight[[5, 0]]


def swapped_columns(weight):
    weight[:, [1, 2]] = weight[:, [2, 1]]


def rectangle_of_steps(weight):
    bits = weight.view(torch.int16)
    bits[0, 0], bits[0, 9], bits[3, 0], bits[3, 9] = bits[0, 0] + 1, bits[0, 9] - 1, bits[3, 0] - 1, bits[3, 9] + 1


@pytest.mark.parametrize("change", [negated_upper_lanes, swapped_rows, swapped_columns, rectangle_of_steps])
def test_a_change_whose_bits_sum_to_nothing_is_seen(change):
    weight = torch.randn(64, 48, dtype=torch.bfloat16)
    before = checksum(weight)
    change(weight)
    assert checksum(weight) != before


def test_two_words_of_two_tiles_cannot_change_places():
    words_per_tile = 1 << 17
    value = torch.zeros(2 * words_per_tile, dtype=torch.int32)
    value[1] = 5  # place 1 of tile 0
    moved = torch.zeros_like(value)
    moved[words_per_tile] = 5  # place 0 of tile 1
    assert checksum(value) != checksum(moved)


def test_no_small_step_of_training_goes_unnoticed():
    weight = torch.randn(32, 32, dtype=torch.bfloat16)
    seen = {checksum(weight)}
    for step in range(400):
        places = torch.randint(1024, (2 + step % 3,))
        weight.view(-1).view(torch.int16)[places] += torch.randint(0, 2, places.shape, dtype=torch.int16) * 2 - 1
        seen.add(checksum(weight))
    # A walk of so few steps hardly returns to where it was; the sum of the bits would take a few dozen values.
    assert len(seen) > 395


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("cuts", [[0, 7, 7, 500, 300_001], [0, 1, 262_144, 262_147, 300_001]])
def test_parts_cut_anywhere_add_up_to_the_whole(dtype, cuts):
    value = torch.randn(300_001).to(dtype)
    parts = [checksum_of_part(value[a:b], a) for a, b in pairwise(cuts)]
    assert int(sum(parts)) == checksum(value)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(10, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, ids):
        self.calls += 1
        return self.head(self.norm(self.embed(ids)))


@pytest.mark.parametrize("name", ["embed.weight", "norm.weight", "norm.running_mean", "head.bias", "head.weight"])
@pytest.mark.filterwarnings("ignore:.* stay in full precision")
def test_export_refuses_whatever_the_last_validation_did_not_see(name, tmp_path):
    model = Mixed().eval()
    with CalibrationSession(model, "INT8_STATIC"):
        model(torch.arange(10))
    model(torch.arange(10))
    assert changed_since(model) == []
    with torch.no_grad():
        model.state_dict()[name].view(-1)[0] += 1e-3
    assert changed_since(model) == [name]
    with pytest.raises(CalibrationError, match=rf"1 parameters and buffers have changed since .*: {name}"):
        export_checkpoint(model, tmp_path / "out")
