"""The plan: the modules that will be quantized, each with its scheme, and the sets of them that are fused.

A planned module determines the names and shapes of its quantization parameters. Parameters from a file or a user are
checked against them (:func:`find_misfits`): others would broadcast where they should not, or give NaN.

Modules of a fused set are multiplied as one matrix by an inference engine, which says which they are
(:data:`~lightning_obs.engines.engine.FUSED_SETS`: q, k, v; gate, up). So they must have one scheme, and with two-level
scales (tensor_group, NVFP4) one global scale for the weight and one for the input, which their observers compute
together. Gate and up of one expert are fused; different experts are not.

"5 of 5 Linear" says nothing of an LSTM, or of an ``nn.MultiheadAttention``, which may hold a third of the weights. So
:func:`shares_in_float` says how much of a model a plan leaves in float.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_range
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.model.kinds import count_heads, inside_adapted
from lightning_obs.model.module_qparams import ROUNDED
from lightning_obs.model.offload import at_rest
from lightning_obs.model.weight import identity, matrix_shape, whole_shape
from lightning_obs.numerics.qparams import (
    ATTENTION,
    ROUNDING,
    can_be_signed,
    flatten_for_calibration,
    rounding_of,
    scheme_args,
)
from lightning_obs.numerics.rounding_options import with_inputs_in_full_precision

#: modules that an engine makes a part of the convolution or product before them
_FOLLOWERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.ReLU, nn.ReLU6, nn.Identity)


@dataclass(frozen=True)
class PlannedModule:
    """A module that will be quantized.

    ``build_plan`` makes one for each module that a target selects, before any data. Calibration, engines and exports
    read it.

    Attributes:
        name: the module's name in the calibrated model.
        module: the module itself, without wrappers and adapters around it.
        scheme: says which of its tensors are quantized, and how.
        states: the args of an attention module's states, ``{"q": args, "k": args, "v": args}`` or k and v only; empty
            for every other module.
        is_block: whether it is a module around others, such as a residual block. Only its output is quantized, and
            only if the output is a sum of quantized outputs.
    """

    name: str
    module: nn.Module
    scheme: QuantizationScheme
    states: Mapping[str, QuantizationArgs] = field(default_factory=dict)
    is_block: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({type(self.module).__name__})"

    @cached_property
    def args(self) -> dict[str, QuantizationArgs]:
        """The args of each quantized tensor, by base name: ``weight``, ``input``, ``output``, ``q``, ``k`` or ``v``."""
        return dict(self.states or scheme_args(self.scheme))

    @property
    def is_follower(self) -> bool:
        """Whether only its output is quantized, and engines fuse it into the module that it reads from.

        Asked while a plan is made, and while it is observed which module reads which output. False for a subclass
        with a forward of its own, which engines may not fuse.
        """
        return self.args.keys() == {"output"} and type(self.module).forward in [kind.forward for kind in _FOLLOWERS]


@dataclass(frozen=True)
class Plan:
    """The modules of a model that will be quantized: made by ``build_plan`` before any data, and read until the export.

    Finalize may take outputs out of it (:func:`drop_outputs`), and a recipe may go over to another rounding
    (:func:`round_by_full_precision`).
    """

    config: QuantizationConfig  # the user's; its ``ignore`` also names ``left_out``
    targets: list[PlannedModule]  # the modules that will be quantized
    fused: list[list[str]] = field(default_factory=list)  # names of the modules of each fused set
    #: modules of a targeted class that cannot be quantized, by name the reason
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def schemes(self) -> dict[str, QuantizationScheme]:
        """The scheme of each planned module, by its name; the writers of files are asked about them."""
        return {target.name: target.scheme for target in self.targets}


def drop_outputs(plan: Plan, names: Collection[str]) -> None:
    """Take the outputs of some modules out of a plan, because the output of a module behind each is quantized instead.

    Called by finalize, and when its result is loaded from a saved state. A batch norm or activation whose only
    quantized tensor is such an output keeps an empty scheme; so does a block whose output is no sum.

    Args:
        plan: its targets are replaced. The schemes of ``names`` list them by name, because other modules of their
            class keep their outputs. For the same reason blocks and ``nn.Identity`` modules that keep theirs are listed
            by name in their scheme, which is changed in place: ``build_plan`` gives all of them one scheme.
        names: the modules whose outputs are taken out.
    """
    schemes: dict[int, QuantizationScheme] = {}
    for index, target in enumerate(plan.targets):
        if target.name not in names or "output" not in target.args:
            continue
        key = id(target.scheme)
        scheme = schemes.get(key)
        if scheme is None:
            scheme = target.scheme.model_copy(update={"output_activations": None, "targets": []})
            schemes[key] = scheme
        scheme.targets.append(target.name)
        plan.targets[index] = replace(target, scheme=scheme)
    named = []
    for target in plan.targets:
        if "output" in target.args and (target.is_block or type(target.module) is nn.Identity):
            named.append(target)
    for target in named:
        target.scheme.targets = [target.name for target in named]


def round_by_full_precision(plan: Plan) -> None:
    """Let the schemes of the planned modules say that weights are rounded by inputs in full precision.

    Called by :meth:`.KeptRuns.round_by_full_precision` when a recipe cannot round on quantized inputs: the schemes are
    written into checkpoints, which record what was done.

    Args:
        plan: its targets are replaced. Its ``config`` stays what the user asked for, by which saved states are
            recognized.
    """
    schemes: dict[int, QuantizationScheme] = {}
    for index, target in enumerate(plan.targets):
        weights = target.scheme.weights
        rounding = None if weights is None else rounding_of(weights)
        if weights is None or rounding is None or not rounding.on_quantized_inputs:
            continue
        key = id(target.scheme)
        if key not in schemes:
            option = with_inputs_in_full_precision(weights.observer_kwargs[ROUNDING])
            kwargs = {**weights.observer_kwargs, ROUNDING: option}
            changed_weights = weights.model_copy(update={"observer_kwargs": kwargs})
            schemes[key] = target.scheme.model_copy(update={"weights": changed_weights})
        plan.targets[index] = replace(target, scheme=schemes[key])


def scheme_identity(scheme: QuantizationScheme) -> str:
    """A text that is equal for schemes that differ in their targets only.

    Schemes are compared by this text: those of a fused set in a plan, and those of a checkpoint that engines judge.
    """
    return str(scheme.model_dump_json(exclude={"targets"}))


def check_own_sets(own: Sequence[Sequence[str]]) -> None:
    """Refuse values other than a list of fused sets: two or more attribute names each, and no name in two sets.

    Called for the option ``fused_sets`` when :class:`~lightning_obs.CalibrationOptions` are made.
    """
    if not isinstance(own, (list, tuple)) or not all(isinstance(fused, (list, tuple)) for fused in own):
        raise CalibrationError("fused_sets", got=repr(own), expected="a list of lists of names, [['a', 'b']]")
    names = list(chain.from_iterable(own))
    malformed = []
    for name in names:
        if not isinstance(name, str) or not name or "." in name:
            malformed.append(str(name))
    for fused in own:
        if len(set(map(str, fused))) < 2:  # as texts: what is no name may have no hash
            malformed.append(str(list(fused)))
    refuse(
        malformed,
        "not a fused set",
        expected="two or more attribute names under one parent, without dots: ['gate_proj', 'up_proj']",
    )
    repeated = sorted({name for name in names if names.count(name) > 1})
    refuse(repeated, "a name is in two fused sets", remedy="make them one set.")


def find_fused(names: Iterable[str], sets: Sequence[Sequence[str]]) -> list[list[str]]:
    """The lists of names whose modules are fused: they have one parent, and their last parts are in one of ``sets``.

    A set of which only some members exist is fused, too, if these are at least two. A last part that is in two sets
    belongs to the later one. Called by ``build_plan`` for the planned modules, and by vLLM's engine for all modules.

    >>> find_fused(["0.k", "0.q", "0.o", "1.up", "1.gate", "2.up"], [("q", "k", "v"), ("gate", "up")])
    [['0.q', '0.k'], ['1.gate', '1.up']]
    """
    places: dict[str, tuple[int, int]] = {}  # by attribute name, the number of its set and its position there
    for set_number, fused in enumerate(sets):
        for position, attribute in enumerate(fused):
            places[attribute] = set_number, position
    members: dict[tuple[str, int], list[tuple[int, str]]] = {}  # by parent and set
    for name in names:
        parent, _, attribute = name.rpartition(".")
        if attribute in places:
            set_number, position = places[attribute]
            members.setdefault((parent, set_number), []).append((position, name))
    fused_names: list[list[str]] = []
    for positioned in members.values():
        if len(positioned) > 1:
            fused_names.append([name for _, name in sorted(positioned)])
    return fused_names


# ---------------------------------------------------------------------- qparams of a quantized module


def expected_shapes(target: PlannedModule, base_name: str) -> dict[str, tuple[int, ...] | None]:
    """The quantization parameters that one tensor of a module needs, by name: ``{"weight_scale": shape}``.

    A shape that depends on the data is None. The dict is empty where scales are computed as the model runs. Finalize
    checks new parameters against them, and a checkpoint's entries are laid out by them.
    """
    args = target.args[base_name]
    shapes: dict[str, tuple[int, ...] | None] = {}
    if args.dynamic is True:
        return shapes
    if args.strategy == "tensor_group":
        shapes[f"{base_name}_global_scale"] = (1,)
    if args.dynamic is False:  # else "local": scales of groups are computed as the model runs
        shape = scale_shape(target, base_name, args)
        shapes[f"{base_name}_scale"] = shape
        if not args.symmetric:
            shapes[f"{base_name}_zero_point"] = shape
    return shapes


def find_misfits(
    target: PlannedModule, qparams: Mapping[str, Any], bases: Collection[str] | None = None
) -> Iterator[str]:
    """Yield a message for each parameter that is missing from ``qparams``, unexpected there, or has a wrong value.

    Called for parameters from elsewhere: of a saved state, of a checkpoint, and those on modules at export.

    Args:
        target: the module that the parameters belong to.
        qparams: the parameters by name, ``{"weight_scale": tensor}``.
        bases: base names of the tensors that must have parameters; parameters of other tensors are unexpected. None:
            all tensors that the scheme quantizes.
    """
    expected: dict[str, tuple[tuple[int, ...] | None, QuantizationArgs]] = {}
    for base_name, args in target.args.items():
        if bases is None or base_name in bases:
            for name, shape in expected_shapes(target, base_name).items():
                expected[name] = shape, args
    if "weight" in target.args and ROUNDED in qparams:
        expected[ROUNDED] = matrix_shape(target.module), target.args["weight"]
    prefix = f"{target.name}." if target.name else ""
    for name in sorted(expected.keys() | qparams.keys()):
        if name not in expected:
            yield f"{prefix}{name} belongs to nothing that is quantized"
            continue
        misfit = _misfit(name, qparams.get(name), *expected[name])
        if misfit is not None:
            yield f"{prefix}{name} {misfit}"


def _misfit(name: str, value: Any, shape: tuple[int, ...] | None, args: QuantizationArgs) -> str | None:
    """Why a value cannot be the parameter of this name; None: it can."""
    if value is None:
        return "is missing"
    if not isinstance(value, torch.Tensor):
        return f"is a {type(value).__name__}, not a tensor"
    if shape is not None and value.shape != shape:
        return f"has shape {tuple(value.shape)} instead of {tuple(shape)}"
    if name.endswith("scale"):
        return _scale_misfit(name, value, args)
    low, high = calculate_range(args, value.device)  # here it is a zero point, or a rounded weight
    wide = value.float()
    if not bool(((wide >= low) & (wide <= high)).all()):
        return f"is not from {low:g} to {high:g}"
    return None


def _scale_misfit(name: str, scale: torch.Tensor, args: QuantizationArgs) -> str | None:
    """Why a tensor cannot be a scale; None: it can."""
    if not scale.is_floating_point():
        return f"is {scale.dtype}"
    wide = scale.float()  # torch does not compare float8
    if can_be_signed(name.removesuffix("_scale"), args):
        wide = wide.abs()
        expected = "other than zero"
    else:
        expected = "positive"
    if not bool((torch.isfinite(wide) & (wide > 0)).all()):
        return f"is not finite and {expected}"
    return None


def scale_shape(target: PlannedModule, base_name: str, args: QuantizationArgs) -> tuple[int, ...] | None:
    """The shape of a scale as it is stored; None where it depends on the data's shape.

    Called by :func:`expected_shapes`, and by fine-tuning for the scales that it learns.

    Args:
        target: the module that the scale belongs to.
        base_name: the tensor that the scale is for.
        args: how that tensor is quantized.
    """
    if base_name in ATTENTION:
        if args.strategy == "attn_head":
            return (count_heads(target.module)[base_name], 1, 1)
        return (1,)
    matrix = matrix_shape(target.module)
    if base_name == "weight" and matrix is not None:
        weight = torch.empty(matrix, device="meta")
        flat = flatten_for_calibration(weight, "weight", args)  # (observations, *shape of the scale, values per scale)
        return tuple(flat.shape[1:-1])
    if args.strategy not in ("group", "tensor_group"):
        return (1,)
    if matrix is None or len(whole_shape(target.module) or ()) != 2:
        return None
    rows, columns = matrix
    channels = columns if base_name == "input" else rows
    assert args.group_size is not None  # QuantizationArgs requires it for groups
    return (channels // args.group_size,)


# ---------------------------------------------------------------------- the share left in float


#: how many classes a text of shares names at most; the shares of the others are added up
_NAMED = 4
#: by class: how its weights can be quantized after all, and what a user has to expect of that; added to the class in a
#: text of shares
_REMEDIES = {nn.MultiheadAttention.__name__: " (linearize_attention makes it Linears)"}
for _layer in (nn.LSTM, nn.GRU):
    _REMEDIES[_layer.__name__] = " (linearize_recurrent lets its weights be quantized: smaller, not faster)"
    _REMEDIES[f"Linear{_layer.__name__}"] = " (its products stay in float, too: smaller, not faster)"


@at_rest()
def shares_in_float(
    model: nn.Module, targets: Sequence[PlannedModule], skipped: Collection[str] = ()
) -> dict[str, float]:
    """How much of a model stays in float: by class of module, its share of the bytes of all parameters.

    Only parameters in modules without a quantized weight count. Called by the callback for the line that says what it
    calibrates, and when a calibration has ended, for its result. Parameters that accelerate has offloaded are not
    loaded: under ``at_rest`` modules show them where they rest, which is enough for their sizes.

    Args:
        model: the module that is calibrated; tied parameters count once.
        targets: its planned modules.
        skipped: names of the planned modules that are left in float after all.

    Returns:
        ``{"LSTM": 0.41, "LayerNorm": 0.01}``, the largest share first; empty where nothing is left. The parameters of
        the modules in an ``nn.MultiheadAttention`` count under that class.
    """
    quantized: set[int] = set()
    for target in targets:
        if target.scheme.weights is not None and target.name not in skipped:
            quantized.add(id(target.module))
    modules = dict(model.named_modules())
    adapters = inside_adapted(model)
    # A weight that is tied to a quantized one is quantized, so quantized modules are counted first.
    order = sorted(modules, key=lambda name: id(modules[name]) not in quantized)
    counted = set()
    total = 0
    in_float: Counter[str] = Counter()
    for name in order:
        module = modules[name]
        is_quantized = id(module) in quantized
        # In a LoRA layer of peft, ``base_layer`` is the module that was there before. The other modules are adapters,
        # which are merged into the weight of the base layer, so they take no bytes of their own.
        if name in adapters and not name.endswith("base_layer"):
            continue
        for key, parameter in module._parameters.items():
            shape = None if parameter is None else whole_shape(module, key)
            if parameter is None or shape is None or identity(module, key) in counted:
                continue
            counted.add(identity(module, key))
            size = shape.numel() * parameter.itemsize
            total += size
            if not is_quantized:
                in_float[_owner(modules, name)] += size
    return {kind: size / total for kind, size in in_float.most_common() if size}


def _owner(modules: Mapping[str, nn.Module], name: str) -> str:
    """The name of the class under which a module's parameters are reported.

    For a part of an ``nn.MultiheadAttention`` it is that class.
    """
    name = name.partition(".parametrizations.")[0]
    parent = modules.get(name.rpartition(".")[0])
    owner = parent if isinstance(parent, nn.MultiheadAttention) else modules[name]
    # FSDP2 gives a module a class of its own, with the module's class as a base.
    return next(cls.__name__ for cls in type(owner).__mro__ if not issubclass(cls, FSDPModule))


def shares_text(shares: Mapping[str, float]) -> str:
    """The shares of :func:`shares_in_float` as a text: the largest ones, and the sum of the others.

    Called for the line that the callback shows before a calibration, and for the facts of its result. A class has its
    remedy in brackets, if there is one.

    >>> shares_text({"Embedding": 0.34, "LayerNorm": 0.012, "ViT": 0.002, "PReLU": 0.001}), shares_text({})
    ('Embedding 34 %, LayerNorm 1 %, others <1 %', 'none')
    >>> shares_text({"MultiheadAttention": 0.34})
    'MultiheadAttention 34 % (linearize_attention makes it Linears)'
    """
    largest = list(shares.items())[:_NAMED]
    named = {kind: share for kind, share in largest if share >= 0.01}
    if not named:
        named = dict(largest[:1])
    texts = [f"{kind} {_percent(share)}{_REMEDIES.get(kind, '')}" for kind, share in named.items()]
    unnamed_share = sum(share for kind, share in shares.items() if kind not in named)
    if unnamed_share:
        texts.append(f"others {_percent(unnamed_share)}")
    return ", ".join(texts) or "none"


def _percent(share: float) -> str:
    """A share in percent, without decimals."""
    if share >= 0.01:
        return f"{100 * share:.0f} %"
    return "<1 %"
