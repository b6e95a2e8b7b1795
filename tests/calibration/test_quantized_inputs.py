"""Weights rounded on the inputs that the quantized modules before them give, module by module."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch
from accelerate import cpu_offload
from torch import nn

from lightning_obs import (
    CalibrationCallback,
    CalibrationError,
    CalibrationSession,
    CalibrationWarning,
    QuantizationAwareTraining,
    quantized,
)
from lightning_obs.calibration import quantized_inputs
from lightning_obs.calibration.blocks import Blocks
from lightning_obs.calibration.stepwise import StepwiseCalibration
from lightning_obs.numerics.rounding import corrected_target, round_by_hessian
from lightning_obs.ranks.collectives import Collectives
from tests.calibration.common import Experts, Shared, hooks
from tests.support.lightning_ranks import like_torchrun, trainer
from tests.support.rank_processes import run_ranks

INT4 = {"weights": {"num_bits": 4, "strategy": "group", "group_size": 16}}
NEAREST = {"observers": {"weight": "memoryless_minmax"}}


def rounding(correction=0.25, **more):
    return {"name": "gptq", "inputs": "quantized", "correction": correction, **more}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32)).requires_grad_(False)


def data(tokens: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(tokens, 16, generator=generator) @ torch.randn(16, 64, generator=generator)


def calibrated(model, batches, **options) -> CalibrationSession:
    with CalibrationSession(model, INT4, **{**NEAREST, "rounding": rounding(), **options}) as session, torch.no_grad():
        for batch in batches:
            model(**batch) if isinstance(batch, dict) else model(batch)
    return session


@pytest.mark.parametrize("correction", [0, 0.25, 1.0])
def test_a_weight_is_rounded_by_the_inputs_that_the_quantized_module_before_it_gives(correction):
    model, inputs = net(), data()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    session = calibrated(model, inputs.chunk(4), rounding=rounding(correction))
    exact = model[1](model[0](inputs))
    with quantized(model[0]):
        given = model[1](model[0](inputs))
    target = model[2].weight
    hessian = given.mT @ given
    if correction:
        errors = (exact - given).mT @ given
        target = corrected_target(target, hessian, errors, damping=0.1, share=correction)
    qparams = {"scale": model[2].weight_scale}
    expected = round_by_hessian(target, qparams, session.observers["2", "weight"].args, hessian, damping=0.1)
    assert (model[2].weight_rounded != expected).float().mean() < 0.01  # sums of batches, in another order
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert hooks(model) == 0
    assert session.result.modules == ["0", "2"]
    assert session.result.batches == 4
    assert session.label.endswith("gptq on quantized inputs")


def lost(model, inputs):
    with torch.no_grad():
        expected = model(inputs)
        with quantized(model):
            return float((model(inputs) - expected).norm() / expected.norm())


def test_the_correction_loses_less_and_a_resumed_session_has_its_numbers():
    model = nn.Sequential(*net(), nn.GELU(), nn.Linear(32, 32))
    calibrated(model, [data()], rounding="gptq")
    plain = lost(model, data())
    session = calibrated(model, [data()])
    corrected = lost(model, data())
    assert corrected < 0.95 * plain
    resumed = nn.Sequential(*net(), nn.GELU(), model[4])
    CalibrationSession(resumed, INT4, **NEAREST, rounding=rounding()).load_state_dict(session.state_dict())
    assert lost(resumed, data()) == corrected


def test_progress_is_that_of_all_steps():
    model, reports = net(), []
    session = CalibrationSession(model, INT4, **NEAREST, rounding=rounding())
    session.show_progress(lambda name, done, total: reports.append((name, done, total)))
    with session, torch.no_grad():
        model(data())
    total = 4 * (64 * 48 + 48 * 32)
    assert reports[0] == ("0", 4 * 64 * 48, total)
    assert reports[-1] == ("2", total, total)


def sentences():
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, 4:] = 0
    ids = torch.randint(1, 40, (4, 2, 7), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": each, "attention_mask": mask} for each in ids]


def tiny_bert():
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False).eval()


def test_blocks_that_run_alone_give_the_numbers_of_the_whole_model(monkeypatch):
    runs, found = [], []
    for known in (True, False):
        if not known:
            monkeypatch.setattr(quantized_inputs, "known_blocks", lambda _: Blocks())
        model = tiny_bert()
        count = []
        handle = model.encoder.layer[0].attention.register_forward_hook(lambda *_: count.append(1))  # noqa: B023
        session = calibrated(model, sentences(), token_mask="attention_mask")
        handle.remove()
        runs.append(len(count))
        found.append({name: model.get_submodule(name).weight_rounded for name in session.result.modules})
    assert runs[0] < 0.6 * runs[1]  # the first block is not run again for the others
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) == 18
    for name, rounded in found[0].items():
        assert (rounded != found[1][name]).float().mean() < 0.01, name


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Tower(nn.Module):
    """Blocks, and a head behind them."""

    def __init__(self, block_class=Block):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(block_class() for _ in range(3))
        self.head = nn.Linear(16, 16)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class WithAuxiliaryHead(Tower):
    """A second head reads the output of the first block, behind all blocks."""

    def __init__(self):
        super().__init__()
        self.auxiliary = nn.Linear(16, 16)

    def forward(self, x):
        outputs = [x]
        for layer in self.layers:
            outputs.append(layer(outputs[-1]))
        return self.head(outputs[-1]), self.auxiliary(outputs[1])


class WithHeadOfEachBlock(Tower):
    """One head reads the output of each block."""

    def forward(self, x):
        outputs = []
        for layer in self.layers:
            x = layer(x)
            outputs.append(self.head(x))
        return outputs[-1], outputs[:-1]


@dataclass
class State:
    x: torch.Tensor


class BlockOfState(Block):
    """It writes to the state that it is given."""

    def forward(self, state):
        state.x = super().forward(state.x)
        return state


class OnState(Tower):
    def __init__(self):
        super().__init__(BlockOfState)

    def forward(self, x):
        state = State(x)
        for layer in self.layers:
            state = layer(state)
        return self.head(state.x)


class WithMask(Tower):
    """Its first output is booleans."""

    def forward(self, x):
        output = super().forward(x)
        return output > 0, output


@pytest.mark.parametrize("model_class", [Tower, WithAuxiliaryHead, WithHeadOfEachBlock, OnState, WithMask])
def test_blocks_that_read_more_than_the_block_before_give_the_numbers_of_the_whole_model(model_class, monkeypatch):
    batches = data(64)[:, :16].chunk(4)
    by_blocks = calibrated(model_class(), batches)
    monkeypatch.setattr(quantized_inputs, "known_blocks", lambda _: Blocks())
    as_whole = calibrated(model_class(), batches)
    assert by_blocks.result.modules
    for name in by_blocks.result.modules:
        rounded = by_blocks.model.get_submodule(name).weight_rounded
        assert torch.equal(rounded, as_whole.model.get_submodule(name).weight_rounded), name


class InOtherOrder(Tower):
    """The model calls its last block first."""

    def forward(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("model_class", "obstacle"),
    [
        (WithAuxiliaryHead, "other inputs than in a run as a whole: auxiliary"),
        (WithHeadOfEachBlock, "other inputs than in a run as a whole: head"),
        (OnState, "block 0 returns a State, which cannot be copied"),
        (InOtherOrder, "block 2 was called after 0 others"),
    ],
)
def test_a_recipe_rounds_in_full_precision_where_blocks_read_more_than_the_block_before(model_class, obstacle):
    batches = data(64)[:, :16].chunk(4)
    with pytest.warns(
        CalibrationWarning, match=rf"cannot be run block by block: {model_class.__name__}. Got {obstacle}"
    ):
        session = calibrated(model_class(), batches, recipe="accurate", rounding=None, observers=None)
    assert session.label == "int4 group 16 weights + gptq"
    assert session.result.fit_errors  # the batches that ran again were counted, and every fourth was kept out


def test_a_hook_of_the_users_changes_the_arguments_of_a_kept_call_once():
    batches = data(64)[:, :16].chunk(4)
    hooked = Tower()
    hooked.register_forward_pre_hook(lambda _, args: (3 * args[0],))
    session = calibrated(hooked, batches)
    expected = calibrated(Tower(), [3 * batch for batch in batches])
    assert torch.equal(session.model.layers[0].down.weight_rounded, expected.model.layers[0].down.weight_rounded)
    assert not torch.equal(
        session.model.layers[0].down.weight_rounded, calibrated(Tower(), batches).model.layers[0].down.weight_rounded
    )


def first(output) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


class OnTuple(nn.Linear):
    """A Linear whose only argument is a tuple."""

    def forward(self, values):
        return super().forward(values[0])


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = OnTuple(8, 8), OnTuple(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.second((self.first((x,)),)))


def test_modules_that_read_tuples_are_steps_of_their_own():
    model = Chain()
    observation = CalibrationSession(model, {"weights": {"num_bits": 4, "strategy": "channel"}}).observation
    batches = MagicMock(__len__=lambda _: 1, run=lambda *_: model(torch.ones(2, 8)), random_tokens=None)
    steps = StepwiseCalibration(observation, Blocks(), batches)
    assert steps._steps(0) == [["first"], ["second"], ["last"]]


def test_modules_that_read_one_tensor_are_one_step_and_share_what_is_measured():
    model = nn.Sequential(Shared(), nn.Linear(16, 16))
    session = calibrated(model, data(64)[:, :16].chunk(2))
    assert session.result.measurements == 4  # of two tensors in two batches, each for a Hessian
    assert session.result.modules == ["0.q_proj", "0.k_proj", "0.v_proj", "1"]


def test_tokens_are_weighed_as_in_the_run_of_the_owner(tiny_llama, batches):
    rounded = []
    for weigh, option in ((True, "gptq"), (True, rounding()), (False, rounding())):
        model = tiny_llama()
        weight = {"name": "imatrix_mse", "weigh_tokens": weigh}
        calibrated(model, batches, observers={"weight": weight}, rounding=option, ignore=["lm_head"])
        layers = model.model.layers
        rounded.append([layers[0].self_attn.k_proj.weight_rounded, layers[1].mlp.down_proj.weight_rounded])
    plain, weighed, alike = rounded
    assert torch.equal(weighed[0], plain[0])  # nothing before it is quantized
    assert (alike[0] != plain[0]).float().mean() > 0.05
    assert (weighed[1] != plain[1]).float().mean() > 0.05
    assert (weighed[1] != alike[1]).float().mean() > 0.05


REFUSED = {
    "attention states": (lambda model: model, {"kv_cache": "FP8"}, r"attention states and outputs.*self_attn"),
    "offloaded": (
        partial(cpu_offload, execution_device="cpu"),
        {},
        r"whole weights in memory.*self_attn\.q_proj",
    ),
    "experts": (lambda model: nn.Sequential(model, Experts()), {}, "tokens of experts are not known there.*experts"),
}


@pytest.mark.parametrize(("change", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_a_model_or_scheme_that_cannot_run_step_by_step_is_refused_before_data(change, options, message, tiny_llama):
    model = change(tiny_llama())
    options = {**NEAREST, "ignore": ["re:.*lm_head"], **options}
    session = CalibrationSession(model, INT4, **options, rounding=rounding())
    message = rf"{message}.*rounding='gptq'"
    with pytest.raises(CalibrationError, match=message):
        session.attach()
    with pytest.raises(CalibrationError, match=message):
        session.begin_run(Collectives(), is_fitting=False)


def test_wrong_options_are_refused_and_data_are_needed():
    for wrong in ({"inputs": "quantised"}, {"correction": 0.25}, {"inputs": "quantized", "correction": 2}):
        with pytest.raises(CalibrationError, match=r"rounding\. Got"):
            CalibrationSession(net(), INT4, rounding=wrong)
    with pytest.raises(CalibrationError, match="inputs in full precision"):
        QuantizationAwareTraining(INT4, train="scales", rounding=rounding())
    with pytest.raises(CalibrationError, match="saw no data"):
        calibrated(net(), [])


class Unused(nn.Sequential):
    """Its last layer is not called."""

    def forward(self, x):
        return self[0](x)


def test_a_module_that_no_data_reached_is_an_error_or_stays_in_full_precision():
    model = Unused(net(), nn.Linear(32, 8))
    with pytest.raises(CalibrationError, match=r"no data reached 1 of 1 observers: 1 \(inputs for its weight\)"):
        calibrated(model, [data()])
    assert not hasattr(model[0][0], "weight_scale")
    with pytest.warns(CalibrationWarning, match="left in full precision"):
        session = calibrated(model, [data()], on_missing="warn")
    assert (session.result.modules, session.skipped) == (["0.0", "0.2"], {"1"})


# ---------------------------------------------------------------------- the callback


def on_share(rank, ranks):
    from lightning_obs import CalibrationCallback
    from tests.support.lightning_package import L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.net(batch).square().mean(), sync_dist=True)

        def val_dataloader(self):
            return torch.utils.data.DataLoader(data(96), batch_size=16)

    if ranks > 1:
        like_torchrun(rank, ranks)
    callback = CalibrationCallback(INT4, **NEAREST, rounding=rounding(), show=False)
    module = Module()
    trainer(callback, ranks=ranks).validate(module, verbose=False)
    rounded = [module.net[0].weight_rounded, module.net[2].weight_rounded]
    return callback.result.batches, callback.result.qparams, [value.clone() for value in rounded]


def test_ranks_round_alike_and_as_one_device_does():
    first, second = run_ranks(on_share, 2, 2)
    batches, qparams, rounded = on_share(0, 1)
    assert (batches, first[0], second[0]) == (6, 3, 3)
    for other in (first, second):
        assert all(torch.equal(value, qparams[name]) for name, value in other[1].items())
    for mine, others, alone in zip(first[2], second[2], rounded, strict=True):
        assert torch.equal(mine, others)
        assert (mine != alone).float().mean() < 0.02


def test_the_second_pass_of_a_callback_measures_the_rounded_model(tiny_llama, batches):
    from tests.callbacks.calibration_modules import OFF, Language
    from tests.support.lightning_package import L

    model = tiny_llama()
    callback = CalibrationCallback(
        INT4, **NEAREST, rounding=rounding(), ignore=["lm_head"], evaluate=True, show=False, max_batches=2
    )
    L.Trainer(callbacks=[callback], **OFF).validate(
        Language(model), torch.utils.data.DataLoader(batches, None), verbose=False
    )
    expected = []
    with torch.no_grad():
        for batch in batches:
            exact = model(**batch).logits.log_softmax(-1)
            with quantized(model):
                given = model(**batch).logits.log_softmax(-1)
            expected.append((exact.exp() * (exact - given)).sum(-1).mean())
    assert callback.result.batches == 2
    assert callback.moved.divergence == pytest.approx(float(torch.stack(expected).mean()), rel=1e-4)
    assert hooks(model) == 0


# ---------------------------------------------------------------------- a convolution beside a Linear

INT4_CHANNELS = {"num_bits": 4, "strategy": "channel"}
#: weights of convolutions are rounded to nearest, those of Linears on quantized inputs
BESIDE = {
    "linears": {
        "targets": ["Linear"],
        "weights": {**INT4_CHANNELS, "observer_kwargs": {"rounding": {"name": "gptq", "inputs": "quantized"}}},
    },
    "convolutions": {"targets": ["Conv1d"], "weights": INT4_CHANNELS},
}


class ReadByBoth(nn.Module):
    """A convolution and a Linear read one tensor with as many positions as channels; either may be called first."""

    def __init__(self, *, is_convolution_first):
        super().__init__()
        self.before, self.linear, self.convolution = nn.Linear(16, 16), nn.Linear(16, 16), nn.Conv1d(16, 16, 1)
        self.is_convolution_first = is_convolution_first

    def forward(self, x):
        hidden = self.before(x)
        readers = (self.convolution, self.linear) if self.is_convolution_first else (self.linear, self.convolution)
        return [reader(hidden) for reader in readers]


def test_a_convolution_that_reads_the_tensor_of_a_linear_does_not_change_how_the_linear_is_rounded():
    data = [torch.randn(4, 16, 16) * torch.linspace(0.2, 3, 16) for _ in range(3)]
    torch.manual_seed(0)
    weights = ReadByBoth(is_convolution_first=True).state_dict()
    rounded = []
    for is_convolution_first in (True, False):
        model = ReadByBoth(is_convolution_first=is_convolution_first)
        model.load_state_dict(weights)
        with CalibrationSession(model, BESIDE) as session, torch.no_grad():
            for batch in data:
                model(batch)
        assert sorted(session.result.modules) == ["before", "convolution", "linear"]
        rounded.append(model.linear.weight_rounded)
    assert torch.equal(*rounded)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"rounding": {"name": "gptq", "inputs": "quantized"}},
            r"the rounding of the weight needs inputs .*: convolution \(Conv1d\).*give it to the group of the Linears",
        ),
        (
            {"observers": {"weight": "imatrix_mse"}},
            r"the observer of the weight needs inputs .*: convolution \(Conv1d\).*another observer \(memoryless_mse\)",
        ),
    ],
)
def test_a_convolution_has_no_input_channel_for_each_column_of_its_weight(options, match):
    scheme = {"all": {"targets": ["Linear", "Conv1d"], "weights": INT4_CHANNELS}}
    with pytest.raises(CalibrationError, match=match):
        CalibrationSession(ReadByBoth(is_convolution_first=True), scheme, **options)
