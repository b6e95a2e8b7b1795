"""Experts that one 3-D parameter holds, as Linear modules that can be targeted.

transformers stacks all experts of a layer (``experts.gate_up_proj``: experts x rows x columns), so there is no Linear
to quantize. :func:`linearize_experts` replaces every stack by one Linear per expert and projection, under the names of
the hub's checkpoints, which vLLM reads too: ``experts.0.gate_proj``, ``up_proj``, ``down_proj`` (``w1``, ``w3``, ``w2``
in Mixtral's family). It is the user's call, because the ``state_dict`` has other keys afterwards.

The price: experts run one after the other, as in transformers' ``eager`` implementation, no matter which one the
model's config asks for.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_obs.errors import CalibrationError
from lightning_obs.model.conversions import stacked_weights
from lightning_obs.model.kinds import is_dispatched, require_transformers
from lightning_obs.model.weight import whole_shape


class LinearExpert(nn.Module):
    """One expert: ``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` without a gate.

    ``projections`` are names by role (``gate``, ``up``, ``down``), ``layers`` the Linear of each role. Of the stacked
    module, ``origin``, the activation function and gating are used.
    """

    origin: nn.Module

    def __init__(self, origin: nn.Module, projections: dict[str, str], layers: dict[str, nn.Linear]) -> None:
        super().__init__()
        for role, name in projections.items():
            self.add_module(name, layers[role])
        self.projections = projections
        vars(self)["origin"] = origin  # not a submodule

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``(tokens, hidden)`` to ``(tokens, hidden)``, before the router's weight."""
        origin: Any = self.origin
        layers: dict[str, Any] = {role: self._modules[name] for role, name in self.projections.items()}
        up = layers["up"](hidden_states)
        inner = _gated(origin, layers["gate"](hidden_states), up) if "gate" in layers else origin.act_fn(up)
        output = layers["down"](inner)
        return origin.post_expert_norm(output) if getattr(origin, "has_post_expert_norm", False) else output


class LinearExperts(nn.Module):
    """The experts of one layer, ``"0"``, ``"1"``..., each a :class:`LinearExpert`."""

    def __init__(self, origin: nn.Module, experts: list[LinearExpert]) -> None:
        super().__init__()
        self.num_experts = len(experts)
        self.config = getattr(origin, "config", None)
        for index, expert in enumerate(experts):
            self.add_module(str(index), expert)
        for name, child in origin.named_children():  # act_fn may have parameters; they keep their names
            self.add_module(name, child)
        #: while an expert runs, the indices ``(n,)`` of its tokens in the running call, on the host; None otherwise
        self.rows: torch.Tensor | None = None
        self.total = 0  # how many tokens the last call had
        self.train(origin.training)

    @property
    def experts(self) -> list[nn.Module]:
        """The experts in order."""
        return [self.get_submodule(str(index)) for index in range(self.num_experts)]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Send every token to its experts and add up their outputs, in the order of transformers' eager experts.

        Args:
            hidden_states: ``(tokens, hidden)``.
            top_k_index: ``(tokens, k)``, the experts of each token; an index past the last one selects none.
            top_k_weights: ``(tokens, k)``.
        """
        output = torch.zeros_like(hidden_states)
        self.total = len(hidden_states)
        try:
            chosen = top_k_index.T.flatten().cpu()  # only the router knows how many tokens an expert gets: one wait
            order = chosen.argsort(stable=True)
            indices, counts = chosen[order].unique_consecutive(return_counts=True)
            sent = order.to(output.device, non_blocking=True)
            rows, lengths = sent % max(1, self.total), counts.tolist()
            weights = top_k_weights[rows, sent // max(1, self.total), None]
            parts = (order % max(1, self.total)).split(lengths), rows.split(lengths), weights.split(lengths)
            for index, self.rows, own, weight in zip(indices.tolist(), *parts, strict=True):
                if 0 <= index < self.num_experts:
                    given = self.get_submodule(str(index))(hidden_states[own]) * weight
                    output.index_add_(0, own, given.to(output.dtype))
        finally:
            self.rows = None
        return output


class SortedExperts(LinearExperts):
    """Experts of Llama 4: each gets every token, multiplied by its router weight, which is zero unless it is selected.

    They compute zeros too, as transformers does, so a reloaded model gives the same bits; with ``only_sent``, while
    observers watch, only the other tokens, of which alone the outputs are not zero.
    """

    only_sent = False

    def forward(self, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
        """``(experts x tokens, hidden)``, sorted by expert, to the same shape."""
        tokens = hidden_states.view(self.num_experts, -1, hidden_states.shape[-1])
        output = torch.zeros_like(tokens)
        if not self.only_sent:
            for index, expert in enumerate(self.experts):
                output[index] = expert(tokens[index])
            return output.view_as(hidden_states)
        self.total = tokens.shape[1]
        try:
            chosen, rows = tokens.any(-1).cpu().nonzero(as_tuple=True)  # one wait for all experts
            indices, counts = chosen.unique_consecutive(return_counts=True)
            parts = (each.split(counts.tolist()) for each in (rows, rows.to(tokens.device, non_blocking=True)))
            for index, self.rows, own in zip(indices.tolist(), *parts, strict=True):
                output[index, own] = self.get_submodule(str(index))(tokens[index, own])
        finally:
            self.rows = None
        return output.view_as(hidden_states)


def linearize_experts(model: nn.Module) -> list[str]:
    """Replace every module that stacks experts in 3-D parameters by one of a Linear per expert and projection.

    Outputs stay the same: bit for bit those of transformers' ``eager`` experts wherever a matrix product does not
    depend on how many columns are computed together (on the CPU that was tried it does not, in float32 and bfloat16).
    With biases (gpt-oss), in Llama 4, and compared with other implementations (``grouped_mm``, ``batched_mm``), numbers
    are added in another order and the last bits differ. Weights are copied one layer at a time; dtype, device,
    ``requires_grad`` and training mode are kept, forward hooks on the stacked module are not. Call it before optimizers
    are made.

    Args:
        model: changed in place. Its ``state_dict`` has other keys afterwards.

    Returns:
        Names of the modules that were replaced.

    Raises:
        CalibrationError: a layout that is not known, weights that are already quantized or sharded, or a module whose
            outputs would not stay the same. Layers before it are replaced then.
    """
    require_transformers(model)
    done = []
    checked: set[type[nn.Module]] = set()
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    projections = hub_names(model)
    for name, module in fused_experts(model).items():
        if not name:
            raise CalibrationError("the model is itself the experts", remedy="wrap it in a module.")
        _require_known(name, module)
        experts = _build(module, projections[name])
        if type(module) not in checked:
            _require_same(name, module, experts)
            checked.add(type(module))
        for key in list(dict(module.named_parameters(recurse=False))):
            delattr(module, key)
        for known_as in names[id(module)]:
            parent, _, leaf = known_as.rpartition(".")
            setattr(model.get_submodule(parent), leaf, experts)
        done.append(name)
    return done


def fused_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold experts in 3-D parameters, by name."""
    return {name: module for name, module in model.named_modules() if _stacks_experts(name, module)}


def linear_experts(model: nn.Module) -> dict[str, LinearExperts]:
    """Every :class:`LinearExperts` of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LinearExperts)}


def modules_beside(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules under the parent of ``name``, by their full names. The router of experts is one of them."""
    parent = name.rpartition(".")[0]
    for leaf, module in model.get_submodule(parent).named_children():
        yield (f"{parent}.{leaf}" if parent else leaf), module


def hub_names(model: nn.Module) -> dict[str, dict[str, str]]:
    """How checkpoints on the hub name the projections of stacked experts, by module and role (gate, up, down).

    As transformers' loader knows them; ``gate_proj``, ``up_proj`` and ``down_proj`` where it knows none.
    """
    found = {}
    stacked = fused_experts(model)
    sources = stacked_weights(
        model, [f"{name}.{key}" for name in stacked for key in ("gate_up_proj", "up_proj", "down_proj")]
    )
    for name, module in stacked.items():
        inputs, roles = ("gate_up_proj", ("gate", "up")) if hasattr(module, "gate_up_proj") else ("up_proj", ("up",))
        found[name] = {role: f"{role}_proj" for role in (*roles, "down")}
        found[name].update(zip(roles, sources.get(f"{name}.{inputs}", ()), strict=False))
        found[name].update(zip(["down"], sources.get(f"{name}.down_proj", ()), strict=False))
    return found


def expert_containers(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The experts of every layer, by the name of the module that holds them.

    That is a :class:`LinearExperts`, or a ``ModuleList`` called ``experts`` (in models with code of their own).
    """
    containers: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if isinstance(module, LinearExperts):
            containers[name] = module.experts
        elif isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts" and len(module) > 1:
            containers[name] = list(module)
    return containers


def split_experts(model: nn.Module, planned: Container[str]) -> list[str]:
    """Layers whose experts have modules that will be quantized and modules that will not."""
    split = []
    for name, experts in linear_experts(model).items():
        linears = [f"{name}.{n}" for n, m in experts.named_modules() if isinstance(m, nn.Linear)]
        if 0 < sum(linear in planned for linear in linears) < len(linears):
            split.append(name)
    return split


def routers(model: nn.Module) -> list[str]:
    """Modules beside a :class:`LinearExperts` that hold a weight of one row per expert and are no Linear.

    Engines have a Linear there, so a checkpoint has to list it as not quantized.
    """
    names = []
    for name, experts in linear_experts(model).items():
        for other, module in modules_beside(model, name):
            shape = whole_shape(module, "weight") if isinstance(getattr(module, "weight", None), nn.Parameter) else ()
            if shape and shape[0] == experts.num_experts and not isinstance(module, nn.Linear):
                names.append(other)
    return names


# ---------------------------------------------------------------------- the stacked layout


def _stacks_experts(name: str, module: nn.Module) -> bool:
    named = name.rpartition(".")[2] == "experts" or "Experts" in type(module).__name__ or hasattr(module, "num_experts")
    return named and any(len(whole_shape(module, key) or ()) == 3 for key, _ in module.named_parameters(recurse=False))


def _require_known(name: str, module: nn.Module) -> None:
    parameters = dict(module.named_parameters(recurse=False))
    suffixes = ("", "_bias") if getattr(module, "has_bias", False) else ("",)
    inputs = "gate_up_proj" if hasattr(module, "gate_up_proj") else "up_proj"
    expected = {name + suffix for name in (inputs, "down_proj") for suffix in suffixes}
    is_called_as_known = len(inspect.signature(module.forward).parameters) > 2 or _is_sorted(module)
    if set(parameters) != expected or not is_called_as_known:
        raise CalibrationError(
            "stacked experts in a layout that is not known",
            where=[f"{name} ({type(module).__name__})"],
            got=", ".join(f"{key} {tuple(value.shape)}" for key, value in parameters.items()),
            expected="gate_up_proj and down_proj, called with (hidden_states, top_k_index, top_k_weights)",
            remedy="leave them in full precision: list them in `ignore` (`re:.*experts`).",
        )
    unusual = [key for key, value in parameters.items() if not value.is_floating_point() or value.itemsize < 2]
    sharded = [key for key, value in parameters.items() if isinstance(value, DTensor)]
    if unusual or sharded or is_dispatched(module) or getattr(module, "_is_expert_parallel", False):
        raise CalibrationError(
            "stacked experts are quantized, sharded or offloaded, and cannot be taken apart",
            where=[f"{name}.{key}" for key in unusual or sharded or parameters],
            expected="plain floating point parameters",
            remedy="load the model in full precision and whole, call linearize_experts, then distribute it.",
        )


def _is_sorted(module: nn.Module) -> bool:
    return any(cls.__name__ == "Llama4TextExperts" for cls in type(module).__mro__)


def _build(module: nn.Module, names: dict[str, str]) -> LinearExperts:
    stacks = dict(module.named_parameters(recurse=False))

    def taken(role: str, suffix: str, index: int) -> nn.Parameter:
        joined = role != "down" and "gate_up_proj" in stacks
        stack = stacks[("gate_up_proj" if joined else f"{role}_proj") + suffix]
        rows = rows_of_expert(module, stack.detach()[index], role, joined, bool(suffix))
        return nn.Parameter(rows.clone(memory_format=torch.contiguous_format), stack.requires_grad)

    experts = []
    for index in range(len(stacks["down_proj"])):
        layers = {}
        for role in names:
            weight, bias = taken(role, "", index), getattr(module, "has_bias", False)
            layers[role] = nn.Linear(weight.shape[1], weight.shape[0], bias, device="meta", dtype=weight.dtype)
            layers[role].weight = weight
            if bias:
                layers[role].bias = taken(role, "_bias", index)
        experts.append(LinearExpert(module, names, layers))
    return (SortedExperts if _is_sorted(module) else LinearExperts)(module, experts)


def rows_of_expert(origin: nn.Module, item: torch.Tensor, role: str, joined: bool, is_bias: bool) -> torch.Tensor:
    """The rows (output channels) of an expert's projection (gate, up, down), a view of the expert's item in a stack.

    ``origin`` is the stacked module, which tells the layout; ``joined``: the stack holds gate and up together.
    """
    rows = item.T if getattr(origin, "is_transposed", _is_sorted(origin)) and not is_bias else item
    if not joined:
        return rows
    place = ("gate", "up").index(role)
    return rows.chunk(2)[place] if getattr(origin, "is_concatenated", True) else rows[place::2]


def _gated(origin: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    apply = getattr(type(origin), "_apply_gate", None)
    if apply is None or apply.__name__ == "_default_apply_gate":
        return origin.act_fn(gate) * up
    if getattr(origin, "is_concatenated", True):
        return origin._apply_gate(torch.cat([gate, up], dim=-1))
    return origin._apply_gate(torch.stack([gate, up], dim=-1).flatten(-2))


def _require_same(name: str, module: nn.Module, experts: LinearExperts) -> None:
    """Compare outputs on a few tokens: a class may compute something else with parameters of the same names."""
    weight = next(module.parameters(recurse=False))
    if weight.is_meta:
        return
    width = next(m for m in experts.modules() if isinstance(m, nn.Linear)).in_features
    with torch.inference_mode(False), torch.no_grad():
        # Not random: the caller's random number generator is not advanced.
        count = 8 * experts.num_experts if _is_sorted(module) else 8
        tokens = torch.linspace(0, 97, count * width, dtype=torch.float64).sin().view(count, width).to(weight)
        index = torch.arange(16, device=weight.device).view(8, 2) % experts.num_experts
        share = torch.full((8, 2), 0.5, dtype=weight.dtype, device=weight.device)
        inputs = (tokens,) if _is_sorted(module) else (tokens, index, share)
        expected = inspect.unwrap(type(module).forward)(module, *inputs).double()
        got = experts(*inputs).double()
    tolerance = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 0.05
    if bool(torch.isfinite(expected).all()) and (got - expected).norm() > tolerance * expected.norm():
        raise CalibrationError(
            "stacked experts do not compute what their parameters' names say",
            where=[f"{name} ({type(module).__name__})"],
            got=f"outputs that differ by {float((got - expected).norm() / expected.norm()):.1%}",
            remedy="leave them in full precision: list them in `ignore` (`re:.*experts`).",
        )
