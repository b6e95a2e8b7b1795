"""Three observers as the ecosystem's observers' guide writes them, with only the import line changed."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import nn

from lightning_obs import CalibrationError, CalibrationSession
from lightning_obs.observers import Observer, QParamsDict


class GuideMinMax(Observer):
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.min_vals = torch.amin(observed, dim=(0, -1))
        self.max_vals = torch.amax(observed, dim=(0, -1))


class GuideNormal(Observer):
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self._mean = observed.float().mean(dim=(0, -1))
        self._std = observed.float().std(dim=(0, -1))

    @property
    def has_statistics(self) -> bool:
        return hasattr(self, "_mean") and hasattr(self, "_std")

    def get_min_max(self):
        k = self.args.observer_kwargs.get("k", 3.0)
        return self._mean - k * self._std, self._mean + k * self._std

    def get_qparams(self) -> QParamsDict:
        min_vals, max_vals = self.get_min_max()
        global_scale = None
        if self.args.strategy == QuantizationStrategy.TENSOR_GROUP:
            ranges = [observer.get_min_max() for observer in [self, *self._fused_observers]]
            low = min(r[0].min() for r in ranges)
            high = max(r[1].max() for r in ranges)
            global_scale = generate_gparam(low.reshape(1), high.reshape(1))
        scale, zero_point = calculate_qparams(min_vals, max_vals, self.args, global_scale=global_scale)
        return {"scale": scale, "zero_point": zero_point, "global_scale": global_scale}


class GuidePercentile(Observer):
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        p = self.args.observer_kwargs.get("percentile", 99.0) / 100
        flat = observed.movedim(0, -2).flatten(-2).float()
        self.min_vals = torch.quantile(flat, 1 - p, dim=-1)
        self.max_vals = torch.quantile(flat, p, dim=-1)


@pytest.fixture(autouse=True)
def registered(own_registry):
    Observer.register("guide_minmax")(GuideMinMax)
    Observer.register("guide_normal")(GuideNormal)
    if "percentile" in Observer.registered_names():
        with pytest.warns(UserWarning, match="observer 'percentile' is now"):
            Observer.register("percentile")(GuidePercentile)
    else:
        Observer.register("percentile")(GuidePercentile)


def calibrate(model, observers, scheme="INT8_STATIC"):
    x = torch.randn(32, 16)
    with CalibrationSession(model, scheme, observers=observers) as session:
        model(x)
    return x, session.result


def test_an_observer_that_sets_min_vals_and_max_vals(mlp):
    x, result = calibrate(mlp, {"input": "guide_minmax", "weight": "guide_minmax"})
    assert mlp.fc1.input_scale.tolist() == [(x.abs().max() / 127.5).item()]
    assert torch.equal(mlp.fc1.weight_scale, mlp.fc1.weight.detach().abs().amax(1, keepdim=True) / 127.5)
    assert result.modules == ["fc1", "fc2"]


def test_an_observer_that_gathers_statistics_and_does_not_say_so_is_named(mlp):
    Observer.register("guide_silent")(type("GuideSilent", (GuideNormal,), {"has_statistics": Observer.has_statistics}))
    with pytest.raises(
        CalibrationError,
        match=r"has_statistics=False although it stored statistics: fc1 \(input\), fc2 \(input\).*declare",
    ):
        calibrate(mlp, {"input": "guide_silent"})


def test_an_observer_with_statistics_and_qparams_of_its_own(mlp):
    x, _ = calibrate(mlp, {"input": {"name": "guide_normal", "k": 2.0}})
    expected = torch.maximum(-(x.mean() - 2 * x.std()), x.mean() + 2 * x.std()) / 127.5
    assert mlp.fc1.input_scale.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_range_that_quantile_finds(mlp):
    x, _ = calibrate(mlp, {"input": {"name": "percentile", "percentile": 90}, "weight": "percentile"})
    low, high = torch.quantile(x, torch.tensor([0.1, 0.9]))
    weight = torch.quantile(mlp.fc2.weight.detach(), torch.tensor([0.01, 0.99]), dim=1).abs().amax(0)
    assert mlp.fc1.input_scale.item() == pytest.approx(torch.maximum(-low, high).item() / 127.5, rel=1e-5)
    torch.testing.assert_close(mlp.fc2.weight_scale.flatten(), weight / 127.5)


def test_an_observer_of_one_s_own_computes_the_global_scale_of_its_fused_set():
    model = nn.ModuleDict({name: nn.Linear(32, 4, bias=False) for name in ("gate_proj", "up_proj")})
    nn.init.normal_(model["up_proj"].weight, std=3)
    weight = {"name": "guide_normal", "k": 1.5}
    with CalibrationSession(model, "NVFP4A16", observers={"weight": weight}, engines="unchecked"):
        pass
    groups = [m.weight.detach().reshape(4, 2, 16) for m in model.values()]
    mean, std = (torch.stack([f(g) for g in groups]) for f in (lambda g: g.mean(-1), lambda g: g.std(-1)))
    absmax = torch.maximum(-(mean - 1.5 * std), mean + 1.5 * std).max()
    expected = pytest.approx(448 * 6 / absmax.item(), rel=1e-5)
    assert [m.weight_global_scale.item() for m in model.values()] == [expected, expected]


@pytest.mark.parametrize("cls", [GuideMinMax, GuideNormal, GuidePercentile])
@pytest.mark.parametrize(
    ("base_name", "args", "shape", "scales"),
    [
        ("weight", QuantizationArgs(strategy="channel"), (6, 8), (6, 1)),
        ("weight", QuantizationArgs(num_bits=4, group_size=4), (6, 8), (6, 2)),
        ("k", QuantizationArgs(strategy="attn_head"), (2, 3, 5, 4), (3, 1, 1)),
        ("input", QuantizationArgs(), (2, 5, 8), (1,)),
    ],
)
def test_a_class_of_the_guide_needs_no_case_for_the_strategy(cls, base_name, args, shape, scales):
    observer = cls(base_name, args)(torch.randn(shape))
    assert observer.get_qparams()["scale"].shape == scales
    observer.reset()
    assert not observer.has_statistics
