"""Which module inside a LightningModule is calibrated, and the parameters left out."""

from __future__ import annotations

from torch import nn
from torchmetrics import Metric

from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.callbacks.lightning_package import class_of
from lightning_obs.errors import CalibrationError, likely, name_list
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.model.wrappers import inside_adapted, unwrapped, without_wrappers
from lightning_obs.schemes.left_in_float import shares_in_float, shares_text


def find_module(pl_module: nn.Module, path: str | None = None) -> tuple[str, nn.Module]:
    """The path of the module to calibrate, and the module without its wrappers.

    ``path`` is the option ``module`` of the callbacks. Models inside torchmetrics' metrics do not count.
    """
    if path is not None:
        try:
            module = pl_module.get_submodule(path)
        except AttributeError as error:
            children = ", ".join(name for name, _ in pl_module.named_children()) or "none"
            raise CalibrationError(
                f"{type(pl_module).__name__} has no module {path!r}{likely(path, dict(pl_module.named_modules()))}",
                expected=f"one of its modules: {children}",
            ) from error
        return path, _innermost(module)
    models = _nearest_models(pl_module)
    if len(models) > 1:
        raise CalibrationError(
            f"{type(pl_module).__name__} holds several transformers models",
            where=list(models),
            remedy='say which one: CalibrationCallback(module="...").',
        )
    if models:
        return next(iter(models.items()))
    weighted = {} if has_forward(pl_module) else _weighted_children(pl_module)
    only = next(iter(weighted.items())) if len(weighted) == 1 else None
    return only if only is not None and has_forward(only[1]) else ("", pl_module)


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called; a LightningModule whose steps call its parts often has no ``forward``."""
    lightning_module = class_of(module, "LightningModule") or nn.Module
    return "forward" in vars(module) or type(module).forward not in (nn.Module.forward, lightning_module.forward)


def require_forward(module: nn.Module, why: str) -> None:
    """Refuse to call a module without ``forward``; ``why`` names the caller."""
    if not has_forward(module):
        children = list(_weighted_children(module))
        raise CalibrationError(
            f"{why} calls {type(module).__name__}, which has no forward()",
            expected=f"a module that can be called, such as one of: {', '.join(children)}",
            remedy=f'say which one: module="{children[0] if children else "..."}"; or write a forward().',
        )


def _weighted_children(module: nn.Module) -> dict[str, nn.Module]:
    return {
        name: _innermost(child)
        for name, child in module.named_children()
        if not isinstance(child, Metric) and next(child.parameters(), None) is not None
    }


def _nearest_models(pl_module: nn.Module) -> dict[str, nn.Module]:
    """The transformers models that stand nearest to the LightningModule, by their paths."""
    level: dict[str, nn.Module] = {"": pl_module}
    while level:
        level = {
            f"{path}.{name}".lstrip("."): _innermost(child)
            for path, module in level.items()
            for name, child in module.named_children()
            if not isinstance(child, Metric)
        }
        models = {path: module for path, module in level.items() if is_transformers_model(module)}
        if models:
            return models
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
    kinds = {type(module) for module in planned}
    everything = set(session.model.modules())
    beside = [name for name, module in pl_module.named_modules() if type(module) in kinds and module not in everything]
    with without_wrappers(session.model):
        adapters = inside_adapted(session.model)
        others = [(name, module) for name, module in session.model.named_modules() if module not in planned]
        in_float = shares_text(shares_in_float(session.model, session.plan.targets))
    inside = [name for name, module in others if type(module) in kinds and name not in adapters]
    why = session.plan.left_out
    inside = [f"{name} ({why[name]})" if name in why else name for name in inside]
    names = "/".join(sorted(kind.__name__ for kind in kinds))
    where = f"`{path}`" if path else "the LightningModule itself"
    text = f"calibrating {type(session.model).__name__} ({where}): {len(planned)} of {len(planned) + len(inside)} "
    left = {"left out": inside, "not part of it, and left in full precision": beside}
    named = [f"{how}: {name_list(found, 3)}" for how, found in left.items() if found]
    return "; ".join([text + names, *named, f"left in float: {in_float}"])


def _innermost(module: nn.Module) -> nn.Module:
    """The module inside wrappers and peft's adapters."""
    module = unwrapped(module)
    if hasattr(module, "peft_config") and hasattr(module, "get_base_model"):
        base = module.get_base_model()  # type: ignore[operator]
        assert isinstance(base, nn.Module)
        return base
    return module
