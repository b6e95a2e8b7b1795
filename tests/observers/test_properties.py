"""What holds for every built-in observer, whatever the values: one, equal, denormal, huge, negative, none at all.

What its range covers of any values is said in the observer's own test (``test_normal.py``).
"""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    initialize_module_for_quantization,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.quant_args import round_to_quantized_type_args
from compressed_tensors.quantization.utils import calculate_qparams, calculate_range
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_obs.observers import Observer
from tests.observers.contract import BUILT_IN_NAMES, NAMES, OF_INPUTS, tensors
from tests.support.markdown import ROOT

ONE_SCALE_ONLY = {"histogram", "percentile"}
NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights
FORMATS = {
    "int8": QuantizationArgs(num_bits=8),
    "int8 asymmetric": QuantizationArgs(num_bits=8, symmetric=False),
    "int4": QuantizationArgs(num_bits=4),
    "fp8": QuantizationArgs(num_bits=8, type="float"),
}
every_observer = pytest.mark.parametrize("name", NAMES)


def make(name: str, base_name: str = "input", args: QuantizationArgs = FORMATS["int8"], **kwargs) -> Observer:
    if name in OF_INPUTS:  # here they do without
        base_name, kwargs = "weight", {"strict": False, **kwargs}
    return Observer.load_from_registry(name, base_name=base_name, args=args, **kwargs)


@pytest.mark.parametrize("name", BUILT_IN_NAMES)
def test_it_has_a_config(name):
    observer_class = Observer.get_value_from_registry(name)
    defaults = observer_class.hyperparameters or {}
    kind, scheme = ("weight_observer", "w4a16") if name in OF_INPUTS else ("observer", "int8_static")
    changed = "".join(f" {kind}.{key}={value}" for key, value in defaults.items())
    lines = [
        "# <what its range is, in a sentence>",
        f"#   python -m lightning_obs scheme={scheme} {kind}={name}{changed}",
        f"name: {name}",
        *(f"{key}: {value}" for key, value in defaults.items()),
    ]
    has_config = any(
        (ROOT / "configs" / folder / f"{name}.yaml").is_file() for folder in ("observer", "weight_observer")
    )
    assert has_config, "\n".join([f"write configs/{kind}/{name}.yaml:", *lines])


# ---------------------------------------------------------------------- scale


@pytest.mark.slow_but_first
@every_observer
@settings(max_examples=25)
@given(data=st.data(), form=st.sampled_from(sorted(FORMATS)))
def test_the_scale_is_finite_and_positive_and_zero_is_on_the_grid(name, data, form):
    first = data.draw(tensors())
    second = data.draw(tensors([first.dtype]))
    args = FORMATS[form]
    observer = make(name, args=args)(torch.empty(0, 4))(first)(torch.empty(2, 0))(second)
    qparams = observer.get_qparams()
    assert torch.isfinite(qparams["scale"]).all()
    assert (qparams["scale"] > 0).all()
    low, high = (float(end) for end in calculate_range(args, "cpu"))
    assert low <= qparams["zero_point"].item() <= high
    assert qparams["zero_point"].dtype == args.zp_dtype
    assert observer.nonfinite_statistics() is None
    lowest, highest = observer.get_min_max()
    assert lowest <= highest


@every_observer
@settings(max_examples=10)
@given(value=tensors(), empty=st.sampled_from([(0,), (0, 3), (2, 0, 3), (3, 0)]))
def test_an_empty_tensor_changes_nothing_and_a_reset_observer_is_a_new_one(name, value, empty):
    plain, other = make(name)(value), make(name)(torch.empty(empty))
    assert not other.has_statistics
    other(value + 1).reset()
    assert not other.has_statistics
    other(value)(torch.empty(empty, dtype=value.dtype))
    assert all(torch.equal(a, b) for a, b in zip(plain.get_min_max(), other.get_min_max(), strict=True))


WEIGHTS = {
    "tensor": (QuantizationArgs(strategy="tensor"), torch.float32),
    "channel": (QuantizationArgs(strategy="channel"), torch.bfloat16),
    "group": (QuantizationArgs(num_bits=4, strategy="group", group_size=4), torch.float16),
    "block": (QuantizationArgs(strategy="block", block_structure=[4, 8]), torch.float32),
    "block that does not divide": (QuantizationArgs(strategy="block", block_structure=[7, 3]), torch.bfloat16),
    "tensor_group": (NVFP4, torch.bfloat16),
}


@pytest.mark.parametrize(
    ("name", "strategy"), [(n, s) for n in NAMES for s in WEIGHTS if s == "tensor" or n not in ONE_SCALE_ONLY]
)
def test_a_weight_s_qparams_fit_the_module_that_compressed_tensors_initializes(name, strategy):
    args, dtype = WEIGHTS[strategy]
    module = nn.Linear(32, 12, dtype=dtype)
    initialize_module_for_quantization(module, QuantizationScheme(targets=["Linear"], weights=args))
    qparams = make(name, "weight", args)(module.weight).get_qparams()
    assert qparams["scale"].shape == module.weight_scale.shape
    assert qparams["zero_point"].shape == module.weight_zero_point.shape
    assert qparams["zero_point"].dtype == module.weight_zero_point.dtype
    if args.strategy == "tensor_group":
        assert qparams["global_scale"].shape == module.weight_global_scale.shape
    else:
        assert qparams["global_scale"] is None


@every_observer
def test_a_vector_is_observed_as_its_one_row(name):
    x = torch.randn(16)
    vector, row = make(name)(x), make(name)(x[None])
    assert all(torch.equal(a, b) for a, b in zip(vector.get_min_max(), row.get_min_max(), strict=True))
    assert vector.get_qparams()["scale"].shape == (1,)


# ---------------------------------------------------------------------- least error


FP4 = NVFP4.model_copy(update={"scale_dtype": None})
#: No search counts what float32 cannot: below 1e-15, the error's power of 2.4 is zero for every candidate.
hundredths = st.integers(-(10**4), 10**4).map(lambda n: n / 100)


def error(x, low, high, args, norm):
    """``sum |quantized(x) - x| ** norm`` in float64, with the scale as it is stored."""
    scale, zero_point = (value.double() for value in calculate_qparams(low, high, args))
    levels = round_to_quantized_type_args((x / scale + zero_point).float(), args, *calculate_range(args, "cpu"))
    return ((levels.double() - zero_point) * scale - x).abs().pow(norm).sum().item()


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("name", "factors", "norm"),
    [
        ("memoryless_mse", [1 - i / 100 for i in range(20)], 2.4),
        ("mse", [1 - i / 100 for i in range(20)], 2.4),
        ("nvfp4_expanded_mse", [1.8 * (1 - i / 200) for i in range(111)], 2.4),
        ("histogram", [1 - i / 100 for i in range(95)], 2.0),
    ],
)
@settings(max_examples=40)
@given(values=st.lists(hundredths, min_size=1, max_size=32), form=st.sampled_from([*sorted(FORMATS), "fp4"]))
def test_no_candidate_in_float64_has_less_error_than_the_chosen(name, factors, norm, values, form):
    args = FORMATS.get(form, FP4)
    x = torch.tensor(values, dtype=torch.bfloat16).float()  # the histogram counts bfloat16
    args = args.model_copy(update={"strategy": "tensor", "group_size": None})
    low, high = make(name, args=args, patience=1000)(x[None]).get_min_max()
    every = [error(x.double(), x.min().reshape(1) * p, x.max().reshape(1) * p, args, norm) for p in factors]
    assert error(x.double(), low, high, args, norm) <= min(every) * (1 + 1e-4) + 1e-9 * x.abs().max().item() ** norm
