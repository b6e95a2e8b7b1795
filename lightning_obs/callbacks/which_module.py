"""Find the module inside a LightningModule that is calibrated, and say which one it is."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torchmetrics import Metric

from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.lightning_package import class_of
from lightning_obs.errors import CalibrationError, likely, name_list
from lightning_obs.model.kinds import inside_adapted, is_transformers_model, unwrapped, without_wrappers
from lightning_obs.schemes.planned_modules import shares_in_float, shares_text

#: names of layers that a message lists
_NAMES_SHOWN = 3


def find_module(pl_module: nn.Module, path: str | None = None) -> tuple[str, nn.Module]:
    """Find the module to calibrate.

    Args:
        pl_module: holds it.
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
    """Whether the module can be called; a LightningModule whose steps call its children often has no ``forward``."""
    if "forward" in vars(module):
        return True
    lightning_module = class_of(module, "LightningModule") or nn.Module
    return type(module).forward not in (nn.Module.forward, lightning_module.forward)


def require_forward(module: nn.Module, caller: str) -> None:
    """Refuse to call a module without ``forward``.

    Args:
        module: to call.
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
    """The module's children with parameters, without wrappers, by name."""
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

    Args:
        pl_module: holds the module.
        module_path: the option ``module`` by which it was found.
        session: of the module.

    Returns:
        A line with the names of left out layers of the calibrated classes, and the share of bytes that each class of
        modules keeps in float.
    """
    path, _ = find_module(pl_module, module_path)
    planned = {target.module for target in session.plan.targets}
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
