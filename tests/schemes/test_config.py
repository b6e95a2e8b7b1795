from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationStatus,
    preset_name_to_scheme,
)
from torch import nn

from lightning_obs.errors import CalibrationError, CalibrationWarning
from lightning_obs.schemes.config import label, make_observer, preset_names, resolve_config
from lightning_obs.schemes.options import CalibrationOptions
from lightning_obs.schemes.plan import build_plan

FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT4 = {"num_bits": 4, "group_size": 8}
LLAMA_LINEARS = 2 * 7


def plan(model, scheme, reload="default", **options):
    return build_plan(model, CalibrationOptions(scheme, reload=reload, **options))


def names(*args, **kwargs):
    return [target.name for target in plan(*args, **kwargs).targets]


# ---------------------------------------------------------------------- what the user wrote


FP8 = preset_name_to_scheme("FP8", ["Linear"])


@pytest.mark.parametrize(
    "scheme",
    [
        "FP8",
        "fp8",
        {"FP8": ["Linear"]},
        {"FP8": "Linear"},
        FP8,
        {"group_0": FP8},
        FP8.model_dump(),
        {key: value for key, value in FP8.model_dump().items() if key != "targets"},
        {"weights": FP8.weights, "input_activations": FP8.input_activations},
        {"g": {"weights": FP8.weights, "input_activations": FP8.input_activations.model_dump()}},
        {"config_groups": {"FP8": ["Linear"]}},
        {"config_groups": {"group_0": FP8}},
        QuantizationConfig(config_groups={"FP8": ["Linear"]}),
        QuantizationConfig(config_groups={"group_0": FP8}).model_dump(),
    ],
)
def test_every_way_to_write_a_scheme_gives_the_same_config(scheme):
    (found,) = resolve_config(scheme).config_groups.values()
    assert found == FP8


@pytest.mark.parametrize("scheme", ["W8A8", "FP8", "W4A16", "W4A16_ASYM", "FP8_BLOCK", "NVFP4", "MXFP4", "INT8_STATIC"])
def test_every_preset_resolves(scheme):
    (found,) = resolve_config(scheme, targets="re:.*mlp.*").config_groups.values()
    assert found.targets == ["re:.*mlp.*"]
    assert scheme in preset_names()


def test_int8_static_is_static_and_symmetric_and_needs_data():
    (scheme,) = resolve_config("INT8_STATIC").config_groups.values()
    assert (scheme.weights.num_bits, scheme.weights.strategy, scheme.weights.symmetric) == (8, "channel", True)
    activations = scheme.input_activations
    assert (activations.num_bits, activations.strategy, activations.dynamic) == (8, "tensor", False)
    assert activations.observer == "static_minmax"


@pytest.mark.parametrize(
    ("scheme", "needed"),
    [("W8A8", False), ("W4A16", False), ("FP8_DYNAMIC", False), ("FP8", True), ("NVFP4", True), ("NVFP4A16", False)],
)
def test_data_is_needed_for_static_activations_only(scheme, needed):
    plan = build_plan(nn.Sequential(nn.Linear(128, 16, dtype=torch.bfloat16)), CalibrationOptions(scheme, ignore=()))
    assert plan.needs_data is needed


def test_several_groups_keep_their_schemes():
    groups = resolve_config({"FP8": ["re:.*mlp.*"], "INT8_STATIC": ["fc1", "fc2"]}).config_groups
    assert {name: group.targets for name, group in groups.items()} == {
        "FP8": ["re:.*mlp.*"],
        "INT8_STATIC": ["fc1", "fc2"],
    }
    assert groups["FP8"].weights.type == "float"


def test_resolving_changes_nothing_that_was_given():
    config = QuantizationConfig(config_groups={"group_0": FP8}, ignore=["lm_head"])
    before = config.model_dump()
    found = resolve_config(config, ignore="fc1", observers={"input": "minmax"})
    assert found.ignore == ["lm_head", "fc1"]
    assert config.model_dump() == before
    preset = resolve_config("INT8_STATIC", observers={"input": "minmax"})
    assert preset != resolve_config("INT8_STATIC")


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("fp8", "FP8"),
        ({"int8_static": ["a"], "FP8": ["b"]}, "INT8_STATIC + FP8"),
        (
            {"W8A8": ["a"], "g": {"weights": INT4}},
            "int8 channel weights, dynamic int8 token inputs + int4 group 8 weights",
        ),
        ({"a": {"weights": INT4}, "b": {"weights": INT4}}, "int4 group 8 weights"),
    ],
)
def test_a_scheme_has_a_short_name(scheme, expected):
    assert label(scheme, resolve_config(scheme)) == expected


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("FP9", {}, r"unknown scheme 'FP9'. Expected one of .*FP8.*INT8_STATIC.*NVFP4"),
        ("UNQUANTIZED", {}, r"unknown scheme 'UNQUANTIZED'"),
        ({"FP9": ["Linear"]}, {}, r"unknown scheme 'FP9'"),
        ({}, {}, r"the scheme is empty"),
        (8, {}, r"not a scheme. Got int, expected a preset name, a dict, or a QuantizationConfig"),
        ({"weights": INT4, "inputs": INT4}, {}, r"the scheme has no field inputs. Expected .*input_activations"),
        ({"g": {"weight": INT4}}, {}, r"scheme group 'g' has no field weight. Expected .*weights"),
        ({"g": 3}, {}, r"scheme group 'g'. Got 3, expected a list of targets or a dict of fields"),
        ({"weights": {"bits": 4}}, {}, r"(?s)compressed-tensors refuses the scheme: .*bits"),
        ({"weights": {"strategy": "rows"}}, {}, r"(?s)compressed-tensors refuses the scheme: .*rows"),
        ({"input_activations": {"strategy": "channel"}}, {}, r"compressed-tensors refuses the scheme"),
        ({"config_groups": {"FP9": ["Linear"]}}, {}, r"compressed-tensors refuses the scheme"),
        (
            FP8,
            {"targets": "Linear"},
            r"targets are given twice. Got targets=\['Linear'\] beside the QuantizationScheme",
        ),
        ({"weights": INT4, "targets": ["a"]}, {"targets": ["b"]}, r"targets are given twice.*the scheme\."),
        ({"FP8": ["a"]}, {"targets": ["b"]}, r"targets are given twice.*the scheme's groups"),
        (
            {"config_groups": {"FP8": ["a"]}},
            {"targets": ["b"]},
            r"targets are given twice.*QuantizationConfig's groups",
        ),
        ("FP8", {"observers": {"inputs": "minmax"}}, r"observers for 'inputs'. Expected one of weight, input, output"),
        ("FP8", {"observers": {"input": "minmx"}}, r"unknown observer 'minmx'. Expected one of .*minmax"),
        (
            "FP8",
            {"observers": {"input": {"averaging_constant": 1}}},
            r"observers\['input'\] has hyperparameters but no name",
        ),
        (
            "FP8",
            {"observers": {"input": {"name": "minmax", "c": 1}}},
            r"no hyperparameter 'c'. Expected averaging_constant",
        ),
        ("FP8", {"observers": {"input": {"name": "minmax", "averaging_constant": 2}}}, r"averaging_constant. Got 2"),
        ("W8A8", {"observers": {"input": "minmax"}}, r"'minmax' is given for input, but the scheme has nothing static"),
        (
            "FP8",
            {"observers": {"output": "minmax"}},
            r"'minmax' is given for output, but the scheme has nothing static",
        ),
    ],
)
def test_what_cannot_be_a_scheme_is_refused(scheme, options, message):
    with pytest.raises(CalibrationError, match=message):
        resolve_config(scheme, **options)


def test_an_observer_that_the_scheme_itself_names_is_checked():
    with pytest.raises(CalibrationError, match="unknown observer 'minmx'"):
        resolve_config({"weights": {**INT4, "observer": "minmx"}})


# ---------------------------------------------------------------------- observers


def test_observers_replace_those_of_the_scheme_in_every_group():
    config = resolve_config(
        {"FP8": ["fc1"], "INT8_STATIC": ["fc2"]},
        observers={"input": {"name": "minmax", "averaging_constant": 0.05}, "weight": "static_minmax"},
    )
    for group in config.config_groups.values():
        assert (group.input_activations.observer, group.weights.observer) == ("minmax", "static_minmax")
        assert group.input_activations.observer_kwargs == {"averaging_constant": 0.05}


@pytest.mark.parametrize("value", [None, {}, {"name": None}])
def test_no_observer_leaves_the_scheme_s_own(value):
    assert resolve_config("FP8", observers={"input": value, "weight": value}) == resolve_config("FP8")


@pytest.mark.parametrize(
    ("base_name", "expected"),
    [("weight", "MemorylessMinMaxObserver"), ("input", "MinMaxObserver"), ("output", "MinMaxObserver")],
)
def test_the_default_observer_is_that_of_the_ecosystem(base_name, expected):
    assert type(make_observer(base_name, QuantizationArgs())).__name__ == expected


# ---------------------------------------------------------------------- which modules


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


def test_a_llama_is_planned_with_its_fused_groups(tiny_llama):
    found = plan(tiny_llama(), "FP8", ignore=["lm_head"])
    assert len(found.targets) == LLAMA_LINEARS
    prefix = "model.layers.0"
    assert found.fused[:2] == [
        [f"{prefix}.self_attn.{n}_proj" for n in "qkv"],
        [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"],
    ]


@pytest.mark.parametrize("target", ["re:fc3", "c1", "Conv2d", "re:c1"])
def test_a_target_that_matches_nothing_is_refused(mlp, target):
    with pytest.raises(CalibrationError, match=f"matches no module of MLP: {target}. .*or a class: Linear"):
        plan(mlp, "FP8", targets=["fc1", target])


def test_a_target_in_two_groups_is_refused(mlp):
    with pytest.raises(CalibrationError, match="a target stands in two groups: Linear"):
        plan(mlp, {"FP8": ["Linear"], "INT8_STATIC": ["Linear", "fc1"]})


def test_an_ignore_that_matches_nothing_is_said(mlp):
    with pytest.warns(CalibrationWarning, match="ignore matches no module of MLP: lm_head"):
        assert names(mlp, "FP8", ignore=["lm_head", "fc1"]) == ["fc2"]


def test_a_model_of_which_everything_is_ignored_is_refused(mlp):
    with pytest.raises(
        CalibrationError, match=r"nothing is left to quantize. Got targets \['Linear'\].*ignore \['re:fc"
    ):
        plan(mlp, "FP8", ignore=["re:fc"])


# ---------------------------------------------------------------------- what modules cannot have


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (
            {"weights": {"num_bits": 4, "group_size": 24}},
            "weight group size 24 .*columns: fc1. Got 16 columns.*size of 16, or",
        ),
        (
            {"weights": FP8_WEIGHTS, "input_activations": {"strategy": "group", "group_size": 12, "dynamic": True}},
            "input group size 12 .*: fc1. Got 16 columns, expected a multiple of 12. Remedy: list the modules",
        ),
    ],
)
def test_columns_that_the_group_size_does_not_divide_are_refused(mlp, scheme, message):
    with pytest.raises(CalibrationError, match=message):
        plan(mlp, scheme)


def tied():
    model = nn.ModuleDict({"embed": nn.Embedding(8, 16), "lm_head": nn.Linear(16, 8, bias=False)})
    model["lm_head"].weight = model["embed"].weight
    return model


def test_a_tied_weight_is_refused():
    with pytest.raises(CalibrationError, match=r"shares its weight with embed \(tied\).*: lm_head.*or untie first"):
        plan(tied(), "FP8")


def test_a_tied_weight_that_both_sides_target_is_refused():
    with pytest.raises(CalibrationError, match=r"shares its weight with lm_head \(tied\).*: embed, lm_head"):
        plan(tied(), {"weights": FP8_WEIGHTS}, targets=["Linear", "Embedding"])


def test_a_tied_weight_that_is_ignored_is_fine():
    model = nn.ModuleDict({"tied": tied(), "fc": nn.Linear(4, 4)})
    assert names(model, "FP8", ignore=["re:.*lm_head"]) == ["fc"]


def already_compressed():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].quantization_status = QuantizationStatus.COMPRESSED
    return model


@pytest.mark.parametrize(
    ("model", "scheme", "options", "message"),
    [
        (
            nn.Sequential(nn.Embedding(8, 4)),
            "FP8",
            {"targets": "Embedding"},
            "an Embedding's input is token indices.*: 0",
        ),
        (
            nn.TransformerEncoderLayer(8, 2),
            "FP8",
            {},
            r"reads the weight of its out_proj without calling it.*: self_attn.out_proj.*`re:.\*out_proj\$`",
        ),
        (already_compressed(), "FP8", {}, r"already quantized, its weights are on another grid: 0"),
        (
            nn.Sequential(nn.LayerNorm(4)),
            "W8A8",
            {"targets": "LayerNorm"},
            r"has no weight matrix to quantize: 0 \(LayerNorm\)",
        ),
        (
            nn.Sequential(nn.ReLU(), nn.Linear(4, 4)),
            "W8A8",
            {"targets": "ReLU"},
            r"has no weight matrix to quantize: 0 \(ReLU\).*target its input_activations only",
        ),
        (
            nn.Sequential(nn.ConvTranspose2d(4, 4, 3, groups=2)),
            "W8A8",
            {"targets": "ConvTranspose2d"},
            r"has no weight matrix to quantize: 0 \(ConvTranspose2d\)",
        ),
    ],
    ids=["Embedding input", "out_proj", "compressed", "LayerNorm", "ReLU", "grouped ConvTranspose"],
)
def test_a_module_that_cannot_be_quantized_is_refused(model, scheme, options, message):
    with pytest.raises(CalibrationError, match=message):
        plan(model, scheme, **options)


def test_an_integer_weight_is_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(CalibrationError, match="the weight is not floating point: 0"):
        plan(model, "FP8")


@pytest.mark.parametrize("target", ["Conv2d", "ReLU"])
def test_a_module_that_compressed_tensors_cannot_hold_is_planned(target):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    scheme = {"input_activations": {"num_bits": 8}} | ({"weights": FP8_WEIGHTS} if target == "Conv2d" else {})
    assert names(model, scheme, targets=target) == [str(int(target == "ReLU"))]


def test_a_fused_group_with_two_schemes_is_refused(tiny_llama):
    scheme = {"FP8": ["re:.*q_proj"], "INT8_STATIC": [r"re:.*layers.*(k|v|o|gate|up|down)_proj"]}
    with pytest.raises(CalibrationError, match=r"different schemes: model.layers.0.self_attn.q_proj, .*k_proj"):
        plan(tiny_llama(), scheme)


def test_a_fused_group_with_one_scheme_in_two_groups_is_fine(tiny_llama):
    scheme = {"a": {"targets": ["re:.*q_proj"], "weights": FP8_WEIGHTS}, "FP8": [r"re:.*layers.*mlp.*_proj"]}
    scheme["b"] = {"targets": [r"re:.*(k|v)_proj"], "weights": {**FP8_WEIGHTS, "symmetric": True}}
    assert len(plan(tiny_llama(), scheme).fused) == 4


def test_a_fused_group_that_is_partly_ignored_is_said(tiny_llama):
    with pytest.warns(CalibrationWarning, match=r"only a part is targeted: gate_proj/up_proj in model.layers.1.mlp$"):
        plan(tiny_llama(), "FP8", ignore=["lm_head", "model.layers.1.mlp.up_proj"])


# ---------------------------------------------------------------------- can it be loaded back

EMBEDDING_INT4 = {"weights": {"num_bits": 4, "strategy": "channel"}}
EMBEDDING_FP8 = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}


@pytest.mark.parametrize(
    ("scheme", "dtype", "options", "message"),
    [
        (
            "NVFP4",
            torch.float32,
            {},
            r"loads NVFP4 weights as bfloat16, which a torch.float32 model cannot run.*dtype=torch.bfloat16",
        ),
        (
            "NVFP4A16",
            torch.float16,
            {},
            r"loads NVFP4 weights as bfloat16, which a torch.float16 model cannot run",
        ),
        ("MXFP4", torch.float32, {}, r"loads MX weights as bfloat16, which a torch.float32 model cannot run"),
        ("MXFP8", torch.float32, {}, r"loads MX weights as bfloat16, which a torch.float32 model cannot run"),
        ("W4A16_ASYM", torch.bfloat16, {}, r"packed asymmetric weights.*symmetric scheme \(W4A16\).*dequantize=True"),
        (
            EMBEDDING_INT4,
            torch.bfloat16,
            {"targets": "Embedding"},
            r"packed integer Embedding.*use FP8 for the embedding",
        ),
    ],
)
@pytest.mark.parametrize("reload", ["default", "dequantize", "unchecked"])
def test_what_transformers_cannot_load_back_is_refused_with_the_way_out(
    tiny_llama, scheme, dtype, options, message, reload
):
    options = options or {"ignore": "lm_head"}
    if reload != "default":
        plan(tiny_llama(dtype), scheme, reload, **options)
        return
    with pytest.raises(CalibrationError, match=rf'{message}.*reload="unchecked"'):
        plan(tiny_llama(dtype), scheme, **options)


@pytest.mark.parametrize(
    ("scheme", "dtype", "options"),
    [
        ("NVFP4", torch.bfloat16, {}),
        ("MXFP4", torch.bfloat16, {}),
        ("W4A16", torch.float32, {}),
        ("FP8", torch.float16, {}),
        ("INT8_STATIC", torch.float32, {}),
        (EMBEDDING_FP8, torch.bfloat16, {"targets": "Embedding"}),
    ],
)
def test_what_transformers_can_load_back_is_planned(tiny_llama, scheme, dtype, options):
    assert plan(tiny_llama(dtype), scheme, **(options or {"ignore": "lm_head"})).targets


@pytest.mark.parametrize(("reload", "refused"), [("default", False), ("dequantize", True), ("unchecked", False)])
def test_several_schemes_cannot_be_dequantized(tiny_llama, reload, refused):
    scheme = {"FP8": ["re:.*mlp.*_proj"], "W4A16": ["re:.*self_attn.*_proj"]}
    if not refused:
        plan(tiny_llama(), scheme, reload)
        return
    with pytest.raises(
        CalibrationError, match=r"several schemes. Remedy: reload=\"default\", or set reload=\"unchecked\""
    ):
        plan(tiny_llama(), scheme, reload)


def test_one_scheme_in_two_groups_can_be_dequantized(tiny_llama):
    one, two = {"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": "channel", "type": "int"}
    scheme = {"a": {"targets": ["re:.*mlp.*_proj"], "weights": one}, "b": {"targets": ["re:.*o_proj"], "weights": two}}
    assert len(names(tiny_llama(), scheme, "dequantize")) == 8


@pytest.mark.parametrize("scheme", ["MXFP4", "W4A16_ASYM"])
def test_a_module_of_one_s_own_is_not_asked_how_transformers_loads_it(scheme):
    assert names(nn.Sequential(nn.Linear(128, 32)), scheme) == ["0"]


@pytest.mark.parametrize(("dtype", "refused"), [(torch.float32, True), (torch.bfloat16, False)])
def test_nvfp4_in_a_module_of_one_s_own_is_refused_where_it_comes_back_with_other_numbers(dtype, refused):
    model = nn.Sequential(nn.Linear(32, 32, dtype=dtype))
    assert names(model, "NVFP4", "unchecked") == ["0"]
    if not refused:
        assert names(model, "NVFP4") == ["0"]
        return
    with pytest.raises(CalibrationError, match=r"NVFP4 .* torch.float32 model would compute with other numbers: 0"):
        names(model, "NVFP4")


def test_a_pattern_passes_over_containers_and_activations(tiny_llama):
    plan = build_plan(tiny_llama(), CalibrationOptions("W8A8", targets="re:.*mlp.*"))
    assert {target.name.rpartition(".")[2] for target in plan.targets} == {"gate_proj", "up_proj", "down_proj"}


def test_a_norm_that_a_pattern_matches_is_named(tiny_llama):
    with pytest.raises(CalibrationError, match=r"no weight matrix.*input_layernorm \(LlamaRMSNorm\)"):
        build_plan(tiny_llama(), CalibrationOptions("W8A8", targets="re:.*layers[.]0.*"))


def test_a_parametrized_weight_is_refused():
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    with pytest.raises(CalibrationError, match=r"computed at each access.*: 0\..*remove_parametrizations"):
        build_plan(model, CalibrationOptions("W8A8"))


@pytest.mark.parametrize("scheme", ["MXFP4", "MXFP8"])
def test_microscaling_in_float16_is_refused(tiny_llama, scheme):
    with pytest.raises(
        CalibrationError, match=r"loads MX weights as bfloat16, which a torch\.float16 model cannot run"
    ):
        build_plan(tiny_llama(torch.float16), CalibrationOptions(scheme, ignore="lm_head"))


def test_buffers_that_were_cast_are_told_about(tiny_llama):
    build_plan(tiny_llama(torch.bfloat16), CalibrationOptions("FP8", ignore="lm_head"))
    with pytest.warns(CalibrationWarning, match=r"other logits: .*rotary_emb[.]inv_freq.*dtype=torch[.]bfloat16"):
        build_plan(tiny_llama().to(torch.bfloat16), CalibrationOptions("FP8", ignore="lm_head"))


def test_adapters_have_to_be_merged_first(tiny_llama):
    model = tiny_llama()
    model.peft_config = {}  # what peft's models have
    with pytest.raises(CalibrationError, match=r"adapters beside its weights.*merge_and_unload"):
        build_plan(model, CalibrationOptions("FP8", ignore="lm_head"))
