"""The observer contract, on the built-in observers and on a class of a user's."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

from lightning_obs.errors import CalibrationError, CalibrationWarning
from lightning_obs.observers import Observer
from tests.observers.contract import BUILT_IN, INT8, Largest, make

NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights

every_observer = pytest.mark.parametrize("name", BUILT_IN)

# ---------------------------------------------------------------------- two phases


@every_observer
def test_an_observer_observes_then_computes(name):
    observer = make(name)
    assert not observer.has_statistics
    assert observer(torch.tensor([[-1.0, 2.0]])) is observer
    assert observer.has_statistics
    qparams = observer.get_qparams()
    assert set(qparams) == {"scale", "zero_point", "global_scale"}
    assert qparams["scale"].item() == pytest.approx(2 / 127.5)
    assert qparams["global_scale"] is None


@every_observer
def test_computing_changes_nothing(name):
    observer = make(name, "weight", NVFP4)(torch.randn(4, 32))
    before = {key: value for key, value in vars(observer).items() if isinstance(value, torch.Tensor)}
    first, second = observer.get_qparams(), observer.get_qparams()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert {key: value for key, value in vars(observer).items() if isinstance(value, torch.Tensor)} == before


@pytest.mark.parametrize("make_one", [*(lambda n=n: make(n) for n in BUILT_IN), lambda: Largest("input", INT8)])
def test_reset_forgets_everything(make_one):
    observer, fresh = make_one(), make_one()
    observer(torch.full((2, 4), 100.0))
    observer.reset()
    assert not observer.has_statistics
    x = torch.randn(2, 4)
    assert observer(x).get_min_max() == fresh(x).get_min_max()
    observer.reset()
    observer.reset()
    assert not observer.has_statistics


def test_reset_keeps_the_fused_set():
    a, b = make("static_minmax", "weight", NVFP4), make("static_minmax", "weight", NVFP4)
    a(torch.ones(2, 16))
    Observer.fuse([a, b])
    a.reset()
    assert a._fused_observers == [b]


@pytest.mark.parametrize("getter", ["get_min_max", "get_qparams"])
@every_observer
def test_nothing_observed_is_said(name, getter):
    with pytest.raises(CalibrationError, match=r"No statistics available in \w+ \(input\).*observe a tensor first"):
        getattr(make(name), getter)()


@every_observer
def test_an_empty_tensor_changes_nothing(name):
    observer = make(name)(torch.empty(0, 4))
    assert not observer.has_statistics
    observer(torch.ones(1, 4))(torch.empty(2, 0, 4))
    assert observer.get_min_max() == (1, 1)


def test_an_observer_that_observes_nothing_says_what_to_write():
    with pytest.raises(NotImplementedError, match="Observer must implement update_statistics_from_observed, or"):
        Observer("input", INT8)(torch.ones(1))


def test_an_unknown_base_name_is_refused():
    with pytest.raises(CalibrationError, match=r"unknown base name 'inputs'. Expected one of weight, input, output"):
        make("minmax", "inputs")


@every_observer
def test_statistics_made_under_inference_mode_can_be_updated_later(name):
    observer = make(name)
    with torch.inference_mode():
        observer(torch.randn(3, 4))
        observer(torch.randn(3, 4))
    observer.min_vals.add_(1)
    observer(torch.randn(3, 4))
    assert not observer.min_vals.is_inference()


@every_observer
def test_observing_keeps_no_graph(name):
    observer = make(name)(torch.randn(3, 4, requires_grad=True))
    assert not observer.min_vals.requires_grad


@pytest.mark.parametrize(
    ("name", "kwargs", "lows", "highs"),
    [
        ("memoryless_minmax", {}, [0, -3, -1], [0, 1, 3]),
        ("static_minmax", {}, [0, -3, -3], [0, 1, 3]),
        ("minmax", {"averaging_constant": 0.1}, [0, -0.3, -0.37], [0, 0.1, 0.39]),
        ("memoryless_mse", {}, [0, -3, -1], [0, 1, 3]),
        ("mse", {"averaging_constant": 0.1}, [0, -0.3, -0.37], [0, 0.1, 0.39]),
    ],
)
def test_every_vector_moves_the_range_as_the_peer_pins(name, kwargs, lows, highs):
    observer = make(name, **kwargs)
    ranges = [observer(x).get_min_max() for x in torch.tensor([[0.0, 0.0], [-3.0, 1.0], [-1.0, 3.0]])]
    assert [low.item() for low, _ in ranges] == pytest.approx(lows)
    assert [high.item() for _, high in ranges] == pytest.approx(highs)


@pytest.mark.parametrize("args", [INT8, NVFP4], ids=["int8", "nvfp4"])
def test_statistics_that_were_set_give_qparams_like_observed_ones(args):
    """What a sync or a resumed run leaves in a new observer."""
    x = torch.tensor([[-5.0, *[5.0] * 15]])
    observed, filled = make("static_minmax", "weight", args)(x), make("static_minmax", "weight", args)
    filled.min_vals, filled.max_vals = observed.get_min_max()
    assert filled.get_qparams() == observed.get_qparams()
    assert (filled.get_qparams()["global_scale"] is None) == (args is INT8)


# ---------------------------------------------------------------------- fused sets


def test_a_fused_set_has_one_global_scale_and_its_own_local_scales():
    weights = [torch.randn(4, 32) * k for k in (1, 5, 3)]
    group = [make("memoryless_minmax", "weight", NVFP4)(w) for w in weights]
    alone = [observer.get_qparams()["global_scale"] for observer in group]
    Observer.fuse(group)
    fused = [observer.get_qparams()["global_scale"] for observer in group]
    assert fused[0] == fused[1] == fused[2] == min(alone)
    assert not torch.equal(group[0].get_qparams()["scale"], group[1].get_qparams()["scale"])


def test_a_fused_member_that_saw_nothing_is_said():
    a, b = make("static_minmax", "weight", NVFP4), make("static_minmax", "weight", NVFP4)
    Observer.fuse([a, b])
    with pytest.raises(CalibrationError, match="No statistics available"):
        a(torch.ones(2, 16)).get_qparams()


@pytest.mark.parametrize("args", [INT8, QuantizationArgs(num_bits=4, group_size=4)])
def test_only_tensor_group_has_a_global_scale(args):
    assert make("static_minmax", "weight", args)(torch.ones(2, 8)).get_global_scale() is None


# ---------------------------------------------------------------------- hyperparameters


@pytest.mark.parametrize("where", ["args", "keyword", "both"])
def test_hyperparameters_come_from_args_or_keywords_and_keywords_win(where):
    in_args = {"averaging_constant": 0.5 if where == "args" else 0.1} if where != "keyword" else {}
    keywords = {"averaging_constant": 0.5} if where != "args" else {}
    observer = make("minmax", args=QuantizationArgs(observer_kwargs=in_args), **keywords)
    assert observer.averaging_constant == 0.5
    assert observer.args.observer_kwargs == {"averaging_constant": 0.5}


def test_a_constructor_does_not_change_its_caller_s_args():
    args = QuantizationArgs(num_bits=4, observer="minmax", observer_kwargs={})
    before = args.model_dump()
    observer = make("minmax", args=args, averaging_constant=0.5)
    observer.args.observer_kwargs["averaging_constant"] = 0.9
    observer.args.num_bits = 8
    assert args.model_dump() == before


def test_observers_that_share_args_do_not_share_hyperparameters():
    args = QuantizationArgs()
    first = make("minmax", args=args, averaging_constant=0.5)
    second = make("minmax", args=args)
    assert (first.averaging_constant, second.averaging_constant) == (0.5, 0.01)


@pytest.mark.parametrize(("name", "known"), [("minmax", "averaging_constant"), ("static_minmax", "signed")])
def test_an_unknown_hyperparameter_is_refused_and_the_known_are_named(name, known):
    with pytest.raises(CalibrationError, match=rf"Observer has no hyperparameter 'averaging'.*\. Expected .*{known}"):
        make(name, averaging=0.5)


def test_a_class_that_declares_no_hyperparameters_takes_what_it_is_given():
    observer = Largest("input", QuantizationArgs(observer_kwargs={"a": 1}), b=2)
    assert observer.args.observer_kwargs == {"a": 1, "b": 2}


# ---------------------------------------------------------------------- registry


@pytest.mark.parametrize("name", ["static_minmax", "static-minmax", "Static_MinMax"])
def test_a_name_is_found_however_it_is_written(name):
    assert type(make(name)).__name__ == "StaticMinMaxObserver"


def test_an_unknown_name_is_refused_and_the_known_are_named():
    with pytest.raises(
        CalibrationError,
        match=r"unknown observer 'minmx' .did you mean `minmax`.*Expected one of .*mse, .*static_minmax",
    ):
        make("minmx")


@pytest.mark.parametrize("name", [None, 3, ["minmax"]])
def test_a_name_is_a_text(name):
    with pytest.raises(CalibrationError, match=r"an observer has a name. Got .*, expected one of .*minmax"):
        make(name)


@pytest.mark.usefixtures("own_registry")
def test_a_class_registers_under_a_name_and_its_aliases():
    Observer.register("largest", alias=["biggest"])(Largest)
    assert type(make("largest")) is Largest
    assert type(make("biggest")) is Largest


@pytest.mark.usefixtures("own_registry")
def test_a_class_registers_under_its_own_name():
    Observer.register()(Largest)
    assert type(make("Largest")) is Largest


@pytest.mark.usefixtures("own_registry")
def test_a_class_that_replaces_another_keeps_its_aliases():
    with pytest.warns(CalibrationWarning, match=r"observer 'Minmax' is now .*Minmax; it replaces .*MinMax"):
        Observer.register(alias=["biggest"])(type("Minmax", (Largest,), {}))
    assert type(make("biggest")).__name__ == "Minmax"


@pytest.mark.usefixtures("own_registry")
def test_a_class_under_a_built_in_name_takes_its_place_and_says_so_once(recwarn):
    with pytest.warns(CalibrationWarning, match=r"observer 'minmax' is now .*Largest; it replaces .*MinMax") as said:
        Observer.register("minmax")(Largest)
    assert said[0].filename == __file__
    Observer.register("minmax")(Largest)  # a notebook cell that is run again
    assert not recwarn.list
    assert type(make("minmax")) is Largest
