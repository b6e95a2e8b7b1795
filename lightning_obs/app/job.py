"""Make the options, model, data and Trainers of a composed config, and a task that works with them.

Hydra's containers become dicts and lists here; nothing below the app knows of Hydra.
"""

from __future__ import annotations

import inspect
import math
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import InstantiationException
from hydra.utils import get_class, get_object, instantiate
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn

from lightning_obs.app.console import StepsBar, say, step
from lightning_obs.app.data.module import CalibrationData
from lightning_obs.app.tasks.task import Task
from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.callbacks.session_callback import SessionCallback
from lightning_obs.callbacks.strategies import collectives_of
from lightning_obs.callbacks.which_module import find_module
from lightning_obs.checkpoint.load import load_checkpoint
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.files.read import naming, read_json
from lightning_obs.files.tensors import deal_to_files
from lightning_obs.files.write import require_free
from lightning_obs.forward.quantized_forward import quantized
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.model.offload import device_of, stay_put
from lightning_obs.model.weight import in_shards
from lightning_obs.report.predictions import Moved, Predictions
from lightning_obs.schemes.config import PRESET, as_names
from lightning_obs.schemes.patterns import unmatched

#: below this relative loss by calibration, a share of it that was recovered is noise and is not shown
_LOST = 1e-3


@dataclass(frozen=True)
class Quality:
    """The number by which a model is judged, logged by the module's ``test_step`` on held-out data."""

    name: str  # under which ``test_step`` logged it
    value: float  # over all held-out batches and ranks
    higher_is_better: bool | None  # as the torchmetrics metric of that name says; None where the module has none
    moved: Moved | None = None  # the predictions, from the original's; None for the original, and without logits


class Job(Task):
    """A task that runs a model on its data, with a callback."""

    callback: SessionCallback
    module: LightningModule
    model: nn.Module  # the one inside ``module`` that is calibrated
    data: LightningDataModule
    folder: Path | None  # of the checkpoint; None: none is written
    trainer: Trainer  # runs the callback
    evaluator: Trainer  # runs without it, to measure
    predictions: Predictions  # of the original model on held-out data

    def load(self) -> None:
        """Load model and data."""
        config = self.config
        self.folder = Path(config.export.folder) if config.export.folder else None
        if self.folder is not None:
            require_free(self.folder, config.export.overwrite)
            deal_to_files({}, config.export.max_shard_size)
        check_data(config)
        self.module = load_module(config)
        self.data = make_data(config, self.module)
        _, self.model = find_module(self.module, config.module)
        refuse_idle_ignore(config, self.model)
        self.evaluator, self.predictions = make_trainer(config), Predictions()

    def run_with(self, callback: SessionCallback) -> None:
        """Let this callback calibrate, in a Trainer of its own."""
        self.callback, self.trainer = callback, make_trainer(self.config, callback)

    def inputs(self, batch: Any) -> dict[str, Any]:
        """Keyword arguments of ``model`` for a batch (``model_inputs``, or all of it), on the model's device."""
        if hasattr(self.module, "model_inputs"):
            inputs = self.module.model_inputs(batch)
        else:
            inputs = {**batch, **({"use_cache": False} if is_transformers_model(self.model) else {})}
        return dict(move_data_to_device(inputs, device_of(self.model)))

    def to_device(self) -> None:
        """Put the model where Lightning runs it: a Trainer leaves it on the CPU."""
        if not any(map(in_shards, self.module.modules())):
            self.module.to(self.trainer.strategy.root_device)

    def first_inputs(self, loader: Any, batches: int | None = None) -> list[dict[str, Any]]:
        """:meth:`inputs` of the first batches, or all, where Lightning runs the model."""
        self.to_device()
        return [self.inputs(batch) for batch in islice(loader, batches)]

    def quality(self, what: str, as_quantized: bool = True, again: LightningModule | None = None) -> Quality | None:
        """Measure the quality of the model; None if ``evaluate`` is off.

        Args:
            what: the name of the measured model for the user.
            as_quantized: False: measure the original, and keep its predictions to compare later ones with.
            again: measure this module instead, which a checkpoint was loaded into.
        """
        if not self.config.evaluate:
            return None
        say(f"· measuring {what}")
        if not as_quantized:
            with self.predictions.kept(self.model):
                original = measure_quality(self.module, self.evaluator, self.data)
            _require_a_number(original)
            return original
        model = self.model if again is None else find_module(again, self.config.module)[1]
        how = quantized(model) if again is None else nullcontext()
        with how, self.predictions.compared(model) as comparison:
            found = measure_quality(again or self.module, self.evaluator, self.data)
        return found and replace(found, moved=comparison.reduced(collectives_of(self.evaluator)))

    def load_again(self, folder: Path) -> LightningModule:
        """A new LightningModule with the checkpoint in ``folder``, loaded as a user loads it."""
        if is_transformers_model(self.model):
            as_saved = {"dtype": "auto"} if "dtype" in self.config.model else {}
            return _make_module(self.config, path=str(folder), **as_saved)
        module = _make_module(self.config)
        load_checkpoint(find_module(module, self.config.module)[1], folder)
        return module


def typed_words() -> list[str] | None:
    """The arguments of ``python -m lightning_obs`` in the command of this run; None: it was composed in Python."""
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    folders = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    words: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)  # ${...} as it stands
    return [*(f"--config-dir={folder}" for folder in folders), *map(str, words)]


def refuse_idle_ignore(config: DictConfig, model: nn.Module) -> None:
    """Refuse what the user has typed as ``ignore`` and matches no module; defaults of configs may match none."""
    words = [word for word in typed_words() or () if not word.startswith("--")]
    typed = {str(override.key_or_group) for override in OverridesParser.create().parse_overrides(words)}
    if "ignore" in typed:
        refuse(
            unmatched(model, as_names(plain(config.ignore))),
            f"ignore matches no module of {type(model).__name__}",
            expected="names or classes of modules, or `re:` patterns (anchored at the front)",
        )


def make_trainer(config: DictConfig, *callbacks: Callback) -> Trainer:
    """The Trainer that ``trainer`` describes, with these callbacks."""
    bars = [StepsBar()] if config.trainer.get("enable_progress_bar", True) else []
    return instantiate(config.trainer, callbacks=[*callbacks, *bars])


def made(node: Any, **given: Any) -> Any:
    """Instantiate a node of a config. A CalibrationError of its constructor is not wrapped in Hydra's own error."""
    try:
        return instantiate(node, **given)
    except InstantiationException as error:
        if isinstance(error.__cause__, CalibrationError):
            raise error.__cause__ from None
        raise


def load_module(config: DictConfig) -> LightningModule:
    """The LightningModule that ``model`` describes."""
    refuse(
        ["model.layerwise"] if config.model.get("layerwise") else [],
        "layer by layer a model is calibrated and exported, nothing else is done with it",
        remedy="leave it out, or choose task=calibrate.",
    )
    with step("loading the model"):
        module = _make_module(config)
    stay_put(module)  # the Trainer that measures has no callback of ours
    return module


def _make_module(config: DictConfig, **given: Any) -> LightningModule:
    wanted = deepcopy(config.model)
    with open_dict(wanted):
        wanted.pop("layerwise", None)  # of the task, not of the module
    return made(wanted, **given)


def check_data(config: DictConfig) -> None:
    """Refuse data that are missing or lack a field before a model is loaded; for data classes of this package."""
    kind = get_class(config.data._target_)
    if issubclass(kind, CalibrationData):
        kind.check(plain(config.data))


def make_data(config: DictConfig, module: LightningModule) -> LightningDataModule:
    """The data that ``data`` describes; its constructor gets the values of ``module.for_data()`` that it takes."""
    with step("reading the data"):
        return read_data(config, module)


def read_data(config: DictConfig, module: LightningModule) -> LightningDataModule:
    """:func:`make_data` without a word to the user."""
    offered = module.for_data() if hasattr(module, "for_data") else {"tokenizer": getattr(module, "tokenizer", None)}
    asked = inspect.signature(get_object(config.data._target_)).parameters
    told = {name: value for name, value in offered.items() if name in asked}
    return made(config.data, _convert_="all", **told)


def measure_quality(module: LightningModule, trainer: Trainer, data: LightningDataModule) -> Quality | None:
    """Run ``trainer.test``. None if ``test_step`` logs nothing; of several values, ``module.metric`` names one."""
    logged = trainer.test(module, datamodule=data, verbose=False)[0]
    if not logged:
        return None
    wanted = getattr(module, "metric", None)
    name = str(wanted or next(iter(logged)))
    if name not in logged or (wanted is None and len(logged) > 1):
        raise CalibrationError(
            f"which value judges the model: {type(module).__name__}.test_step logs {', '.join(logged)}",
            got=f"metric = {wanted!r}",
            remedy=f"name one of them in the class: metric = {next(iter(logged))!r}.",
        )
    return Quality(name, float(logged[name]), getattr(getattr(module, name, None), "higher_is_better", None))


def _require_a_number(original: Quality | None) -> None:
    """Refuse a metric of the original model by which nothing could be compared."""
    if original is not None and not math.isfinite(original.value):
        raise CalibrationError(
            f"the {original.name} of the unquantized model is not a finite number, so nothing can be compared with it",
            got=str(original.value),
            remedy="look for NaN in the weights and for samples without anything to predict, or set evaluate=false.",
        )


def recovered_share(full: Quality | None, calibrated: Quality | None, tuned: Quality | None) -> float | None:
    """The share of calibration's loss that fine-tuning recovered, from 0 (none, or it lost more) to 1 (all, or more).

    None if calibration lost next to nothing, or the metric does not say which direction is better.
    """
    if full is None or calibrated is None or tuned is None or full.higher_is_better is None:
        return None
    sign = -1 if full.higher_is_better else 1
    lost = sign * (calibrated.value - full.value)
    back = sign * (calibrated.value - tuned.value)
    return None if lost < _LOST * abs(full.value) or not lost else min(1.0, max(0.0, back / lost))


def make_options(config: DictConfig) -> CalibrationOptions:
    """The options that ``scheme``, ``kv_cache``, ``observer``, ``weight_observer``, ``ignore``... describe."""
    scheme = _in_groups(plain(config.scheme), config.group_size)
    targets = scheme.pop("targets", None)
    if scheme.get(PRESET) is None:
        scheme.pop(PRESET, None)  # scheme=none
    same = ("on_missing", "calibrate_all_experts", "fused_sets", "join_fused_scales", "rounding")
    return CalibrationOptions(
        scheme[PRESET] if set(scheme) == {PRESET} else scheme or None,
        targets=targets,
        ignore=[*as_names(plain(config.ignore)), *_ignored_by_report(config.ignore_from)],
        observers={"input": plain(config.observer), "weight": plain(config.weight_observer)},
        kv_cache=plain(config.kv_cache) or None,
        reload=config.export.reload,
        engines=plain(config.export.engines),
        **{name: plain(config[name]) for name in same},
    )


def _in_groups(scheme: dict[str, Any], size: int | None) -> dict[str, Any]:
    """The scheme with weights in groups of ``size`` columns; None: as it says itself."""
    weights = scheme.get("weights")
    if size is None:
        return scheme
    if not weights or weights.get("strategy") != "group":
        raise CalibrationError(
            "group_size with a scheme whose groups are fixed, or that has none",
            got=f"group_size={size}, scheme {scheme.get('preset') or sorted(scheme)}",
            expected="scheme=w4a16, w4a8 or w8a16, or another whose weights have strategy group",
            remedy="leave group_size out, or choose such a scheme.",
        )
    return {**scheme, "weights": {**weights, "group_size": size}}


def plain(node: Any) -> Any:
    """Hydra's containers as dict and list, interpolations resolved."""
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _ignored_by_report(path: str | None) -> list[str]:
    if path is None:
        return []
    expected = "ignore_from=<report.json of an earlier run>"
    found = read_json(path, expected=expected)
    with naming(path, expected=expected):
        names = found["ignore"]
        if not isinstance(names, (str, list)) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"ignore is {names!r:.80}, not names")
        return as_names(names)
