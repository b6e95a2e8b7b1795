"""The experts of a mixture model as Linear modules, which a scheme can target.

transformers stacks all experts of a layer in one parameter (``experts.gate_up_proj``: experts x rows x columns), so
there is no Linear to quantize. :func:`linearize_experts` replaces every stack by one Linear for each expert and
projection. The Linears have the names of the hub's checkpoints, which vLLM reads, too: ``experts.0.gate_proj``,
``up_proj``, ``down_proj`` (``w1``, ``w3``, ``w2`` in Mixtral's family). Users call this function before a calibration,
because the model's ``state_dict`` has other keys afterwards. Quantizing a checkpoint from its files and the command
line call it by themselves.

The price: experts run one after the other, as in transformers' ``eager`` implementation, even if the model's config
asks for a faster one.

Words: a *stacked module* is transformers' module that holds the stacks. A *role* is gate, up or down, one of the
projections of an expert.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_obs.errors import CalibrationError
from lightning_obs.model.conversions import stacked_weights
from lightning_obs.model.kinds import is_dispatched, is_named_experts, require_transformers
from lightning_obs.model.weight import whole_shape

#: the sine up to this angle gives the tokens on which outputs are compared: 15 periods, so that tokens differ
_LAST_ANGLE = 97.0


class LinearExpert(nn.Module):
    """One expert: ``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` without a gate.

    :func:`linearize_experts` makes one for each expert of a stack.

    Args:
        origin: the stacked module, whose activation function and gating are used. It does not become a submodule.
        projections: by role, the name of the Linear among the submodules; without gate if the expert has none.
        layers: by role, the Linear.
    """

    origin: nn.Module

    def __init__(self, origin: nn.Module, projections: dict[str, str], layers: dict[str, nn.Linear]) -> None:
        super().__init__()
        for role, name in projections.items():
            self.add_module(name, layers[role])
        self.projections = projections
        vars(self)["origin"] = origin  # nn.Module would register it as a submodule

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The expert's output ``(tokens, hidden)`` for ``(tokens, hidden)``, not yet multiplied by the router's weight.

        :class:`LinearExperts` calls the expert with the tokens that were routed to it.
        """
        origin: Any = self.origin
        up = self._project("up", hidden_states)
        if "gate" in self.projections:
            inner = _gated(origin, self._project("gate", hidden_states), up)
        else:
            inner = origin.act_fn(up)
        output = self._project("down", inner)
        if getattr(origin, "has_post_expert_norm", False):
            return origin.post_expert_norm(output)
        return output

    def _project(self, role: str, value: torch.Tensor) -> torch.Tensor:
        """Apply the projection of a role."""
        layer: Any = self._modules[self.projections[role]]  # by name: an adapter may have replaced the Linear
        return layer(value)


class LinearExperts(nn.Module):
    """The experts of one layer; it takes the place of the stacked module in the model.

    Its submodules ``"0"``, ``"1"``... are a :class:`LinearExpert` each. While an expert runs, a calibration reads
    ``rows`` and ``total`` to know which tokens the expert was given (``calibration/expert_tokens.py``).

    Args:
        origin: the stacked module; its config, submodules and training mode are taken over.
        experts: the experts, in order.
    """

    def __init__(self, origin: nn.Module, experts: list[LinearExpert]) -> None:
        super().__init__()
        self.num_experts = len(experts)
        self.config = getattr(origin, "config", None)
        for index, expert in enumerate(experts):
            self.add_module(str(index), expert)
        for name, child in origin.named_children():  # act_fn may have parameters, which keep their names
            self.add_module(name, child)
        #: while an expert runs, the indices ``(n,)`` of its tokens among all tokens of the call, on the host; else None
        self.rows: torch.Tensor | None = None
        #: the number of tokens of the last call
        self.total = 0
        self.train(origin.training)

    @property
    def experts(self) -> list[nn.Module]:
        """The experts in order, for :func:`expert_containers` and :meth:`SortedExperts.forward`."""
        return [self.get_submodule(str(index)) for index in range(self.num_experts)]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Send every token to its experts and add up their outputs, in the order of transformers' eager experts.

        The model's mixture layer calls this with the result of its router.

        Args:
            hidden_states: ``(tokens, hidden)``.
            top_k_index: ``(tokens, k)``, the experts chosen for each token. An index that is no expert's is skipped:
                ``num_experts``, by which transformers marks the experts of other ranks, any greater one, and negative
                ones.
            top_k_weights: ``(tokens, k)``, the router's weights of the chosen experts.

        Returns:
            ``(tokens, hidden)``.
        """
        output = torch.zeros_like(hidden_states)
        self.total = len(hidden_states)
        divisor = max(1, self.total)
        try:
            # The host must know how many tokens each expert gets, so it waits for the router, once for all experts.
            selected = top_k_index.T.flatten().cpu()  # (k * tokens,): all first choices, all second choices, ...
            order = selected.argsort(stable=True)
            indices, counts = selected[order].unique_consecutive(return_counts=True)
            lengths = counts.tolist()
            order_on_device = order.to(output.device, non_blocking=True)
            rows = order_on_device % divisor
            choices = order_on_device // divisor
            weights = top_k_weights[rows, choices, None]
            host_rows = (order % divisor).split(lengths)
            segments = zip(indices.tolist(), host_rows, rows.split(lengths), weights.split(lengths), strict=True)
            for index, expert_host_rows, expert_rows, expert_weights in segments:
                if index < 0 or index >= self.num_experts:
                    continue
                self.rows = expert_host_rows
                expert = self.get_submodule(str(index))
                weighted = expert(hidden_states[expert_rows]) * expert_weights
                output.index_add_(0, expert_rows, weighted.to(output.dtype))
        finally:
            self.rows = None
        return output


class SortedExperts(LinearExperts):
    """The experts of one layer of Llama 4, which are called with other arguments than :class:`LinearExperts`.

    Each expert gets every token, multiplied by the router's weight of this expert, which is zero unless the router
    selected it. The experts compute on these zeros, too, as in transformers, so that a reloaded model gives the same
    bits.
    """

    #: True while a calibration observes (``calibration/expert_tokens.py`` sets it): an expert then runs only on the
    #: tokens that were routed to it, and its output for all other tokens is zero
    only_sent = False

    def forward(self, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
        """Run every expert on its part of the input; the model's mixture layer calls this.

        With ``only_sent``, tokens that are zero are left out: an expert runs only on the tokens that were routed to it,
        and while it runs, ``rows`` holds their indices.

        Args:
            hidden_states: ``(experts x tokens, hidden)``: all tokens, weighted for expert 0, then all tokens, weighted
                for expert 1, and so on.

        Returns:
            The outputs in the same shape and order.
        """
        width = hidden_states.shape[-1]
        tokens = hidden_states.view(self.num_experts, -1, width)
        output = torch.zeros_like(tokens)
        if not self.only_sent:
            for index, expert in enumerate(self.experts):
                output[index] = expert(tokens[index])
            return output.view_as(hidden_states)
        self.total = tokens.shape[1]
        try:
            is_sent = tokens.any(-1).cpu()  # one wait for all experts
            expert_of_token, host_rows = is_sent.nonzero(as_tuple=True)
            indices, counts = expert_of_token.unique_consecutive(return_counts=True)
            lengths = counts.tolist()
            rows = host_rows.to(tokens.device, non_blocking=True)
            segments = zip(indices.tolist(), host_rows.split(lengths), rows.split(lengths), strict=True)
            for index, expert_host_rows, expert_rows in segments:
                self.rows = expert_host_rows
                expert = self.get_submodule(str(index))
                output[index, expert_rows] = expert(tokens[index, expert_rows])
        finally:
            self.rows = None
        return output.view_as(hidden_states)


def linearize_experts(model: nn.Module) -> list[str]:
    """Replace every module that stacks experts in 3-D parameters by a module with a Linear per expert and projection.

    Users call it before a calibration that should quantize experts, and before they make optimizers. The command line
    (``model.linearize_experts``) and ``streaming/source.py`` call it right after they load a language model.

    Outputs stay the same. They have the bits of transformers' ``eager`` experts wherever a matrix product does not
    depend on how many columns are computed together (on the CPU that was tried it does not, in float32 and bfloat16).
    With biases (gpt-oss), in Llama 4, and compared with other implementations (``grouped_mm``, ``batched_mm``), numbers
    are added in another order and the last bits differ. Weights are copied one layer at a time. Dtype, device,
    ``requires_grad`` and training mode are kept; forward hooks on the stacked module are not.

    Args:
        model: changed in place. Its ``state_dict`` has other keys afterwards.

    Returns:
        Names of the modules that were replaced.

    Raises:
        CalibrationError: transformers is too old for its models to be calibrated; nothing is replaced then. Or, for
            one of the stacked modules: it is the model itself, its layout is not known, its weights are quantized,
            sharded or offloaded, or its outputs would change. The stacked modules before it are replaced by then.
    """
    require_transformers(model)
    replaced = []
    compared: set[type[nn.Module]] = set()
    names_of: dict[int, list[str]] = {}  # of each module object, which a model may hold under several names
    for name, module in model.named_modules(remove_duplicate=False):
        names_of.setdefault(id(module), []).append(name)
    projections = hub_names(model)
    for name, module in fused_experts(model).items():
        if not name:
            raise CalibrationError("the model itself is the module of stacked experts", remedy="wrap it in a module.")
        _require_known_layout(name, module)
        _require_plain_parameters(name, module)
        experts = _build(module, projections[name])
        if type(module) not in compared:
            _require_same_outputs(name, module, experts)
            compared.add(type(module))
        for key in list(dict(module.named_parameters(recurse=False))):
            delattr(module, key)
        for alias in names_of[id(module)]:
            parent_name, _, leaf = alias.rpartition(".")
            setattr(model.get_submodule(parent_name), leaf, experts)
        replaced.append(name)
    return replaced


def fused_experts(model: nn.Module) -> dict[str, nn.Module]:
    """By name, the modules that hold experts in 3-D parameters.

    :func:`linearize_experts` replaces them. The planning and the checks of transformers' engine look for experts that
    are still stacked, and ``streaming/source.py`` for the stacks in a checkpoint's files.
    """
    return {name: module for name, module in model.named_modules() if _stacks_experts(name, module)}


def linear_experts(model: nn.Module) -> dict[str, LinearExperts]:
    """By name, every :class:`LinearExperts` of a model.

    Called by :func:`split_experts` and :func:`routers`, by the checks of engines, and by
    ``streaming/quantized_files.py`` before it writes a checkpoint file by file.
    """
    return {name: module for name, module in model.named_modules() if isinstance(module, LinearExperts)}


def modules_beside(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of the parent of the module ``name``, with their full names.

    The router of a layer is a sibling of its experts; :func:`routers` and vLLM's checks look for it here.
    """
    parent_name = name.rpartition(".")[0]
    prefix = f"{parent_name}." if parent_name else ""
    for leaf, module in model.get_submodule(parent_name).named_children():
        yield prefix + leaf, module


def hub_names(model: nn.Module) -> dict[str, dict[str, str]]:
    """The names that checkpoints on the hub have for the projections of stacked experts (``w1`` for the gate, say).

    transformers' loader knows these names; without an entry there they are ``gate_proj``, ``up_proj`` and
    ``down_proj``. Called by :func:`linearize_experts`, and by the check of a plan that refuses stacked experts.

    Args:
        model: a model with stacked experts; others give an empty result.

    Returns:
        By name of the stacked module, the name of each role's projection.
    """
    stacked = fused_experts(model)
    if not stacked:
        return {}
    parameters = []
    for name in stacked:
        for key in ("gate_up_proj", "up_proj", "down_proj"):
            parameters.append(f"{name}.{key}")
    # By parameter, the names in files of the projections that it stacks ("w1", "w3": gate before up). A parameter that
    # transformers does not stack has no entry; its projections keep the default names.
    sources = stacked_weights(model, parameters)
    names = {}
    for name, module in stacked.items():
        first_roles = ("gate", "up") if _joins_gate_and_up(module) else ("up",)
        first_sources = sources.get(f"{name}.{_first_stack(module)}", ())
        down_sources = sources.get(f"{name}.down_proj", ())
        projections = {role: f"{role}_proj" for role in (*first_roles, "down")}
        projections.update(zip(first_roles, first_sources, strict=False))
        projections.update(zip(["down"], down_sources, strict=False))
        names[name] = projections
    return names


def expert_containers(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The experts of every layer, by the name of the module that holds them (their container).

    A container is a :class:`LinearExperts`, or any ``ModuleList`` of two or more modules that is called ``experts``.
    Models of a user's own code have such lists; who wrote a model is not checked. (A single expert gets all tokens,
    like any other module.) A calibration watches these experts; vLLM's checks look at the modules beside them.
    """
    containers: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if isinstance(module, LinearExperts):
            containers[name] = module.experts
        elif isinstance(module, nn.ModuleList):
            is_called_experts = name.rpartition(".")[2] == "experts"
            if is_called_experts and len(module) > 1:
                containers[name] = list(module)
    return containers


def split_experts(model: nn.Module, planned: Container[str]) -> list[str]:
    """Names of the :class:`LinearExperts` of which a plan quantizes some Linears and leaves others in float.

    The checks of transformers and vLLM call it for a planned checkpoint, and refuse such layers.

    Args:
        model: a model with experts as Linears.
        planned: names of the modules that will be quantized.
    """
    layers = []
    for name, experts in linear_experts(model).items():
        is_planned = set()
        for leaf, module in experts.named_modules():
            if isinstance(module, nn.Linear):
                is_planned.add(f"{name}.{leaf}" in planned)
        if is_planned == {True, False}:
            layers.append(name)
    return layers


def routers(model: nn.Module) -> list[str]:
    """Names of the routers that are no Linears: modules beside a :class:`LinearExperts` with a weight row per expert.

    Engines may run a Linear in the place of such a router, and would load it quantized. So ``checkpoint/export.py``
    calls it, and lists these names in the ``ignore`` of the checkpoint's config.
    """
    names = []
    for name, experts in linear_experts(model).items():
        for sibling_name, module in modules_beside(model, name):
            if isinstance(module, nn.Linear) or not isinstance(getattr(module, "weight", None), nn.Parameter):
                continue
            shape = whole_shape(module, "weight")
            if shape and shape[0] == experts.num_experts:
                names.append(sibling_name)
    return names


# ---------------------------------------------------------------------- the stacked layout


def _stacks_experts(name: str, module: nn.Module) -> bool:
    """Whether a module is named like experts or has ``num_experts``, and itself has a parameter of three dimensions."""
    if not is_named_experts(name, module):
        return False
    for key, _ in module.named_parameters(recurse=False):
        shape = whole_shape(module, key)
        if shape is not None and len(shape) == 3:
            return True
    return False


def _joins_gate_and_up(module: nn.Module) -> bool:
    """Whether a stacked module holds gate and up in one parameter."""
    return hasattr(module, "gate_up_proj")


def _first_stack(module: nn.Module) -> str:
    """The name of the stacked module's parameter that multiplies the hidden states."""
    return "gate_up_proj" if _joins_gate_and_up(module) else "up_proj"


def _require_known_layout(name: str, module: nn.Module) -> None:
    """Raise a CalibrationError if a stacked module has unknown parameters, or its forward unknown arguments."""
    parameters = dict(module.named_parameters(recurse=False))
    expected = {_first_stack(module), "down_proj"}
    if getattr(module, "has_bias", False):
        expected |= {f"{key}_bias" for key in expected}
    takes_router_weights = len(inspect.signature(module.forward).parameters) > 2
    if set(parameters) == expected and (takes_router_weights or _is_sorted(module)):
        return
    shapes = [f"{key} {tuple(value.shape)}" for key, value in parameters.items()]
    raise CalibrationError(
        "stacked experts in a layout that is not known",
        where=[f"{name} ({type(module).__name__})"],
        got=", ".join(shapes),
        expected="gate_up_proj and down_proj, called with (hidden_states, top_k_index, top_k_weights)",
        remedy="leave them in full precision: list them in `ignore` (`re:.*experts`).",
    )


def _require_plain_parameters(name: str, module: nn.Module) -> None:
    """Raise a CalibrationError if parameters of a stacked module are quantized, sharded or offloaded."""
    quantized = []
    sharded = []
    parameters = dict(module.named_parameters(recurse=False))
    for key, value in parameters.items():
        if not value.is_floating_point() or value.itemsize < 2:
            quantized.append(key)
        if isinstance(value, DTensor):
            sharded.append(key)
    is_elsewhere = is_dispatched(module) or getattr(module, "_is_expert_parallel", False)
    if quantized or sharded or is_elsewhere:
        raise CalibrationError(
            "stacked experts are quantized, sharded or offloaded, and cannot be taken apart",
            where=[f"{name}.{key}" for key in quantized or sharded or parameters],
            expected="plain floating point parameters",
            remedy="load the model in full precision and whole, call linearize_experts, then distribute it.",
        )


def _is_sorted(module: nn.Module) -> bool:
    """Whether a stacked module is called with all tokens for each expert in turn, as Llama 4's is."""
    return any(cls.__name__ == "Llama4TextExperts" for cls in type(module).__mro__)


def _build(module: nn.Module, projections: dict[str, str]) -> LinearExperts:
    """Make the experts of a stacked module as Linears, with copies of its weights.

    Args:
        module: the stacked module, in a known layout.
        projections: by role, the name of the Linear.
    """
    stacks = dict(module.named_parameters(recurse=False))
    experts = []
    for index in range(len(stacks["down_proj"])):
        layers = {}
        for role in projections:
            weight = _copied_rows(module, stacks, role, index, is_bias=False)
            rows, columns = weight.shape
            has_bias = getattr(module, "has_bias", False)
            layer = nn.Linear(columns, rows, has_bias, device="meta", dtype=weight.dtype)
            layer.weight = weight
            if has_bias:
                layer.bias = _copied_rows(module, stacks, role, index, is_bias=True)
            layers[role] = layer
        experts.append(LinearExpert(module, projections, layers))
    container = SortedExperts if _is_sorted(module) else LinearExperts
    return container(module, experts)


def _copied_rows(
    module: nn.Module, stacks: Mapping[str, nn.Parameter], role: str, index: int, is_bias: bool
) -> nn.Parameter:
    """A copy of the weight, or bias, of an expert's projection, from the stack that holds it.

    Args:
        module: the stacked module.
        stacks: the parameters of the stacked module, by name.
        role: gate, up or down.
        index: the number of the expert in the stack.
        is_bias: whether to copy the bias.
    """
    joined = role != "down" and _joins_gate_and_up(module)
    key = "gate_up_proj" if joined else f"{role}_proj"
    stack = stacks[f"{key}_bias" if is_bias else key]
    rows = rows_of_expert(module, stack.detach()[index], role, joined, is_bias)
    return nn.Parameter(rows.clone(memory_format=torch.contiguous_format), stack.requires_grad)


def rows_of_expert(origin: nn.Module, item: torch.Tensor, role: str, joined: bool, is_bias: bool) -> torch.Tensor:
    """The weight ``(rows, columns)`` of one projection of an expert, a view of the expert's item in a stack.

    Called when experts become Linears, and by ``streaming/source.py`` when it reads an expert from the files of a
    checkpoint.

    Args:
        origin: the stacked module, whose attributes tell the layout.
        item: the expert's matrix in a stack, in some layouts transposed; or the expert's bias, ``(rows,)``.
        role: gate, up or down.
        joined: whether the stack holds gate and up together.
        is_bias: whether the stack holds biases.
    """
    is_transposed = getattr(origin, "is_transposed", _is_sorted(origin))
    rows = item.T if is_transposed and not is_bias else item
    if not joined:
        return rows
    position = ("gate", "up").index(role)
    if getattr(origin, "is_concatenated", True):
        return rows.chunk(2)[position]
    return rows[position::2]  # interleaved


def _gated(origin: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The product of the activated ``gate`` and ``up``, computed as the stacked module ``origin`` computes it.

    :meth:`LinearExpert.forward` calls this. A class of experts in transformers may write a gating of its own as
    ``_apply_gate`` (gpt-oss clamps both and adds 1 to ``up``), which takes gate and up joined as in the stack.
    """
    apply_gate = getattr(type(origin), "_apply_gate", None)
    # transformers' decorator of such classes gives the others the function _default_apply_gate: the product below.
    if apply_gate is None or apply_gate.__name__ == "_default_apply_gate":
        return origin.act_fn(gate) * up
    if getattr(origin, "is_concatenated", True):
        return origin._apply_gate(torch.cat([gate, up], dim=-1))
    interleaved = torch.stack([gate, up], dim=-1).flatten(-2)
    return origin._apply_gate(interleaved)


def _require_same_outputs(name: str, module: nn.Module, experts: LinearExperts) -> None:
    """Compare the outputs of a stacked module and of its Linears on a few tokens, once for each class.

    A class may compute something unexpected with parameters of the usual names. ``linearize_experts`` calls this before
    it replaces the first module of each class. Nothing is compared if the weights have no data (meta device) or the
    stacked module's outputs are not finite.

    Args:
        name: the name of the stacked module, for the error.
        module: the stacked module.
        experts: the Linears made of it.

    Raises:
        CalibrationError: the Linears' outputs differ from the stacked module's.
    """
    weight = next(module.parameters(recurse=False))
    if weight.is_meta:
        return
    with torch.inference_mode(False), torch.no_grad():  # modules may keep what they compute, for training
        inputs = _sample_inputs(module, experts, weight)
        # transformers' decorator may choose another implementation by the config; the Linears compute as the eager one.
        stacked_forward = inspect.unwrap(type(module).forward)
        expected = stacked_forward(module, *inputs).double()
        error = (experts(*inputs).double() - expected).norm()
        size = expected.norm()
    # Sums in another order differ only by their rounding, which is larger in dtypes of 16 bits.
    tolerance = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 0.05
    are_alike = bool(error <= tolerance * size)  # False for an error that is NaN, too
    if bool(expected.isfinite().all()) and not are_alike:
        raise CalibrationError(
            "stacked experts do not compute what their parameters' names say",
            where=[f"{name} ({type(module).__name__})"],
            got=f"outputs that differ by {float(error / size):.1%}",
            remedy="leave them in full precision: list them in `ignore` (`re:.*experts`).",
        )


def _sample_inputs(module: nn.Module, experts: LinearExperts, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The arguments for a call of experts with eight tokens, two experts for each, for :func:`_require_same_outputs`.

    The values are those of a sine, and not random, so that the user's random number generator does not advance. Dtype
    and device are those of ``weight``.
    """
    first_layer = next(layer for layer in experts.modules() if isinstance(layer, nn.Linear))
    width = first_layer.in_features
    count = 8 * experts.num_experts if _is_sorted(module) else 8
    values = torch.linspace(0, _LAST_ANGLE, count * width, dtype=torch.float64).sin()
    tokens = values.view(count, width).to(weight)
    if _is_sorted(module):
        return (tokens,)
    top_k_index = torch.arange(16, device=weight.device).view(8, 2) % experts.num_experts
    top_k_weights = torch.full_like(top_k_index, 0.5, dtype=weight.dtype)
    return tokens, top_k_index, top_k_weights
