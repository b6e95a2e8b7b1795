"""Fixtures of all tests: small models and batches.

Every test starts from the same seed, on two threads, or on one beside another worker. ``tests/conftest.py`` registers
this module as a plugin of pytest in each process that runs tests.
"""

from __future__ import annotations

import copy
import logging
import os

import pytest
import torch
from compressed_tensors.registry import registry as ct_registry
from hypothesis import settings
from lightning_utilities.core import rank_zero
from torch import nn

from lightning_obs.forward.eager import eager_blocks
from lightning_obs.observers import Observer
from lightning_obs.streaming import worker_processes
from tests.conftest import VOCAB
from tests.support.compilation import compile_in_turn
from tests.support.onnx_exports import cheap_exports
from tests.support.quick_configs import quick_configs
from tests.support.rank_processes import warm_context

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
settings.register_profile("seeded", derandomize=True, deadline=None, database=None)
settings.load_profile("seeded")
compile_in_turn()


@pytest.fixture(scope="session", autouse=True)
def exports_to_onnx_are_cheap():
    with cheap_exports():
        yield


@pytest.fixture(scope="session", autouse=True)
def configs_are_composed_quickly():
    with quick_configs():
        yield


@pytest.fixture(autouse=True)
def seeded():
    """Where there is no accelerator, torch.manual_seed would note its caller's stack for later, which takes 2 ms."""
    seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seed(0)


@pytest.fixture(autouse=True)
def messages_of_rank_zero_are_logged_afterwards():
    """A test that left the number of a rank, another logger or another level would take messages from later tests."""
    before = logged_messages()
    yield
    after = logged_messages()
    changed = [f"{name}: {after[name]}, before {value}" for name, value in before.items() if after[name] != value]
    assert not changed, f"the test has left for all later ones: {'; '.join(changed)}"


def logged_messages():
    """What decides whether a message of rank 0 is logged, and where."""
    return {
        "rank": rank_zero.rank_zero_only.rank,
        "logger": rank_zero.log.name,
        "level": rank_zero.log.level,
        "propagates": rank_zero.log.propagate,
        "is disabled": rank_zero.log.disabled,
        "level that is off everywhere": logging.root.manager.disable,
    }


@pytest.fixture(autouse=True)
def compiled_graphs_may_run_again():
    """A session that a test leaves attached would keep every later test from compiling, until it is collected."""
    before = _users_of_eager_blocks()
    yield
    assert _users_of_eager_blocks() <= before, "a session was left attached, or quantized() was left open"


def _users_of_eager_blocks() -> int:
    """How many blocks are open in which no compiled graph runs."""
    block = eager_blocks.open.get(torch)
    return 0 if block is None else block.users


@pytest.fixture
def own_registry():
    """Observers that a test registers are gone after it."""
    tables = (ct_registry._REGISTRY[Observer], ct_registry._ALIAS_REGISTRY[Observer], Observer._replacements)
    saved = [dict(table) for table in tables]
    yield
    for table, before in zip(tables, saved, strict=True):
        table.clear()
        table.update(before)


@pytest.fixture
def warm_workers(monkeypatch):
    """Workers of ``quantize_checkpoint`` are forks of a process that has imported torch.

    tests/app/test_weights.py starts them as users do.
    """
    monkeypatch.setattr(worker_processes, "get_context", lambda method: warm_context())


class MLP(nn.Module):
    """Two Linear layers, named as people name them."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.fc1 = nn.Linear(16, width)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(width, 8)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class CNN(nn.Module):
    """A convolution, a pool, a head."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, image):
        return self.head(self.conv(image).relu().mean((-2, -1)))


@pytest.fixture
def mlp():
    return MLP()


@pytest.fixture
def cnn():
    return CNN()


@pytest.fixture
def everything():
    """A calibrated model with a module of every kind."""
    from tests.forward.quantized_modules import calibrated_everything

    return calibrated_everything()


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory):
    """A two-layer Llama on disk; loading it gives rotary buffers in float32, whatever the dtype of the weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny_llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,  # large enough for the layers to matter
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def loaded_llamas(tiny_llama_folder):
    """The tiny Llama by dtype, as it is loaded from disk."""
    from transformers import LlamaForCausalLM

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return {dtype: LlamaForCausalLM.from_pretrained(tiny_llama_folder, dtype=dtype).eval() for dtype in dtypes}


@pytest.fixture
def tiny_llama(loaded_llamas):
    """Make a fresh tiny Llama of a dtype: ``tiny_llama(torch.bfloat16)``. To copy takes an eighth of loading."""

    def make(dtype: torch.dtype = torch.float32) -> nn.Module:
        return copy.deepcopy(loaded_llamas[dtype])

    return make


@pytest.fixture
def batches():
    """Three seeded batches of token ids."""
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, VOCAB, (2, 16), generator=generator)} for _ in range(3)]
