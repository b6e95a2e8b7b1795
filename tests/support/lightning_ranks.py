"""A LightningModule and data for tests on several ranks, whose numbers have the same bits however batches are cut.

Weights and data are small multiples of a power of two, so every sum is exact in float32 and no matrix product depends
on how many rows it has. Ranks of `run_ranks` look to Lightning like those that torchrun starts.
"""

from __future__ import annotations

import logging
import os
import warnings
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_obs import CalibrationCallback
from tests.support.in_process import Done, run_command_line, run_script
from tests.support.lightning_package import MESSAGES, L
from tests.support.rank_processes import run_ranks

WIDTH = 8


def environment_of_torchrun(rank: int, ranks: int) -> dict[str, str]:
    """The variables by which Lightning knows a rank that torchrun has started."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip


def like_torchrun(rank: int, ranks: int) -> None:
    """Make Lightning take this process for one of torchrun's."""
    os.environ.update(environment_of_torchrun(rank, ranks))
    warnings.filterwarnings("ignore", message=".*LeafSpec.*deprecated")


def run_command_line_on_ranks(ranks: int, *arguments: str, folder: Path) -> list[Done]:
    """``torchrun --nproc_per_node=ranks -m lightning_obs arguments`` in ``folder``: what each rank printed."""
    return run_ranks(_on_rank, ranks, ranks, arguments, folder, timeout=120)


def _on_rank(rank: int, ranks: int, arguments: tuple[str, ...], folder: Path) -> Done:
    return run_command_line(*arguments, folder=folder, environment=environment_of_torchrun(rank, ranks))


def run_script_on_ranks(ranks: int, path: Path, *arguments: str, folder: Path) -> list[Done]:
    """``torchrun --nproc_per_node=ranks path arguments`` in ``folder``: what ranks printed, and Lightning's messages.

    Lightning's own launcher: tests/app/test_cli.py.
    """
    return run_ranks(_script_on_rank, ranks, ranks, path, arguments, folder, timeout=120)


def _script_on_rank(rank: int, ranks: int, path: Path, arguments: tuple[str, ...], folder: Path) -> Done:
    messages = StringIO()
    handler = logging.StreamHandler(messages)
    logger = logging.getLogger(MESSAGES)
    logger.addHandler(handler)
    try:
        done = run_script(path, *arguments, folder=folder, environment=environment_of_torchrun(rank, ranks))
    finally:
        logger.removeHandler(handler)
    done.stderr += messages.getvalue()
    return done


def trainer(*callbacks: L.Callback, ranks: int = 1, **options: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": ranks,
        "strategy": "ddp" if ranks > 1 else "auto",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(callbacks=list(callbacks), **{**defaults, **options})


def exact(parameter: torch.Tensor, generator: torch.Generator) -> None:
    with torch.no_grad():
        parameter.copy_(torch.randint(-32, 33, parameter.shape, generator=generator) / 32)


class Net(nn.Module):
    """Two layers; each sample's last value says which of three experts it goes to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 12) for _ in range(3))
        self.last = nn.Linear(12, 4)
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            exact(parameter, generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        out = hidden.new_zeros(len(x), 12)
        for number, expert in enumerate(self.experts):
            chosen = x[:, -1] == number
            if chosen.any() or self.training:  # in training every rank has a gradient of every expert
                out = out.index_put((chosen,), expert(hidden[chosen]))
        return self.last(out)


class Module(L.LightningModule):
    def __init__(self, lr: float = 0.0, logs: bool = True) -> None:
        super().__init__()
        self.net, self.lr, self.logs = Net(), lr, logs

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.net(batch[0]).pow(2).mean()
        if self.logs:
            self.log("val_loss", loss, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether names, shapes, dtypes and bits are equal; fails where they are not."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
        assert torch.equal(value.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8)), name
    return True


def samples(count: int, experts: tuple[int, ...] = (0,)) -> torch.Tensor:
    """``(count, WIDTH)``; sample i goes to expert ``experts[i % len(experts)]``. Later samples are larger."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randint(-16, 17, (count, WIDTH), generator=generator) / 4
    x *= 1 + torch.arange(count).unsqueeze(1) // 4
    x[:, -1] = torch.tensor(experts)[torch.arange(count) % len(experts)]
    return x


def loader(x: torch.Tensor, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x), batch_size=batch_size)


def calibration(*, weight: str = "memoryless_minmax", scheme: Any = "INT8_STATIC", **options: Any) -> Any:
    observers = {"input": options.pop("input", "static_minmax"), "weight": weight}
    return CalibrationCallback(scheme, observers=observers, module="net", **options)
