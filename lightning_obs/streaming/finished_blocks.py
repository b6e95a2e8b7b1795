"""The finished blocks of a run layer by layer, from which the next run goes on if this one is killed.

A block's file and the outputs of the last block are valid only for the checkpoint, batches, scheme, options and
versions that they were made with. So each saved state holds these facts, and checksums of every tensor that was read
and of every file that was written. A tensor's checksum is computed when the run reads it, which costs no second
reading. A run that goes on reads the tensors and files of the finished blocks once more, to compare them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_obs.calibration.observation import Observation
from lightning_obs.calibration.saved_state import changes, flat_fields
from lightning_obs.checkpoint.load import CONFIG_FILE
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.files.sealed import form_checksum, state_checksum
from lightning_obs.files.unfinished import Unfinished
from lightning_obs.files.write import file_checksum
from lightning_obs.streaming.source import CheckpointSource

#: the packages whose versions are among the facts of a run
_VERSIONS = ("lightning_obs", "torch", "transformers", "compressed_tensors")


class FinishedBlocks:
    """The files of finished blocks, and the state after each block, in the folder of an unfinished run.

    Each rank's run (``layerwise.py``) makes one before any block is loaded: from then on, checksums of all that
    ``source`` reads are kept.

    Args:
        unfinished: the folder, which this rank has opened.
        source: the checkpoint that is read.
        facts: everything else that the files depend on (:func:`facts_of_run`).
    """

    def __init__(self, unfinished: Unfinished, source: CheckpointSource, facts: dict[str, Any]) -> None:
        self.folder = unfinished.folder
        self._unfinished = unfinished
        self._source = source
        self._facts = facts
        #: the checksum of each file that this rank has written; never None, which :func:`.file_checksum` gives for a
        #: folder
        self._file_checksums: dict[str, int | None] = {}
        source.reader.watch()

    @property
    def remedy(self) -> str:
        """The remedy in the errors of :meth:`load` and :meth:`require_whole`: how a user can go on."""
        return f"delete {self.folder} to start over, or choose another folder."

    def add(self, file: str) -> None:
        """Keep the checksum of a complete file of the folder; every later state is saved with it.

        Called by rank 0 when it has written a part's file.
        """
        self._file_checksums[file] = file_checksum(self.folder / file)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Save the state of the run after ``step`` blocks, with the facts and checksums that it depends on.

        ``layerwise.py`` calls this on every rank after each block; :meth:`load` returns the state to a later run.
        ``Unfinished.save`` adds a checksum of the whole state, which its ``load`` compares.
        """
        saved_state = dict(state)
        saved_state["facts"] = self._facts
        saved_state["read"] = self._source.reader.checksums
        saved_state["written"] = self._file_checksums
        self._unfinished.save(step, saved_state)

    def load(self, step: int) -> dict[str, Any]:
        """Check and return the state that an earlier run saved after ``step`` blocks.

        ``layerwise.py`` calls this on every rank before the first block, if a killed run has left states.

        Raises:
            CalibrationError: the state or a block's file is damaged or missing; the checkpoint, batches, options or
                versions differ from the ones that the finished blocks were made with.
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
        self._file_checksums = state["written"]
        self.require_whole()
        self._source.reader.watch(state["read"])  # the earlier run's checksums hold for later reading, too
        return state

    def require_whole(self) -> None:
        """Raise a CalibrationError for files of finished blocks that are missing, or changed since they were sealed.

        Called when a run goes on after a killed one, and before the files become the new checkpoint.
        """
        missing = []
        changed = []
        for file, checksum in self._file_checksums.items():
            path = self.folder / file
            if not path.is_file():
                missing.append(file)
            elif file_checksum(path) != checksum:
                changed.append(file)
        refuse(missing, f"files of finished blocks are missing in {self.folder}", remedy=self.remedy)
        refuse(changed, f"files of finished blocks in {self.folder} have changed", remedy=self.remedy)


def facts_of_run(
    source: CheckpointSource, observation: Observation, batches: Sequence[Any], runs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything that a run's files depend on except the data of weights: numbers and strings by name.

    ``_LayerwiseRun`` (``layerwise.py``) calls this in its constructor, to make :class:`FinishedBlocks`. The ``load`` of
    that compares the facts with those of the killed run.

    Args:
        source: the checkpoint that is read.
        observation: has the options, observers and ranks.
        batches: the calibration data of this rank.
        runs: what of the :class:`.BlockRuns` changes results: ``token_mask``, the type of the ``device``, and, unless
            blocks run step by step, ``inputs`` (``"full_precision"`` or ``"quantized"``).

    Raises:
        CalibrationError: batches hold an object whose checksum cannot be computed.
    """
    reader = source.reader
    forms = {name: form_checksum(reader.meta(name)) for name in reader}
    facts: dict[str, Any] = {
        "checksum of config.json": file_checksum(source.folder / CONFIG_FILE),
        "checksum of the names, types and shapes of the weights": state_checksum(forms),
        "number of batches": len(batches),
        "checksum of the batches": _checksum_of_batches(batches),
        "rank": observation.collectives.rank,
        "number of ranks": observation.collectives.size,
    }
    facts.update(runs)
    for file in reader.files:
        facts[f"bytes of {file}"] = Path(source.folder, file).stat().st_size
    for name, value in observation.options.beside_scheme.items():
        facts[name] = repr(value)
    scheme = json.loads(observation.options.config.model_dump_json())
    for name, value in flat_fields(scheme):
        facts[name] = repr(value)
    for (_, base), observer in observation.observers.items():
        observer_class = type(observer)
        class_path = f"{observer_class.__module__}.{observer_class.__qualname__}"
        facts[f"class of {observer.args.observer} ({base})"] = class_path
    for package in _VERSIONS:
        facts[f"version of {package}"] = str(import_module(package).__version__)
    return facts


def _checksum_of_batches(batches: Sequence[Any]) -> int:
    """One checksum of all batches, which hold tensors, numbers and strings."""
    try:
        return state_checksum(list(batches))
    except Exception as error:
        raise CalibrationError(
            "no checksum can be taken of the batches, so a killed run could not go on",
            got=f"{type(error).__name__}: {error}",
            expected="tensors, numbers and strings, and lists and dicts of them",
        ) from error
