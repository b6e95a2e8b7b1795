"""Lightning's evaluation loop once more, over batches that were kept, in the middle of a validation or a test.

The loop and the connector of metrics are instances of the private classes that the Trainer itself uses (pyproject.toml
has the versions that were tried). The alternative is to write steps, loaders and reductions of all strategies again.

No hook of a callback is called, and nothing is logged. The user's step may read the Trainer, so its callbacks, loggers
and metrics stay there: only the loop gets a Trainer without callbacks (:class:`_TrainerWithoutCallbacks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from compressed_tensors.utils.helpers import patch_attr

from lightning_obs.callbacks.lightning_package import class_of, collect_rng_states, set_rng_states
from lightning_obs.forward.kept_batches import KeptBatches
from lightning_obs.report.predictions import Predictions

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: a metric's value, and further arguments to log it with
Metrics: TypeAlias = dict[str, tuple[torch.Tensor, dict[str, Any]]]

#: the connector's dicts of metrics, which a Trainer shows as its ``callback_metrics``, ``logged_metrics``...
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


@dataclass(frozen=True)
class BatchNote:
    """Where a kept batch stood in the first pass, and the random states before its step.

    `QuantizedValidation` keeps one with each batch; the second pass reads it before it runs the batch.

    Attributes:
        batch_idx: the number of the batch in its loader.
        dataloader_idx: the number of the loader.
        random_states: the states of Python's, NumPy's and torch's random generators.
    """

    batch_idx: int
    dataloader_idx: int
    random_states: dict[str, Any]


class ReplayedLoop:
    """One more run of the Trainer's evaluation loop, from the first kept batch to ``on_validation_epoch_end``.

    Made and run by :class:`~.quantized_validation.QuantizedValidation` after the last batch of a validation or a test.

    Args:
        trainer: runs that validation or test.
        batches_of_loaders: the kept batches of each loader, each with a :class:`BatchNote`; the run empties them.
        predictions: before a batch runs, its attribute ``batch`` is set to the numbers of the batch and of its loader.
        metrics: the Trainer's metrics before the first batch (:func:`metrics_of`).

    Attributes:
        logged: the metrics that were logged for the whole epoch.
        higher_is_better: by name, the direction of each metric that was logged as a torchmetrics object with a
            direction.
    """

    def __init__(
        self,
        trainer: Trainer,
        batches_of_loaders: list[KeptBatches],
        predictions: Predictions,
        metrics: dict[str, dict[str, Any]],
    ) -> None:
        self._trainer = trainer
        self._first_loop: Any = trainer._active_loop
        self._random_states_at_end = collect_rng_states()
        self._loop = self._make_loop(batches_of_loaders, predictions)
        self._connector = self._make_connector(metrics)
        self.logged: Metrics = {}
        self.higher_is_better: dict[str, bool] = {}

    def run(self) -> None:
        """Run all batches, and fill ``logged`` and ``higher_is_better``.

        Called once. Afterwards the Trainer has its own loop and metrics again, also if a step raises.
        """
        with self._in_place():
            self._loop.run()

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """A block in which the Trainer has this loop and this connector, where ``self.log`` looks for them."""
        trainer: Any = self._trainer
        owner, name = self._place_of_first_loop()
        with patch_attr(trainer, "_logger_connector", self._connector), patch_attr(owner, name, self._loop):
            yield

    def _place_of_first_loop(self) -> tuple[Any, str]:
        """The object that holds the Trainer's running loop, and the name of the attribute."""
        trainer: Any = self._trainer
        places = ((trainer.fit_loop.epoch_loop, "val_loop"), (trainer, "validate_loop"), (trainer, "test_loop"))
        for owner, name in places:
            if getattr(owner, name) is self._first_loop:
                return owner, name
        raise AssertionError("the second pass runs in a validation or a test")

    def _make_loop(self, batches_of_loaders: list[KeptBatches], predictions: Predictions) -> Any:
        """Make a loop of the class of the Trainer's, without set-up, which takes the kept batches.

        Args:
            batches_of_loaders: the kept batches of each loader.
            predictions: is told which batch runs.
        """
        first_loop = self._first_loop
        loop_class: Any = class_of(first_loop, "_EvaluationLoop")
        trainer = _TrainerWithoutCallbacks(self._trainer)
        loop = loop_class(trainer, first_loop._trainer_fn, first_loop._stage, verbose=False)
        loop.inference_mode = first_loop.inference_mode
        loop._combined_loader = first_loop._combined_loader  # the loop counts the loaders in it
        loop._max_batches = [len(batches) for batches in batches_of_loaders]
        loop._data_fetcher = _KeptBatchFetcher(batches_of_loaders, predictions)
        # The first pass has set up, and will call the user's `on_validation_end`.
        for name in ("setup_data", "reset", "on_run_start", "_on_evaluation_model_train", "_on_evaluation_end"):
            setattr(loop, name, _do_nothing)
        end_epoch = loop._on_evaluation_epoch_end

        def end_epoch_as_in_the_first_pass() -> None:
            """Call the module's hook with the random state that it has at the end of the first pass."""
            set_rng_states(self._random_states_at_end)
            end_epoch()

        loop._on_evaluation_epoch_end = end_epoch_as_in_the_first_pass
        return loop

    def _make_connector(self, metrics: dict[str, dict[str, Any]]) -> Any:
        """Make a connector that begins with ``metrics`` and hands what is logged to `_keep_logged`."""
        connector_class: Any = class_of(self._trainer._logger_connector, "_LoggerConnector")
        connector = connector_class(self._trainer)
        for name, values in metrics.items():
            setattr(connector, name, dict(values))
        connector.log_metrics = _do_nothing  # not to the loggers: the names are the first pass's
        update = connector.update_eval_epoch_metrics

        def keep_and_update() -> Any:
            """Called by the loop after each loader and at the end."""
            self._keep_logged(connector)
            return update()

        connector.update_eval_epoch_metrics = keep_and_update
        return connector

    def _keep_logged(self, connector: Any) -> None:
        """Keep the epoch's values in ``logged``, with the arguments to log them again, and their directions.

        The loop has reduced a value over ranks if it was logged with ``sync_dist=True``, or as a torchmetrics object,
        which reduces itself. Such a value is equal on all ranks. It is logged again with ``sync_dist=True``, because
        Lightning warns otherwise; the maximum over ranks of equal values is the value itself.
        """
        results: Any = self._trainer._results
        values = connector.metrics["callback"]
        for _, result in results.valid_items():
            is_reduced = result.meta.sync.should or not result.is_tensor  # no tensor: a torchmetrics object
            arguments = {"prog_bar": result.meta.prog_bar, "sync_dist": is_reduced, "reduce_fx": "max"}
            direction = getattr(result.value, "higher_is_better", None)
            for name in results._forked_name(result, False):
                if name in values:
                    self.logged[name] = values[name], arguments
                    if direction is not None:
                        self.higher_is_better[name] = direction


def metrics_of(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Return copies of the metrics that the Trainer shows now, with which a :class:`ReplayedLoop` begins.

    :class:`.QuantizedValidation` calls it before the first batch of the first pass.
    """
    connector = trainer._logger_connector
    return {name: dict(getattr(connector, name)) for name in _METRICS}


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Take the place of a method of the loop or the connector that must not run in the second pass."""


class _TrainerWithoutCallbacks:
    """The Trainer in every respect, except that it has no callbacks whose hooks could be called.

    Made for the second pass's loop, which alone has it: ``LightningModule.trainer`` is the Trainer itself, with its
    callbacks.
    """

    callbacks: tuple[Any, ...] = ()

    def __init__(self, trainer: Trainer) -> None:
        object.__setattr__(self, "_trainer", trainer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._trainer, name, value)


class _KeptBatchFetcher:
    """The second pass's source of kept batches, which its loop reads in place of Lightning's data fetcher.

    Args:
        batches_of_loaders: the kept batches of each loader.
        predictions: before a batch runs, its attribute ``batch`` is set to the numbers of the batch and of its loader.
    """

    def __init__(self, batches_of_loaders: list[KeptBatches], predictions: Predictions) -> None:
        self._batches_of_loaders = batches_of_loaders
        self._predictions = predictions
        self._batches = _pop_in_turn(batches_of_loaders)

    @property
    def done(self) -> bool:
        """Whether the last batch was fetched; Lightning's loop asks before each batch."""
        return not any(map(len, self._batches_of_loaders))

    def __next__(self) -> tuple[Any, int, int]:
        """Return the next batch, its number and its loader's; Lightning's loop calls this before each step.

        The random state that the batch had in the first pass is put in force, and ``predictions`` is told the numbers.
        """
        batch, note = next(self._batches)
        self._predictions.batch = note.batch_idx, note.dataloader_idx
        set_rng_states(note.random_states)
        return batch, note.batch_idx, note.dataloader_idx


def _pop_in_turn(batches_of_loaders: list[KeptBatches]) -> Iterator[tuple[Any, BatchNote]]:
    """The batches of the first loader, then those of the next loader; :class:`_KeptBatchFetcher` takes them in turn."""
    for batches in batches_of_loaders:
        yield from batches.pop_all()
