"""An observer of your own: one method, one name, usable wherever a built-in one is.

python examples/04_own_observer.py
"""

import torch
from torch import nn

from lightning_obs import CalibrationSession, Observer


@Observer.register("two_sigma")
class TwoSigmaObserver(Observer):
    """Clip the range to two standard deviations around the mean, of the widest batch seen."""

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        # observed: (num_observations, *qparam_shape, group_size); a range has qparam_shape
        mean, std = observed.mean(dim=(0, -1)), observed.std(dim=(0, -1))
        low, high = mean - 2 * std, mean + 2 * std
        if self.has_statistics:
            low, high = torch.minimum(low, self.min_vals), torch.maximum(high, self.max_vals)
        self.min_vals, self.max_vals = low, high


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

for name in ("static_minmax", "two_sigma"):
    with CalibrationSession(model, "INT8_STATIC", observers={"input": name}) as session:
        for _ in range(8):
            model(torch.randn(64, 16))
    print(
        name, {layer: f"[{low:.2f}, {high:.2f}]" for layer, (low, high) in session.result.chosen_input_ranges.items()}
    )
