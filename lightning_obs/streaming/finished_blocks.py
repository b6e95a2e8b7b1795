"""The finished blocks of a run layer by layer, so that a killed run goes on from them and from nothing else.

A block's file and the outputs of the last block are worth something only together with all that they were made of: the
checkpoint, batches, scheme, options, versions. So each state holds these facts, and checksums of every tensor that was
read and of every file that was written. A weight is summed up when it is read for the run: that costs no further
reading. A run that goes on reads once more what the finished blocks were made of, and their files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_obs.calibration.saved_state import changes, flat_fields
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.checkpoint.load import CONFIG_FILE
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.files.sealed import form_checksum, state_checksum
from lightning_obs.files.unfinished import Unfinished
from lightning_obs.files.write import file_checksum
from lightning_obs.streaming.source import CheckpointSource

_VERSIONS = ("lightning_obs", "torch", "transformers", "compressed_tensors")


class FinishedBlocks:
    """The files of finished blocks and the states after them, in the folder ``unfinished``, of one rank.

    Args:
        unfinished: the folder.
        source: the checkpoint that is read; checksums are kept of all that is read of it from now on.
        facts: all else that the files depend on (:func:`facts_of_run`).
    """

    def __init__(self, unfinished: Unfinished, source: CheckpointSource, facts: dict[str, Any]) -> None:
        self.folder = unfinished.folder
        self._unfinished = unfinished
        self._source = source
        self._facts = facts
        self._files: dict[str, int | None] = {}  # the checksum of each file that this rank has written
        source.reader.watch()

    @property
    def remedy(self) -> str:
        """What a user can do about finished blocks that cannot be taken over."""
        return f"delete {self.folder} to start over, or choose another folder."

    def add(self, file: str) -> None:
        """Count a file as finished, with the bytes that it has now."""
        self._files[file] = file_checksum(self.folder / file)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write the state after a number of blocks."""
        checks = {"facts": self._facts, "read": self._source.reader.checksums, "written": self._files}
        self._unfinished.save(step, {**state, **checks})

    def load(self, step: int) -> dict[str, Any]:
        """The state after a number of blocks.

        Raises:
            CalibrationError: the state or a block's file is damaged or missing; the checkpoint, batches, options...
                are others than those that the blocks were made of.
        """
        state = self._unfinished.load(step)
        refuse(
            changes(state["facts"], self._facts),
            f"{self.folder} was begun with other arguments",
            expected="the same checkpoint, batches, scheme, options, ranks and versions",
            remedy=self.remedy,
        )
        refuse(
            self._source.reader.changed(state["read"]),
            f"{self.folder} was begun with other weights than {self._source.folder} has now",
            remedy=self.remedy,
        )
        self._files = state["written"]
        self.require_whole()
        self._source.reader.watch(state["read"])
        return state

    def require_whole(self) -> None:
        """Refuse files of finished blocks that are missing, or have other bytes than were written."""
        missing = [file for file in self._files if not (self.folder / file).is_file()]
        refuse(missing, f"files of finished blocks are missing in {self.folder}", remedy=self.remedy)
        changed = [file for file, checksum in self._files.items() if file_checksum(self.folder / file) != checksum]
        refuse(changed, f"files of finished blocks in {self.folder} have changed", remedy=self.remedy)


def facts_of_run(
    source: CheckpointSource, session: CalibrationSession, batches: Sequence[Any], runs: dict[str, Any]
) -> dict[str, Any]:
    """All that a run's files depend on except the data of weights, as numbers and strings by name.

    ``runs``: how the blocks are run.

    Raises:
        CalibrationError: batches hold something of which no checksum can be taken.
    """
    reader = source.reader
    forms = {name: form_checksum(reader.meta(name)) for name in reader}
    facts: dict[str, Any] = {
        "checksum of config.json": file_checksum(source.folder / CONFIG_FILE),
        "checksum of the names, types and shapes of the weights": state_checksum(forms),
        "number of batches": len(batches),
        "checksum of the batches": _checksum_of_batches(batches),
        "rank": session.collectives.rank,
        "number of ranks": session.collectives.size,
        **runs,
    }
    for file in reader.files:
        facts[f"bytes of {file}"] = Path(source.folder, file).stat().st_size
    for name, value in session.options.beside_scheme.items():
        facts[name] = repr(value)
    for name, value in flat_fields(json.loads(session.options.config.model_dump_json())):
        facts[name] = repr(value)
    for (_, base), observer in session.observers.items():
        kind = type(observer)
        facts[f"class of {observer.args.observer} ({base})"] = f"{kind.__module__}.{kind.__qualname__}"
    for package in _VERSIONS:
        facts[f"version of {package}"] = str(import_module(package).__version__)
    return facts


def _checksum_of_batches(batches: Sequence[Any]) -> int:
    try:
        return state_checksum(list(batches))
    except Exception as error:
        raise CalibrationError(
            "no checksum can be taken of the batches, so a killed run could not go on",
            got=f"{type(error).__name__}: {error}",
            expected="tensors, numbers and strings, and lists and dicts of them",
        ) from error
