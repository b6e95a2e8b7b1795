"""Models, and what a path through the package may ask of a device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_range
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_obs import linearize_experts
from lightning_obs.model.module_qparams import checksum
from lightning_obs.numerics.histogram import count_values
from tests.support.moe_models import tiny_moe
from tests.support.pretend_device import DEVICE, Counts, on_cpu
from tests.support.pretend_loops import add_loops

add_loops()
# Tables that are made once in a process.
checksum(torch.zeros(1, device=DEVICE))
count_values(torch.zeros(1, 1, 1, device=DEVICE))
for bits, kind in ((4, "int"), (8, "int"), (4, "float"), (8, "float")):
    calculate_range(QuantizationArgs(num_bits=bits, type=kind), DEVICE)


class Budget(NamedTuple):
    """The most that the package may ask for; what the model asks for is not counted.

    ``moved`` is in units of ``holds``: bytes a value, or megabytes.
    """

    launches: int
    moved: float
    reads: int

    def holds(self, counts: Counts, of: str, unit: float = 1e6) -> None:
        """Fail where more was asked for, and name the lines that asked."""
        launches, moved, reads = counts.of_package()
        found = Budget(launches, round(moved / unit, 2), reads)
        assert all(a <= b for a, b in zip(found, self, strict=True)), f"{of}: {found}, budget {self}\n{counts}"


def llama(layers: int = 2, seed: int = 0, **options) -> torch.nn.Module:
    """A model of 14 modules, 7 a layer. Attention is written out: other kernels of the CPU are not the device's."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=128, num_hidden_layers=layers, attn_implementation="eager", **sizes, **options)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()  # not the buffers, which loading leaves in float32
    return model


def mixture(experts: int = 4) -> torch.nn.Module:
    """Two layers of experts, each a Linear."""
    torch.manual_seed(0)
    model = tiny_moe("qwen3_moe", attn_implementation="eager", num_experts=experts)
    linearize_experts(model)
    return model


def token_batches(count: int = 3, length: int = 32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 128, (2, length), generator=generator) for _ in range(count)]


def assert_same_bits(found, expected, of: str = "") -> None:
    """Nests of tensors have the same bits, wherever they lie."""
    found, expected = on_cpu(found), on_cpu(expected)
    assert found.keys() == expected.keys()
    differ = [n for n in expected if found[n].dtype != expected[n].dtype or not _equal(found[n], expected[n])]
    assert not differ, f"{of}: not the CPU's: {differ}"


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.float(), other.float())


class PretendAccelerator(Accelerator):
    """Runs a Trainer on the device, as a user's accelerator of another maker would."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices):
        return devices

    @staticmethod
    def get_parallel_devices(devices):
        return [DEVICE]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "pretend"


def on_trainer_device() -> dict[str, object]:
    """Arguments of a Trainer that runs on the device."""
    return {"accelerator": PretendAccelerator(), "strategy": SingleDeviceStrategy(device=DEVICE), "devices": 1}
