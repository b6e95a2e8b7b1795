"""What observes and what quantizes may begin and end in any order; torch.compile's stance is then what it was.

torch's encoder layers read weights without calling their modules, unless they are told not to.
"""

import copy
import itertools

import pytest
import torch
from torch import nn

from lightning_obs import (
    CalibrationSession,
    QuantizationAwareTraining,
    export_checkpoint,
    load_checkpoint,
    quantized,
)
from tests.callbacks.calibration_modules import trainer
from tests.support.lightning_package import L

ORDERS = [  # of two blocks, each begins before it ends
    order
    for order in set(itertools.permutations(["session", "session", "quantized", "quantized"]))
    if order[0] != order[1]
]


@pytest.mark.parametrize("order", sorted(ORDERS), ids="-".join)
@pytest.mark.parametrize("stance", ["default", "eager_on_recompile"])
def test_the_stance_is_restored_in_whatever_order_blocks_end(order, stance, mlp):
    with CalibrationSession(mlp, "W8A8"):
        pass
    session, block = CalibrationSession(mlp, "INT8_STATIC"), quantized(mlp)
    end = {"session": session.detach, "quantized": lambda: block.__exit__(None, None, None)}
    steps = {"session": session.attach, "quantized": block.__enter__}
    with torch.compiler.set_stance(stance):
        for place, name in enumerate(order):
            steps[name]()
            steps[name] = end[name]
            now = torch._dynamo.eval_frame._stance.stance
            assert now == (stance if place == 3 else "force_eager")


def test_a_compiled_model_is_compiled_again_after_blocks_that_ended_out_of_order(mlp):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled, x = torch.compile(mlp, backend=count), torch.randn(5, 16)
    session = CalibrationSession(mlp, "INT8_STATIC")
    with session:
        mlp(x)
    session.attach()
    with quantized(mlp):
        session.detach()
        compiled(x)
        assert graphs == []
    compiled(x)
    assert len(graphs) == 1


LINEARS = ["re:.*linear[12]"]
WEIGHTS = {"targets": LINEARS, "weights": {"num_bits": 4, "strategy": "channel"}}


def encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


def padding():
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[0, 5:] = True
    return mask


def is_fused(model):
    """Whether outputs without gradients are those of the fused operation."""
    return all(layer.activation_relu_or_gelu for layer in model.layers) and model.use_nested_tensor


@torch.no_grad()
def calibrated(model, x, **options):
    with CalibrationSession(model, {"INT8_STATIC": LINEARS}):
        model(x, **options)
    return model


def test_quantized_gives_the_same_with_gradients_and_without():
    x = torch.randn(2, 8, 16)
    model = encoder()
    with CalibrationSession(model, {"group": WEIGHTS}):
        pass
    with quantized(model):
        expected = model(x)
        with torch.no_grad():
            outputs = model(x)
    torch.testing.assert_close(outputs, expected, atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        assert (model(x) - expected).abs().max() > 1e-3
    assert is_fused(model)


def test_a_padded_batch_is_observed():
    x = torch.randn(2, 8, 16)
    model, alone = encoder(), encoder()
    alone.load_state_dict(model.state_dict())
    calibrated(model, x, src_key_padding_mask=padding())
    calibrated(alone, x[1:])  # a sample without padding
    assert is_fused(model)
    scale = model.layers[0].linear1.input_scale
    assert scale > 0.99 * alone.layers[0].linear1.input_scale
    with torch.no_grad(), quantized(model):
        outputs = model(x, src_key_padding_mask=padding())
        torch.testing.assert_close(outputs[1:], model(x[1:]), atol=1e-5, rtol=1e-4)
        assert outputs[0].isfinite().all()


def test_a_copy_made_inside_is_fused_again():
    model = calibrated(encoder(), torch.randn(2, 8, 16))
    with quantized(model):
        assert not is_fused(model)
        assert is_fused(copy.deepcopy(model))


def test_a_loaded_model_calls_its_modules_and_so_do_its_copies(tmp_path):
    x = torch.randn(2, 8, 16)
    model = calibrated(encoder(), x)
    loaded = load_checkpoint(encoder(), export_checkpoint(model, tmp_path / "folder"))
    with torch.no_grad(), quantized(model):
        expected = model(x)
    for reader in (loaded, copy.deepcopy(loaded)):
        with torch.no_grad():
            torch.testing.assert_close(reader(x), expected, atol=1e-6, rtol=1e-5)


class Encoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = encoder().train()
        self.outputs = []

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.outputs.append(self.net(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_validation_of_quantization_aware_training_runs_quantized():
    data = torch.utils.data.DataLoader(torch.randn(4, 8, 16), batch_size=2)
    module = Encoder()
    callback = QuantizationAwareTraining({"INT8_STATIC": LINEARS}, module="net", calibration_batches=2)
    trainer(callback, max_epochs=2, num_sanity_val_steps=0).fit(module, data, data)
    batch = next(iter(data))
    with torch.no_grad(), quantized(module.net.eval()):
        expected = module.net(batch)
    torch.testing.assert_close(module.outputs[-2], expected, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        assert (module.net(batch) - expected).abs().max() > 1e-3
