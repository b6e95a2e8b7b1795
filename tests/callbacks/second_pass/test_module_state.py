"""What the second pass has of its own, and what both passes share."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

from lightning_obs.callbacks.module_state import ModuleState


class Meter:
    """An accumulator as people write it: plain data, in attributes of the object itself."""

    def __init__(self):
        self.total = 0.0
        self.history = []

    def update(self, value):
        self.total += value
        self.history.append(value)


class Logger:
    def __init__(self):
        self.lines = []
        self.write = self.lines.append


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.teachers = [nn.Linear(2, 2)]
        self.metrics = {"val": [MeanMetric()]}
        self.outputs = []
        self.same_outputs = self.outputs
        self.meter = Meter()
        self.meters = {"val": [Meter()]}
        self.log_file = Logger()
        self.data = TensorDataset(torch.ones(2))


def test_weights_teachers_metrics_and_objects_of_other_classes_stay_the_same_objects():
    module = Holder()
    teacher, metric, meter, data, weight = (
        module.teachers[0],
        module.metrics["val"][0],
        module.meter,
        module.data,
        module.net.weight,
    )
    with ModuleState(module).restored():
        assert module.teachers[0] is teacher
        assert module.metrics["val"][0] is metric
        assert module.meter is meter
        assert module.data is data
        assert module.net.weight is weight
        module.log_file.write("second pass")
    assert module.log_file.lines == ["second pass"]


def test_an_accumulator_of_a_users_class_begins_as_recorded_and_ends_as_the_first_pass_left_it():
    module = Holder()
    module.meter.update(1.0)
    state = ModuleState(module)
    history = module.meter.history
    for meter in (module.meter, module.meters["val"][0]):
        meter.update(2.0)
    with state.restored():
        assert vars(module.meter) == {"total": 1.0, "history": [1.0]}
        assert vars(module.meters["val"][0]) == {"total": 0.0, "history": []}
        module.meter.update(5.0)
        module.meter.peak = 5.0
    assert vars(module.meter) == {"total": 3.0, "history": [1.0, 2.0]}
    assert module.meter.history is history


def test_an_accumulator_may_hold_a_list_that_holds_itself():
    module = Holder()
    module.meter.history.append(module.meter.history)
    state = ModuleState(module)
    module.meter.update(2.0)
    with state.restored():
        assert len(module.meter.history) == 1
        assert module.meter.history[0] is module.meter.history


def test_lists_and_metrics_begin_as_recorded_and_end_as_the_first_pass_left_them():
    module = Holder()
    state = ModuleState(module)
    metric = module.metrics["val"][0]
    metric.update(2.0)
    module.outputs.append(1)
    module.born_late = []
    outputs = module.outputs
    with state.restored():
        assert not metric.update_called
        assert module.outputs == []
        assert module.outputs is module.same_outputs
        assert not hasattr(module, "born_late")
        module.outputs.append(7)
        metric.update(9.0)
    assert module.outputs is module.same_outputs is outputs
    assert outputs == [1]
    assert module.born_late == []
    assert float(metric.compute()) == 2.0


def test_after_an_error_the_module_has_its_own_state():
    module = Holder()
    state = ModuleState(module)
    module.outputs.append(1)
    try:
        with state.restored():
            module.outputs.append(2)
            raise RuntimeError
    except RuntimeError:
        pass
    assert module.outputs == [1]


def prune_half(layer):
    prune.l1_unstructured(layer, "weight", amount=0.5)


def end_pruning(layer):
    prune.remove(layer, "weight")


@pytest.mark.parametrize(
    ("before", "since"),
    [
        ([], prune_half),
        ([prune_half], prune_half),
        ([prune_half], end_pruning),
        ([], parametrizations.weight_norm),
    ],
)
def test_a_weight_that_is_computed_since_is_computed_in_the_second_pass_too(before, since):
    module = Holder()
    for change in before:
        change(module.net)
    state = ModuleState(module)
    since(module.net)
    expected = module.net(torch.eye(2))
    module.outputs.append(1)
    with state.restored():
        assert module.outputs == []
        assert torch.equal(module.net(torch.eye(2)), expected)
    assert module.outputs == [1]
    assert torch.equal(module.net(torch.eye(2)), expected)


def test_a_second_pass_has_the_hidden_states_of_the_first(tiny_llama):
    """transformers installs hooks at the first call that asks for hidden states, and marks the model."""
    model = tiny_llama()
    ids = torch.ones(1, 4, dtype=torch.long)
    state = ModuleState(model)
    first = model(ids, output_hidden_states=True).hidden_states
    with state.restored():
        second = model(ids, output_hidden_states=True).hidden_states
    assert len(first) == len(second) == len(model(ids, output_hidden_states=True).hidden_states)
    assert len(first) == model.config.num_hidden_layers + 1
