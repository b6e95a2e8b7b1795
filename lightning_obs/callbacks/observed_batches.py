"""Which batches of a validation are observed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.overrides import is_overridden
from typing_extensions import Unpack, override

from lightning_obs.calibration.options import CalibrationOptions, takes_keywords_of
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.base import SessionCallback, SessionKeywords, require_at_least, validation_loaders
from lightning_obs.callbacks.lightning_package import class_of
from lightning_obs.errors import CalibrationError
from lightning_obs.schemes.config import SchemeLike

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loops.fetchers import _DataFetcher


class BatchKeywords(SessionKeywords, total=False):
    """The options of :class:`ObservedBatches`, for type checkers and editors."""

    max_batches: int | None
    dataloaders: int | str | Sequence[int | str] | None


class ObservedBatches(SessionCallback):
    """A callback that observes batches of a validation.

    Args:
        max_batches: observe at most this many batches of a validation, on each rank; None: all.
        dataloaders: the observed ones of several validation loaders, by number, or by key where they are a dict;
            None: all.
        **options: of :class:`~lightning_obs.callbacks.base.SessionCallback`, and the fields of
            :class:`~lightning_obs.CalibrationOptions`.
    """

    @takes_keywords_of(SessionCallback)
    def __init__(
        self,
        scheme: SchemeLike | CalibrationOptions | None,
        *,
        max_batches: int | None = None,
        dataloaders: int | str | Sequence[int | str] | None = None,
        **options: Unpack[SessionKeywords],
    ) -> None:
        super().__init__(scheme, **options)
        require_at_least(1, max_batches=max_batches)
        self.max_batches = max_batches
        self.dataloaders = [dataloaders] if isinstance(dataloaders, (str, int)) else dataloaders and list(dataloaders)
        #: on an accelerator, by number and loader, batches that were fetched and not run, on the host
        self._fetched: dict[tuple[int, int], Any] = {}

    @override
    def observe_validation(self, trainer: Trainer, session: CalibrationSession) -> None:
        """Attach the observers; refuse numbers or names of loaders that the Trainer does not have."""
        loaders = validation_loaders(trainer)
        known = list(dict.fromkeys([*range(len(loaders)), *loaders]))
        wrong = [one for one in self.dataloaders or () if one not in known]
        if wrong or self.dataloaders == []:
            expected = f"some of the {len(loaders)} validation loaders: {known}"
            raise CalibrationError("dataloaders", got=wrong or "none", expected=expected)
        super().observe_validation(trainer, session)
        self._fetched = {}
        if class_of(_fetcher(trainer), "_PrefetchDataFetcher") and _moves_batches_only(trainer):
            _show_fetched(trainer, self._keep)

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Pause the observers for batches that are not asked for; find out which tokens of the others count."""
        if self.session is not None and self.session.is_attached:
            names = {dataloader_idx, list(validation_loaders(trainer))[dataloader_idx]}
            of_loader = self.dataloaders is None or not names.isdisjoint(self.dataloaders)
            wanted = of_loader and (self.max_batches is None or self.session.batches < self.max_batches)
            self.session.ignore_calls(not wanted)
        # A mask on the host is read without waiting for the accelerator.
        batch = self._fetched.pop((batch_idx, dataloader_idx), batch)
        super().on_validation_batch_start(trainer, pl_module, batch, batch_idx, dataloader_idx)

    def _keep(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self._fetched[batch_idx, dataloader_idx] = batch

    @override
    def clean_up(self) -> None:
        """Remove every hook, and release the batches."""
        super().clean_up()
        self._fetched = {}


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
    for owner in (trainer.lightning_module, trainer.datamodule):
        lightnings = class_of(owner, "LightningModule", "LightningDataModule")
        if lightnings is not None and any(is_overridden(hook, owner, lightnings) for hook in hooks):
            return False
    return bool(trainer.strategy.root_device.type != "cpu")
