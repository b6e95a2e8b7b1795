"""The table of the worst layers, as text."""

from lightning_obs.report.layer_errors import LayerError
from lightning_obs.report.metrics import TensorError
from lightning_obs.report.summary import layer_table


def test_a_layer_of_which_no_number_is_known_has_no_row():
    table = layer_table([LayerError("linear", weight=TensorError(sqnr=40.0)), LayerError("relu")])
    assert [str(name) for name in table.columns[0].cells] == ["linear"]


def test_where_nothing_is_known_the_names_stay():
    table = layer_table([LayerError("first"), LayerError("second")])
    assert [str(name) for name in table.columns[0].cells] == ["first", "second"]
