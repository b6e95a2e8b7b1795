"""Which modules a config reaches, and what engines fuse."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers as t
from torch import nn
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashTopkRouter
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.wavlm.modeling_wavlm import WavLMAttention

from lightning_obs import CalibrationSession, export_checkpoint, load_checkpoint, quantized
from lightning_obs.errors import CalibrationError, CalibrationWarning
from tests.schemes.plans import FP8_WEIGHTS, names, plan

LLAMA_LINEARS = 2 * 7


@pytest.mark.parametrize(
    ("scheme", "needed"),
    [("W8A8", False), ("W4A16", False), ("FP8_DYNAMIC", False), ("FP8", True), ("NVFP4", True), ("NVFP4A16", False)],
)
def test_data_is_needed_for_static_activations_only(scheme, needed):
    model = nn.Sequential(nn.Linear(128, 16, dtype=torch.bfloat16))
    assert CalibrationSession(model, scheme).needs_data is needed


@pytest.mark.parametrize(
    ("scheme", "options", "expected"),
    [
        ("FP8", {}, ["fc1", "fc2"]),
        ("FP8", {"targets": "fc1"}, ["fc1"]),
        ("FP8", {"targets": ["re:fc[2-9]"]}, ["fc2"]),
        ("FP8", {"ignore": "fc2"}, ["fc1"]),
        ("FP8", {"ignore": ["re:.*1$"]}, ["fc2"]),
        ("FP8", {"targets": ["fc1", "Linear"]}, ["fc1", "fc2"]),
        ({"config_groups": {"FP8": ["Linear"]}, "ignore": ["fc1"]}, {}, ["fc2"]),
    ],
)
def test_targets_and_ignore_choose_the_modules(mlp, scheme, options, expected):
    assert names(mlp, scheme, **options) == expected


def test_the_most_specific_target_decides(mlp):
    found = plan(mlp, {"FP8": ["Linear"], "INT8_STATIC": ["fc2"]}).targets
    assert [(t.name, t.scheme.weights.type) for t in found] == [("fc1", "float"), ("fc2", "int")]


def test_a_subclass_is_its_class():
    class Mine(nn.Linear):
        pass

    assert names(nn.Sequential(Mine(4, 4)), "FP8") == ["0"]


def test_a_model_that_is_one_layer_is_a_target():
    assert names(nn.Linear(4, 4), "FP8") == [""]


def test_a_llama_is_planned_with_its_fused_sets(tiny_llama):
    found = plan(tiny_llama(), "FP8", ignore=["lm_head"])
    assert len(found.targets) == LLAMA_LINEARS
    prefix = "model.layers.0"
    assert found.fused[:2] == [
        [f"{prefix}.self_attn.{n}_proj" for n in "qkv"],
        [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"],
    ]


@pytest.mark.parametrize("target", ["re:fc3", "c1", "Conv2D", "re:c1"])
def test_a_target_that_matches_nothing_is_refused(mlp, target):
    with pytest.raises(CalibrationError, match=f"matches no module of MLP: {target}.*[.] .*or a class: Linear"):
        plan(mlp, "FP8", targets=["fc1", target])


def conv_net():
    """Without a Linear; its norms hold parameters, and cannot be quantized."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 3, 2), nn.LSTM(3, 3), nn.PReLU())


def test_absent_classes_are_left_out_of_a_list_in_which_another_matches(mlp):
    assert names(conv_net(), "INT8_STATIC", targets=["Linear", "Conv2d"]) == ["0"]
    assert names(mlp, "FP8", targets=["Conv1D", "Linear", "Conv2d"]) == ["fc1", "fc2"]
    assert plan(conv_net(), "FP8", targets=["Linear", "Conv2d"]).config.config_groups["group_0"].targets == ["Conv2d"]
    grouped = {"FP8": ["Linear", "Embedding"], "INT8_STATIC": ["Conv2d", "Conv3d"]}
    with pytest.raises(CalibrationError, match=r"matches no module of Sequential: Linear, Embedding[.]"):
        plan(conv_net(), grouped)


def test_the_classes_offered_to_a_net_without_a_linear_can_be_quantized():
    offered = (
        r"a target matches no module of Sequential: Linear[.] .*a class: Conv2d, ConvTranspose2d[.] .*(targets=.*)[.]$"
    )
    with pytest.raises(CalibrationError, match=offered) as refused:
        plan(conv_net(), "INT8_STATIC")
    assert refused.value.remedy == "targets=['Conv2d', 'ConvTranspose2d']."
    assert names(conv_net(), "INT8_STATIC", targets=["Conv2d", "ConvTranspose2d"]) == ["0", "2"]


def test_an_embedding_is_offered_to_a_scheme_of_weights_only():
    model = nn.Sequential(nn.Embedding(8, 4), nn.LSTM(4, 4))
    with pytest.raises(CalibrationError, match=r"or a class: Embedding[.]"):
        plan(model, "W8A16")
    with pytest.raises(CalibrationError, match=r"Sequential has no module that this scheme could quantize[.]$"):
        plan(model, "INT8_STATIC")


def test_a_group_whose_modules_another_takes_is_warned_of(mlp):
    with pytest.warns(CalibrationWarning, match=r"these targets quantize nothing.*re:fc2\.\*"):
        assert names(mlp, {"FP8": ["fc1", "fc2"], "W8A8": ["re:fc2.*"]}) == ["fc1", "fc2"]


def test_a_target_in_two_groups_is_refused(mlp):
    with pytest.raises(CalibrationError, match="a target is in two groups: Linear"):
        plan(mlp, {"FP8": ["Linear"], "INT8_STATIC": ["Linear", "fc1"]})


@pytest.mark.parametrize(("wrong", "meant"), [("net.fc1", "fc1"), ("linear", "Linear")])
def test_a_misspelt_module_is_named_with_the_nearest(mlp, wrong, meant):
    with pytest.raises(CalibrationError, match=rf"{wrong} \(did you mean `{meant}`\?\)"):
        plan(mlp, "FP8", targets=["fc2", wrong])
    with pytest.warns(CalibrationWarning, match=rf"{wrong} \(did you mean `{meant}`\?\)"):
        plan(mlp, "FP8", ignore=[wrong])


def test_an_ignore_that_matches_nothing_is_said(mlp):
    with pytest.warns(CalibrationWarning, match="ignore matches no module of MLP: lm_head$"):
        assert names(mlp, "FP8", ignore=["lm_head", "fc1"]) == ["fc2"]


def test_a_model_of_which_everything_is_ignored_is_refused(mlp):
    expected = r"nothing is left to quantize. Got targets \['Linear'\].*ignore \['re:fc.*among Linear"
    with pytest.raises(CalibrationError, match=expected):
        plan(mlp, "FP8", ignore=["re:fc"])


def test_an_empty_plan_of_gpt2_names_what_loads_its_kind_of_layer(tmp_path):
    config = t.GPT2Config(vocab_size=16, n_positions=16, n_embd=8, n_layer=1, n_head=1, bos_token_id=1, eos_token_id=2)
    model = t.GPT2LMHeadModel(config).eval()
    message = (
        r"matched by ignore \[\], or left out: lm_head \(tied to transformer\.wte\), expected a target that `ignore` "
        r"leaves, among Linear\. Remedy: transformers loads no quantized Conv1D\. .*engines='unchecked'\."
    )
    with pytest.raises(CalibrationError, match=message):
        plan(model, "W8A8")
    with CalibrationSession(model, "W8A8", targets=["Conv1D"], engines="unchecked"):
        pass
    reloaded = load_checkpoint(t.GPT2LMHeadModel(config).eval(), export_checkpoint(model, tmp_path / "out"))
    tokens = torch.arange(8)[None]
    with torch.no_grad(), quantized(model):
        assert torch.equal(reloaded(tokens).logits, model(tokens).logits)


def test_a_pattern_passes_over_containers_and_activations(tiny_llama):
    found = names(tiny_llama(), "W8A8", targets="re:.*mlp.*")
    assert {name.rpartition(".")[2] for name in found} == {"gate_proj", "up_proj", "down_proj"}


def test_a_fused_set_with_two_schemes_is_refused(tiny_llama):
    scheme = {"FP8": ["re:.*q_proj"], "INT8_STATIC": [r"re:.*layers.*(k|v|o|gate|up|down)_proj"]}
    with pytest.raises(CalibrationError, match=r"different schemes: .*q_proj, .*k_proj.*Remedy: target or ignore them"):
        plan(tiny_llama(), scheme)


def test_a_fused_set_with_one_scheme_in_two_groups_is_fine(tiny_llama):
    scheme = {"a": {"targets": ["re:.*q_proj"], "weights": FP8_WEIGHTS}, "FP8": [r"re:.*layers.*mlp.*_proj"]}
    scheme["b"] = {"targets": [r"re:.*(k|v)_proj"], "weights": {**FP8_WEIGHTS, "symmetric": True}}
    assert len(plan(tiny_llama(), scheme).fused) == 4


def test_a_fused_set_that_is_partly_ignored_is_said(tiny_llama):
    with pytest.warns(CalibrationWarning, match=r"only a part is targeted: gate_proj/up_proj in model.layers.1.mlp"):
        plan(tiny_llama(), "FP8", ignore=["lm_head", "model.layers.1.mlp.up_proj"])


def _mamba():
    config = t.MambaConfig(hidden_size=8, intermediate_size=16, state_size=4, time_step_rank=8)
    return MambaMixer(config, 0)


@pytest.mark.parametrize(
    ("layer", "read"),
    [
        (partial(nn.MultiheadAttention, 8, 2), {"out_proj"}),
        (_mamba, {"dt_proj"}),
        (partial(WavLMAttention, 8, 2), {"q_proj", "k_proj", "v_proj", "out_proj"}),
        (lambda: LongcatFlashTopkRouter(t.LongcatFlashConfig(hidden_size=8)), {"classifier"}),
    ],
    ids=["PyTorch", "Mamba", "WavLM", "LongCat"],
)
def test_weights_that_are_read_without_a_call_are_left_out_or_refused(layer, read):
    model = nn.Sequential(layer(), nn.Linear(64, 64))
    found = plan(model, "FP8_DYNAMIC")
    assert found.left_out == {f"0.{name}": "read without a call" for name in read}
    assert set(found.config.ignore) == set(found.left_out)
    assert not set(found.left_out) & {target.name for target in found.targets}
    name = min(read)
    with pytest.raises(CalibrationError, match=rf"without calling them.*0\.{name}.*target the class"):
        plan(model, "FP8_DYNAMIC", targets=["Linear", f"re:.*{name}"])


def test_a_weight_without_elements_is_left_out():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1, bias=False))
    model[1].weight = nn.Parameter(torch.empty(0, 8))
    found = plan(model, "FP8_DYNAMIC")
    assert found.left_out == {"1": "no elements"}
    assert [target.name for target in found.targets] == ["0"]
