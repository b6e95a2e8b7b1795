"""Make the options, the model, the data and the Trainers that a composed config describes.

The tasks (``tasks/``) and the job that they hold (``job.py``) call these functions. Hydra's containers become dicts and
lists here; no other folder of the package knows Hydra.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import deepcopy
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_class, get_object, instantiate
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_obs.app.console import step
from lightning_obs.app.data.module import TextData
from lightning_obs.app.steps_bar import make_steps_bar
from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.callbacks.lightning_package import class_of, package_of
from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.files.read import naming, read_json
from lightning_obs.model.weight import stay_put
from lightning_obs.schemes.config import PRESET, as_names
from lightning_obs.schemes.recipes import RECIPES, Recipe, RecipeLike


def plain(node: Any) -> Any:
    """Return a node of a config as dict, list or value, with its interpolations resolved; other values unchanged.

    Tasks and other code of ``app/`` call it for values of the config that go to code that does not know OmegaConf.
    """
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


# ---------------------------------------------------------------------- options


def make_options(config: DictConfig) -> CalibrationOptions:
    """The options of calibration, from ``scheme``, ``kv_cache``, ``observer``, ``weight_observer``, ``ignore``...

    A task calls this before it loads the model. ``step_commands.py`` calls it for the config of a command that it
    might propose as a next step.

    Raises:
        CalibrationError: options that are wrong, or do not go together.
    """
    scheme = _with_group_size(plain(config.scheme), config.group_size)
    targets = scheme.pop("targets", None)
    if scheme.get(PRESET) is None:
        scheme.pop(PRESET, None)  # scheme=none
    has_only_a_preset = set(scheme) == {PRESET}
    return CalibrationOptions(
        scheme[PRESET] if has_only_a_preset else scheme or None,
        targets=targets,
        ignore=[*as_names(plain(config.ignore)), *names_ignored_by_report(config.ignore_from)],
        observers={"input": plain(config.observer), "weight": plain(config.weight_observer)},
        kv_cache=plain(config.kv_cache) or None,
        engines=plain(config.export.engines),
        on_missing=config.on_missing,
        calibrate_all_experts=config.calibrate_all_experts,
        fused_sets=plain(config.fused_sets),
        join_fused_scales=config.join_fused_scales,
        rounding=plain(config.rounding),
        recipe=_recipe(plain(config.recipe)),
    )


def _recipe(choices: dict[str, Any]) -> RecipeLike:
    """The recipe of the config: its name, unless the user has changed its choices; None for ``recipe=none``."""
    if choices["name"] is None:
        return None
    recipe = Recipe.of(choices)
    return recipe.name if recipe == RECIPES.get(recipe.name) else recipe


def _with_group_size(scheme: dict[str, Any], size: int | None) -> dict[str, Any]:
    """The scheme with weights in groups of ``size`` input columns; None: in the groups that the scheme has itself.

    Raises:
        CalibrationError: a size for a scheme whose weights have other groups or none.
    """
    if size is None:
        return scheme
    weights = scheme.get("weights")
    if not weights or weights.get("strategy") != "group":
        raise CalibrationError(
            "group_size with a scheme whose groups are fixed, or that has none",
            got=f"group_size={size}, scheme {scheme.get('preset') or sorted(scheme)}",
            expected="scheme=w4a16, w4a8 or w8a16, or another whose weights have strategy group",
            remedy="leave group_size out, or choose such a scheme.",
        )
    return {**scheme, "weights": {**weights, "group_size": size}}


def names_ignored_by_report(path: str | None) -> list[str]:
    """Read which modules the ``report.json`` of an earlier run proposes to leave in full precision.

    :func:`make_options` calls it with ``ignore_from`` of the config.

    Returns:
        Names of modules; empty if ``path`` is None.

    Raises:
        CalibrationError: a file that is no report.
    """
    if path is None:
        return []
    expected = "ignore_from=<report.json of an earlier run>"
    report = read_json(path, expected=expected)
    with naming(path, expected=expected):
        names = report["ignore"]
        if not isinstance(names, (str, list)) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"ignore is {names!r:.80}, not names")
        return as_names(names)


# ---------------------------------------------------------------------- model


def load_module(config: DictConfig) -> LightningModule:
    """The LightningModule that ``model`` describes, with its weights.

    The check of a task calls this once, before the data are read.

    Raises:
        CalibrationError: ``model.layerwise`` is set; a model that cannot be loaded; one that the Trainer does not take.
    """
    refuse(
        ["model.layerwise"] if config.model.get("layerwise") else [],
        "layer by layer a model is calibrated and exported, nothing else is done with it",
        remedy="leave it out, or choose task=calibrate.",
    )
    with step("loading the model"):
        module = make_module(config)
    _require_same_package(module, _trainer_class(config))
    stay_put(module)  # offloaded weights must not be moved, and the Trainer that measures has no callback to prevent it
    return module


def make_module(config: DictConfig, **arguments: Any) -> LightningModule:
    """A new instance of the LightningModule that ``model`` describes.

    Called for the run's module, and again after the export: for a second module that is given the exported checkpoint
    (``Job.load_again``) or the adapters (``task=lora``).

    Args:
        config: the composed config.
        arguments: arguments of the constructor, in place of keys of ``model``.
    """
    node = deepcopy(config.model)
    with open_dict(node):
        node.pop("layerwise", None)  # an option of the task, not of the module
    return _instantiate(node, **arguments)


# ---------------------------------------------------------------------- data


def check_data(config: DictConfig) -> None:
    """Refuse text data that are missing or lack a field; data of other classes check themselves.

    Tasks call this before they load the model.
    """
    data_class = get_class(config.data._target_)
    if issubclass(data_class, TextData):
        data_class.check(plain(config.data))


def facts_for_data(module: LightningModule) -> Mapping[str, Any]:
    """Arguments by name that the model offers to its data: the result of ``module.for_data()``, or its tokenizer.

    Tasks call it once the model is loaded, and give the result to :func:`make_data`.
    """
    if hasattr(module, "for_data"):
        facts: Mapping[str, Any] = module.for_data()
        return facts
    return {"tokenizer": getattr(module, "tokenizer", None)}


def make_data(config: DictConfig, facts: Mapping[str, Any]) -> LightningDataModule:
    """Read the data as :func:`read_data` does, with a moving bar; tasks call it once the model is loaded."""
    with step("reading the data"):
        return read_data(config, facts)


def read_data(config: DictConfig, facts: Mapping[str, Any]) -> LightningDataModule:
    """Make an instance of the LightningDataModule that ``data`` describes.

    :func:`make_data` calls it for a run; ``step_commands.py`` calls it to check the data of a proposed run.

    Args:
        config: the composed config.
        facts: arguments that the model offers (:func:`facts_for_data`); the constructor gets those that it takes.
    """
    parameters = inspect.signature(get_object(config.data._target_)).parameters
    arguments = {name: value for name, value in facts.items() if name in parameters}
    return _instantiate(config.data, _convert_="all", **arguments)


# ---------------------------------------------------------------------- Trainers


def make_trainer(config: DictConfig, *callbacks: Callback) -> Trainer:
    """Make the Trainer that ``trainer`` describes, with these callbacks before those of ``trainer.callbacks``.

    Tasks call it for each of their loops: to calibrate, to train, and to measure. A Trainer of Lightning also gets the
    command line's own progress bar (:func:`make_steps_bar`), unless ``trainer.enable_progress_bar`` is off or the
    config has another bar.
    """
    trainer_class = _trainer_class(config)
    of_config = instantiate(config.trainer.get("callbacks")) or []
    bars = []
    package = package_of(trainer_class)
    has_bar = any(class_of(callback, "ProgressBar") for callback in of_config)
    if package is not None and config.trainer.get("enable_progress_bar", True) and not has_bar:
        bars.append(make_steps_bar(package))
    target = f"{trainer_class.__module__}.{trainer_class.__qualname__}"
    return instantiate(config.trainer, _target_=target, callbacks=[*callbacks, *of_config, *bars])


def require_training(trainer: Trainer) -> None:
    """Refuse a Trainer whose fit takes no step; the tasks that train call it before they measure anything.

    Raises:
        CalibrationError: ``trainer.max_steps=0`` or ``trainer.max_epochs=0``.
    """
    for name in ("max_steps", "max_epochs"):
        if getattr(trainer, name) == 0:
            raise CalibrationError(
                f"trainer.{name}=0 trains nothing",
                expected="one or more, or -1 for no limit",
                remedy="task=calibrate calibrates without training.",
            )


def _trainer_class(config: DictConfig) -> type[Trainer]:
    """The Trainer of the package of Lightning that the class of ``model`` is of, or the class that a user has set.

    :func:`make_trainer` calls this. Tasks that calibrate or train make a Trainer before they load the model, to refuse
    wrong devices early; so the class of the module is asked, not the module. :func:`load_module` calls this to compare
    packages.
    """
    set_class: type[Trainer] = get_class(config.trainer._target_)
    if set_class is not Trainer:
        return set_class
    try:
        module_class = resolve_name(config.model._target_)
    except Exception:  # of any kind, in a file of the user's: load_module tells it
        return Trainer
    package = package_of(module_class) if isinstance(module_class, type) else None
    return Trainer if package is None else import_module(package).Trainer


def _require_same_package(module: LightningModule, trainer_class: type[Trainer]) -> None:
    """Refuse a module of ``pytorch_lightning`` for a Trainer of ``lightning``, and the other way round."""
    package = package_of(type(module))
    other = package_of(trainer_class)
    if package is not None and other is not None and package != other:
        raise CalibrationError(
            f"{type(module).__name__} is a LightningModule of {package}, and the Trainer is of {other}",
            got=f"trainer._target_={trainer_class.__module__}.{trainer_class.__name__}",
            remedy=f"add trainer._target_={package}.Trainer.",
        )


def _instantiate(node: Any, **arguments: Any) -> Any:
    """An instance of a node's ``_target_``; a CalibrationError of the constructor loses Hydra's exception around it."""
    try:
        return instantiate(node, **arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, CalibrationError):
            raise error.__cause__ from None
        raise
