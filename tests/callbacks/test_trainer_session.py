"""Which module inside a LightningModule is calibrated where transformers' are not there to say so."""

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_obs import CalibrationCallback, CalibrationError, QuantizationAwareTraining
from lightning_obs.callbacks.trainer_session import find_module
from lightning_obs.model.kinds import unwrapped
from tests.callbacks.calibration_modules import Plain, loader, trainer
from tests.support.lightning_package import MESSAGES


class Steps(Plain):
    """As most are written: no ``forward``, the steps call the net."""

    forward = Plain.__mro__[1].forward

    def __init__(self):
        super().__init__()
        self.loss, self.mean = nn.MSELoss(), MeanMetric()

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))


class Coder(Steps):
    """Two children with weights."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(2, 8)

    def training_step(self, batch, batch_idx):
        return self.decoder(self.net(batch[0])).pow(2).mean()


class Direct(Plain):
    """It has a ``forward`` that its steps do not call."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).mean())


SCHEME = {
    "weights": {"num_bits": 8, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "strategy": "tensor", "dynamic": False},
}


def test_without_a_forward_the_one_child_with_weights_is_the_module():
    module = Steps()
    assert find_module(module) == ("net", module.net)
    assert find_module(module, "") == ("", module)
    assert find_module(Plain())[0] == ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrap", [torch.compile, lambda net: nn.ModuleList([net])])
def test_a_wrapper_is_seen_through_and_a_child_that_cannot_be_called_is_not_the_module(wrap):
    module = Steps()
    net = module.net
    module.net = wrap(net)
    expected = ("net", net) if unwrapped(module.net) is net else ("", module)
    assert find_module(module) == expected


def test_a_forward_set_on_the_instance_counts():
    module = Steps()
    module.forward = module.net.forward
    assert find_module(module) == ("", module)


def test_steps_that_call_the_net_calibrate_choose_and_report(tmp_path):
    module, callback = Steps(), CalibrationCallback(SCHEME, observers="auto", show=False)
    trainer(callback, max_epochs=1, num_sanity_val_steps=0).fit(module, loader(), loader())
    assert callback.result.modules == ["0", "2"]
    assert callback.choice.losses
    assert {error.name for error in callback.layer_errors([torch.randn(4, 8)])} == {"0", "2"}
    assert callback.report(tmp_path, [torch.randn(4, 8)]).exists()


def test_several_children_are_all_calibrated_and_only_what_calls_the_module_is_refused(tmp_path):
    module, callback = Coder(), CalibrationCallback(SCHEME, evaluate=True, show=False)
    trainer(callback).validate(module, loader(), verbose=False)
    assert callback.result.modules == ["net.0", "net.2", "decoder"]
    for use in (callback.layer_errors, lambda batches: callback.report(tmp_path, batches)):
        with pytest.raises(CalibrationError, match=r'Coder, which has no forward.*one of: net, decoder.*module="net"'):
            use([torch.randn(4, 8)])


def test_auto_says_before_training_that_it_needs_a_module_to_call():
    module = Coder()
    module.training_step = lambda *_: pytest.fail("trained")
    callback = CalibrationCallback(SCHEME, observers="auto")
    with pytest.raises(CalibrationError, match=r'observers="auto" calls Coder.*one of: net, decoder'):
        trainer(callback, max_epochs=1, num_sanity_val_steps=0).fit(module, loader(), loader())


def test_auto_says_before_training_that_it_takes_no_token_mask():
    module = Plain()
    module.training_step = lambda *_: pytest.fail("trained")
    callback = CalibrationCallback(SCHEME, observers="auto", token_mask="mask")
    with pytest.raises(CalibrationError, match="without a token mask"):
        trainer(callback, max_epochs=1, num_sanity_val_steps=0).fit(module, loader(), loader())


def test_auto_names_the_remedy_where_the_steps_do_not_call_the_forward():
    with pytest.raises(CalibrationError, match=r"no validation batch called Direct.*module="):
        trainer(CalibrationCallback(SCHEME, observers="auto")).validate(Direct(), loader(), verbose=False)


def test_fine_tuning_finds_the_net_too():
    module, callback = Steps(), QuantizationAwareTraining("INT8_STATIC", calibration_batches=1)
    trainer(callback, max_epochs=1).fit(module, loader(), loader())
    assert callback.session.model is module.net


class WithAttention(Plain):
    """A third of its bytes is in nn.MultiheadAttention, which is not quantized; its norm is small."""

    def build(self):
        layer = nn.TransformerEncoderLayer(8, 2, 32, batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 2))

    def forward(self, x):
        return self.net(x[:, None])


def test_the_first_line_and_the_closing_one_name_what_stays_in_float(caplog, tmp_path):
    callback = CalibrationCallback(SCHEME, show=False)
    with caplog.at_level("INFO", logger=MESSAGES):
        trainer(callback).validate(WithAttention(), loader(), verbose=False)
    first, closing = (r.message for r in caplog.records if " calibrat" in r.message)
    shares = "MultiheadAttention 32 % (linearize_attention makes it Linears), LayerNorm 4 %"
    left = f"left in float: {shares}"
    assert first.endswith(f": 3 of 3 Linear; {left}")
    assert closing.endswith(f" s, {left}")
    page = callback.report(tmp_path).read_text()
    assert f"<dt>left in float</dt><dd>{shares}</dd>" in page
