"""Which batches of a validation are observed, and how one that was killed goes on.

Lightning cannot resume a validation: its loop begins at batch 0, and no hook can skip a step. But its iterator over the
loaders exists when the hooks of the start are called, and batches taken from it are not run: the loop goes on with the
next batch, by its own number. Checksums tell whether the batches taken are the ones that were observed.

Each rank saves its own statistics without waiting for others, so ranks may be killed at different batches. Each keeps
its last two saves, and all resume from the last one that all have. Ranks that wait for each other in each step (FSDP,
``sync_dist``) are at most one batch apart and have one in common; where there is none, each resumes from its own last.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from typing_extensions import Unpack, override

from lightning_obs.calibration.options import CalibrationOptions, takes_keywords_of
from lightning_obs.calibration.saved_state import (
    changes,
    dump_statistics,
    load_statistics,
    refuse_other_options,
    require_whole,
    sealed,
    state_checksum,
)
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.base import SessionCallback, SessionKeywords, require_at_least, validation_loaders
from lightning_obs.callbacks.quantized_validation import require_batches
from lightning_obs.errors import CalibrationError, refuse, warn
from lightning_obs.files.unfinished import SavedSteps
from lightning_obs.model.checksums import weights_checksum
from lightning_obs.ranks.collectives import on_all_ranks
from lightning_obs.schemes.config import SchemeLike


class BatchKeywords(SessionKeywords, total=False):
    """The options of :class:`ObservedBatches`, for type checkers and editors."""

    max_batches: int | None
    dataloaders: int | str | Sequence[int | str] | None
    save_every: int | None
    save_to: str | os.PathLike[str] | None


class ObservedBatches(SessionCallback):
    """A callback that observes batches of a validation, and may save its statistics while the validation runs.

    Args:
        max_batches: observe at most this many batches of a validation, on each rank; None: all.
        dataloaders: the observed ones of several validation loaders, by number, or by key where they are a dict;
            None: all.
        save_every: in ``trainer.validate``, save the statistics to ``save_to`` after every so many batches. If the
            process is killed, the same ``validate`` resumes after the last save, with the qparams of an uninterrupted
            run; your own metrics then cover the remaining batches only, which a warning says. The saves are deleted
            when ``validate`` has ended. (A fit is resumed from Lightning's checkpoints.)
        save_to: a folder, one for each callback.
        **options: of :class:`~lightning_obs.callbacks.base.SessionCallback`, and the fields of
            :class:`~lightning_obs.CalibrationOptions`.

    Raises:
        CalibrationError: before the first batch, on all ranks alike: a save in ``save_to`` is damaged, or of another
            scheme, other observers, weights or data, or another number of ranks.
    """

    @takes_keywords_of(SessionCallback)
    def __init__(
        self,
        scheme: SchemeLike | CalibrationOptions | None,
        *,
        max_batches: int | None = None,
        dataloaders: int | str | Sequence[int | str] | None = None,
        save_every: int | None = None,
        save_to: str | os.PathLike[str] | None = None,
        **options: Unpack[SessionKeywords],
    ) -> None:
        super().__init__(scheme, **options)
        require_at_least(1, max_batches=max_batches, save_every=save_every)
        if (save_every is None) != (save_to is None):
            missing = "save_to" if save_to is None else "save_every"
            raise CalibrationError(f"save_every and save_to are given together, and {missing} is missing")
        self.max_batches, self.save_every = max_batches, save_every
        self.dataloaders = [dataloaders] if isinstance(dataloaders, (str, int)) else dataloaders and list(dataloaders)
        self.save_to = None if save_to is None else Path(save_to)
        self._save: _Save | None = None  # of the validation that runs now
        #: on an accelerator, by number and loader, batches that were fetched and not run, on the host
        self._fetched: dict[tuple[int, int], Any] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse, before the first batch, saves that could not be made."""
        super().setup(trainer, pl_module, stage)
        if self.save_to is not None:
            require_batches(pl_module, "save_every")
            others = [c for c in trainer.callbacks if isinstance(c, ObservedBatches) and c is not self]
            if self.save_to in [other.save_to for other in others]:
                raise CalibrationError("two callbacks with one save_to", where=[str(self.save_to)])

    @override
    def observe_validation(self, trainer: Trainer, session: CalibrationSession) -> None:
        """Attach the observers; resume after the batches that were observed before the process was killed."""
        loaders = validation_loaders(trainer)
        known = list(dict.fromkeys([*range(len(loaders)), *loaders]))
        wrong = [one for one in self.dataloaders or () if one not in known]
        if wrong or self.dataloaders == []:
            expected = f"some of the {len(loaders)} validation loaders: {known}"
            raise CalibrationError("dataloaders", got=wrong or "none", expected=expected)
        super().observe_validation(trainer, session)
        self._fetched = {}
        if isinstance(_fetcher(trainer), _PrefetchDataFetcher) and _moves_batches_only(trainer):
            _show_fetched(trainer, self._keep)
        if self.save_to is not None and trainer.state.fn == TrainerFn.VALIDATING:
            mask = getattr(self.token_mask, "__qualname__", self.token_mask)  # a function has another address each run
            asked = {"max_batches": self.max_batches, "dataloaders": self.dataloaders, "token_mask": mask}
            asked |= {"precision": str(trainer.precision), "experts": session.options.calibrate_all_experts}
            self._save = _Save(self.save_to, session, {name: repr(value) for name, value in asked.items()})
            skipped = self._save.resume(trainer)
            if skipped and trainer.is_global_zero:
                warn(
                    f"{self.label}: {skipped} batches were observed before, by a run that was killed ({self.save_to}). "
                    "They are skipped: the metrics of this validation are of the remaining batches."
                )

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Pause the observers for batches that are not asked for; find out which tokens of the others count."""
        if self.session is not None and self.session.is_attached:
            names = {dataloader_idx, list(validation_loaders(trainer))[dataloader_idx]}
            of_loader = self.dataloaders is None or not names.isdisjoint(self.dataloaders)
            wanted = of_loader and (self.max_batches is None or self.session.batches < self.max_batches)
            self.session.is_paused = not wanted
        # A mask on the host is read without waiting for the accelerator.
        batch = self._fetched.pop((batch_idx, dataloader_idx), batch)
        super().on_validation_batch_start(trainer, pl_module, batch, batch_idx, dataloader_idx)

    def _keep(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self._fetched[batch_idx, dataloader_idx] = batch

    @override
    def on_validation_batch_end(self, *seen: Any) -> None:
        """Count the batch if it was observed; save if a save is due."""
        super().on_validation_batch_end(*seen)
        if self._save is not None and self.save_every is not None:
            self._save.done += 1
            if self._save.done % self.save_every == 0:
                self._save.write()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave nothing behind; the run has ended and its checkpoint is written, so delete the saves."""
        super().teardown(trainer, pl_module, stage)
        if self._save is not None:
            self._save.remove()
        self._save = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing behind but the saves."""
        super().on_exception(trainer, pl_module, exception)
        self._save = None

    @override
    def clean_up(self) -> None:
        """Take every hook out, and let batches go."""
        super().clean_up()
        self._fetched = {}


class _Save:
    """This rank's statistics of a validation, saved after ``done`` batches that it has run or skipped."""

    def __init__(self, folder: Path, session: CalibrationSession, asked: dict[str, str]) -> None:
        self._files, self._session, self.done = SavedSteps(folder, session.collectives.rank, kept=2), session, 0
        # All ranks read the weights together; each has batches of its own.
        model = weights_checksum(session.model)
        self._run = {**asked, "ranks": session.collectives.size, "checksum of the weights": model}
        self._batches: list[int] = []  # the checksum of each batch that was fetched

    def resume(self, trainer: Trainer) -> int:
        """Load the last save and skip its batches; returns how many. Every rank must call this."""
        _show_fetched(trainer, lambda batch, *_: self._batches.append(_checksum(batch)))
        own, saved = self._session.collectives, self._files.steps
        with on_all_ranks(own):
            state = self._read(saved[-1]) if saved else {}
        every = own.gather_object(saved)
        # A rank has none if the run was killed while ranks wrote their first save or removed their last.
        start = max(set.intersection(*map(set, every)) or saved) if all(every) else 0
        with on_all_ranks(own):
            if start:
                state = state if start == saved[-1] else self._read(start)
                self._skip(_fetcher(trainer), state["batches"])
                load_statistics(self._session.fed, state["statistics"])
                self._session.experts.tokens = state["tokens"]
                self._session.batches, self._session.measurements = state["counts"]
                self._session.started -= state["seconds"]
                self.done = start
            for step in saved:
                if step > start:
                    self._files.drop(step)
            if not start:
                self.write()  # so statistics or a folder that cannot be saved are an error before the first batch
        return start

    def write(self) -> None:
        """Save the statistics."""
        session = self._session
        state = {"config": session.plan.config.model_dump_json(), "run": self._run}
        state |= {"batches": self._batches[: self.done], "statistics": dump_statistics(session.fed)}
        state |= {"tokens": session.experts.tokens, "counts": [session.batches, session.measurements]}
        state |= {"seconds": time.perf_counter() - session.started}
        self._files.save(self.done, sealed(state))

    def remove(self) -> None:
        """Remove this rank's files, and the folder with the last rank's."""
        for step in self._files.steps:
            self._files.drop(step)
        with suppress(OSError):
            self._files.folder.rmdir()

    def _read(self, step: int) -> dict[str, Any]:
        folder, state = self._files.folder, self._files.load(step)
        require_whole(state)
        refuse_other_options(state, self._session.plan.config)
        remedy = f"run it as it was, or delete {folder} to start over."
        refuse(changes(state["run"], self._run), f"{folder} holds the save of another run", remedy=remedy)
        return state

    def _skip(self, fetcher: _DataFetcher, expected: list[int]) -> None:
        for number, known in enumerate(expected):
            if next(fetcher, None) is None or self._batches[number] != known:
                raise CalibrationError(
                    f"batch {number} of the validation is not the one that was observed before",
                    where=[str(self._files.folder)],
                    expected="the same data in the same order",
                    remedy="give the loader its data back (seed_everything, if it shuffles), or delete the folder to "
                    "start over.",
                )


def _fetcher(trainer: Trainer) -> _DataFetcher:
    """What takes batches from the loaders of the validation that starts."""
    return trainer._active_loop._data_fetcher


def _show_fetched(trainer: Trainer, see: Callable[[Any, int, int], None]) -> None:
    """Show ``see`` each batch of the validation that starts, with its number and loader, when it is fetched."""
    fetcher = _fetcher(trainer)
    for found in getattr(fetcher, "batches", ()):  # a loader without a length has fetched a batch in advance
        see(*found)

    def shown(fetched: Iterator[Any]) -> Iterator[Any]:
        for found in iter(partial(next, fetched), None):  # iter(fetched) would begin at the first batch again
            see(*found)
            yield found

    fetcher.iterator = shown(fetcher.iterator)


def _moves_batches_only(trainer: Trainer) -> bool:
    """Whether Lightning moves the loaders' batches to an accelerator, and no hook of the user's changes them."""
    hooks = "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"
    owners = [owner for owner in (trainer.lightning_module, trainer.datamodule) if owner is not None]
    changed = any(is_overridden(hook, owner) for hook in hooks for owner in owners)
    return trainer.strategy.root_device.type != "cpu" and not changed


def _checksum(batch: Any) -> int:
    """A checksum of the tensors, strings and numbers in a batch of dicts, lists, tuples and dataclasses."""
    found: list[Any] = []
    apply_to_collection(batch, (torch.Tensor, str, int, float), found.append)
    return state_checksum(found)
