"""Remove from a recipe, before any data, what the model or the machine cannot do.

A recipe (``recipe="accurate"``) names the choice that lost least in measurements. But not every model can be run
backward, which token weights need, or block by block, which quantized inputs need; and not every machine can hold the
products ``x x^T`` of every module's inputs, which rounding needs. So the user gets as much of the recipe as fits, and a
warning says what was left out and why.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace

import torch
from torch import nn

from lightning_obs.calibration.blocks import known_blocks
from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.errors import name_list, warn
from lightning_obs.model.kinds import is_dispatched, kind_of
from lightning_obs.model.weight import in_shards, matrix_shape, whole_shape
from lightning_obs.moe.experts import expert_containers
from lightning_obs.observers.hessian import MOST_OUTPUTS
from lightning_obs.schemes.build_plan import build_plan
from lightning_obs.schemes.planned_modules import Plan
from lightning_obs.schemes.recipes import Recipe, WeightChoice

#: the share of a device's memory that the sums of products may take; the rest is for the model and its activations
_SHARE_OF_MEMORY = 0.5
#: bytes of one element of these sums, float32
_BYTES = 4


def fitted_options(model: nn.Module, options: CalibrationOptions) -> CalibrationOptions:
    """Return the options with a recipe that the model can run; a warning says what was left out.

    ``Observation.of_model`` calls this if the options have a recipe, before it makes the plan. An observer or a
    rounding that the user has named beside the recipe does not change.

    Args:
        model: the calibrated module.
        options: of the calibration; they have a recipe.

    Returns:
        ``options`` itself if the whole recipe fits.
    """
    assert options.recipe is not None
    recipe = Recipe.of(options.recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the observation makes the plan again, and shows its warnings then
        plan = build_plan(model, options.config)
    fitted_recipe = _without_unfit_parts(recipe, model, plan, options)
    return options if fitted_recipe == recipe else replace(options, recipe=fitted_recipe)


def _without_unfit_parts(recipe: Recipe, model: nn.Module, plan: Plan, options: CalibrationOptions) -> Recipe:
    """Return the recipe without the parts that the model cannot run, and warn of what was left out.

    Weights are chosen without data if rounding cannot use their inputs, or if the products of the inputs do not fit in
    memory. Quantized inputs are left out if the model cannot be run block by block; they belong to the recipe's
    rounding, so they are not in use if the user has named another (``options.rounding``). Token weights, which belong
    to the observers, are left out if the model cannot be run backward, or if their further products do not fit.
    """
    choices = _choices_in_use(recipe, plan, options)
    needs_inputs = any(choice.rounding is not None for choice in choices)
    if not needs_inputs:
        return recipe
    misfit = _why_no_inputs(plan)
    if misfit is None:
        misfit = _why_no_memory(plan, weighs_tokens=False)
    if misfit is not None:
        _warn(recipe, f"weights are chosen without data: {misfit}")
        return recipe.without_data()
    if options.rounding is None and any(choice.rounds_on_quantized_inputs for choice in choices):
        misfit = _why_no_steps(model, plan)
        if misfit is not None:
            _warn(recipe, f"weights are rounded by inputs in full precision: {misfit}")
            recipe = recipe.without_quantized_inputs()
    if not any(choice.weighs_tokens for choice in choices):
        return recipe
    misfit = _why_no_backward(model, plan)
    if misfit is None:
        misfit = _why_no_memory(plan, weighs_tokens=True)
    if misfit is None:
        return recipe
    _warn(recipe, f"all tokens count alike: {misfit}")
    return recipe.without_token_weights()


def _warn(recipe: Recipe, what: str) -> None:
    """Warn that the recipe does ``what`` instead of its best choice."""
    warn(f"recipe={recipe.name!r}: {what}.")


def _choices_in_use(recipe: Recipe, plan: Plan, options: CalibrationOptions) -> list[WeightChoice]:
    """The recipe's choice for each planned weight that it covers; empty if the user names the observer of weights."""
    if options.names_weight_observer:
        return []
    choices = []
    for target in plan.targets:
        choice = recipe.for_weights(target.scheme)
        if choice is not None:
            choices.append(choice)
    return choices


def _why_no_inputs(plan: Plan) -> str | None:
    """Why rounding cannot use the inputs of some weights: their columns are no input channels. None: it can use all.

    That holds for embeddings, which read indices, and for weights of more than two dimensions (convolutions).
    """
    unfit = []
    for target in plan.targets:
        is_matrix = len(whole_shape(target.module) or ()) == 2
        if target.scheme.weights is not None and (kind_of(target.module).reads_indices or not is_matrix):
            unfit.append(target.name)
    if not unfit:
        return None
    return f"{name_list(unfit)} {'has' if len(unfit) == 1 else 'have'} no input for each column of the weight"


def _why_no_backward(model: nn.Module, plan: Plan) -> str | None:
    """Why the model cannot be run backward from its output; None: nothing speaks against it before the model runs."""
    elsewhere = [target.name for target in plan.targets if in_shards(target.module) or is_dispatched(target.module)]
    if elsewhere:
        return f"{name_list(elsewhere)} {'is' if len(elsewhere) == 1 else 'are'} not whole on one device"
    if expert_containers(model):
        return f"{type(model).__name__} has experts, whose tokens are not known outside of them"
    return None


def _why_no_steps(model: nn.Module, plan: Plan) -> str | None:
    """Why the model cannot be run block by block in good time; None: nothing speaks against it before the data.

    Obstacles that only the data show are found by :meth:`.KeptRuns.calibrate`.
    """
    misfit = _why_no_backward(model, plan)
    if misfit is not None:
        return misfit
    others = [target.name for target in plan.targets if target.states or "output" in target.args]
    if others:
        return f"attention states and outputs are quantized: {name_list(others)}"
    if not known_blocks(model).modules:
        return f"the blocks of {type(model).__name__} were not found, so it would run as a whole for each weight"
    return None


def _why_no_memory(plan: Plan, *, weighs_tokens: bool) -> str | None:
    """Why the sums of products that a rounding gathers do not fit in memory; None: they fit.

    Each planned weight of shape ``(R, C)`` needs ``C x C`` numbers. With token weights it also needs ``R x R`` numbers,
    for the products of the gradients at its outputs; beyond ``MOST_OUTPUTS`` rows these products are not gathered
    (``_rounding_helpers`` in :mod:`.observation`).

    Args:
        plan: of the model.
        weighs_tokens: whether tokens have weights.
    """
    needed: dict[torch.device, int] = {}
    for target in plan.targets:
        shape = matrix_shape(target.module)
        if target.scheme.weights is None or shape is None:
            continue
        device = target.module.get_parameter("weight").device
        outputs, inputs = shape
        products = inputs * inputs
        if weighs_tokens and outputs <= MOST_OUTPUTS:
            products += outputs * outputs
        needed[device] = needed.get(device, 0) + _BYTES * products
    for device, size in needed.items():
        if device.type == "meta":  # from files, block by block: only one block's products are held at a time
            continue
        limit = _SHARE_OF_MEMORY * memory_of(device)
        if size > limit:
            needed_size = f"{size / 2**30:.0f} GiB"
            return f"the products take {needed_size}, more than half of the memory of {device}"
    return None


def memory_of(device: torch.device) -> int:
    """The memory of a device [bytes]; for the CPU, that of the machine.

    Asked before the data, for the sums of products, and by :mod:`.quantized_inputs` when the data have run, for the
    outputs of blocks.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
