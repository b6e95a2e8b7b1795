"""Each layer's estimated effect on the model's predictions."""

import copy

import pytest
import torch
from safetensors import safe_open
from torch import nn

from lightning_obs import (
    CalibrationError,
    CalibrationSession,
    CalibrationWarning,
    export_checkpoint,
    linearize_experts,
    sensitivity,
)
from lightning_obs.choice.divergence import _arguments_of
from lightning_obs.choice.mixed_precision import choose_schemes
from lightning_obs.choice.sensitivity import candidate_options
from lightning_obs.engines.engine import ENGINES, Engine
from lightning_obs.forward import recomputed_product
from lightning_obs.forward.quantized_forward import quantize_forward
from lightning_obs.numerics.fake_quantize import fake_quantize
from lightning_obs.numerics.moments import channel_products
from lightning_obs.observers.statistic import input_statistics
from tests.support.moe_models import tiny_moe
from tests.support.versions import converted_weights

INT4 = {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
INT8 = {"weights": {"num_bits": 8, "strategy": "channel"}}


@pytest.fixture
def classifier():
    """Three layers of which the last matters most: what the first does is nearly lost in the second."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    with torch.no_grad():
        model[2].weight.mul_(0.01)
        model[2].bias.uniform_(0.5, 1)
    return model


def divergence(model, x, layer, scheme):
    """The truth: the mean KL divergence with one layer quantized."""
    with torch.no_grad():
        plain = model(x).double().log_softmax(-1)
        calibrated = copy.deepcopy(model)
        with CalibrationSession(calibrated, scheme) as session:
            if session.needs_data:
                calibrated(x)
        undo = quantize_forward(calibrated.get_submodule(layer))
        moved = calibrated(x).double().log_softmax(-1)
        undo()
    return nn.functional.kl_div(moved, plain, log_target=True, reduction="batchmean").item()


@pytest.mark.parametrize("scheme", [INT4, "INT8_STATIC", "W8A8"], ids=["int4", "static", "dynamic"])
def test_the_estimate_is_the_divergence_with_one_layer_quantized(classifier, scheme):
    x = torch.randn(2048, 32)
    found = sensitivity(classifier, [x], {"scheme": scheme})
    for name, estimate in found.layers["scheme"].items():
        assert estimate == pytest.approx(divergence(classifier, x, name, scheme), rel=0.25)
    assert found.tokens == 2048


def test_a_layer_may_be_called_with_a_vector():
    class Conditioned(nn.Module):
        def __init__(self):
            super().__init__()
            self.condition, self.head = nn.Linear(32, 32), nn.Linear(32, 16)

        def forward(self, x):
            return self.head(x + self.condition(x[0]))

    estimates = sensitivity(Conditioned(), [torch.randn(64, 32)], {"scheme": INT8}).layers["scheme"]
    assert estimates["condition"] > 0


def test_a_twin_that_works_in_place_gets_copies_of_all_arguments():
    x = torch.ones(2)
    args, kwargs = _arguments_of(nn.ReLU(inplace=True), (x,), {"input": x})
    assert args[0] is not x
    assert kwargs["input"] is not x


def test_calls_without_gradients_are_passed_over():
    """HRM runs all cycles but the last without gradients, in training and evaluation."""

    class Cycles(nn.Module):
        def __init__(self):
            super().__init__()
            self.cycle, self.head = nn.Linear(32, 32), nn.Linear(32, 16)

        def forward(self, x):
            with torch.no_grad():
                x = self.cycle(x)
            return self.head(self.cycle(x))

    model, x = Cycles(), torch.randn(512, 32)
    with torch.no_grad():
        first = model.cycle(x)
    last = nn.Sequential(model.cycle, model.head)
    found, alone = (sensitivity(m, [given], {"int4": INT4}).layers["int4"] for m, given in ((model, x), (last, first)))
    assert list(found.values()) == pytest.approx(list(alone.values()), rel=1e-4)


def test_candidates_with_other_parameters_do_not_share_them(classifier):
    """Zero points, global scales and input scales of one are not seen by the next."""
    x = torch.randn(256, 32)
    asymmetric = {"weights": {**INT4["weights"], "symmetric": False}}
    together = {"asymmetric": asymmetric, "int4": INT4, "static": "INT8_STATIC", "nvfp4": "NVFP4", "dynamic": "W8A8"}
    found = sensitivity(classifier, [x], together, engines="unchecked")
    for name, scheme in together.items():
        alone = sensitivity(classifier, [x], {name: scheme}, engines="unchecked")
        assert found.layers[name] == pytest.approx(alone.layers[name])


def test_candidates_that_round_a_weight_alike_round_it_once_a_batch(classifier, monkeypatch):
    rounded = []

    def rounding(value, *given, **options):
        rounded.append(value.data_ptr())
        return fake_quantize(value, *given, **options)

    monkeypatch.setattr(recomputed_product, "fake_quantize", rounding)
    together = {"int4": INT4, "int8": INT8, "dynamic": "W8A8", "static": "INT8_STATIC"}
    sensitivity(classifier, [torch.randn(64, 32), torch.randn(64, 32)], together)
    weights = [layer.weight.data_ptr() for layer in classifier if isinstance(layer, nn.Linear)]
    assert [rounded.count(weight) for weight in weights] == [4, 4, 4]  # by two candidates' grids, in two batches


def test_the_estimate_is_right_on_average_where_errors_of_tokens_agree(tiny_llama, batches):
    """Every sequence in one block, many signs: nothing is left out, and the noise averages out."""
    model, ids = tiny_llama(), torch.cat([batch["input_ids"] for batch in batches])[:, :8]
    found = sensitivity(model, [{"input_ids": ids.repeat(64, 1)}], {"int4": INT4}, ignore=["lm_head"])
    name = "model.layers.1.mlp.down_proj"
    with torch.no_grad():
        plain = model(ids).logits.log_softmax(-1)
        with CalibrationSession(model, INT4, ignore=["lm_head"]):
            pass
        undo = quantize_forward(model.get_submodule(name))
        moved = model(ids).logits.log_softmax(-1)
        undo()
    truth = (plain.exp() * (plain - moved)).sum(-1).mean().item()
    assert found.layers["int4"][name] == pytest.approx(truth, rel=0.15)


def test_more_bits_cost_less_and_full_precision_nothing(classifier):
    found = sensitivity(classifier, [torch.randn(64, 32)], {"int4": INT4, "int8": INT8, "none": None})
    assert [group.names for group in found.groups] == [("0",), ("2",), ("4",)]
    for group in found.groups:
        assert group.losses["int4"] > group.losses["int8"] > group.losses["none"] == 0
    assert found.layers["int4"]["4"] > 100 * found.layers["int4"]["0"]


def test_modules_that_are_fused_are_measured_together(tiny_llama, batches):
    found = sensitivity(tiny_llama(), batches, {"int4": INT4}, ignore=["lm_head"])
    first, *_ = found.groups
    assert first.names == tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
    assert len(found.groups) == 8
    alone = sum(found.layers["int4"][name] for name in first.names)
    assert first.losses["int4"] != pytest.approx(alone, rel=1e-6)  # their errors meet in one attention
    assert first.losses["int4"] == pytest.approx(alone, rel=0.9)


def test_a_name_in_the_option_fused_sets_leaves_the_engines_set(tiny_llama):
    options = {"ignore": ["lm_head"], "engines": "vllm", "fused_sets": [["v_proj", "o_proj"]]}
    found = sensitivity(tiny_llama(), None, {"int8": "W8A8"}, **options)
    attention = [group.names for group in found.groups if "layers.0.self_attn" in group.names[0]]
    members = [tuple(name.rpartition(".")[2] for name in names) for names in attention]
    assert members == [("q_proj", "k_proj"), ("v_proj", "o_proj")]


def test_a_candidates_own_fused_sets_are_added_to_the_engines(tiny_llama, monkeypatch):
    class Fuses(Engine):
        name = "fuses"
        fused_sets = (("q_proj", "o_proj"),)

    monkeypatch.setitem(ENGINES, "fuses", Fuses())
    candidate = {"scheme": "W8A8", "fused_sets": [["k_proj", "v_proj"]]}
    found = sensitivity(tiny_llama(), None, {"int8": candidate}, ignore=["lm_head"], engines="fuses")
    members = [{name.rpartition(".")[2] for name in group.names} for group in found.groups]
    assert members[:4] == [{"q_proj", "o_proj"}, {"k_proj", "v_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}]


@converted_weights
def test_all_experts_of_a_layer_are_one_group():
    model = tiny_moe("qwen3_moe")
    linearize_experts(model)
    ids = torch.randint(3, 64, (2, 16))
    found = sensitivity(model, [ids], {"int8": INT8}, ignore=["lm_head", "re:.*gate$"])
    groups = [group for group in found.groups if any("experts" in name for name in group.names)]
    assert len(groups) == model.config.num_hidden_layers
    assert all("experts" in name for group in groups for name in group.names)
    assert all(group.losses["int8"] > 0 for group in groups)


def test_the_model_is_what_it_was(classifier):
    classifier.train()
    classifier[0].weight.requires_grad_(False)
    with CalibrationSession(classifier, "FP8_DYNAMIC"):
        pass
    scale, before = classifier[0].weight_scale, {k: v.clone() for k, v in classifier.state_dict().items()}
    sensitivity(classifier, [torch.randn(8, 32)], {"int4": INT4, "static": "INT8_STATIC"})
    assert classifier.training
    assert [p.requires_grad for p in classifier.parameters()] == [False, True, True, True, True, True]
    assert all(p.grad is None for p in classifier.parameters())
    assert classifier[0].weight_scale is scale
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in classifier.modules())
    assert all(torch.equal(value, before[key]) for key, value in classifier.state_dict().items())


def test_an_error_leaves_the_model_as_it_was(classifier):
    with pytest.raises(RuntimeError):
        sensitivity(classifier, [torch.randn(8, 32), torch.randn(8, 7)], {"static": "INT8_STATIC"})
    assert all(p.requires_grad for p in classifier.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in classifier.modules())
    assert not hasattr(classifier[0], "quantization_scheme")


def test_the_same_seed_gives_the_same_numbers(classifier):
    x = torch.randn(8, 32)
    first, second, other = (sensitivity(classifier, [x], {"int4": INT4}, seed=seed).layers for seed in (0, 0, 1))
    assert first == second != other


def test_without_data_the_error_of_the_weights_is_all_there_is(classifier):
    found = sensitivity(classifier, None, {"int4": INT4, "int8": INT8})
    assert (found.method, found.tokens) == ("weight error", 0)
    weight = classifier[0].weight.detach()
    scale = weight.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 7.5
    rounded = (weight.unflatten(1, (-1, 32)) / scale).round().clamp(-8, 7) * scale
    expected = (rounded.flatten(1) - weight).square().sum() / weight.square().sum()
    assert found.layers["int4"]["0"] == pytest.approx(expected.item(), rel=1e-5)


def test_a_module_without_weights_and_a_weight_of_zeros_have_no_error_of_the_weight(classifier):
    with torch.no_grad():
        classifier[4].weight.zero_()
    relus = {"targets": ["ReLU"], "output_activations": {"num_bits": 8}}
    scheme = {"config_groups": {"linears": {"targets": ["Linear"], **INT8}, "relus": relus}}
    losses = sensitivity(classifier, None, {"it": scheme}, calibration=[torch.randn(8, 32)]).layers["it"]
    assert losses["0"] > 0
    assert losses["4"] == 0
    assert losses["3"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", [INT4, {"weights": {**INT4["weights"], "symmetric": False}}, "INT8_STATIC", "FP8"])
def test_sizes_are_what_an_export_writes(scheme, dtype, tmp_path):
    model, x = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).to(dtype), torch.randn(4, 64, dtype=dtype)
    found = sensitivity(model, [x], {"scheme": scheme, "none": None}, engines="unchecked")
    with CalibrationSession(model, scheme, engines="unchecked") as session:
        if session.needs_data:
            model(x)
    with safe_open(export_checkpoint(model, tmp_path / "out") / "model.safetensors", "pt") as file:
        written = {key: file.get_tensor(key).nbytes for key in file.keys() if not key.endswith("bias")}  # noqa: SIM118
    assert sum(group.sizes["scheme"] for group in found.groups) == sum(written.values())
    assert sum(group.sizes["none"] for group in found.groups) == dtype.itemsize * found.weights


def test_candidates_that_observe_need_data(classifier):
    with pytest.raises(CalibrationError, match=r"candidates that observe data were given none: static"):
        sensitivity(classifier, None, {"static": "INT8_STATIC", "int8": INT8})


@pytest.mark.parametrize("schemes", ["FP8", {}, {"none": None}, [None], 3])
def test_what_are_no_candidates_is_refused(classifier, schemes):
    with pytest.raises(CalibrationError, match="schemes"):
        sensitivity(classifier, None, schemes)


@pytest.mark.parametrize("scheme", [{"weights": {"num_bits": 4}}, {}, ["FP8"], 3])
def test_a_scheme_without_a_name_is_refused_with_the_way_to_name_it(classifier, scheme):
    with pytest.raises(CalibrationError, match=r"candidate schemes are names of presets: .*Remedy: .*schemes={'my "):
        sensitivity(classifier, None, ["FP8", scheme])


def test_a_candidate_that_stands_twice_is_refused(classifier):
    with pytest.raises(CalibrationError, match="a candidate scheme is listed twice: FP8"):
        sensitivity(classifier, None, ["FP8", None, "FP8"])


def test_a_candidate_that_does_not_fit_is_named(classifier):
    candidates = {"wide": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 7}}, "int8": INT8}
    with pytest.raises(CalibrationError, match=r"^wide: ") as caught:
        sensitivity(classifier, None, candidates)
    assert caught.value.where
    assert str(caught.value).endswith(str(caught.value.remedy))


def test_a_model_without_logits_is_refused(classifier):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = classifier

        def forward(self, x):
            return self.inner(x), x

    with pytest.raises(CalibrationError, match="measured on logits"):
        sensitivity(Pair(), [torch.randn(2, 32)], {"int8": INT8})


def test_logits_that_are_not_finite_are_refused(classifier):
    with pytest.raises(CalibrationError, match="logits are not finite"):
        sensitivity(classifier, [torch.full((2, 32), float("inf"))], {"int8": INT8})


def test_attention_states_are_refused(tiny_llama, batches):
    with pytest.raises(CalibrationError, match="attention states have no weights"):
        sensitivity(tiny_llama(), batches, {"fp8": "FP8"}, ignore=["lm_head"], kv_cache="FP8")


# ---------------------------------------------------------------------- candidates with observers and rounding

SIGNED = {"name": "hessian", "signed": True}
CANDIDATES = {
    "nearest": {"scheme": INT4, "observers": {"weight": {"name": "memoryless_mse", "signed": True}}},
    "imatrix": {"scheme": INT4, "observers": {"weight": "imatrix_mse"}},
    "local": {"scheme": INT4, "observers": {"weight": {"name": "local_hessian", "signed": True}}},
    "hessian": {"scheme": INT4, "observers": {"weight": SIGNED}},
    "one sweep": {"scheme": INT4, "observers": {"weight": {**SIGNED, "sweeps": 1}}},
    "rounded": {"scheme": INT4, "observers": {"weight": SIGNED}, "rounding": "gptq"},
    "nearest, rounded": {"scheme": INT4, "rounding": {"name": "gptq", "damping": 0.02}},
}


def correlated(count=512):
    return torch.randn(count, 8) @ torch.randn(8, 32) + 0.1 * torch.randn(count, 32)


def test_candidates_differ_in_observers_and_rounding_and_each_is_what_it_is_alone(classifier):
    x = correlated()
    found = sensitivity(classifier, [x], CANDIDATES)
    for name, candidate in CANDIDATES.items():
        assert found.layers[name] == sensitivity(classifier, [x], {name: candidate}).layers[name]
    losses = {name: of_layers["0"] for name, of_layers in found.layers.items()}
    assert losses["rounded"] < losses["hessian"] < losses["local"] < losses["nearest"]
    assert losses["nearest, rounded"] < losses["nearest"]
    assert len({group.sizes[name] for group in found.groups[:1] for name in CANDIDATES}) == 1


def test_a_hessian_is_gathered_and_kept_once_for_all_candidates(classifier, monkeypatch):
    gathered, finalize, kept = [], CalibrationSession.finalize, {}

    def counting(value, width):
        gathered.append(width)
        return channel_products(value, width)

    def looking(session):
        for (name, _), observer in session.data_observers.items():
            for statistic in input_statistics(observer):
                tensor = getattr(observer, statistic)
                if tensor.numel() > 1:
                    kept.setdefault((name, tensor.shape), set()).add(tensor.data_ptr())
        return finalize(session)

    monkeypatch.setattr("lightning_obs.observers.hessian.channel_products", counting)
    monkeypatch.setattr(CalibrationSession, "finalize", looking)
    sensitivity(classifier, [correlated(), correlated(64), correlated(64)], CANDIDATES)
    assert sorted(gathered) == sorted([32, 64, 64] * 3 + [32] * 9)  # whole ones, and those of groups of 32
    assert {name: len(tensors) for name, tensors in kept.items()} == {
        (layer, shape): 1
        for layer, channels in (("0", 32), ("2", 64), ("4", 64))
        for shape in ((channels, channels), (channels // 32, 32, 32), (channels,))
    }


def test_a_candidate_has_its_own_options_before_those_of_all():
    options = candidate_options({"scheme": INT4, "rounding": None}, rounding="gptq", observers={"weight": "mse"})
    assert (options.rounding, options.observers) == (None, {"weight": "mse"})
    own = {"scheme": "INT8_STATIC", "observers": {"weight": "mse"}, "ignore": "2"}
    options = candidate_options(own, ignore="0", observers={"input": "histogram", "weight": "minmax"})
    assert (options.ignore, options.observers) == (["2"], {"input": "histogram", "weight": "mse"})
    with pytest.raises(CalibrationError, match="roundin"):
        candidate_options({"scheme": INT4, "roundin": "gptq"})
    with pytest.raises(CalibrationError, match=r"observers\. Got 'mse', expected one for each base name"):
        candidate_options({"scheme": INT4, "observers": "mse"}, observers={"weight": "mse"})


def test_a_module_that_only_a_candidates_own_ignore_spares_is_not_ignored_by_the_plan(classifier):
    own = {"scheme": "W8A8", "ignore": ["4"]}
    measured = sensitivity(classifier, [torch.randn(8, 32)], {"it": own}, ignore=["0", "ReLU"])
    assert [group.names for group in measured.groups] == [("0",), ("2",)]
    assert measured.ignore == ["ReLU"]
    assert choose_schemes(measured).config.ignore == ["ReLU"]


def untouched():
    raise AssertionError("data were read")
    yield


@pytest.mark.parametrize(
    ("candidate", "match"),
    [
        ({"scheme": "NVFP4A16", "observers": {"weight": SIGNED}}, "signed scales are for weights in symmetric integer"),
        ({"scheme": INT4, "rounding": "gtpq"}, r"rounding\. Got 'gtpq'"),
    ],
)
def test_a_candidate_that_the_format_cannot_take_is_refused_before_data(tiny_llama, candidate, match):
    with pytest.raises(CalibrationError, match=match):
        sensitivity(tiny_llama(), untouched(), {"it": candidate}, ignore=["lm_head"], engines="vllm")


def test_the_only_candidate_that_its_engine_does_not_take_is_refused_before_data_with_the_reason(tiny_llama):
    candidate = {"scheme": "W4A8", "observers": {"weight": SIGNED}}
    with (
        pytest.warns(CalibrationWarning, match=r"it is not a candidate: vLLM.* negative scales"),
        pytest.raises(CalibrationError, match=r"no candidate is taken by all engines.* negative scales"),
    ):
        sensitivity(tiny_llama(), untouched(), {"it": candidate}, ignore=["lm_head"], engines="vllm")
