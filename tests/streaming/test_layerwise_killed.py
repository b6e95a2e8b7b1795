"""A run layer by layer that was killed goes on after its last block, on several ranks too, to the same files."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections import Counter
from functools import partial

import pytest
import torch
import transformers as t
from torch import nn

from lightning_obs import BlockRuns, CalibrationError, calibrate_layerwise
from lightning_obs.files.tensors import TensorReader
from lightning_obs.ranks.collectives import Collectives
from tests.streaming.test_checkpoint_weights import sums, tiny_llama
from tests.streaming.test_layerwise import IGNORE, ON_QUANTIZED_INPUTS, STATIC, in_memory, make_batches, require_same
from tests.support.rank_processes import run_ranks

_CALLS = ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.truncate", "os.chmod")


def calibrate_and_die(rank, source, out, at, ranks=1, inputs="full_precision"):
    """Calibrate, and die at the ``at``-th call to the file system beside ``out``; how many there were."""
    seen = [0]

    def hook(event, args):
        if event in _CALLS and any(str(out.parent) in str(each) for each in args) and seen[0] >= 0:
            seen[0] += 1
            if seen[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)

    if rank == 0:
        sys.addaudithook(hook)
    batches = make_batches(4)[rank::ranks]
    collectives = Collectives.of_group() if ranks > 1 else None
    runs = BlockRuns(inputs=inputs)
    result = calibrate_layerwise(source, batches, "FP8", out, **STATIC, collectives=collectives, runs=runs)
    calls, seen[0] = seen[0], -1
    return calls, result.measurements, result.input_ranges


#: a process that is killed may have compiled the loops, and kept nothing of that
LIMIT = 240


def killed_and_gone_on_with(tmp_path, points, inputs="full_precision"):
    source = tiny_llama(tmp_path / "llama")
    calls, *expected = run_ranks(calibrate_and_die, 1, source, tmp_path / "whole" / "out", 0, 1, inputs, timeout=LIMIT)[
        0
    ]
    for number, point in enumerate(points):
        out = tmp_path / str(number) / "out"
        with pytest.raises(RuntimeError, match="died"):
            run_ranks(calibrate_and_die, 1, source, out, max(1, int(calls * point)), 1, inputs, timeout=LIMIT)
        if out.exists():  # the last calls come after it was renamed
            assert sums(out) == sums(tmp_path / "whole" / "out")
            continue
        result = calibrate_layerwise(source, make_batches(4), "FP8", out, **STATIC, runs=BlockRuns(inputs=inputs))
        assert [result.measurements, result.input_ranges] == expected
        require_same(out, tmp_path / "whole" / "out")
        assert (out / "config.json").read_bytes() == (tmp_path / "whole" / "out" / "config.json").read_bytes()
        assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_files(tmp_path):
    killed_and_gone_on_with(tmp_path, [0.3, 0.8, 0.995])


@pytest.mark.nightly
@pytest.mark.parametrize("inputs", ["full_precision", "quantized"])
def test_a_run_that_is_killed_anywhere_goes_on_to_the_same_files(inputs, tmp_path):
    killed_and_gone_on_with(tmp_path, [random.random() for _ in range(20)], inputs)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("scheme", "options"),
    [("FP8", STATIC), ("W4A16", {"ignore": IGNORE, **ON_QUANTIZED_INPUTS})],
    ids=["FP8", "on quantized inputs"],
)
def test_a_run_that_goes_on_loads_only_what_is_not_finished(scheme, options, tmp_path, monkeypatch):
    source, read = tiny_llama(tmp_path / "llama"), Counter()

    def stop(name, done, total):
        if name.startswith("model.layers.1."):
            raise KeyboardInterrupt

    runs = BlockRuns(progress=stop)
    with pytest.raises(KeyboardInterrupt):
        calibrate_layerwise(source, make_batches(), scheme, tmp_path / "out", **options, runs=runs)
    original = TensorReader.read
    monkeypatch.setattr(TensorReader, "read", lambda self, name, *a: (read.update([name]), original(self, name, *a))[1])
    calibrate_layerwise(source, make_batches(), scheme, tmp_path / "out", **options)
    assert not [name for name in read if name.startswith("model.layers.0.")]
    expected, _ = in_memory(source, tmp_path / "memory", make_batches(), scheme, **options)
    assert sums(tmp_path / "out") == sums(expected)


def stopped_in_the_second_block(source, out, scheme="FP8", options=STATIC):
    def stop(name, done, total):
        if name.startswith("model.layers.1."):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_layerwise(source, make_batches(), scheme, out, **options, runs=BlockRuns(progress=stop))


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("batches", "scheme", "options", "runs", "text"),
    [
        (2, "FP8", {}, {}, "number of batches: 3 -> 2, checksum of the batches: "),
        (3, "INT8_STATIC", {}, {}, "config_groups.group_0.weights.type: .*float.* -> .*int"),
        (3, "FP8", {"ignore": ["lm_head", "re:.*down_proj"]}, {}, "ignore: .*re:.*down_proj"),
        (3, "FP8", {"on_missing": "warn"}, {}, "on_missing: .*error.* -> .*warn"),
        (3, "FP8", {}, {"inputs": "quantized"}, "inputs: 'full_precision' -> 'quantized'"),
    ],
)
def test_other_data_or_options_than_those_of_the_killed_run_are_refused(batches, scheme, options, runs, text, tmp_path):
    source, out = tiny_llama(tmp_path / "llama"), tmp_path / "out"
    stopped_in_the_second_block(source, out)
    message = rf"out.unfinished was begun with other arguments: .*{text}.*delete .*out.unfinished to start over"
    with pytest.raises(CalibrationError, match=message):
        calibrate_layerwise(source, make_batches(batches), scheme, out, **{**STATIC, **options}, runs=BlockRuns(**runs))
    assert not out.exists()


class BridgedLlama(t.LlamaForCausalLM):
    """Calls a Linear before its first block, one before its second, and one before every block but the first."""

    def __init__(self, config):
        super().__init__(config)
        for name in ("entry", "bridge", "gate"):
            setattr(self.model, name, nn.Linear(config.hidden_size, config.hidden_size, bias=False))
        for index, layer in enumerate(self.model.layers):
            layer.register_forward_pre_hook(partial(self.before_layer, index))
        self.post_init()

    def before_layer(self, index, _, args):
        hidden, *others = args
        gate = self.model.gate if index else self.model.entry
        hidden = hidden + gate(hidden)
        if index == 1:
            hidden = self.model.bridge(hidden)
        return hidden, *others


def bridged_llama(folder, monkeypatch):
    monkeypatch.setattr("transformers.BridgedLlama", BridgedLlama, raising=False)
    torch.manual_seed(0)
    config = t.LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1,
    )  # fmt: skip
    BridgedLlama(config).bfloat16().save_pretrained(folder)
    return folder


OUTSIDE = {
    "moving averages": ("INT8_STATIC", {"observers": {"input": "minmax"}}, {}),
    "quantized blocks": ("INT8_STATIC", {}, {"inputs": "quantized"}),
    "gptq": ("W4A16", {"observers": {"weight": "hessian"}, "rounding": "gptq"}, {}),
    "on quantized inputs": ("W4A16", ON_QUANTIZED_INPUTS, {}),
}


@pytest.mark.filterwarnings("ignore:.*fitted weights have larger errors")  # of an untrained model, random tokens
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case == "gptq")) for case in OUTSIDE])
def test_modules_outside_of_blocks_are_observed_once_by_both_runs(case, tmp_path, monkeypatch):
    """The first run stops in the third block: what lies before it is not observed again, and not forgotten."""
    source = bridged_llama(tmp_path / "llama", monkeypatch)
    scheme, options, runs = OUTSIDE[case]
    options = {"ignore": IGNORE, "engines": "unchecked", **options}

    def stop(name, done, total):
        if name.startswith("model.layers.2."):
            raise KeyboardInterrupt

    whole = calibrate_layerwise(source, make_batches(4), scheme, tmp_path / "whole", **options, runs=BlockRuns(**runs))
    with pytest.raises(KeyboardInterrupt):
        calibrate_layerwise(
            source, make_batches(4), scheme, tmp_path / "out", **options, runs=BlockRuns(**runs, progress=stop)
        )
    result = calibrate_layerwise(source, make_batches(4), scheme, tmp_path / "out", **options, runs=BlockRuns(**runs))
    assert {"model.entry", "model.bridge", "model.gate"} <= set(result.modules)
    assert sums(tmp_path / "out") == sums(tmp_path / "whole")
    for name in ("modules", "measurements", "input_ranges", "chosen_input_ranges", "skipped", "fit_errors"):
        assert getattr(result, name) == getattr(whole, name), name


def test_a_killed_run_on_quantized_inputs_goes_on_with_other_inputs_of_blocks_which_it_does_not_use(tmp_path):
    source, out = tiny_llama(tmp_path / "llama"), tmp_path / "out"
    options = {"ignore": IGNORE, **ON_QUANTIZED_INPUTS}
    stopped_in_the_second_block(source, out, "W4A16", options)
    calibrate_layerwise(source, make_batches(), "W4A16", out, **options, runs=BlockRuns(inputs="quantized"))
    calibrate_layerwise(source, make_batches(), "W4A16", tmp_path / "whole", **options)
    assert sums(out) == sums(tmp_path / "whole")


def test_a_copy_of_the_checkpoint_is_as_good_as_the_one_that_the_killed_run_read(tmp_path):
    source, out = tiny_llama(tmp_path / "llama"), tmp_path / "out"
    stopped_in_the_second_block(source, out)
    copied = shutil.copytree(source, tmp_path / "copied", copy_function=shutil.copyfile)  # with times of its own
    shutil.rmtree(source)
    calibrate_layerwise(copied, make_batches(), "FP8", out, **STATIC)
    assert sums(out) == sums(in_memory(copied, tmp_path / "memory", make_batches(), "FP8", **STATIC)[0])


@pytest.mark.slow
def test_ranks_with_their_own_data_write_the_files_of_one_also_when_they_were_killed(tmp_path):
    source = tiny_llama(tmp_path / "llama")
    expected, in_one = in_memory(source, tmp_path / "memory", make_batches(4), "FP8", **STATIC)
    (calls, _, ranges), _ = run_ranks(calibrate_and_die, 2, source, tmp_path / "out", 0, 2)
    require_same(tmp_path / "out", expected)
    assert ranges == in_one.input_ranges
    with pytest.raises(RuntimeError, match="died"):
        run_ranks(calibrate_and_die, 2, source, tmp_path / "again", int(calls * 0.6), 2)
    assert len(list((tmp_path / "again.unfinished").glob("state-1-*.pt"))) == 2
    run_ranks(calibrate_and_die, 2, source, tmp_path / "again", 0, 2)
    require_same(tmp_path / "again", expected)
