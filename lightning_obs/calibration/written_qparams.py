"""The qparams that a session has written to its model, where several sessions calibrate one model in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from lightning_obs.calibration.finalize import on_host
from lightning_obs.model.module_qparams import CHECKSUMS, Calibration, calibration_of, put_back, qparams_of
from lightning_obs.model.wrappers import without_adapters, without_wrappers
from lightning_obs.schemes.planned_modules import Plan


class WrittenQParams:
    """The qparams that one session has written to the modules of its plan. Another session may have replaced them.

    Args:
        model: the calibrated model.
        plan: of the session.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model = model
        self._plan = plan
        self._calibration: Calibration = {}

    def __bool__(self) -> bool:
        """Whether the session has written any."""
        return bool(self._calibration)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Qparams that are on the modules after the ``with`` block are the session's; an error restores the earlier."""
        earlier = calibration_of(self._model)
        try:
            yield
            planned_modules = {target.module for target in self._plan.targets}
            self._calibration = calibration_of(self._model, only=planned_modules)
        except BaseException:
            put_back(earlier)
            raise

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Put the session's qparams on the modules inside the ``with`` block, if another has written since."""
        present = calibration_of(self._model)
        put_back(self._calibration)
        try:
            yield
        finally:
            put_back(present)

    def on_host(self) -> dict[str, torch.Tensor]:
        """``{"layer.weight_scale": tensor}``, copies on the CPU."""
        qparams = {target.name: qparams_of(self._calibration, target.module) for target in self._plan.targets}
        return on_host(qparams)

    def checksums(self) -> dict[str, Mapping[str, int]]:
        """The checksums of the weights that the qparams belong to: ``{"layer": {"weight": checksum}}``."""
        checksums: dict[str, Mapping[str, int]] = {}
        with without_wrappers(self._model), without_adapters(self._model):
            for name, module in self._model.named_modules():
                of_module = self._calibration.get(module, {}).get(CHECKSUMS)
                if of_module:
                    checksums[name] = dict(of_module)
        return checksums
