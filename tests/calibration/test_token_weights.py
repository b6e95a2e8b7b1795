"""``weigh_tokens``: tokens count as the predictions depend on them, where a weight is chosen by its inputs."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_obs import (
    BlockRuns,
    CalibrationCallback,
    CalibrationError,
    CalibrationSession,
    QuantizationAwareTraining,
    calibrate_layerwise,
    linearize_experts,
    quantized,
)
from lightning_obs.calibration.base_names import GRADIENTS, HESSIAN
from lightning_obs.forward.probe import fisher_probe, random_signs
from lightning_obs.numerics.rounding import round_by_hessian
from lightning_obs.observers.statistic import input_statistics
from tests.callbacks.calibration_modules import trainer
from tests.streaming.test_checkpoint_weights import tiny_llama as tiny_llama_of
from tests.support.moe_models import tiny_moe
from tests.support.rank_processes import run_ranks
from tests.support.versions import converted_weights

INT4 = {"weights": {"num_bits": 4, "group_size": 16}}
WEIGHED = {"weight": {"name": "hessian", "weigh_tokens": True}}
IGNORE = ["lm_head"]


class LanguageModule(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, _):
        return self.model(**batch, labels=batch["input_ids"]).loss

    def validation_step(self, batch, _):
        self.log("val_loss", self.training_step(batch, _))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def loader(batches):
    return DataLoader(batches, batch_size=None)


class Reader(nn.Module):
    """Predicts from the second half of a sequence alone."""

    def __init__(self, half: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head, self.half = nn.Linear(32, 16), nn.Linear(16, 5), half

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.inner(x).tanh()
        counts = (torch.arange(x.shape[1]) >= x.shape[1] // 2) | (not self.half)
        logits = self.head(hidden * counts[:, None])
        return {"logits": logits if attention_mask is None else logits * attention_mask[..., None]}


def inputs(samples=6):
    return torch.randn(samples, 8, 32, generator=torch.Generator().manual_seed(1))


def observed(model, calls, observers=WEIGHED, **options):
    """A session that has seen calls, and is not finalized."""
    mask = options.pop("token_mask", None)
    session = CalibrationSession(model, INT4, observers=observers, token_mask=mask, **options)
    session.attach()
    with torch.no_grad():
        for call in calls:
            model(**call)
    session.detach()
    return session


def probe_of(logits):
    """The probe of a call's logits ``(batch, tokens, classes)``: the same signs for each sequence."""
    return fisher_probe(logits.detach(), random_signs(logits.shape[1:], 0, "cpu"))


def test_a_probe_has_the_covariance_of_the_fisher_information():
    logits = torch.tensor([[0.5, -1.0, 2.0, 0.0]])
    probes = torch.cat([fisher_probe(logits, random_signs(logits.shape, seed, "cpu")) for seed in range(20_000)])
    p = logits[0].softmax(-1)
    expected = p.diag() - torch.outer(p, p)
    torch.testing.assert_close(probes.T @ probes / len(probes), expected, rtol=0, atol=5e-3)


def test_a_token_counts_the_squared_gradient_at_the_output():
    model, x = Reader(half=False), inputs()
    hessian = observed(model, [{"x": x}]).observers["inner", "weight"].input_hessian
    hidden = model.inner(x)
    logits = model.head(hidden.tanh())
    (gradient,) = torch.autograd.grad(logits, hidden, probe_of(logits))
    weights = gradient.double().square().sum(-1)
    expected = torch.einsum("bt,bti,btj->ij", weights, x.double(), x.double())
    # Entries off the diagonal cancel: float32 rounds by the size of the summands, which the diagonal bounds.
    size = expected.diagonal().sqrt()
    torch.testing.assert_close(hessian / size / size[:, None], expected / size / size[:, None], rtol=0, atol=1e-6)


def test_tokens_that_no_prediction_depends_on_do_not_count():
    x = inputs()
    found = observed(Reader(), [{"x": x}]).observers["inner", "weight"].input_hessian
    x[:, :4] = 1e4
    changed = observed(Reader(), [{"x": x}]).observers["inner", "weight"].input_hessian
    torch.testing.assert_close(changed, found)


@pytest.mark.parametrize("name", ["imatrix_mse", "local_hessian", "hessian"])
def test_the_statistics_do_not_depend_on_the_batches(name):
    observers = {"weight": {"name": name, "weigh_tokens": True}}
    together = observed(Reader(), [{"x": inputs()}], observers).observers["inner", "weight"]
    apart = observed(Reader(), [{"x": x} for x in inputs().split(2)], observers).observers["inner", "weight"]
    statistic = input_statistics(together)[0]
    expected = getattr(together, statistic)
    torch.testing.assert_close(getattr(apart, statistic), expected, rtol=0, atol=1e-6 * float(expected.max()))


def test_padding_counts_in_no_token_and_in_no_prediction(tiny_llama, batches):
    """Predictions after padding would depend on the tokens before it."""
    ids = batches[0]["input_ids"]
    padded = {
        "input_ids": nn.functional.pad(ids, (0, 4)),
        "attention_mask": nn.functional.pad(torch.ones_like(ids), (0, 4)),
    }
    model = tiny_llama()
    name = ("model.layers.0.mlp.down_proj", "weight")
    found = observed(model, [padded], token_mask="attention_mask", ignore=IGNORE).observers[name]
    expected = observed(model, batches[:1], ignore=IGNORE).observers[name]
    assert found.input_count == ids.numel()
    torch.testing.assert_close(found.input_hessian, expected.input_hessian, rtol=1e-3, atol=1e-9)


def test_in_inference_mode_the_statistics_are_the_same():
    mask = torch.ones(6, 8)
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        session = CalibrationSession(Reader(), INT4, observers=WEIGHED)
        session.attach()
        with mode():
            session.model(inputs() * 1, attention_mask=mask * 1)
        session.detach()
        found.append(session.observers["inner", "weight"].input_hessian)
    assert torch.equal(*found)


def test_hooks_on_the_model_see_its_call_alone():
    model, calls = Reader(), []
    model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    observed(model, [{"x": inputs()}])
    assert calls == [False]


def test_modules_that_are_fused_count_a_token_by_the_sum_of_their_gradients(tiny_llama, batches):
    model, outputs, read = tiny_llama(), {}, {}
    attention, ids = model.model.layers[1].self_attn, batches[0]["input_ids"]
    for name in ("q_proj", "k_proj", "v_proj"):
        module = attention.get_submodule(name)
        module.register_forward_hook(lambda _, args, out, name=name: outputs.update({name: out}))
        module.register_forward_pre_hook(lambda _, args: read.update(x=args[0]))
    logits = model(ids).logits
    gradients = torch.autograd.grad(logits, list(outputs.values()), probe_of(logits))
    weights, x = sum(gradient.square().sum(-1) for gradient in gradients), read["x"].detach()
    found = observed(tiny_llama(), batches[:1], ignore=IGNORE).observers["model.layers.1.self_attn.k_proj", "weight"]
    expected = torch.einsum("bt,bti,btj->ij", weights, x, x)
    torch.testing.assert_close(found.input_hessian, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_modules_that_are_fused_share_the_hessian_and_the_rounding_weighs_tokens_too(tiny_llama, batches):
    model = tiny_llama()
    observers = {"weight": {"name": "imatrix_mse", "weigh_tokens": True}}
    session = CalibrationSession(model, INT4, observers=observers, rounding="gptq", ignore=IGNORE)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    with session, torch.no_grad():
        for batch in batches:
            model(**batch)
        q, k = (session.data_observers[f"model.layers.0.self_attn.{x}_proj", HESSIAN] for x in "qk")
        assert q.weigh_tokens
        assert q.input_hessian is k.input_hessian
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert all(p.grad is None for p in model.parameters())


def test_modules_that_read_one_tensor_and_are_not_fused_have_weights_of_their_own():
    class Two(Reader):
        def forward(self, x):
            # no prediction of the first half depends on the one, and none of the second on the other
            early = torch.arange(x.shape[1])[:, None] < x.shape[1] // 2
            return {"logits": self.head(torch.where(early, self.inner(x), self.outer(x)).tanh())}

    model, x = Two(), inputs()
    model.outer = nn.Linear(32, 16)
    model.outer.load_state_dict(model.inner.state_dict())
    seen = observed(model, [{"x": x}]).observers
    for name, half in (("inner", slice(0, 4)), ("outer", slice(4, 8))):
        zero = torch.zeros_like(x)
        zero[:, half] = x[:, half]
        expected = observed(model, [{"x": zero}]).observers[name, "weight"].input_hessian
        torch.testing.assert_close(seen[name, "weight"].input_hessian, expected)


def test_a_validation_gives_what_a_session_gives(tiny_llama, batches):
    model = tiny_llama()
    with CalibrationSession(model, INT4, observers=WEIGHED, ignore=IGNORE) as session, torch.no_grad():
        for batch in batches:
            model(**batch, labels=batch["input_ids"])
    expected = session.result.qparams
    callback = CalibrationCallback(INT4, observers=WEIGHED, ignore=IGNORE, module="model", evaluate=True)
    trainer(callback).validate(LanguageModule(model), loader(batches), verbose=False)
    assert callback.result.batches == len(batches)
    torch.testing.assert_close(callback.result.qparams, expected, rtol=0, atol=0)
    assert callback.moved.positions


def test_the_predictions_change_less_than_with_tokens_that_count_alike():
    """On inputs whose extreme tokens no prediction depends on."""
    x = inputs(64)
    x[:, :4] *= 100 * torch.randn(32)
    model = Reader()
    with torch.no_grad():
        expected = model(x)["logits"].log_softmax(-1)

    def divergence(weigh_tokens):
        observers = {"weight": {"name": "hessian", "weigh_tokens": weigh_tokens}}
        with CalibrationSession(model, INT4, observers=observers, rounding="gptq", ignore=["head"]), torch.no_grad():
            model(x)
        with quantized(model), torch.no_grad():
            found = model(x)["logits"].log_softmax(-1)
        return float((expected.exp() * (expected - found)).sum(-1).mean())

    assert divergence(True) < 0.75 * divergence(False)


def test_a_rounding_knows_which_outputs_go_together(monkeypatch):
    monkeypatch.setattr("lightning_obs.numerics.rounding._ROWS", 4)
    model, x = Reader(half=False), inputs()
    session = CalibrationSession(model, INT4, observers=WEIGHED, rounding="gptq", ignore=["head"])
    with session, torch.no_grad():
        model(x)
        moments = (
            session.data_observers["inner", "weight"].input_hessian,
            session.data_observers["inner", GRADIENTS].input_hessian,
        )
    hidden = model.inner(x)
    logits = model.head(hidden.tanh())
    (gradient,) = torch.autograd.grad(logits, hidden, probe_of(logits))
    outputs = torch.einsum("bt,btr,bts->rs", x.square().sum(-1), gradient, gradient)
    torch.testing.assert_close(moments[1], outputs, rtol=1e-4, atol=1e-4 * float(outputs.max()))

    qparams = {"scale": model.inner.weight_scale}
    args = session.plan.targets[0].args["weight"]
    assert torch.equal(model.inner.weight_rounded, round_by_hessian(model.inner.weight, qparams, args, *moments))
    assert not torch.equal(model.inner.weight_rounded, round_by_hessian(model.inner.weight, qparams, args, moments[0]))


def test_an_input_may_be_given_by_name():
    class ByName(Reader):
        def forward(self, x):
            return {"logits": self.head(self.inner(input=x).tanh())}

    found = []
    for model in (Reader(half=False), ByName()):
        session = observed(model, [{"x": inputs()}], rounding="gptq", ignore=["head"])
        found.append(session.data_observers["inner", GRADIENTS].input_hessian)
    torch.testing.assert_close(*found)


def test_a_rounding_knows_outputs_of_weighed_tokens_and_of_no_vocabulary(monkeypatch):
    def gathered(observers):
        session = CalibrationSession(Reader(), {"weights": {"num_bits": 8}}, observers=observers, rounding="gptq")
        return [name for name, kind in session.data_observers if kind == GRADIENTS]

    monkeypatch.setattr("lightning_obs.calibration.observation.MOST_OUTPUTS", 5)
    assert gathered(WEIGHED) == ["head"]
    assert gathered({"weight": "hessian"}) == []


def on_ranks(rank, ranks):
    from lightning_obs.ranks.collectives import Collectives

    model = Reader()
    own = Collectives.of_group()
    session = CalibrationSession(model, INT4, observers=WEIGHED, rounding="gptq", collectives=own)
    with session, torch.no_grad():
        model(inputs()[rank::ranks])
        outputs = session.data_observers["inner", GRADIENTS]
    return session.qparams | {"outputs": outputs.input_hessian}


def test_two_ranks_end_with_the_scales_of_one():
    model = Reader()
    with CalibrationSession(model, INT4, observers=WEIGHED, rounding="gptq") as session, torch.no_grad():
        model(inputs())
    first, second = run_ranks(on_ranks, 2, 2)
    expected = session.qparams | {"outputs": session.data_observers["inner", GRADIENTS].input_hessian}
    for name, value in expected.items():
        assert torch.equal(first[name], second[name])
        if "rounded" in name:
            assert (first[name] == value).float().mean() > 0.95
        else:
            torch.testing.assert_close(first[name], value, rtol=0.05, atol=1e-6)


# ---------------------------------------------------------------------- errors


def test_a_call_of_a_part_of_the_model_is_refused():
    model = Reader()
    session = CalibrationSession(model, INT4, observers=WEIGHED)
    with (
        pytest.raises(CalibrationError, match=r"no gradient for this call of the module.*inner"),
        session,
    ):
        model.inner(inputs())


@converted_weights
def test_experts_are_refused():
    model = tiny_moe("qwen3_moe")
    linearize_experts(model)
    session = CalibrationSession(model, INT4, observers=WEIGHED, ignore=IGNORE)
    with pytest.raises(CalibrationError, match="does not know the tokens of experts"):
        session.attach()
    assert not session.is_attached


def test_block_by_block_it_is_refused(tmp_path, batches):
    source = tiny_llama_of(tmp_path / "llama")
    with pytest.raises(CalibrationError, match="weigh_tokens runs the whole model backward"):
        calibrate_layerwise(
            source, list(batches), INT4, tmp_path / "out", observers=WEIGHED, ignore=IGNORE, runs=BlockRuns()
        )
    assert not (tmp_path / "out").exists()


def test_training_is_refused(tiny_llama, batches):
    callback = QuantizationAwareTraining(INT4, observers=WEIGHED, module="model")
    with pytest.raises(CalibrationError, match=r"weigh_tokens needs weights that stay as they are.*train='scales'"):
        trainer(callback, max_epochs=1).fit(LanguageModule(tiny_llama()), loader(batches), loader(batches))
