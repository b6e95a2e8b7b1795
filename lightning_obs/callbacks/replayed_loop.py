"""Lightning's evaluation loop once more, over batches that were kept, in the middle of a validation or a test.

The loop and the connector of metrics are made of the private classes that the Trainer itself uses
(pyproject.toml has the versions that were tried). The alternative is to write steps, loaders and reductions of all
strategies again.

No hook of a callback is called, and nothing is logged. The user's step reads the Trainer all the same, so its
callbacks, loggers and metrics stay there: only the loop is given a Trainer without callbacks (:class:`_Silent`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from compressed_tensors.utils.helpers import patch_attr

from lightning_obs.callbacks.copies import KeptBatches
from lightning_obs.callbacks.lightning_package import class_of, collect_rng_states, set_rng_states
from lightning_obs.report.predictions import Predictions

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: a metric's value, and further arguments to log it with
Metrics: TypeAlias = dict[str, tuple[torch.Tensor, dict[str, Any]]]

#: the connector's metrics by name, which a Trainer shows as its ``callback_metrics``, ``logged_metrics``...
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


class ReplayedLoop:
    """One more run of the Trainer's evaluation loop, from the first kept batch to ``on_validation_epoch_end``.

    Args:
        trainer: runs a validation or a test now, and has run its last batch.
        kept: the batches of each loader, with the notes ``(batch_idx, dataloader_idx, random state)``; they are
            taken out.
        predictions: is told which batch runs.
        metrics: the Trainer's metrics (:func:`metrics_of`) before the first batch.
    """

    def __init__(
        self,
        trainer: Trainer,
        kept: list[KeptBatches],
        predictions: Predictions,
        metrics: dict[str, dict[str, Any]],
    ) -> None:
        self._trainer = trainer
        self._outer: Any = trainer._active_loop
        self._random = collect_rng_states()
        self._loop = self._make_loop(kept, predictions)
        self._connector = self._make_connector(metrics)
        #: metrics that were logged for the whole epoch
        self.logged: Metrics = {}
        #: the directions of those that are objects of torchmetrics, where these have one
        self.higher_is_better: dict[str, bool] = {}

    def run(self) -> None:
        """Run all batches; afterwards the Trainer has its own loop and metrics again, also if a step raises."""
        with self._in_place():
            self._loop.run()

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Let the Trainer find this loop and this connector, which ``self.log`` asks it for."""
        trainer: Any = self._trainer
        places = ((trainer.fit_loop.epoch_loop, "val_loop"), (trainer, "validate_loop"), (trainer, "test_loop"))
        owner, name = next(place for place in places if getattr(*place) is self._outer)
        with patch_attr(trainer, "_logger_connector", self._connector), patch_attr(owner, name, self._loop):
            yield

    def _make_loop(self, kept: list[KeptBatches], predictions: Predictions) -> Any:
        outer = self._outer
        evaluation_loop: Any = class_of(outer, "_EvaluationLoop")
        silent = _Silent(self._trainer)
        loop = evaluation_loop(silent, outer._trainer_fn, outer._stage, verbose=False)
        loop.inference_mode = outer.inference_mode
        loop._combined_loader = outer._combined_loader  # is asked how many loaders there are
        loop._max_batches = [len(batches) for batches in kept]
        loop._data_fetcher = _Replay(kept, predictions)
        # The first pass has set up, and will call the user's `on_validation_end`.
        for name in ("setup_data", "reset", "on_run_start", "_on_evaluation_model_train", "_on_evaluation_end"):
            setattr(loop, name, _nothing)
        end_epoch = loop._on_evaluation_epoch_end

        def end_epoch_as_in_the_first_pass() -> None:
            """Call the module's hook with the random state that it has at the end of the first pass."""
            set_rng_states(self._random)
            end_epoch()

        loop._on_evaluation_epoch_end = end_epoch_as_in_the_first_pass
        return loop

    def _make_connector(self, metrics: dict[str, dict[str, Any]]) -> Any:
        logger_connector: Any = class_of(self._trainer._logger_connector, "_LoggerConnector")
        connector = logger_connector(self._trainer)
        vars(connector).update({name: dict(values) for name, values in metrics.items()})
        connector.log_metrics = _nothing  # not to the loggers: the names are the first pass's
        update = connector.update_eval_epoch_metrics

        def keep_and_update() -> Any:
            """Called after each loader and at the end."""
            self._keep_logged(connector)
            return update()

        connector.update_eval_epoch_metrics = keep_and_update
        return connector

    def _keep_logged(self, connector: Any) -> None:
        """Keep the epoch's values.

        A value that the user's ``self.log`` has reduced is equal on all ranks: its largest is itself.
        """
        results: Any = self._trainer._results
        values = connector.metrics["callback"]
        for _, result in results.valid_items():
            is_reduced = result.meta.sync.should or not result.is_tensor  # torchmetrics reduces its own
            how = {"prog_bar": result.meta.prog_bar, "sync_dist": is_reduced, "reduce_fx": "max"}
            direction = getattr(result.value, "higher_is_better", None)
            for name in values.keys() & {*results._forked_name(result, False)}:
                self.logged[name] = values[name], how
                if direction is not None:
                    self.higher_is_better[name] = direction


def metrics_of(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """The metrics that the Trainer shows now, for a :class:`ReplayedLoop` to begin with."""
    connector = trainer._logger_connector
    return {name: dict(getattr(connector, name)) for name in _METRICS}


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a method that is not to be run again."""


class _Silent:
    """A Trainer in all things, except that it has no callbacks whose hooks could be called.

    The loop alone has it. ``LightningModule.trainer`` is the Trainer itself, with its callbacks.
    """

    callbacks: tuple[Any, ...] = ()

    def __init__(self, trainer: Trainer) -> None:
        object.__setattr__(self, "_trainer", trainer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._trainer, name, value)


class _Replay:
    """The loop's source of batches, in place of Lightning's fetcher."""

    def __init__(self, kept: list[KeptBatches], predictions: Predictions) -> None:
        self._kept = kept
        self._predictions = predictions
        self._batches = _taken_in_turn(kept)

    @property
    def done(self) -> bool:
        """Whether the last batch was fetched."""
        return not any(map(len, self._kept))

    def __next__(self) -> tuple[Any, int, int]:
        batch, (batch_idx, dataloader_idx, random) = next(self._batches)
        self._predictions.batch = batch_idx, dataloader_idx
        set_rng_states(random)
        return batch, batch_idx, dataloader_idx


def _taken_in_turn(kept: list[KeptBatches]) -> Iterator[tuple[Any, Any]]:
    for batches in kept:
        yield from batches.taken()
