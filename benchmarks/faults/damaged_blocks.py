"""Damage what a killed run of calibrate_layerwise goes on from, and look what it ships.

    python benchmarks/faults/damaged_blocks.py [--damages 1000] [--seed 0]

A run is stopped after two of three blocks. Then its state, the files of its finished blocks, or the checkpoint that it
reads are damaged: bits are flipped, ranges zeroed, files cut, deleted, replaced, exchanged; config.json or weights are
those of another model. Times of files stay as they were. The run then has to be refused with an error that names a
file, and after what the error proposes (delete the folder) it has to start over to the right files; or to go on to the
very files of an undisturbed run on what is there now. `wrong`: it shipped anything else. `raw`: another error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from lightning_obs import BlockRuns, CalibrationError, calibrate_layerwise

_SCHEME = "INT8_STATIC"


class Damage(NamedTuple):
    """A way to damage a run: ``apply(home, rng)`` says what it did; ``of_source``: to the checkpoint that is read."""

    name: str
    apply: Callable[[Path, random.Random], str]
    of_source: bool = False


# ---------------------------------------------------------------------- the run


def make_source(folder: Path, seed: int = 0) -> Path:
    """A decoder of three blocks; another seed has other weights of the same shapes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=3, **sizes))
    model.save_pretrained(folder)
    return folder


def calibrate(home: Path, out: str = "out", stop_in: str | None = None) -> dict[str, str]:
    """Run, or go on; the digest of each file that was written. ``stop_in``: the part of the model to stop in."""
    generator = torch.Generator().manual_seed(1)
    batches = [{"input_ids": torch.randint(64, (2, 9), generator=generator)}]

    def progress(name: str, done: int, total: int) -> None:
        if stop_in is not None and name.startswith(stop_in):
            raise KeyboardInterrupt

    runs = BlockRuns(progress=progress)
    calibrate_layerwise(home / "source", batches, _SCHEME, home / out, ignore=["lm_head"], runs=runs)
    written = [file for file in sorted((home / out).iterdir()) if file.name != "lightning_obs.json"]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in written}


def make_stopped_run(home: Path) -> Path:
    """A run that was stopped in the third block."""
    make_source(home / "source")
    try:
        calibrate(home, stop_in="model.layers.2.")
    except KeyboardInterrupt:
        return home
    raise AssertionError("the run was not stopped")


# ---------------------------------------------------------------------- damage


def _change_bytes(file: Path, rng: random.Random) -> str:
    """Change the bytes of a file in one of many ways; its times stay."""
    data = bytearray(file.read_bytes())
    times = file.stat()
    at = rng.randrange(len(data))
    length = min(len(data) - at, rng.choice([1, 8, 64, 4096]))
    way = rng.choice(["bit", "bit", "bit", "zeros", "cut", "added", "noise", "empty", "gone", "folder"])
    if way == "bit":
        data[at] ^= 1 << rng.randrange(8)
    elif way == "zeros":
        data[at : at + length] = bytes(length)
    elif way == "cut":
        del data[at:]
    elif way == "added":
        data += bytes(length)
    elif way == "noise":
        data[at : at + length] = rng.randbytes(length)
    file.unlink()
    if way == "folder":
        file.mkdir()
    elif way != "gone":
        file.write_bytes(b"" if way == "empty" else data)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    return f"{file.name}: {way} at {at}"


def _pick(home: Path, pattern: str, rng: random.Random) -> Path:
    return rng.choice(sorted(home.glob(pattern)))


def _exchange_blocks(home: Path, rng: random.Random) -> str:
    one, other = sorted(home.glob("out.unfinished/model-*"))[:2]
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)
    return "blocks exchanged"


def _rename_state(home: Path, rng: random.Random) -> str:
    state = _pick(home, "out.unfinished/state-*", rng)
    step = rng.choice([1, 3])
    state.rename(state.with_name(f"state-{step}-0.pt"))
    return f"{state.name} renamed to step {step}"


def _change_config(home: Path, rng: random.Random) -> str:
    file = home / "source" / "config.json"
    config = json.loads(file.read_text())
    changes: dict[str, Any] = {
        "rms_norm_eps": 0.5,
        "hidden_act": "gelu",
        "attention_bias": True,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "max_position_embeddings": 7,
        "dtype": "bfloat16",
        "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"},
    }
    key = rng.choice(sorted(changes))
    file.write_text(json.dumps({**config, key: changes[key]}))
    return f"config.json: {key}"


def _change_weights(home: Path, rng: random.Random) -> str:
    file = home / "source" / "model.safetensors"
    times = file.stat()
    tensors = load_file(file)
    names = sorted(tensors)
    way = rng.choice(["another model", "one tensor", "two exchanged"])
    if way == "another model":
        make_source(home / "other", seed=1)
        shutil.copy(home / "other" / "model.safetensors", file)
    else:
        name = rng.choice(names)
        if way == "one tensor":
            tensors[name] = tensors[name] * 1.5
        else:
            alike = [other for other in names if tensors[other].shape == tensors[name].shape and other != name]
            other = rng.choice(alike or names)
            if alike:
                tensors[name], tensors[other] = tensors[other], tensors[name]
            way = f"{way} with {other}"
        way = f"{way}: {name}"
        save_file(tensors, file, {"format": "pt"})
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    return f"weights: {way}"


DAMAGES = [
    Damage("state", lambda home, rng: _change_bytes(_pick(home, "out.unfinished/state-*", rng), rng)),
    Damage("state of another step", _rename_state),
    Damage("finished block", lambda home, rng: _change_bytes(_pick(home, "out.unfinished/model-*", rng), rng)),
    Damage("finished blocks exchanged", _exchange_blocks),
    Damage("config.json of the source", _change_config, of_source=True),
    Damage("bytes of the source", lambda home, rng: _change_bytes(_pick(home, "source/*", rng), rng), of_source=True),
    Damage("weights of the source", _change_weights, of_source=True),
]


# ---------------------------------------------------------------------- what comes of it


def outcome(damage: Damage, home: Path, expected: dict[str, str], rng: random.Random) -> tuple[str, str]:
    """Damage the run in ``home`` and go on: "refused", "the same", "wrong" or "raw", and what was done."""
    done = damage.apply(home, rng)
    try:
        files = calibrate(home)
    except CalibrationError as error:
        if not any(name in str(error) for name in ("out.unfinished", "source")):
            return "raw", f"{done}: names no file: {error}"
        if damage.of_source:
            return "refused", ""
        shutil.rmtree(home / "out.unfinished")
        return ("refused", "") if calibrate(home) == expected else ("wrong", f"{done}: after starting over")
    except Exception as error:
        return "raw", f"{done}: {type(error).__name__}: {str(error)[:200]}"
    if damage.of_source:
        try:
            expected = calibrate(home, "undisturbed")
        except CalibrationError as error:
            return "wrong", f"{done}: an undisturbed run is refused: {error}"
    differing = sorted(name for name in files.keys() | expected.keys() if files.get(name) != expected.get(name))
    return ("wrong", f"{done}: {', '.join(differing)}") if differing else ("the same", "")


def damaged(count: int, seed: int, kinds: list[Damage] = DAMAGES) -> Iterator[tuple[str, Counter[str], list[str]]]:
    """Damage in each way alike often; by way how often what came of it, and each fault."""
    with tempfile.TemporaryDirectory() as folder:
        made = make_stopped_run(Path(folder, "made"))
        make_source(Path(folder, "undisturbed", "source"))
        expected = calibrate(Path(folder, "undisturbed"))
        for index, damage in enumerate(kinds):
            rng, counted, faults = random.Random(f"{seed} {damage.name}"), Counter[str](), list[str]()
            for _ in range(count * (index + 1) // len(kinds) - count * index // len(kinds)):
                home = Path(folder, "damaged")
                shutil.copytree(made, home)
                result, fault = outcome(damage, home, expected, rng)
                shutil.rmtree(home)
                counted[result] += 1
                if fault:
                    faults.append(f"{result}: {fault}")
            yield damage.name, counted, faults


def main() -> int:
    """Return 0 if nothing was wrong in silence, or raw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--damages", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    from transformers.utils import logging

    logging.disable_progress_bar()
    total: Counter[str] = Counter()
    for name, counted, faults in damaged(options.damages, options.seed):
        print(f"{name}: {', '.join(f'{number} {result}' for result, number in counted.most_common())}", flush=True)
        print(*(f"    {fault}" for fault in faults), sep="\n", end="\n" if faults else "")
        total += counted
    print(
        f"{options.damages} damages: {total['refused']} refused, {total['the same']} went on to the right files, "
        f"{total['wrong']} wrong in silence, {total['raw']} raw"
    )
    return min(1, total["wrong"] + total["raw"])


if __name__ == "__main__":
    sys.exit(main())
