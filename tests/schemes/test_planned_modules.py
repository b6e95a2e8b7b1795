"""Which modules are fused; and what stays in full precision, which is said in bytes before any data."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_obs import CalibrationSession, CalibrationWarning, export_checkpoint
from lightning_obs.engines.engine import FUSED_SETS
from lightning_obs.errors import CalibrationError
from lightning_obs.schemes.planned_modules import check_own_sets, find_fused, shares_in_float
from tests.support.offloaded import in_memory, on_cpu


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj"], [["a.q_proj", "a.k_proj", "a.v_proj"]]),
        (["a.v_proj", "a.q_proj", "a.k_proj"], [["a.q_proj", "a.k_proj", "a.v_proj"]]),
        (["a.q_proj", "a.k_proj"], [["a.q_proj", "a.k_proj"]]),
        (["a.up_proj", "b.gate_proj"], []),
        (["a.up_proj"], []),
        (["up_proj", "gate_proj"], [["gate_proj", "up_proj"]]),
        (["a.q_a_proj", "a.kv_a_proj_with_mqa", "a.q_b_proj"], [["a.q_a_proj", "a.kv_a_proj_with_mqa"]]),
        (["e.0.w1", "e.0.w2", "e.0.w3", "e.1.w3", "e.1.w1"], [["e.0.w1", "e.0.w3"], ["e.1.w1", "e.1.w3"]]),
        (["a.my_q_proj", "a.my_k_proj"], []),
        ([], []),
    ],
    ids=[
        "q k v",
        "the order of the group",
        "a missing member",
        "another parent",
        "alone",
        "no parent",
        "MLA",
        "experts",
        "part of a name",
        "nothing",
    ],
)
def test_modules_of_one_parent_are_fused(names, groups):
    assert find_fused(names, FUSED_SETS) == groups


def test_sets_of_one_s_own_replace_the_known_ones():
    assert find_fused(["a.q_proj", "a.k_proj", "a.x", "a.y"], [("x", "y")]) == [["a.x", "a.y"]]


def test_sets_of_one_s_own_are_added_to_the_known_ones():
    names = ["a.q_proj", "a.k_proj", "a.x", "a.y"]
    model = nn.ModuleDict({"a": nn.ModuleDict({name[2:]: nn.Linear(2, 2) for name in names})})
    session = CalibrationSession(model, "FP8", fused_sets=[["x", "y"]])
    assert session.plan.fused == [["a.q_proj", "a.k_proj"], ["a.x", "a.y"]]


def test_a_known_name_in_a_set_of_one_s_own_belongs_there():
    groups = [*FUSED_SETS, ["q_proj", "k_proj", "v_proj", "gate"]]
    assert find_fused(["a.gate", "a.v_proj", "a.q_proj"], groups) == [["a.q_proj", "a.v_proj", "a.gate"]]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["q_proj", "k_proj"], "a list of lists"),
        ("ab", "a list of lists"),
        ([["alone"]], r"not a fused set: \['alone'\]"),
        ([["same", "same"]], "not a fused set"),
        ([["attn.q", "attn.k"]], r"not a fused set: attn\.q, attn\.k.*without dots"),
        ([["a", 3]], "not a fused set: 3"),
        ([[["a"], "b"]], r"not a fused set: \['a'\]"),
        ([["a", "b"], ["b", "c"]], r"is in two fused sets: b\. Remedy: make them one"),
    ],
)
def test_what_is_no_fused_set_is_refused(groups, message):
    with pytest.raises(CalibrationError, match=message):
        check_own_sets(groups)


class Net(nn.Module):
    """Seven convolutions, an LSTM, an Embedding, and one Linear."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.convolutions = nn.Sequential(*[nn.Conv1d(16, 16, 3, padding=1) for _ in range(7)])
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, tokens):
        x = self.convolutions(self.embedding(tokens).mT).mT
        return self.head(self.lstm(x)[0][:, -1])


def calibrated(model, scheme, **options):
    with CalibrationSession(model, scheme, **options) as session:
        if session.needs_data:
            model(torch.zeros(2, 5, dtype=torch.long))
    return session


def bytes_of(*modules):
    return sum(p.nbytes for module in modules for p in module.parameters())


@pytest.mark.parametrize(
    ("scheme", "taken"), [("INT8_STATIC", ["Linear", "Conv1d"]), ("FP8", None), ({"weights": {"num_bits": 8}}, None)]
)
def test_what_stays_is_named_with_its_bytes_and_the_targets_that_take_it(scheme, taken):
    model = Net()
    left = bytes_of(model.embedding, model.convolutions, model.lstm)
    with pytest.warns(CalibrationWarning) as found:
        CalibrationSession(model, scheme)
    text = str(found[0].message)
    assert f"{left:,} of {bytes_of(model):,} bytes of Net's parameters stay in full precision" in text
    assert f"Conv1d {bytes_of(model.convolutions):,}" in text
    assert f"LSTM {bytes_of(model.lstm):,}" in text
    targets = re.search(r"targets=\[(.*?)\] to quantize ([\d,]+) of them", text)
    names = re.findall(r"\w+", targets.group(1))
    assert taken is None or names == taken
    assert "LSTM" not in names
    # and what it says is so
    session = CalibrationSession(Net(), scheme, targets=names, ignore=["LSTM", "Embedding"])
    assert len([t for t in session.plan.targets if isinstance(t.module, nn.Conv1d)]) == 7


def test_an_embedding_is_among_the_targets_where_only_weights_are_quantized():
    with pytest.warns(CalibrationWarning, match=r"targets=\['Linear', 'Embedding', 'Conv1d'\]"):
        CalibrationSession(Net(), {"weights": {"num_bits": 8, "strategy": "channel"}})


@pytest.mark.parametrize(
    "options",
    [
        {"ignore": ["LSTM", "Conv1d", "Embedding"]},
        {"targets": ["head"]},
        {"targets": ["re:.*head"]},
        {"targets": ["Linear", "Conv1d", "Embedding"]},
    ],
)
def test_nothing_is_said_of_what_was_left_on_purpose_or_where_most_is_taken(options):
    CalibrationSession(Net(), {"weights": {"num_bits": 8, "strategy": "channel"}}, **options)


def test_embeddings_of_a_transformers_model_stay_without_a_word(tiny_llama):
    CalibrationSession(tiny_llama(), "W8A8", ignore=["lm_head"])


def test_an_export_that_is_not_smaller_than_the_model_says_so(tmp_path):
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2)).to(torch.bfloat16)
    scheme = {"weights": {"num_bits": 8, "strategy": "channel"}}
    with CalibrationSession(model, {"group": {"targets": ["0"], **scheme}}):
        pass
    with pytest.warns(CalibrationWarning, match=r"not smaller than the model: [\d,]+ bytes, [\d,]+ in full precision"):
        export_checkpoint(model, tmp_path / "out")
    large = nn.Sequential(nn.Linear(64, 64))
    with CalibrationSession(large, scheme):
        pass
    export_checkpoint(large, tmp_path / "small")


def test_tied_weights_count_once_where_they_are_offloaded(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "source")
    scale_per_pair = {"weights": {"num_bits": 8, "strategy": "group", "group_size": 2}, "targets": ["Linear"]}
    said = []
    for load in (in_memory, on_cpu):
        model = load(tmp_path / "source", tmp_path)
        with CalibrationSession(model, {"group": scale_per_pair}, ignore=["lm_head"], engines="unchecked"):
            pass
        with pytest.warns(CalibrationWarning, match="not smaller than the model") as warnings:
            export_checkpoint(model, tmp_path / load.__name__)
        said += [str(w.message) for w in warnings if "not smaller" in str(w.message)]
    assert said[0] == said[1]


class Encoder(nn.Module):
    """As nn.TransformerEncoder: a third of its parameters is in nn.MultiheadAttention."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        return self.head(self.encoder(x))


STATIC_8 = {
    "weights": {"num_bits": 8, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "strategy": "tensor", "dynamic": False},
}


def run(model, *batch, **options):
    with torch.no_grad(), CalibrationSession(model, STATIC_8, **options) as session:
        model(*batch)
    return session.result


def test_the_attention_of_a_transformer_encoder_is_named_with_its_share():
    model = Encoder()
    result = run(model, torch.randn(2, 5, 64))
    attention = bytes_of(*(layer.self_attn for layer in model.encoder.layers)) / bytes_of(model)
    norms = bytes_of(*(m for m in model.modules() if isinstance(m, nn.LayerNorm))) / bytes_of(model)
    assert result.plan.in_float == pytest.approx({"MultiheadAttention": attention, "LayerNorm": norms})
    assert 0.33 < attention < 0.34
    assert result.line(", ").endswith(
        " s, left in float: MultiheadAttention 33 % (linearize_attention makes it Linears), others <1 %"
    )
    assert (
        result.facts()["left in float"] == "MultiheadAttention 33 % (linearize_attention makes it Linears), others <1 %"
    )


@pytest.mark.filterwarnings("ignore:.* stay in full precision")
def test_shares_are_of_bytes_and_every_class_counts_once():
    model = Net()
    model.head.bfloat16()  # a quarter of its bytes would be half of its parameters
    shares = CalibrationSession(model, {"weights": {"num_bits": 8, "strategy": "channel"}})
    found = shares_in_float(model, shares.plan.targets)
    total = bytes_of(model)
    expected = {"LSTM": model.lstm, "Embedding": model.embedding, "Conv1d": model.convolutions}
    assert found == pytest.approx({kind: bytes_of(module) / total for kind, module in expected.items()})
    assert list(found) == sorted(found, key=found.get, reverse=True)


def test_a_module_that_no_data_reached_is_left_in_float():
    model = nn.ModuleDict({"used": nn.Linear(8, 8, bias=False), "unused": nn.Linear(8, 24, bias=False)})
    session = CalibrationSession(model, STATIC_8, on_missing="warn")
    with pytest.warns(CalibrationWarning, match="no data reached"), session:
        model["used"](torch.randn(2, 8))
    assert session.result.plan.in_float == {"Linear": 0.75}


def test_a_scheme_of_activations_alone_leaves_all_weights_in_float():
    model = nn.Sequential(nn.Linear(8, 8))
    with CalibrationSession(model, {"input_activations": STATIC_8["input_activations"]}) as session:
        model(torch.randn(2, 8))
    assert session.result.plan.in_float == {"Linear": 1.0}


def test_where_nothing_is_left_that_is_said_too():
    assert run(nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8)).line(", ").endswith("left in float: none")


def test_a_tied_weight_counts_once(tiny_llama):
    config = tiny_llama().config
    tied = type(config)(**{**config.to_dict(), "tie_word_embeddings": True})
    with CalibrationSession(model := LlamaForCausalLM(tied), "W8A8") as session:
        pass
    embedding = model.model.embed_tokens.weight.nbytes / bytes_of(model)
    assert session.result.plan.in_float["Embedding"] == pytest.approx(embedding)
    assert set(session.result.plan.in_float) == {"Embedding", "LlamaRMSNorm"}
