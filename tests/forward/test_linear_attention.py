"""linearize_attention: the same outputs, whatever the arguments; quantized, trained, exported and loaded."""

import copy
import itertools
import pickle

import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_obs import (
    CalibrationError,
    CalibrationSession,
    QuantizationAwareTraining,
    export_checkpoint,
    export_onnx,
    export_program,
    linearize_attention,
    load_checkpoint,
    quantized,
)
from lightning_obs.forward.linear_attention import LinearAttention
from tests.callbacks.calibration_modules import trainer
from tests.support.lightning_package import L
from tests.support.rank_processes import run_ranks

OPTIONS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "own sizes of keys and values": {"kdim": 6, "vdim": 10, "batch_first": True},
    "added keys": {"add_bias_kv": True, "add_zero_attn": True},
    "an odd number of heads": {"batch_first": True, "num_heads": 1},
}


def attention(num_heads=4, **options):
    module = nn.MultiheadAttention(8, num_heads, **options).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def in_layout(module, batch, tokens, channels):
    x = torch.randn(batch, tokens, channels)
    return x if module.batch_first else x.transpose(0, 1)


def masks(queries, keys, heads):
    """Masks of both kinds, for two samples; every query sees the first key."""
    seen = torch.rand(queries, keys) < 0.3
    seen[:, 0] = False
    padded = torch.zeros(2, keys, dtype=torch.bool)
    padded[1, -2:] = True
    return {
        "attention": [None, seen, torch.randn(queries, keys), torch.randn(2 * heads, queries, keys)],
        "padding": [None, padded, torch.randn(2, keys)],
    }


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask is deprecated")
def test_outputs_and_weights_stay_the_same_with_every_argument(case):
    module = attention(**OPTIONS[case])
    before = copy.deepcopy(module)
    assert linearize_attention(module) == [""]
    query = in_layout(module, 2, 5, 8)
    key, value = in_layout(module, 2, 7, module.kdim), in_layout(module, 2, 7, module.vdim)
    of_kind = masks(5, 7, module.num_heads)
    choices = itertools.product(of_kind["attention"], of_kind["padding"], [True, False], [True, False])
    for attn_mask, padding, need_weights, average in choices:
        options = {
            "attn_mask": attn_mask,
            "key_padding_mask": padding,
            "need_weights": need_weights,
            "average_attn_weights": average,
        }
        expected, expected_weights = before(query, key, value, **options)
        output, weights = module(query, key, value, **options)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
        assert output.shape == expected.shape
        if need_weights:
            torch.testing.assert_close(weights, expected_weights, atol=1e-5, rtol=1e-4)
        else:
            assert weights is expected_weights is None


@pytest.mark.parametrize("case", ["plain", "batch first", "added keys"])
def test_one_sample_without_a_batch_dimension(case):
    module = attention(**OPTIONS[case])
    before = copy.deepcopy(module)
    linearize_attention(module)
    x, padding = torch.randn(5, 8), torch.tensor([False, False, False, True, True])
    mask = torch.randn(4, 5, 5)
    for options in ({}, {"key_padding_mask": padding}, {"attn_mask": mask}, {"need_weights": False}):
        for given, expected in zip(module(x, x, x, **options), before(x, x, x, **options), strict=True):
            if expected is None:
                assert given is None
            else:
                torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_causal_hint_needs_its_mask(need_weights):
    module = attention(batch_first=True)
    before = copy.deepcopy(module)
    linearize_attention(module)
    x = torch.randn(2, 5, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    options = {"attn_mask": mask, "is_causal": True, "need_weights": need_weights}
    torch.testing.assert_close(module(x, x, x, **options)[0], before(x, x, x, **options)[0], atol=1e-5, rtol=1e-4)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        module(x, x, x, is_causal=True)


def test_gradients_and_dropout_are_those_of_the_module_before():
    module = attention(dropout=0.5, batch_first=True).train()
    before = copy.deepcopy(module)
    linearize_attention(module)
    x = torch.randn(2, 5, 8)
    outputs = []
    for attn in (module, before):
        torch.manual_seed(1)
        output, _ = attn(x, x, x)
        output.pow(2).sum().backward()
        outputs.append(output)
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-4)
    rows = torch.cat([module.q_proj.weight.grad, module.k_proj.weight.grad, module.v_proj.weight.grad])
    torch.testing.assert_close(rows, before.in_proj_weight.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", OPTIONS)
def test_a_state_dict_from_before_is_loaded(case):
    source, module = attention(**OPTIONS[case]), attention(**OPTIONS[case])
    linearize_attention(module)
    state = source.state_dict()
    holder = nn.ModuleDict({"attn": module})
    holder.load_state_dict({f"attn.{name}": value for name, value in state.items()})
    linearize_attention(source)
    for name, value in source.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    assert {name for name in module.state_dict() if "proj" in name} >= {"q_proj.weight", "out_proj.weight"}


def test_objects_hooks_modes_and_gradients_flags_are_kept():
    module = attention(batch_first=True).train()
    module.in_proj_weight.requires_grad_(False)
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    holder = nn.ModuleDict({"one": module, "two": module})
    assert linearize_attention(holder) == ["one"]
    assert holder["one"] is holder["two"] is module
    assert isinstance(module, nn.MultiheadAttention)
    assert not module.q_proj.weight.requires_grad
    assert module.q_proj.bias.requires_grad
    assert module.q_proj.training
    assert linearize_attention(holder) == []
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(copy.deepcopy(module).eval()(x, x, x)[0], module.eval()(x, x, x)[0])
    assert calls


def test_it_is_pickled():
    module = attention(batch_first=True)
    linearize_attention(module)
    x = torch.randn(2, 5, 8)
    assert torch.equal(pickle.loads(pickle.dumps(module))(x, x, x)[0], module(x, x, x)[0])


class Own(nn.MultiheadAttention):
    pass


def test_what_cannot_be_taken_apart_is_refused_or_left():
    assert linearize_attention(nn.Sequential(Own(8, 2))) == []
    computed = nn.Sequential(attention(), attention())
    parametrizations.weight_norm(computed[1].out_proj)
    with pytest.raises(CalibrationError, match=r"cannot be taken apart: 1\. .*when the model is built"):
        linearize_attention(computed)
    assert type(computed[0]) is nn.MultiheadAttention


# ---------------------------------------------------------------------- whole models


def encoder(**options):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2)


def padding():
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[0, 5:] = True
    return mask


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}])
def test_an_encoder_gives_the_same_in_both_modes_and_with_padding(options):
    model = encoder(**options).eval()
    before = copy.deepcopy(model)
    assert linearize_attention(model) == ["layers.0.self_attn", "layers.1.self_attn"]
    x = torch.randn(2, 8, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(x), before(x), atol=1e-5, rtol=1e-4)
        outputs, expected = (net(x, src_key_padding_mask=padding()) for net in (model, before))
        torch.testing.assert_close(outputs[~padding()], expected[~padding()], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model(x), before(x), atol=1e-5, rtol=1e-4)


def test_a_whole_transformer_with_its_decoder_gives_the_same():
    model = nn.Transformer(16, 4, 1, 1, 32, batch_first=True).eval()
    before = copy.deepcopy(model)
    names = linearize_attention(model)
    assert names == ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"]
    source, target = torch.randn(2, 8, 16), torch.randn(2, 6, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    outputs, expected = (net(source, target, tgt_mask=mask) for net in (model, before))
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-4)


def calibrated(scheme="INT8_STATIC"):
    model = encoder().eval()
    linearize_attention(model)
    with torch.no_grad(), CalibrationSession(model, scheme) as session:
        model(torch.randn(2, 8, 16))
    return model, session.result


def test_all_its_weights_are_quantized():
    model, result = calibrated()
    assert set(result.plan.in_float) == {"LayerNorm"}
    x = torch.randn(2, 8, 16)
    with torch.no_grad():
        in_float = model(x)
        with quantized(model):
            assert (model(x) - in_float).abs().max() > 1e-3


def test_without_it_the_run_and_the_error_name_it():
    model = encoder().eval()
    with torch.no_grad(), CalibrationSession(model, "INT8_STATIC") as session:
        model(torch.randn(2, 8, 16))
    assert "% (linearize_attention makes it Linears)" in session.result.line(", ")
    with pytest.raises(CalibrationError, match=r"layers\.0\.self_attn\.out_proj.*linearize_attention\(model\)"):
        CalibrationSession(encoder(), "INT8_STATIC", targets=["re:.*out_proj"])


def test_a_checkpoint_is_loaded_into_the_model_as_it_is_built(tmp_path):
    model, _ = calibrated()
    folder = export_checkpoint(model, tmp_path / "folder")
    loaded = load_checkpoint(encoder().eval(), folder)
    x = torch.randn(2, 8, 16)
    with torch.no_grad(), quantized(model):
        expected = model(x)
    with torch.no_grad():
        assert torch.equal(loaded(x), expected)
        assert torch.equal(copy.deepcopy(loaded)(x), expected)


def test_a_checkpoint_of_a_lightning_module_is_loaded_into_its_model(tmp_path):
    module = Encoder()
    module.eval()
    with torch.no_grad(), CalibrationSession(module, "INT8_STATIC"):
        module.net(torch.randn(2, 8, 16))
    loaded = load_checkpoint(encoder().eval(), export_checkpoint(module, tmp_path / "folder"))
    assert type(loaded.layers[0].self_attn) is LinearAttention


def test_a_checkpoint_that_does_not_fit_leaves_the_model_unchanged(tmp_path):
    model, _ = calibrated()
    folder = export_checkpoint(model, tmp_path / "folder")
    other = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 48, batch_first=True), 2).eval()
    state = copy.deepcopy(other.state_dict())
    with pytest.raises(CalibrationError, match="does not fit the model"):
        load_checkpoint(other, folder)
    assert type(other.layers[0].self_attn) is nn.MultiheadAttention
    assert list(other.state_dict()) == list(state)
    x = torch.randn(2, 8, 16)
    assert other(x).isfinite().all()


@pytest.mark.slow
def test_an_onnx_file_and_a_program_hold_all_its_weights_as_integers(tmp_path):
    model, _ = calibrated("INT8_STATIC_ASYM")
    x = torch.randn(2, 8, 16)
    with torch.no_grad(), quantized(model):
        expected = model(x)
    program = torch.export.load(export_program(model, tmp_path / "m.pt2", x))
    matrices = {name for name, value in program.state_dict.items() if value.ndim > 1}
    assert matrices == set()
    torch.testing.assert_close(program.module()(x), expected, atol=1e-5, rtol=1e-4)
    session = onnxruntime.InferenceSession(export_onnx(model, tmp_path / "m.onnx", x))
    [outputs] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert (torch.from_numpy(outputs) - expected).abs().max() < 0.05


class Encoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = encoder()
        linearize_attention(self.net)

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.net(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def on_ddp(rank):
    torch.manual_seed(0)
    model = encoder(dropout=0.0)
    linearize_attention(model)
    parallel = nn.parallel.DistributedDataParallel(model)
    batches = torch.randn(2, 2, 8, 16)
    parallel(batches[rank]).pow(2).mean().backward()
    gradient = model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    sum(model(batch).pow(2).mean() for batch in batches).div(2).backward()
    return float((gradient - model.layers[0].self_attn.q_proj.weight.grad).abs().max())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_ddp_averages_its_gradients():
    assert max(run_ranks(on_ddp, 2)) < 1e-6


def test_it_is_fine_tuned_through_the_quantization(tmp_path):
    data = torch.utils.data.DataLoader(torch.randn(4, 8, 16), batch_size=2)
    module = Encoder()
    before = copy.deepcopy(module.net.layers[0].self_attn.q_proj.weight)
    callback = QuantizationAwareTraining("INT8_STATIC", module="net", calibration_batches=1)
    trainer(callback, max_epochs=2, num_sanity_val_steps=0).fit(module, data, data)
    assert not torch.equal(module.net.layers[0].self_attn.q_proj.weight, before)
    loaded = load_checkpoint(encoder().eval(), callback.export(tmp_path / "folder"))
    x = torch.randn(2, 8, 16)
    with torch.no_grad(), quantized(module.net.eval()):
        torch.testing.assert_close(loaded(x), module.net(x))
