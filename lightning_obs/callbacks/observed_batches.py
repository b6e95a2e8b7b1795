"""What a calibration takes from the batches of validations.

:class:`ValidationSchedule` chooses the validations that calibrate, :class:`ObservedBatches` the batches of them that
are observed and the tokens of these that count. :class:`FirstCall` keeps the arguments with which a batch called the
model, so that an ONNX file or a program can be traced later without an example.

On an accelerator a token mask would have to be copied back to the host, which waits for all queued work. So batches are
kept as the loaders made them, on the host, from when Lightning fetches them until they run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.overrides import is_overridden
from torch import nn
from torch.utils import _pytree as pytree

from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.calibration.token_mask import PADDING, find_mask
from lightning_obs.callbacks.lightning_package import TrainerFn, class_of
from lightning_obs.callbacks.sanity_check import SanityWatch
from lightning_obs.callbacks.strategies import repeated_samples, samples_that_count
from lightning_obs.errors import CalibrationError, require_at_least, require_bool, require_kind, warn
from lightning_obs.forward.tracing import Example
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.model.mark import keep_hook_out

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.loops.fetchers import _DataFetcher

#: the hooks in which a user may change a batch on its way to the accelerator
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
#: samples that are kept of the first call: torch.export fixes a size of 1, so a size that may vary is traced with two
_SAMPLES = 2


class ValidationSchedule:
    """Decides at each validation's start whether it calibrates; watches a sanity check that does not.

    `CalibrationCallback` holds one, and calls it in ``on_validation_start`` and ``on_validation_end``.

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
        """Whether the validation that starts calibrates; asked in ``on_validation_start``.

        ``has_calibrated`` says whether there are quantization parameters already.
        """
        if trainer.sanity_checking:
            return self._sanity_check
        if trainer.state.fn != TrainerFn.FITTING:
            return True
        if (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            return True
        return self._starts_at_once and not has_calibrated

    def watch(self, trainer: Trainer, session: CalibrationSession) -> None:
        """In a sanity check that does not calibrate, begin to record which layers its batches call.

        Nothing is recorded in other validations, for a scheme that needs no data, or if the model is calibrated.

        Called in ``on_validation_start`` of a validation that does not calibrate.
        """
        if trainer.sanity_checking and session.needs_data and not session.has_written:
            self._sanity_watch = SanityWatch(session)

    def warn_of_uncalled(self, trainer: Trainer) -> None:
        """Warn, on rank 0, of the layers that a watched sanity check did not call.

        Called in ``on_validation_end`` of every validation; nothing happens if no sanity check was watched.
        """
        if self._sanity_watch is not None and trainer.is_global_zero:
            self._sanity_watch.tell()

    def stop(self) -> None:
        """Stop watching a sanity check, if one is watched; called when a validation or a run ends."""
        if self._sanity_watch is not None:
            self._sanity_watch.close()
        self._sanity_watch = None


class ObservedBatches:
    """Tells a session, batch by batch, whether to observe and which tokens count.

    Both callbacks hold one, and call it before each validation batch; `QuantizationAwareTraining` also asks it for the
    masks of training batches.

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

        Called in ``on_validation_start`` by `CalibrationCallback`, if the validation calibrates, and before the first
        batch of a ``trainer.validate`` that gives `QuantizationAwareTraining` its first ranges. Where Lightning
        only moves batches to an accelerator, each batch is also kept on the host from now on, for its mask. Samples
        that several ranks have get a warning.

        Raises:
            CalibrationError: ``dataloaders`` has a number or a key that the Trainer's loaders do not have.
        """
        loaders = validation_loaders(trainer)
        self._require_loaders(loaders)
        if trainer.world_size > 1:
            _warn_of_repeated_samples(trainer, loaders)
        session.attach(count_calls=False)
        self._on_host = {}
        if _transfers_only(trainer) and class_of(_fetcher(trainer), "_PrefetchDataFetcher"):
            _show_fetched(trainer, self._keep_on_host)

    def begin_batch(
        self, trainer: Trainer, session: CalibrationSession | None, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Before a validation batch runs: observe it or not, and mask its padding and repeated samples.

        Both callbacks call it in ``on_validation_batch_start``. Nothing happens unless the session is attached. An
        observed batch is counted, and the first batch whose padding would be observed gets a warning. A batch that is
        not observed is masked as well, although nothing reads its mask: so a batch without a token mask is an error
        wherever it comes in the validation.

        Raises:
            CalibrationError: the batch, observed or not, has no token mask.
        """
        if session is None or not session.is_attached:
            return
        session.ignore_calls(not self._is_wanted(trainer, session, dataloader_idx))
        batch = self._on_host.pop((batch_idx, dataloader_idx), batch)
        mask = self.mask_of(batch)
        if trainer.world_size > 1:
            loader = list(validation_loaders(trainer).values())[dataloader_idx]
            mask = _masked_also(mask, samples_that_count(loader, batch_idx))
        session.mask_tokens(mask)
        session.warn_of_padding(batch.get(PADDING) if hasattr(batch, "get") else None)
        if not session.observation.calls.is_paused:
            session.count_batches()

    def mask_of(self, batch: Any) -> torch.Tensor | None:
        """Return which tokens of a batch count, ``(batch, tokens)``; None: all.

        Asked before each observed batch of a validation or of training, and in each step of a distillation, whose
        divergence leaves padding out.
        """
        return None if self.token_mask is None else find_mask(batch, self.token_mask)

    def stop(self) -> None:
        """Release the batches that are kept on the host; called when a validation or a run ends."""
        self._on_host = {}

    def _is_wanted(self, trainer: Trainer, session: CalibrationSession, dataloader_idx: int) -> bool:
        """Whether the batch that is about to run is observed, by ``max_batches`` and ``dataloaders``."""
        if self._max_batches is not None and session.batches >= self._max_batches:
            return False
        if self._loader_names is None:
            return True
        key = list(validation_loaders(trainer))[dataloader_idx]
        return dataloader_idx in self._loader_names or key in self._loader_names

    def _require_loaders(self, loaders: Mapping[Any, Any]) -> None:
        """Refuse ``dataloaders`` that the Trainer's ``loaders`` do not have."""
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
        """Keep a batch that Lightning has just fetched, on the host, until :meth:`begin_batch` takes its mask."""
        self._on_host[batch_idx, dataloader_idx] = batch


def validation_loaders(trainer: Trainer) -> dict[Any, Any]:
    """Return the Trainer's validation loaders by number, or by key where the user gave a dict.

    Asked when a validation that calibrates starts, and before its batches.
    """
    loaders = trainer.val_dataloaders
    if isinstance(loaders, Mapping):
        return dict(loaders)
    if not isinstance(loaders, (list, tuple)):
        loaders = [loaders]
    return dict(enumerate(loaders))


def _as_list(dataloaders: int | str | Sequence[int | str] | None) -> list[int | str] | None:
    """The numbers and keys of ``dataloaders`` as a list; None: all loaders."""
    if dataloaders is None:
        return None
    require_kind("dataloaders", dataloaders, (str, int, Iterable), "numbers or keys of validation loaders")
    names = [dataloaders] if isinstance(dataloaders, (str, int)) else list(dataloaders)
    for name in names:
        if isinstance(name, bool) or not isinstance(name, (str, int)):
            raise CalibrationError("dataloaders", got=repr(name), expected="numbers or keys of validation loaders")
    return names


def _warn_of_repeated_samples(trainer: Trainer, loaders: Mapping[Any, Any]) -> None:
    """Warn if ``DistributedSampler`` gives this rank samples that another rank has, too."""
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
        """The fetcher's iterator from now on: give each batch to ``see`` before Lightning gets it."""
        for fetched in iter(partial(next, batches), None):  # iter(batches) would begin at the first batch again
            see(*fetched)
            yield fetched

    fetcher.iterator = shown(fetcher.iterator)


def _transfers_only(trainer: Trainer) -> bool:
    """Whether Lightning moves batches to an accelerator, and no hook of the user changes them on the way."""
    if trainer.strategy.root_device.type == "cpu":
        return False
    for owner in (trainer.lightning_module, trainer.datamodule):
        lightning_class = class_of(owner, "LightningModule", "LightningDataModule")
        if lightning_class is None:
            continue
        if any(is_overridden(hook, owner, lightning_class) for hook in _TRANSFER_HOOKS):
            return False
    return True


# ---------------------------------------------------------------------- an example of the model's inputs


class FirstCall:
    """The arguments of the first observed call of a session's model, an example to trace the model with later.

    `Results` holds one; ``export_onnx`` and ``export_program`` without an example use it.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None  # whose call it is
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._stop_watching: Callable[[], None] | None = None  # None: no call is waited for

    def watch(self, session: CalibrationSession | None) -> None:
        """Keep the next call of the session's model, unless a call of this model is kept or waited for already.

        Called before each validation batch, and each test batch of `CalibrationCallback`; nothing happens for a batch
        that the calibration leaves out.
        """
        if session is None or session.observation.calls.is_paused:
            return
        if self._model is session.model and (self._call is not None or self._stop_watching is not None):
            return
        self.stop()
        self._call = None
        self._model = session.model
        handle = session.model.register_forward_pre_hook(self._keep, with_kwargs=True)
        self._stop_watching = keep_hook_out(session.model, handle)

    def stop(self) -> None:
        """Wait for no call any more; a kept call stays.

        Called when a call was kept, before a call of another model is waited for, and when a validation or a run ends.
        """
        if self._stop_watching is not None:
            self._stop_watching()
        self._stop_watching = None

    def require(self, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call that was kept.

        Called at a validation's end, if ``export_to`` has a file that is traced, and by :meth:`example`.

        Args:
            model: the model of the session, whose call it must be.

        Raises:
            CalibrationError: no call was seen.
        """
        if self._call is None or self._model is not model:
            raise CalibrationError(
                f"no validation batch has called {type(model).__name__}, so there is no example to trace it with",
                remedy="give one: export_onnx(file, example), export_program(file, example), or "
                'export_to={"model.onnx": {"example": example}}.',
            )
        return self._call

    def example(self, model: nn.Module, *, is_dynamic: bool) -> tuple[Any, ...] | dict[str, Any] | Example:
        """Return an example for a writer: the positional arguments if there are no others, else all by name.

        Where some arguments have no names (``*inputs``, or before a ``/``), both kinds stay as they are in the call, in
        an :class:`.Example`.

        Called by ``Results.export_traced`` if the user gave no example. Arguments of a transformers model that
        are labels are left out.

        Args:
            model: the model of the session; the example is put on its device.
            is_dynamic: whether sizes may vary in the file. Then the example has two samples, else one sample.

        Raises:
            CalibrationError: no call was seen.
        """
        args, kwargs = call = self.require(model)
        if not is_dynamic:
            args, kwargs = _first_samples(call, 1)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        if not kwargs:
            return tuple(args)
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        labels = label_names(model)
        if _has_nameless(bound):
            by_name = {name: value for name, value in kwargs.items() if name not in labels}
            return Example(tuple(args), by_name, dynamic_shapes=None)
        example = {}
        for name, value in _flat(bound).items():
            if name not in labels:
                example[name] = value
        return example

    @torch.no_grad()
    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook of the model: keep copies of the first samples of a call, and wait for no other call."""
        self.stop()
        with torch.inference_mode(False):
            samples = _first_samples((args, kwargs), _SAMPLES)
            self._call = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), samples)


def _first_samples(call: Any, count: int) -> Any:
    """The first samples of a call's tensors; the tensors whole, unless all have the same size in their first dimension.

    Args:
        call: tensors in tuples, lists and dicts, beside other values.
        count: of samples.
    """
    sizes = set()
    for value in pytree.tree_leaves(call):
        if isinstance(value, torch.Tensor):
            sizes.add(value.shape[0] if value.ndim else None)
    if len(sizes) != 1 or None in sizes:
        return call
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[:count], call)


def _has_nameless(bound: inspect.BoundArguments) -> bool:
    """Whether some arguments of a call cannot be given by name."""
    nameless = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return any(bound.signature.parameters[name].kind in nameless for name in bound.arguments)


def _flat(bound: inspect.BoundArguments) -> dict[str, Any]:
    """All arguments by name, those that the signature gathers in ``**kwargs`` too; none of them is without a name."""
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(value)
        else:
            arguments[name] = value
    return arguments


def label_names(model: nn.Module) -> list[str]:
    """The arguments of a transformers model's forward that hold labels; none for other models.

    They are left out of the example for a traced file, here and in the command line.
    """
    if not is_transformers_model(model):
        return []
    from transformers.utils import find_labels

    return list(find_labels(type(model)))
