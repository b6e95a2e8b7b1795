"""vLLM itself, where its environment is there (`make engines` makes it): which schemes it takes, what it computes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from pydantic import ValidationError
from torch import nn

from lightning_obs.engines import VLLM
from lightning_obs.model.module_qparams import storage_format

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / ".venv-engines" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:Using GROUP strategy for both"
    ),  # schemes that nobody would choose are asked too
    pytest.mark.skipif(not ENGINE.exists(), reason="no environment with vLLM: make .venv-engines/.installed"),
]

WEIGHTS = [
    *(
        {"num_bits": bits, "symmetric": symmetric, **strategy}
        for bits, symmetric, strategy in itertools.product(
            (2, 3, 4, 6, 8),
            (True, False),
            ({"strategy": "tensor"}, {"strategy": "channel"}, {"group_size": 64}, {"group_size": 32}),
        )
    ),
    *({"num_bits": 8, "type": "float", "strategy": strategy} for strategy in ("tensor", "channel")),
    {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    {"num_bits": 8, "type": "float", "group_size": 32},
    {"num_bits": 8, "type": "float", "group_size": 32, "scale_dtype": "torch.uint8"},
    {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    {"num_bits": 4, "type": "float", "group_size": 32, "scale_dtype": "torch.uint8"},
]
INPUTS = [
    None,
    *({"num_bits": 8, "type": kind, "strategy": "tensor"} for kind in ("int", "float")),
    *({"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True} for kind in ("int", "float")),
    *({"num_bits": 8, "type": kind, "strategy": "tensor", "dynamic": True} for kind in ("int", "float")),
    *({"num_bits": 8, "type": kind, "group_size": 128, "dynamic": True} for kind in ("int", "float")),
    {"num_bits": 8, "strategy": "tensor", "symmetric": False},
    {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": False},
    {"num_bits": 4, "strategy": "token", "dynamic": True},
    {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
    {"num_bits": 4, "type": "float", "group_size": 32, "dynamic": True, "scale_dtype": "torch.uint8"},
    {"num_bits": 8, "type": "float", "group_size": 32, "dynamic": True, "scale_dtype": "torch.uint8"},
]


def schemes():
    for weights, inputs in itertools.product(WEIGHTS, INPUTS):
        try:
            parts = {"weights": weights, **({"input_activations": inputs} if inputs else {})}
            given = {key: QuantizationArgs.model_validate(args) for key, args in parts.items()}
            yield QuantizationScheme(targets=["Linear"], **given)
        except (ValidationError, NotImplementedError):
            continue


def in_vllm(script, *arguments, seconds=300):
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(ENGINE), str(ROOT / "benchmarks" / "engines" / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=clean)
    assert done.returncode == 0, done.stderr[-2000:]


def short(args):
    """``(type, bits, strategy, group size, dynamic)``."""
    return args and (
        args.type,
        args.num_bits,
        getattr(args.strategy, "value", args.strategy),
        args.group_size,
        args.dynamic,
    )


def verdicts(answers):
    for scheme, answer in zip(schemes(), answers, strict=True):
        yield (short(scheme.weights), short(scheme.input_activations)), VLLM().family_of(scheme), answer


#: classes that vLLM chooses by the weights, whatever the inputs should be
DECIDED_BY_WEIGHTS = {
    *("CompressedTensorsW8A16Fp8", "CompressedTensorsW8A8Fp8", "CompressedTensorsW8A8Fp8MoEMethod"),
    *("CompressedTensorsW8A8Mxfp8", "CompressedTensorsW8A8Mxfp8MoEMethod"),
    *("CompressedTensorsW4A4Mxfp4", "CompressedTensorsW4A4Mxfp4MoEMethod"),
    *("CompressedTensorsW8A8Int8", "CompressedTensorsW8A8Int8MoEMethod"),
    "CompressedTensorsW4A8Int8MoEMethod",  # wants a byte for each value, which is refused in Linear modules
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What vLLM says of every scheme, for Linear modules and for experts."""
    folder, questions = tmp_path_factory.mktemp("rules"), []
    for scheme, experts in itertools.product(schemes(), (False, True)):
        format_ = storage_format(nn.Linear, scheme)
        config = QuantizationConfig(config_groups={"group_0": scheme}, format=format_, ignore=[])
        questions.append({"config": config.model_dump(mode="json"), "experts": experts})
    (folder / "questions.json").write_text(json.dumps(questions))
    in_vllm("vllm_rules.py", folder / "questions.json", folder / "answers.json")
    found = json.loads((folder / "answers.json").read_text())
    return {e: [a for a, q in zip(found, questions, strict=True) if q["experts"] is e] for e in (False, True)}


@pytest.mark.parametrize("experts", [False, True])
def test_vllm_takes_every_scheme_that_a_family_fits(answers, experts):
    wrong = [
        f"{family.name}: {answer[:150]}, {weights}, {inputs}"
        for (weights, inputs), family, answer in verdicts(answers[experts])
        if family is not None and (not experts or family.experts is not None) and answer.startswith("refused")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("experts", [False, True])
def test_vllm_refuses_what_no_family_fits_or_computes_something_else(answers, experts):
    wrong = [
        f"{family and family.name}: {answer}, {weights}, {inputs}"
        for (weights, inputs), family, answer in verdicts(answers[experts])
        if (family is None or (experts and family.experts is None))
        and not answer.startswith("refused")
        and answer not in DECIDED_BY_WEIGHTS
    ]
    assert not wrong, "\n".join(wrong)
