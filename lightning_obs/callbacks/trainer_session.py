"""The calibration session of the model that a Trainer runs, and the saved state that the session has still to take.

Quantization parameters are saved in the callback's state, not in the model's ``state_dict``: checkpoints load strictly
with and without the callback. Lightning loads the states of callbacks before it moves the model to its device, so a
loaded state is kept here until the session is prepared.
The session calibrates one module inside the LightningModule (:func:`find_module`); :func:`describe` says which.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torchmetrics import Metric

from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.lightning_package import RESTORES_IN_FIT_ONLY, TrainerFn, class_of
from lightning_obs.callbacks.resumed_optimizers import callback_states
from lightning_obs.callbacks.strategies import collectives_of, require_exact
from lightning_obs.errors import CalibrationError, likely, name_list, require_kind, warn
from lightning_obs.files.sealed import require_whole
from lightning_obs.model.kinds import inside_adapted, is_transformers_model, unwrapped, without_wrappers
from lightning_obs.model.weight import register_shards, reshard, stay_put
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.schemes.planned_modules import shares_in_float, shares_text

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class TrainerSession:
    """Makes the session of the module to calibrate in a Trainer's LightningModule, and keeps it from run to run.

    Each callback holds one, prepares it when a run starts, and reads the session from it.

    Args:
        module_path: attribute path of the module to calibrate; None: :func:`find_module` chooses it.

    Raises:
        CalibrationError: the path is no text.
    """

    def __init__(self, module_path: str | None) -> None:
        require_kind("module", module_path, (str,), "the attribute path of a module, such as 'model'")
        self.module_path = module_path
        self.session: CalibrationSession | None = None
        #: a state that was loaded from a checkpoint, and that no session has taken yet
        self.saved_state: dict[str, Any] | None = None
        self._pl_module: LightningModule | None = None

    @property
    def pl_module(self) -> LightningModule:
        """The LightningModule that holds the session's model; may be read only after :meth:`prepare`."""
        assert self._pl_module is not None
        return self._pl_module

    @property
    def has_calibrated(self) -> bool:
        """Whether the session has quantization parameters, computed or loaded.

        Hooks ask before they measure or export.
        """
        return self.session is not None and self.session.has_written

    def prepare(self, trainer: Trainer, pl_module: LightningModule, options: CalibrationOptions) -> CalibrationSession:
        """Return the session of the module to calibrate, ready for this run; called by the callbacks' ``prepare``.

        That is when a run or a validation starts. The session is a new one if the model is another than in the last
        run. With several ranks the strategy must keep statistics exact (:func:`.require_exact`). A model without a
        ``forward`` cannot be run step by step, so a rounding on quantized inputs is refused for it if the user has
        named one, and given up with a warning if it is a recipe's.

        Args:
            trainer: runs the model now, or will; its strategy tells how ranks communicate.
            pl_module: holds the module to calibrate.
            options: the options with which a new session is made.

        Raises:
            CalibrationError: the module cannot be found; the options do not fit the model or the strategy; the user has
                named a rounding on quantized inputs, and the model has no ``forward`` or cannot run block by block.
        """
        has_ranks = trainer.world_size > 1
        collectives = collectives_of(trainer) if has_ranks else Collectives()
        if isinstance(trainer.strategy.model, nn.Module):
            register_shards(trainer.strategy.model)  # it may hold parameters of the model that is calibrated
        _, model = find_module(pl_module, self.module_path)
        if self.session is None or self.session.model is not model:
            self.session = CalibrationSession(model, options)
        if has_ranks:
            require_exact(trainer, self.session)
        kept_runs = self.session.kept_runs
        if kept_runs is not None and kept_runs.are_in_use and not has_forward(model):
            if not kept_runs.is_of_recipe:
                require_forward(model, "rounding on quantized inputs")
            kept_runs.give_up(f"{type(model).__name__} has no forward()")
        self.session.begin_run(collectives, is_fitting=trainer.state.fn == TrainerFn.FITTING)
        self._pl_module = pl_module
        return self.session

    def require_calibrated(self) -> CalibrationSession:
        """Return the session, if it has calibrated; called by exports, reports, loggers and the second pass.

        Raises:
            CalibrationError: nothing was calibrated yet.
        """
        if self.session is None or not self.has_calibrated:
            raise CalibrationError(
                "nothing was calibrated yet", remedy="run trainer.validate or trainer.fit with this callback first."
            )
        return self.session

    def finalize(self) -> bool:
        """Compute the quantization parameters of the observed data, write them to the modules, and print the result.

        Called in ``on_validation_epoch_end``, if the validation was observed.

        Returns:
            Whether parameters were written. False only in a fit in which data are missing (the session's
            ``finalize`` notes this in ``observation.coverage.lacks_data``): then a warning replaces the error.

        Raises:
            CalibrationError: data are missing or not finite. Nothing was written then.
        """
        session = self.session
        assert session is not None
        # FSDP2 leaves its outermost module gathered after a forward, which may be the LightningModule around the
        # session's model. Weights must be in their shards when they are observed.
        reshard(self.pl_module)
        try:
            result = session.finalize()
        except CalibrationError as error:
            observation = session.observation
            if not (observation.is_fitting and observation.coverage.lacks_data):
                raise
            warn(f"{session.label}: this validation has calibrated nothing, and the training goes on. {error}")
            return False
        rank_zero_info(f"{result.scheme}: calibrated {result.line(', ')}")
        return True

    def keep_state(self, state: dict[str, Any]) -> None:
        """Keep a checkpoint's state of the callback for the next session, and forget the present session.

        Called by the callback's ``load_state_dict``. An empty state is not kept.

        Raises:
            CalibrationError: the state is damaged.
        """
        if state:
            require_whole(state)
        self.saved_state = state or None
        self.session = None

    def take_state(self) -> dict[str, Any] | None:
        """Return the kept state, and keep it no longer; None if there is none.

        Each callback's ``prepare`` calls this, and loads the state into the session.
        """
        state = self.saved_state
        self.saved_state = None
        return state

    def stop(self) -> None:
        """Take the session's hooks off the model, if they are on it; called when a validation or a run ends."""
        if self.session is not None:
            self.session.detach()


def leave_in_place(trainer: Trainer, pl_module: LightningModule) -> None:
    """Keep the Trainer from moving modules that accelerate or compressed-tensors has dispatched; called in ``setup``.

    The Trainer calls ``model.to(device)`` before the run and ``model.cpu()`` in ``strategy.teardown()``, its last act.
    Neither moves such modules, until the teardown has ended: :func:`.stay_put` lets ``pl_module.to`` and ``cpu`` skip
    them, and returns the function that ends this. So the strategy's ``teardown`` is replaced for one call, which ends
    with that function. With two callbacks, the second one's replacement calls the first one's.
    """
    undo = stay_put(pl_module)
    strategy_attributes = vars(trainer.strategy)
    teardown = trainer.strategy.teardown

    def teardown_in_place() -> None:
        """Replace the strategy's ``teardown``: run it, then let the modules move again."""
        # None: the replacement of a later callback runs before this one, and has removed itself.
        strategy_attributes.pop("teardown", None)
        try:
            teardown()
        finally:
            undo()

    strategy_attributes["teardown"] = teardown_in_place


def state_in_checkpoint(trainer: Trainer, state_key: str) -> dict[str, Any] | None:
    """Read a callback's state from the checkpoint of ``validate``, ``test`` or ``predict`` where Lightning does not.

    Called when one of these starts. The model has the weights of ``ckpt_path`` by then, which need their own scales.

    Args:
        trainer: runs one of the three, or fit, in which Lightning restores callbacks itself.
        state_key: names the callback's state in the checkpoint.

    Returns:
        The state; None if Lightning restores it, or if the checkpoint has none.
    """
    if not RESTORES_IN_FIT_ONLY or trainer.state.fn == TrainerFn.FITTING:
        return None
    state: dict[str, Any] | None = callback_states(trainer).get(state_key)
    return state


# ---------------------------------------------------------------------- which module of a LightningModule is calibrated


#: names of layers that a message lists
_NAMES_SHOWN = 3


def find_module(pl_module: nn.Module, path: str | None = None) -> tuple[str, nn.Module]:
    """Find the module to calibrate.

    Called whenever a session is prepared, before a fit that copies the model as its teacher, and by the command line
    when it loads a model.

    Args:
        pl_module: the LightningModule, which holds it.
        path: the option ``module`` of the callbacks. None: the transformers model nearest to the LightningModule
            (models inside torchmetrics' metrics do not count); else its only child with weights, if only the child has
            a ``forward``; else the LightningModule.

    Returns:
        The path of the module in ``pl_module``, and the module without wrappers and adapters.

    Raises:
        CalibrationError: there is no module of that path; or several transformers models are equally near.
    """
    if path is not None:
        return path, _innermost(_submodule(pl_module, path))
    models = _nearest_models(pl_module)
    if len(models) > 1:
        raise CalibrationError(
            f"{type(pl_module).__name__} holds several transformers models",
            where=list(models),
            remedy='say which one: CalibrationCallback(module="...").',
        )
    if models:
        return next(iter(models.items()))
    if not has_forward(pl_module):
        children = _weighted_children(pl_module)
        name, child = next(iter(children.items()), ("", pl_module))
        if len(children) == 1 and has_forward(child):
            return name, child
    return "", pl_module


def _submodule(pl_module: nn.Module, path: str) -> nn.Module:
    """Return the submodule at a path; a path that does not exist is an error that names the children."""
    try:
        return pl_module.get_submodule(path)
    except AttributeError as error:
        children = ", ".join(name for name, _ in pl_module.named_children()) or "none"
        hint = likely(path, dict(pl_module.named_modules()))
        raise CalibrationError(
            f"{type(pl_module).__name__} has no module {path!r}{hint}",
            expected=f"one of its modules: {children}",
        ) from error


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called; a LightningModule whose steps call its children often has no ``forward``.

    Asked when the module to calibrate is chosen, and before a module is called on its own (:func:`require_forward`).
    """
    if "forward" in vars(module):
        return True
    lightning_module = class_of(module, "LightningModule") or nn.Module
    return type(module).forward not in (nn.Module.forward, lightning_module.forward)


def require_forward(module: nn.Module, caller: str) -> None:
    """Refuse to call a module without ``forward``.

    Called before a choice of observers, a rounding on quantized inputs, and layer errors that are measured on batches.

    Args:
        module: the module to call.
        caller: the option or function that would call it, for the error.

    Raises:
        CalibrationError: the module has no ``forward``; its children with weights are named.
    """
    if has_forward(module):
        return
    children = list(_weighted_children(module))
    example = children[0] if children else "..."
    raise CalibrationError(
        f"{caller} calls {type(module).__name__}, which has no forward()",
        expected=f"a module that can be called, such as one of: {', '.join(children)}",
        remedy=f'say which one: module="{example}"; or write a forward().',
    )


def _weighted_children(module: nn.Module) -> dict[str, nn.Module]:
    """The module's children with parameters, each without its wrappers, by name; metrics are left out."""
    children = {}
    for name, child in module.named_children():
        has_weights = next(child.parameters(), None) is not None
        if has_weights and not isinstance(child, Metric):
            children[name] = _innermost(child)
    return children


def _nearest_models(pl_module: nn.Module) -> dict[str, nn.Module]:
    """The transformers models with the fewest modules between them and the LightningModule, by their paths."""
    level = {"": pl_module}
    while level:
        next_level = {}
        for path, module in level.items():
            for name, child in module.named_children():
                if not isinstance(child, Metric):
                    next_level[f"{path}.{name}".lstrip(".")] = _innermost(child)
        models = {path: module for path, module in next_level.items() if is_transformers_model(module)}
        if models:
            return models
        level = next_level
    return {}


def describe(pl_module: nn.Module, module_path: str | None, session: CalibrationSession) -> str:
    """Say which module a session calibrates, how many of its layers, and which stay in float.

    Printed when a session is made, and by the command line's ``calibrate``.

    Args:
        pl_module: holds the module.
        module_path: the option ``module`` by which it was found.
        session: the session that calibrates the module.

    Returns:
        A line with the names of left out layers of the calibrated classes, and the share of bytes that each class of
        modules keeps in float.
    """
    path, _ = find_module(pl_module, module_path)
    # Blocks are modules around other planned modules (residual blocks), of which only the output is quantized.
    planned = {target.module for target in session.plan.targets if not target.is_block}
    classes = {type(module) for module in planned}
    left_out = _left_out_layers(session, planned, classes)
    class_names = "/".join(sorted(cls.__name__ for cls in classes))
    place = f"`{path}`" if path else "the LightningModule itself"
    total = len(planned) + len(left_out)
    clauses = [f"calibrating {type(session.model).__name__} ({place}): {len(planned)} of {total} {class_names}"]
    if left_out:
        clauses.append(f"left out: {name_list(left_out, _NAMES_SHOWN)}")
    outside = _layers_outside(pl_module, session.model, classes)
    if outside:
        clauses.append(f"not part of it, and left in full precision: {name_list(outside, _NAMES_SHOWN)}")
    with without_wrappers(session.model):
        shares = shares_in_float(session.model, session.plan.targets)
        clauses.append(f"left in float: {shares_text(shares)}")
    return "; ".join(clauses)


def _left_out_layers(
    session: CalibrationSession, planned: Collection[nn.Module], classes: Collection[type[nn.Module]]
) -> list[str]:
    """Names of the layers of the calibrated classes that are not planned, with the reason where there is one."""
    reasons = session.plan.left_out
    names = []
    with without_wrappers(session.model):
        adapters = inside_adapted(session.model)
        for name, module in session.model.named_modules():
            if type(module) in classes and module not in planned and name not in adapters:
                names.append(f"{name} ({reasons[name]})" if name in reasons else name)
    return names


def _layers_outside(pl_module: nn.Module, model: nn.Module, classes: Collection[type[nn.Module]]) -> list[str]:
    """Names of the LightningModule's layers of the calibrated classes that are not in the calibrated model."""
    inside = set(model.modules())
    names = []
    for name, module in pl_module.named_modules():
        if type(module) in classes and module not in inside:
            names.append(name)
    return names


def _innermost(module: nn.Module) -> nn.Module:
    """The module inside wrappers (DDP, compiled...) and peft's adapters."""
    module = unwrapped(module)
    if hasattr(module, "peft_config") and hasattr(module, "get_base_model"):
        base_model = module.get_base_model()  # type: ignore[operator]
        assert isinstance(base_model, nn.Module)
        return base_model
    return module
