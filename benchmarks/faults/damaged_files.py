"""Damage whatever the package reads, and look what it says.

    python benchmarks/faults/damaged_files.py [--damages 1000] [--seed 0]

Files are cut, overwritten, flipped, filled, nested too deep or put in other encodings, or lose a value; states of
callbacks lose or change a value anywhere in them. Reading must then give a CalibrationError, or just what was written
(a damage may hit a byte that says nothing). `wrong`: it gave something else in silence. `raw`: another error. Reports
and texts carry no checksum, for users write and edit them: of these, another content in the right form is `content`.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_obs import (
    CalibrationCallback,
    CalibrationError,
    CalibrationSession,
    QuantizationAwareTraining,
    export_checkpoint,
    load_checkpoint,
)
from lightning_obs.app.data.files import read_rows, value_of
from lightning_obs.app.from_config import names_ignored_by_report
from lightning_obs.app.models.pretrained import load_pretrained
from lightning_obs.app.tasks.compare import _row_of_report
from lightning_obs.files.sealed import state_checksum


@dataclass
class Kind:
    """Something that is read.

    Attributes:
        make: write it into a folder, or return a state.
        read: read it; what was read, comparable.
        checked: whether another content is seen by a checksum.
    """

    name: str
    make: Callable[[Path], Any]
    read: Callable[[Any], Any]
    checked: bool = True


# ---------------------------------------------------------------------- what is read


class Net(L.LightningModule):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two numbers."""
        output: torch.Tensor = self.net(x)
        return output

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Squared error."""
        return self(batch[0]).pow(2).mean()

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _data() -> Any:
    return DataLoader(TensorDataset(torch.linspace(-1, 1, 128).view(16, 8)), batch_size=4)


def _trainer(callback: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(callbacks=[callback], accelerator="cpu", max_epochs=1, enable_checkpointing=False, **quiet)


def _plain_checkpoint(folder: Path) -> Path:
    net = Net().net
    with CalibrationSession(net, "INT8_STATIC"):
        net(torch.linspace(-1, 1, 128).view(16, 8))
    return export_checkpoint(net, folder / "out")


def _load_plain(folder: Path) -> Any:
    return load_checkpoint(Net().net, folder)(torch.linspace(-1, 1, 8)).tolist()


def _transformers_checkpoint(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes)).eval()
    with CalibrationSession(model, "W8A8"):
        pass
    return export_checkpoint(model, folder / "out", tokenizer=_tokenizer())


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, **{chr(97 + i): i + 1 for i in range(26)}}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[])))


def _load_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, tokenizer = load_pretrained(folder, AutoModelForCausalLM)
    with torch.no_grad():
        return model(torch.arange(8)[None]).logits.tolist(), tokenizer("abc").input_ids


def _report(folder: Path) -> Path:
    run = {"run": "FP8", "metric": "perplexity", "perplexity": [14.8, 15.1], "size": 100, "seconds": 2.5}
    file = folder / "report.json"
    file.write_text(json.dumps({**run, "worst_sqnr": 20.5, "ignore": ["lm_head", "re:.*gate"], "layers": []}))
    return file


def _read_texts(file: Path) -> list[str]:
    """The texts of a file or folder, as the command line reads them."""
    return [value_of(place, row, "text") for place, row in read_rows(file)]


def _texts(suffix: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        rows, file = [{"text": f"row {i} says äöü"} for i in range(8)], folder / f"texts.{suffix}"
        if suffix == "parquet":
            from pyarrow import Table, parquet

            parquet.write_table(Table.from_pylist(rows), file)
        elif suffix == "saved":
            from datasets import Dataset

            Dataset.from_list(rows).save_to_disk(str(file))
        elif suffix == "json":
            file.write_text(json.dumps(rows))
        else:
            lines = {"jsonl": [json.dumps(row) for row in rows], "csv": ["text", *(row["text"] for row in rows)]}
            file.write_text("\n".join(lines.get(suffix, [row["text"] + "\n" for row in rows])))
        return file

    return make


def _state(callback: Any, entry: str) -> Callable[[Path], Any]:
    def make(_: Path) -> Any:
        made = callback()
        arguments = (_data(), _data()) if entry == "fit" else (_data(),)
        getattr(_trainer(made), entry)(Net(), *arguments)
        return made.state_dict()

    return make


def _resumed(callback: Any) -> Callable[[Any], Any]:
    def read(state: Any) -> Any:
        made, module = callback(), Net()
        made.load_state_dict(state)
        trainer = _trainer(made)
        trainer.strategy.connect(module)
        made.prepare(trainer, module)
        return state_checksum({key: value for key, value in made.state_dict().items() if key != "crc"})

    return read


def _calibration() -> CalibrationCallback:
    return CalibrationCallback("INT8_STATIC", show=False)


def _automatic() -> CalibrationCallback:
    return CalibrationCallback("INT8_STATIC", observers="auto", show=False)


def _training() -> QuantizationAwareTraining:
    return QuantizationAwareTraining("INT8_STATIC", train="all", calibration_batches=1)


def _observing() -> QuantizationAwareTraining:
    return QuantizationAwareTraining("INT8_STATIC", observers={"input": "histogram"}, calibration_batches=100)


KINDS = [
    Kind("checkpoint of a plain module", _plain_checkpoint, _load_plain),
    Kind("checkpoint on the command line", _transformers_checkpoint, _load_transformers),
    Kind("report.json of runs=", _report, _row_of_report, checked=False),
    Kind("report.json of ignore_from=", _report, names_ignored_by_report, checked=False),
    *(
        Kind(f"texts: {suffix}", _texts(suffix), _read_texts, checked=False)
        for suffix in ("txt", "jsonl", "json", "csv", "parquet", "saved")
    ),
    Kind("state of CalibrationCallback", _state(_calibration, "validate"), _resumed(_calibration)),
    Kind('state of observers="auto"', _state(_automatic, "validate"), _resumed(_automatic)),
    Kind("state of QuantizationAwareTraining", _state(_training, "fit"), _resumed(_training)),
    Kind("state of a half-done observation", _state(_observing, "fit"), _resumed(_observing)),
]

# ---------------------------------------------------------------------- damage

_ODD_JSON = [None, True, -1, 10**400, float("nan"), "", "\ud800", [], {}, [[1]], {"a": {}}, "re:(a+)+$"]
_ODD = [*_ODD_JSON, torch.zeros(0), b"x"]


def damage_file(path: Path, rng: random.Random) -> str:
    """Damage one file, a random one of a folder, and say how."""
    if path.is_dir():
        path = rng.choice(sorted(file for file in path.rglob("*") if file.is_file()))
    data = bytearray(path.read_bytes())
    at, ways = rng.randrange(len(data)), ["cut", "flip", "fill", "swap", "gone", "utf-16", "deep", "folder"]
    way = rng.choice([*ways, *["json"] * 4] if path.suffix == ".json" and path.stat().st_size < 1e5 else ways)
    if way == "json":
        path.write_text(json.dumps(change(json.loads(data), rng, _ODD_JSON)))
    elif way == "gone":
        path.unlink()
    elif way == "folder":
        path.unlink()
        path.mkdir()
    else:
        end = at + rng.randrange(1, 64)
        flipped = bytes([data[at] ^ 1 << rng.randrange(8)])
        path.write_bytes(
            {
                "cut": bytes(data[:at]),
                "flip": bytes(data[:at]) + flipped + bytes(data[at + 1 :]),
                "fill": bytes(data[:at]) + bytes(len(data[at:end])) + bytes(data[end:]),
                "swap": bytes(data[end:]) + bytes(data[:end]),
                "utf-16": data.decode("latin-1").encode("utf-16"),
                "deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
            }[way]
        )
    return f"{way} {path.name} at {at}"


def change(value: Any, rng: random.Random, odd: list[Any]) -> Any:
    """A copy of nested dicts, lists and tensors in which one place is another, or gone."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return rng.choice(odd)
    owner, key = rng.choice(places)
    way = rng.choice(["other", "other", "gone", "value"])
    if way == "gone":
        del owner[key]
    elif way == "value" and isinstance(owner[key], torch.Tensor) and owner[key].numel():
        flat = owner[key].view(-1)
        flat[rng.randrange(len(flat))] = rng.choice([0, 1, 2, 100])
    else:
        owner[key] = rng.choice(odd)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def outcome(kind: Kind, made: Any, right: Any, rng: random.Random, folder: Path) -> tuple[str, str]:
    """Damage once, and read: "refused", "the same", "content", "wrong" or "raw", and what was done."""
    if isinstance(made, Path):
        there = folder / made.name
        shutil.copytree(made, there) if made.is_dir() else shutil.copy(made, there)
        done = damage_file(there, rng)
    else:
        there, done = change(made, rng, _ODD), "state"
    try:
        found = kind.read(there)
    except CalibrationError as error:
        named = not isinstance(made, Path) or any(part in str(error) for part in (there.name, str(folder)))
        return ("refused", "") if named else ("raw", f"{done}: names no file: {error}")
    except Exception as error:
        return "raw", f"{done}: {type(error).__name__}: {str(error)[:200]}"
    if repr(found) == repr(right):
        return "the same", ""
    return ("wrong", f"{done}: {str(found)[:200]}") if kind.checked else ("content", "")


def damages(count: int, seed: int, kinds: list[Kind]) -> Iterator[tuple[str, Counter[str], list[str]]]:
    """Damage each kind alike often; by kind how often what came of it, and each fault."""
    for index, kind in enumerate(kinds):
        rng, counted, faults = random.Random(f"{seed} {kind.name}"), Counter[str](), []
        with tempfile.TemporaryDirectory() as home:
            made = kind.make(Path(home))
            right = kind.read(copy.deepcopy(made) if not isinstance(made, Path) else made)
            for number in range(count * (index + 1) // len(kinds) - count * index // len(kinds)):
                folder = Path(home) / f"damaged {number}"
                folder.mkdir()
                what, fault = outcome(kind, made, right, rng, folder)
                shutil.rmtree(folder)
                counted[what] += 1
                faults += [f"{what}: {fault}"] if fault else []
        yield kind.name, counted, faults


def main() -> int:
    """Return 0 if nothing was wrong in silence, or raw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--damages", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    total: Counter[str] = Counter()
    for name, counted, faults in damages(options.damages, options.seed, KINDS):
        print(f"{name}: {', '.join(f'{number} {what}' for what, number in counted.most_common())}", flush=True)
        print(*(f"    {fault}" for fault in faults), sep="\n", end="\n" if faults else "")
        total += counted
    print(
        f"{options.damages} damages: {total['refused']} refused, {total['the same']} harmless, "
        f"{total['content']} another content, {total['wrong']} wrong in silence, {total['raw']} raw"
    )
    return min(1, total["wrong"] + total["raw"])


if __name__ == "__main__":
    sys.exit(main())
