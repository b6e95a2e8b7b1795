"""The phases of fine-tuning: what each hook's event makes of them, and what a checkpoint says."""

import pytest
import torch
from torch import nn

from lightning_obs import CalibrationSession
from lightning_obs.fine_tuning.quantized_training import Phase, QuantizedTraining


@pytest.fixture
def training(mlp):
    """Fine-tuning of a model with static inputs, running."""
    training = QuantizedTraining(CalibrationSession(mlp, "INT8_STATIC"))
    training.start()
    yield training
    training.stop()


def run(training: QuantizedTraining) -> None:
    training.session.model(torch.randn(4, 16))


def observed(training: QuantizedTraining) -> None:
    """Give the activations their first ranges."""
    training.begin_training_batch()
    training.observe_training()
    run(training)
    assert training.end_training_batch(wanted=1)


def test_training_batches_are_observed_until_the_last_one_writes_the_ranges(training):
    assert training.begin_training_batch()
    training.observe_training()
    for is_last in (False, True):
        assert training.phase is Phase.OBSERVING
        assert not training.begin_training_batch()
        run(training)
        assert training.end_training_batch(wanted=2) == is_last
    assert training.phase is Phase.TRAINING
    assert training.has_all_ranges
    assert not training.session.is_attached


def test_a_validation_ends_an_observation_with_what_there_is(training):
    training.begin_training_batch()
    training.observe_training()
    run(training)
    training.end_training_batch(wanted=5)
    training.begin_validation()
    assert training.phase is Phase.TRAINING
    assert training.has_all_ranges


def test_a_validation_that_comes_before_any_batch_was_seen_lets_the_observation_begin_anew(training):
    training.begin_training_batch()
    training.observe_training()
    training.begin_validation()
    assert training.phase is Phase.NEW
    training.end_validation()
    assert training.begin_training_batch()


def test_an_observation_that_was_stopped_goes_on_with_all_that_was_seen(mlp):
    """Also what the Hessian of a rounding has seen, which is a second observer beside the one that finds the range."""
    found, batches = [], [torch.randn(4, 16) for _ in range(2)]
    for stops in (False, True):
        training = QuantizedTraining(CalibrationSession(mlp, "INT8_STATIC", rounding="gptq"))
        training.start()
        training.begin_training_batch()
        training.observe_training()
        for batch in batches:
            training.begin_training_batch()
            mlp(batch)
            assert not training.end_training_batch(wanted=3)
            if stops:
                training.stop()
                training.start()
        found.append({key: observer.get_statistics() for key, observer in training.session.data_observers.items()})
        training.stop()
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_validation_begins_once_and_its_end_makes_ranges_due(training):
    observed(training)
    training.switch.activations = False
    training.begin_validation()
    assert training.switch.activations
    training.switch.activations = False  # a second begin of the same validation changes nothing
    training.begin_validation()
    assert not training.switch.activations
    training.end_validation()
    assert training.phase is Phase.VALIDATED
    assert training.begin_training_batch()
    assert training.phase is Phase.TRAINING


@pytest.mark.parametrize(("refreshes_weights", "growth"), [(False, 1), (True, 2)])
def test_the_weights_ranges_follow_no_batch_and_a_validation_where_it_refreshes_them(
    training, refreshes_weights, growth
):
    training.refreshes_weights = refreshes_weights
    observed(training)
    layer = training.session.model.fc1
    before = layer.weight_scale.clone()
    with torch.no_grad():
        layer.weight.mul_(2)
    training.begin_training_batch()
    assert torch.equal(layer.weight_scale, before)
    training.end_validation()
    training.begin_training_batch()
    assert torch.equal(layer.weight_scale, growth * before)


def test_what_a_validation_gathered_is_written_by_the_next_training_batch(training):
    observed(training)
    before = training.session.model.fc1.input_scale.clone()
    training.begin_validation()
    training.session.attach(count_calls=False)
    training.session.model(100 * torch.randn(4, 16))
    training.session.count_batches(1)
    training.gather()
    training.end_validation()
    assert training.phase is Phase.GATHERED
    assert torch.equal(training.session.model.fc1.input_scale, before)
    assert not training.begin_training_batch()
    assert training.phase is Phase.TRAINING
    assert training.session.model.fc1.input_scale > 10 * before


@pytest.mark.parametrize("phase", Phase)
def test_a_checkpoint_holds_the_phase(phase, training, mlp):
    training.phase = phase
    state = training.state_dict()
    assert state["phase"] == phase.value
    other = QuantizedTraining(CalibrationSession(nn.Sequential(*mlp.children()), "INT8_STATIC"))
    other.load_state_dict({**state, "statistics": {}} if "observed" not in state else state)
    assert other.phase is phase
