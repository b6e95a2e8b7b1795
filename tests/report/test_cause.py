"""Where a run loses, from made-up numbers."""

import math
from dataclasses import replace

import pytest
import torch

from lightning_obs.numerics.histogram import Support
from lightning_obs.report.cause import layer_losses
from lightning_obs.report.facts import LayerFacts
from lightning_obs.report.judgement import judge
from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.metrics import TensorError
from tests.report.runs import layer, run


def test_the_cause_is_named_by_layers_kind_and_fault():
    counts = {"layers.11.down_proj": Support(torch.tensor([-2571.0, -0.5, 0.25, 1.0]), torch.tensor([1, 2, 3, 2]))}
    judgement = judge(run(counts=counts))
    assert judgement.grade == "broken"
    assert judgement.cause == (
        "2 of 20 layers hold 100 % of the noise: all down_proj. 100 % of it comes from their inputs: single values of "
        "up to 2,571 (half of all in that layer are below 0.5) stretch the scale that all values share, and their "
        "median layer uses 1.3 of its 8 bits."
    )


def test_the_cause_and_the_step_that_leaves_layers_out_speak_of_the_same_layers():
    poor = [layer(f"layers.{i}.down_proj", 12.0, 40.0, 2.0) for i in (1, 11)]
    errors = [*poor, layer("layers.3.v_proj", 14.0), *(layer(f"layers.3.{x}_proj", 30.0) for x in "qko")]
    errors += [layer(f"layers.{i}.up_proj", 17.0) for i in range(3)]
    report = run(errors=errors)
    report.result.plan.fused = [[f"layers.3.{x}_proj" for x in "qkv"]]
    judgement = judge(report)
    assert judgement.cause.startswith(
        "5 of 9 layers hold 73 % of the noise: 2 down_proj, layers.3.v_proj, 2 fused with these. "
    )
    errors += [layer(f"layers.{i}.up_proj", 40.0) for i in range(3, 9)]
    report = replace(report, errors=errors, can_run=lambda step: step.name == "leave_out")
    (leave_out,) = judge(report).steps
    assert leave_out.title == "Leave the 5 worst layers in full precision"
    assert leave_out.reason.startswith("removes 73 % of the noise")


def test_the_share_of_the_weights_is_named_where_they_make_most_of_the_noise():
    errors = [layer("layers.0.down_proj", 9.0, 10.0, 15.0), *(layer(f"layers.{i}.up_proj", 40.0) for i in range(9))]
    # 10 ** -1 of 10 ** -1 + 10 ** -1.5
    assert judge(run(errors=errors)).cause.endswith("% of the noise. 76 % of it comes from their weights.")


def test_noise_that_is_spread_over_layers_is_said_of_the_fewest_that_hold_four_fifths():
    errors = [layer(f"layers.{i}.{kind}", 18.0) for i in range(5) for kind in ("up_proj", "down_proj")]
    errors += [layer("layers.7.up_proj", 14.5), layer("layers.8.up_proj", 40.0)]
    assert judge(run(errors=errors)).cause.startswith("9 of 12 layers hold 84 % of the noise: 5 up_proj, 4 down_proj")


def test_layers_whose_error_is_not_known_or_not_finite_have_no_part_of_the_loss():
    errors = [layer("a", math.nan), replace(layer("b", 10.0), input=None), layer("c", -5.0), layer("d", math.inf)]
    losses = {one.name: one.loss for one in layer_losses(run(errors=errors))}
    assert losses == {"a": 0.0, "b": pytest.approx(0.1), "c": 1.0, "d": 0.0}


def test_inputs_in_full_precision_have_no_part_of_the_loss():
    error = replace(layer("a", 10.0, 12.0), input=None)
    facts = LayerFacts("int4", 4, None, "", "", 8, 2, 0, [], None)
    (loss,) = layer_losses(run(errors=[error], layers={"a": facts}))
    assert (loss.weight, loss.input) == (1.0, 0.0)


def test_noise_that_neither_weights_nor_inputs_cause_is_not_said_to_come_from_weights():
    errors = [LayerError(f"layers.{i}.norm", output=TensorError(10.0)) for i in range(2)]
    facts = LayerFacts("int8 outputs", None, None, "", "", 8, 8, 0, [], None)
    report = run(errors=errors, layers={error.name: facts for error in errors})
    assert judge(report).cause == "2 of 2 layers hold 100 % of the noise: all norm."
