"""Weights are rounded by the calibration batches and by the same batches with random tokens."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationError, CalibrationSession
from lightning_obs.calibration.random_tokens import RandomTokens, token_embeddings
from lightning_obs.ranks.collectives import Collectives
from tests.calibration.common import hooks
from tests.calibration.test_quantized_inputs import INT4, NEAREST, net, sentences, tiny_bert

MASK = {"token_mask": "attention_mask"}


def rounding(share):
    return {"name": "gptq", "inputs": "quantized", "random_tokens": share}


def calibrated(batches, scheme=INT4, **options):
    model = tiny_bert()
    with CalibrationSession(model, scheme, **{**NEAREST, **MASK, **options}) as session, torch.no_grad():
        for batch in batches:
            model(**batch)
    return model, session


def rounded(model, session):
    return {name: model.get_submodule(name).weight_rounded for name in session.result.modules}


def tokens_that_were_read(batches, share):
    """The distinct tensors of tokens that the model's embedding is given in a calibration."""
    model, read = tiny_bert(), []
    embedding = model.embeddings.word_embeddings
    embedding.register_forward_hook(lambda _, args, __: read.append(args[0].clone()))
    with CalibrationSession(model, INT4, **NEAREST, **MASK, rounding=rounding(share)), torch.no_grad():
        for batch in batches:
            model(**batch)
    distinct = []
    for tokens in read:
        if not any(torch.equal(tokens, earlier) for earlier in distinct):
            distinct.append(tokens)
    return distinct


@pytest.mark.slow_but_first
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_weights_are_those_of_a_calibration_that_has_the_random_batches_too(share):
    batches = sentences()
    distinct = tokens_that_were_read(batches, share)
    assert len(distinct) == 2 * len(batches)
    random_batches = [{**batch, "input_ids": ids} for batch, ids in zip(batches, distinct[4:], strict=True)]
    expected = rounded(*calibrated(batches + random_batches, rounding=rounding(0)))
    model, session = calibrated(batches, rounding=rounding(share))
    found = rounded(model, session)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    without = rounded(*calibrated(batches, rounding=rounding(0)))
    assert any(not torch.equal(found[name], without[name]) for name in expected)
    assert session.result.batches == len(batches)
    assert hooks(model) == 0


def test_a_share_of_the_tokens_is_replaced_by_any_of_the_vocabulary():
    ids = torch.ones(64, 16, dtype=torch.long)
    _, replaced = tokens_that_were_read([{"input_ids": ids, "attention_mask": torch.ones_like(ids)}], 0.25)
    is_kept = replaced == 1
    assert 0.7 < is_kept.float().mean() < 0.8
    assert set(replaced.unique().tolist()) == set(range(40))


def test_ranks_that_a_run_gives_a_session_have_other_random_tokens():
    model = tiny_bert()
    session = CalibrationSession(model, INT4, **NEAREST, **MASK, rounding=rounding(0.5))
    random_tokens = RandomTokens.of(session.observation)  # before the run says which rank this is
    embedding, ids, read = model.embeddings.word_embeddings, torch.ones(2, 8, dtype=torch.long), []
    for rank in (0, 1):
        session.begin_run(Collectives(rank=rank), is_fitting=False)
        with ExitStack() as stack:
            random_tokens.attach(0, stack)
            read.append(embedding(ids))
    assert not torch.equal(*read)


def test_ranges_of_inputs_are_those_of_the_batches_alone():
    linear = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}
    scheme = {"config_groups": {"all": {**linear, "input_activations": {"num_bits": 8, "observer": "static_minmax"}}}}
    name = "encoder.layer.0.attention.self.query"  # read before anything is quantized
    scales = []
    for share in (0, 1.0):
        model, _ = calibrated(sentences(), scheme, rounding=rounding(share))
        scales.append(model.get_submodule(name).input_scale)
    assert torch.equal(*scales)


def test_an_encoder_with_weighed_tokens_takes_them_from_the_recipe():
    model, session = calibrated(sentences(), observers=None, recipe="accurate")
    assert session.label.endswith("gptq on quantized inputs")
    without = {"name": "gptq", "inputs": "quantized", "random_tokens": 0}
    other_model, other_session = calibrated(sentences(), observers=None, recipe="accurate", rounding=without)
    found, other = rounded(model, session), rounded(other_model, other_session)
    assert any(not torch.equal(found[name], other[name]) for name in found)


def test_a_model_without_an_embedding_of_tokens_is_refused_before_data_and_runs_without_under_a_recipe():
    with pytest.raises(
        CalibrationError, match=r"random_tokens: .*no embedding of tokens: Sequential.*leave out random_tokens"
    ):
        CalibrationSession(net(), INT4, **NEAREST, rounding=rounding(0.5))
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    with CalibrationSession(model, INT4, recipe="accurate") as session, torch.no_grad():
        model(torch.randn(32, 64))
    assert session.result.modules == ["0.0", "0.1"]
    assert session.label.endswith("gptq on quantized inputs")


@pytest.mark.parametrize("wrong", [-0.1, 1.5, "half"])
def test_a_share_that_is_none_is_refused(wrong):
    with pytest.raises(CalibrationError, match=r"rounding\. Got"):
        CalibrationSession(tiny_bert(), INT4, rounding=rounding(wrong))


def test_a_share_without_quantized_inputs_is_refused():
    with pytest.raises(CalibrationError, match=r"rounding\. Got"):
        CalibrationSession(tiny_bert(), INT4, rounding={"name": "gptq", "random_tokens": 0.5})


def test_embeddings_of_positions_and_segments_are_none_of_tokens():
    model = tiny_bert()
    assert token_embeddings(nn.ModuleDict({"model": model})) == [model.embeddings.word_embeddings]
