"""Choose the validations that calibrate, the batches of them that are observed, and the tokens of these that count.

On an accelerator a token mask would have to be copied back to the host, which waits for all queued work. So batches are
kept as the loaders made them, on the host, from when Lightning fetches them until they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.overrides import is_overridden

from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.calibration.token_mask import PADDING, find_mask
from lightning_obs.callbacks.lightning_package import TrainerFn, class_of
from lightning_obs.callbacks.sanity_check import SanityWatch
from lightning_obs.callbacks.strategies import repeated_in_batch, repeated_samples
from lightning_obs.errors import CalibrationError, require_at_least, require_bool, require_kind, warn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.loops.fetchers import _DataFetcher

_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class ValidationSchedule:
    """Decides at each validation's start whether it calibrates; watches a sanity check that does not.

    Args:
        every_n_epochs: in fit, calibrate in the validations of the epochs n, 2n, ... only.
        sanity_check: also calibrate in fit's sanity check.
        starts_at_once: calibrate in the first validation of a fit in any case, so that a monitor of a quantized metric
            has a value from the first validation on.

    Raises:
        CalibrationError: an argument of another type, or ``every_n_epochs`` below one.
    """

    def __init__(self, every_n_epochs: int, sanity_check: bool, starts_at_once: bool) -> None:
        require_at_least(1, every_n_epochs=every_n_epochs)
        require_bool(sanity_check=sanity_check)
        self.every_n_epochs = every_n_epochs
        self._sanity_check = sanity_check
        self._starts_at_once = starts_at_once
        self._sanity_watch: SanityWatch | None = None  # of the sanity check that runs now

    def is_due(self, trainer: Trainer, has_calibrated: bool) -> bool:
        """Whether the validation that starts calibrates; ``has_calibrated``: whether there are qparams already."""
        if trainer.sanity_checking:
            return self._sanity_check
        if trainer.state.fn != TrainerFn.FITTING:
            return True
        if (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            return True
        return self._starts_at_once and not has_calibrated

    def watch(self, trainer: Trainer, session: CalibrationSession) -> None:
        """In a sanity check that does not calibrate, see which layers its batches call."""
        if trainer.sanity_checking and session.needs_data and not session.has_written:
            self._sanity_watch = SanityWatch(session)

    def warn_of_uncalled(self, trainer: Trainer) -> None:
        """At the end of a sanity check, warn of the layers that were not called; rank 0 does."""
        if self._sanity_watch is not None and trainer.is_global_zero:
            self._sanity_watch.tell()

    def stop(self) -> None:
        """Stop watching. Can be called at any time, any number of times."""
        if self._sanity_watch is not None:
            self._sanity_watch.close()
        self._sanity_watch = None


class ObservedBatches:
    """Tells a session, batch by batch, whether to observe and which tokens count.

    Args:
        token_mask: key of the batch, or function of it, that gives a tensor ``(batch, tokens)``, nonzero for tokens
            that count; None: all count.
        max_batches: observe at most this many batches of a validation, on each rank; None: all.
        dataloaders: the validation loaders to observe, by number, or by key where they are a dict; None: all.

    Raises:
        CalibrationError: an argument of another type, or ``max_batches`` below one.
    """

    def __init__(
        self,
        token_mask: str | Callable[[Any], torch.Tensor] | None,
        max_batches: int | None = None,
        dataloaders: int | str | Sequence[int | str] | None = None,
    ) -> None:
        require_kind("token_mask", token_mask, (str, Callable), "a key of the batch, or a function of it")
        require_at_least(1, max_batches=max_batches)
        self.token_mask = token_mask
        self._max_batches = max_batches
        self._loader_names = _as_list(dataloaders)
        #: on an accelerator, by ``(batch_idx, dataloader_idx)``, batches on the host that were fetched and not run
        self._on_host: dict[tuple[int, int], Any] = {}

    def start(self, trainer: Trainer, session: CalibrationSession) -> None:
        """Attach the session's observers for a validation that starts.

        Raises:
            CalibrationError: ``dataloaders`` has a number or a key that the Trainer's loaders do not have.
        """
        loaders = validation_loaders(trainer)
        self._require_loaders(loaders)
        if trainer.world_size > 1:
            _warn_of_repeated_samples(trainer, loaders)
        session.attach(count_calls=False)
        self._on_host = {}
        if class_of(_fetcher(trainer), "_PrefetchDataFetcher") and _transfers_only(trainer):
            _show_fetched(trainer, self._keep_on_host)

    def begin_batch(
        self, trainer: Trainer, session: CalibrationSession | None, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Before a validation batch runs: observe it or not, and mask its padding and repeated samples.

        Nothing happens unless the session is attached.

        Raises:
            CalibrationError: the batch has no token mask.
        """
        if session is None or not session.is_attached:
            return
        session.ignore_calls(not self._is_wanted(trainer, session, dataloader_idx))
        batch = self._on_host.pop((batch_idx, dataloader_idx), batch)
        mask = self.mask_of(batch)
        if trainer.world_size > 1:
            loader = list(validation_loaders(trainer).values())[dataloader_idx]
            mask = _masked_also(mask, repeated_in_batch(loader, batch_idx))
        session.mask_tokens(mask)
        session.warn_of_padding(batch.get(PADDING) if hasattr(batch, "get") else None)
        if not session.observation.calls.is_paused:
            session.count_batches()

    def mask_of(self, batch: Any) -> torch.Tensor | None:
        """Return which tokens of a batch count, ``(batch, tokens)``; None: all."""
        return None if self.token_mask is None else find_mask(batch, self.token_mask)

    def stop(self) -> None:
        """Release the batches that are kept. Can be called at any time, any number of times."""
        self._on_host = {}

    def _is_wanted(self, trainer: Trainer, session: CalibrationSession, dataloader_idx: int) -> bool:
        if self._max_batches is not None and session.batches >= self._max_batches:
            return False
        if self._loader_names is None:
            return True
        key = list(validation_loaders(trainer))[dataloader_idx]
        return dataloader_idx in self._loader_names or key in self._loader_names

    def _require_loaders(self, loaders: Mapping[Any, Any]) -> None:
        if self._loader_names is None:
            return
        names = list(dict.fromkeys([*range(len(loaders)), *loaders]))
        unknown = [name for name in self._loader_names if name not in names]
        if unknown or not self._loader_names:
            raise CalibrationError(
                "dataloaders",
                got=unknown or "none",
                expected=f"some of the {len(loaders)} validation loaders: {names}",
            )

    def _keep_on_host(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self._on_host[batch_idx, dataloader_idx] = batch


def validation_loaders(trainer: Trainer) -> dict[Any, Any]:
    """The Trainer's validation loaders by number, or by key where they are a dict."""
    loaders = trainer.val_dataloaders
    if isinstance(loaders, Mapping):
        return dict(loaders)
    if not isinstance(loaders, (list, tuple)):
        loaders = [loaders]
    return dict(enumerate(loaders))


def _as_list(dataloaders: int | str | Sequence[int | str] | None) -> list[int | str] | None:
    if dataloaders is None:
        return None
    if isinstance(dataloaders, (str, int)):
        return [dataloaders]
    return list(dataloaders)


def _warn_of_repeated_samples(trainer: Trainer, loaders: Mapping[Any, Any]) -> None:
    repeated = sum(repeated_samples(loader) for loader in loaders.values())
    if repeated:
        warn(
            f"rank {trainer.global_rank}: DistributedSampler repeats {repeated} sample(s), so that all ranks have "
            "as many. Calibration leaves them out; your own metrics count them twice."
        )


def _masked_also(mask: torch.Tensor | None, samples: torch.Tensor | None) -> torch.Tensor | None:
    """Combine the mask ``(batch, tokens)`` of tokens with the mask ``(batch,)`` of samples; None: all count."""
    if samples is None:
        return mask
    if mask is None:
        return samples
    samples = samples.to(mask.device, mask.dtype)
    return (mask.T * samples).T


def _fetcher(trainer: Trainer) -> _DataFetcher:
    """The object that takes batches from the loaders of the validation that runs."""
    return trainer._active_loop._data_fetcher


def _show_fetched(trainer: Trainer, see: Callable[[Any, int, int], None]) -> None:
    """Call ``see(batch, batch_idx, dataloader_idx)`` whenever the validation that starts fetches a batch."""
    fetcher = _fetcher(trainer)
    for fetched in getattr(fetcher, "batches", ()):  # a loader without a length has fetched a batch in advance
        see(*fetched)

    def shown(batches: Iterator[Any]) -> Iterator[Any]:
        for fetched in iter(partial(next, batches), None):  # iter(batches) would begin at the first batch again
            see(*fetched)
            yield fetched

    fetcher.iterator = shown(fetcher.iterator)


def _transfers_only(trainer: Trainer) -> bool:
    """Whether Lightning moves batches to an accelerator, and no hook of the user changes them on the way."""
    for owner in (trainer.lightning_module, trainer.datamodule):
        lightning_class = class_of(owner, "LightningModule", "LightningDataModule")
        if lightning_class is None:
            continue
        if any(is_overridden(hook, owner, lightning_class) for hook in _TRANSFER_HOOKS):
            return False
    return bool(trainer.strategy.root_device.type != "cpu")
