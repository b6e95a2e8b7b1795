"""Smoothing moves outliers of inputs into weights, and changes no output of the unquantized model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from lightning_obs import CalibrationError, CalibrationSession, CalibrationWarning, quantized, smooth_inputs
from lightning_obs.model.mark import mark_of
from tests.support.tiny_model import save_tiny_llama


class GatedMlp(nn.Module):
    """A norm, a gated MLP and a residual sum, as in a Llama's layer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16, dtype=dtype)
        self.gate = nn.Linear(16, 32, dtype=dtype)
        self.up = nn.Linear(16, 32, dtype=dtype)
        self.down = nn.Linear(32, 16, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


def with_outliers(dtype: torch.dtype = torch.float32) -> GatedMlp:
    """Channels of 300 in the input of gate and up, and of ``down``, that few rows read."""
    torch.manual_seed(0)
    model = GatedMlp(dtype)
    with torch.no_grad():
        model.norm.weight[3] = 300.0
        model.gate.weight[:, 3] *= 1e-3
        model.up.weight[:, 3] *= 1e-3
        model.up.weight[7] *= 300.0
        model.down.weight[:, 7] *= 1e-3
    return model


def quantization_error(model: nn.Module, batches: list[torch.Tensor], scheme: str) -> float:
    """The squared error of outputs of the calibrated model, relative to the unquantized model's."""
    session = CalibrationSession(model, scheme)
    with session, torch.no_grad():
        for batch in batches if session.needs_data else ():
            model(batch)
    with torch.no_grad():
        expected = model(batches[0]) - batches[0]
        with quantized(model):
            got = model(batches[0]) - batches[0]
    return float((got - expected).square().sum() / expected.square().sum())


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 8, 16, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_stay_the_same_bit_for_bit(dtype):
    model = with_outliers(dtype)
    data = [batch.to(dtype) for batch in batches()]
    before = model(data[0])
    smoothed = smooth_inputs(model, data, "INT8_STATIC")
    assert [(entry.producer, entry.readers) for entry in smoothed] == [("norm", ("gate", "up")), ("up", ("down",))]
    assert torch.equal(model(data[0]), before)
    assert model.norm.weight[3] < 300


def test_a_pair_that_is_tried_gets_its_smallest_numbers_back():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)).half()
    with torch.no_grad():
        model[1].weight.fill_(3 * 2.0**-24)  # three times float16's smallest number: a quarter of it loses digits
    before = model[1].weight.detach().clone()
    with pytest.warns(CalibrationWarning, match="no input was smoothed"):
        smooth_inputs(model, [torch.randn(32, 8).half()], "INT8_STATIC")
    assert torch.equal(model[1].weight, before)


@pytest.mark.parametrize("scheme", ["INT8_STATIC", "INT8_STATIC_ASYM", "W8A8"])
def test_quantization_loses_less_and_the_estimates_say_so(scheme):
    plain = with_outliers()
    smooth = copy.deepcopy(plain)
    smoothed = smooth_inputs(smooth, batches(), scheme)
    errors = [quantization_error(model, batches(), scheme) for model in (plain, smooth)]
    assert errors[1] < errors[0] / 10
    for entry in smoothed:
        assert entry.error_after < entry.error_before


def test_inputs_of_four_bits_lose_less_though_each_group_has_its_scale():
    plain = with_outliers(torch.bfloat16)
    smooth = copy.deepcopy(plain)
    data = [batch.bfloat16() for batch in batches()]
    assert smooth_inputs(smooth, data, "NVFP4")
    assert torch.equal(smooth(data[0]), plain(data[0]))
    errors = [quantization_error(model, data, "NVFP4") for model in (plain, smooth)]
    assert errors[1] < 0.8 * errors[0]


def test_a_relu_passes_factors_on_and_gelu_does_not():
    torch.manual_seed(0)
    for activation, expected in ((nn.ReLU(), [("0", ("2",))]), (nn.GELU(), [])):
        model = nn.Sequential(nn.Linear(16, 16), activation, nn.Linear(16, 4))
        with torch.no_grad():
            model[0].weight[5] *= 200
        before = {name: value.clone() for name, value in model.state_dict().items()}
        if expected:
            smoothed = smooth_inputs(model, batches(), "INT8_STATIC")
            assert [(entry.producer, entry.readers) for entry in smoothed] == expected
        else:
            with pytest.warns(CalibrationWarning, match="no input was smoothed"):
                assert smooth_inputs(model, batches(), "INT8_STATIC") == []
            for name, value in model.state_dict().items():
                assert torch.equal(value, before[name]), name


def test_a_norm_that_is_read_elsewhere_stays():
    class ReadTwice(GatedMlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.norm(x)
            return hidden + self.down(F.silu(self.gate(hidden)) * self.up(hidden))

    torch.manual_seed(0)
    model = ReadTwice()
    model.load_state_dict(with_outliers().state_dict())
    smoothed = smooth_inputs(model, batches(), "INT8_STATIC")
    assert [entry.producer for entry in smoothed] == ["up"]


class ReadByParent(nn.Module):
    """The parent reads the weight of a norm inside its block, which is no output of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = with_outliers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) * self.block.norm.weight.max()


class Counting(nn.Module):
    """Gives another output whenever it is called: it adds the number of its calls."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.block(x) + self.calls


def overflowing() -> nn.Module:
    """In float16, the factor of 256 for channel 3 makes weights of 400 too large; the trial multiplies by 2 there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(0.01)
        model[0].weight[3] = 3.0
        model[1].weight.uniform_(-8000, 8000)
        model[1].weight[:, 3] = 400.0
    return model.half()


@pytest.mark.parametrize(
    ("make", "strength", "data"),
    [
        (ReadByParent, 0.5, batches()),
        (lambda: Counting(with_outliers()), 0.5, batches()),
        (overflowing, 1, [torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).half()]),
    ],
    ids=["read by the parent", "counting", "float16"],
)
def test_a_model_whose_outputs_would_change_is_refused_and_left_as_it_was(make, strength, data):
    model = make().train()
    before = copy.deepcopy(model.state_dict())
    random_numbers = torch.get_rng_state()
    with pytest.raises(CalibrationError, match=r"would change the outputs of the model: (block\.norm|0).*Remedy"):
        smooth_inputs(model, data, "INT8_STATIC", strength=strength)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(torch.get_rng_state(), random_numbers)
    for module in model.modules():
        assert module.training
        assert mark_of(module) is None or not mark_of(module).reads_smooth_input
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_model_that_counts_and_has_no_outliers_is_left_alone_with_a_warning():
    with pytest.warns(CalibrationWarning, match="no input was smoothed"):
        assert smooth_inputs(Counting(nn.Linear(16, 16)), batches(), "INT8_STATIC") == []


@pytest.mark.parametrize("token_mask", ["attention_mask", lambda batch: batch["attention_mask"]], ids=["name", "call"])
def test_padding_does_not_count(token_mask):
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = with_outliers()

        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.block(x)

    padding = 1000.0 * torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([1] * 8 + [0] * 3).expand(4, -1)
    padded = [{"x": torch.cat([batch, padding * batch[:, :1]], 1), "attention_mask": mask} for batch in batches()]
    expected, unmasked, model = Masked(), Masked(), Masked()
    whole = [{"x": batch, "attention_mask": mask} for batch in batches()]
    smoothed = smooth_inputs(expected, whole, "INT8_STATIC")
    assert smooth_inputs(model, padded, "INT8_STATIC", token_mask=token_mask) == smoothed
    smooth_inputs(unmasked, padded, "INT8_STATIC")
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name
    changed = [
        name for name, value in unmasked.state_dict().items() if not torch.equal(value, model.state_dict()[name])
    ]
    assert changed


def test_a_batch_without_its_mask_or_without_tokens_that_count():
    with pytest.raises(CalibrationError, match="the batch has no 'attention_mask', which token_mask names"):
        smooth_inputs(with_outliers(), batches(), "INT8_STATIC", token_mask="attention_mask")
    with pytest.warns(CalibrationWarning, match="no input was smoothed"):
        nothing = smooth_inputs(
            with_outliers(), batches(), "INT8_STATIC", token_mask=lambda x: torch.zeros(x.shape[:2])
        )
    assert nothing == []


def test_shared_weights_stay():
    model = with_outliers()
    tied = nn.ModuleDict({"first": model, "second": GatedMlp()})
    tied["second"].norm.weight = model.norm.weight

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = tied

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts["second"](self.parts["first"](x))

    both = Both()
    shared = model.norm.weight.clone()
    smooth_inputs(both, batches(), "INT8_STATIC")
    assert torch.equal(model.norm.weight, shared)


def test_a_llama_gives_the_same_logits_and_keeps_mode_and_random_numbers(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save_tiny_llama(tmp_path))
    model.train()
    inputs = [{"input_ids": torch.arange(12).view(1, 12) % 16 + index} for index in range(2)]
    state = torch.get_rng_state()
    model.eval()
    before = model(**inputs[0]).logits
    model.train()
    smoothed = smooth_inputs(model, inputs, "INT8_STATIC")
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.use_cache
    model.eval()
    assert torch.equal(model(**inputs[0]).logits, before)
    producers = {entry.producer.rsplit(".", 1)[1] for entry in smoothed}
    assert producers <= {"input_layernorm", "post_attention_layernorm", "up_proj", "v_proj"}
    assert "up_proj" in producers
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Around(nn.Module):
    """Calls the block in one way or another; ``mode`` says which."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.block = with_outliers()
        self.mode = mode

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.block(x)
        if self.mode == "random numbers":
            output = output + torch.randn_like(output)
        loss = output.mean()
        return {"loss": loss * torch.nan if self.mode == "no loss" else loss, "output": output}


@pytest.mark.parametrize("mode", ["random numbers", "no loss"])
def test_outputs_that_are_random_or_not_a_number_do_not_hinder(mode):
    model = Around(mode)
    torch.manual_seed(2)
    expected = model(batches()[0])["output"]
    assert smooth_inputs(model, batches(), "INT8_STATIC")
    torch.manual_seed(2)
    assert torch.equal(model(batches()[0])["output"], expected)


def test_weights_that_autocast_keeps_copies_of_are_smoothed():
    model = with_outliers()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(batches()[0])
        assert smooth_inputs(model, batches(), "INT8_STATIC")
        assert torch.equal(model(batches()[0]), expected)


class Twice(nn.Module):
    """A norm and a Linear that only the first of two calls of this module reaches."""

    def __init__(self, reads_norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)
        self.reads_norm = reads_norm
        with torch.no_grad():
            self.norm.weight[3] = 300.0
            self.linear.weight[:, 3] *= 1e-3

    def forward(self, x: torch.Tensor, is_second: bool = False) -> torch.Tensor:
        if is_second:
            return x.abs()
        hidden = self.norm(x)
        return self.linear(hidden) + (hidden if self.reads_norm else 0)


class CallsTwice(nn.Module):
    def __init__(self, reads_norm: bool) -> None:
        super().__init__()
        self.part = Twice(reads_norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.part(x), is_second=True)


def test_a_pair_is_kept_once_if_it_holds_in_each_call_of_the_module_around_it():
    smoothed = smooth_inputs(CallsTwice(reads_norm=False), batches(), "INT8_STATIC")
    assert [entry.producer for entry in smoothed] == ["part.norm"]
    with pytest.warns(CalibrationWarning, match="no input was smoothed"):
        assert smooth_inputs(CallsTwice(reads_norm=True), batches(), "INT8_STATIC") == []


def test_what_is_wrong_is_refused():
    model = with_outliers()
    with pytest.raises(CalibrationError, match=r"quantizes none.*ot int4 group 16.*scheme such as INT8_STATIC"):
        smooth_inputs(model, batches(), {"preset": "W4A16", "weights": {"group_size": 16}})
    with pytest.raises(CalibrationError, match="smoothing without data"):
        smooth_inputs(model, [], "INT8_STATIC")
    with pytest.raises(CalibrationError, match=r"strength\. Got 2, expected a number above 0"):
        smooth_inputs(model, batches(), "INT8_STATIC", strength=2)
