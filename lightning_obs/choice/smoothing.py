"""Move the outliers of inputs into weights before a calibration, so that one scale fits all channels of an input.

In a language model a few channels of an input can be hundreds of times as large as the others. With one scale for the
whole tensor, as in static INT8 and FP8, the others are then rounded to few numbers, or all to zero. Dividing a channel
and multiplying the weights that read it changes no product, and costs nothing at run time where the module before can
divide (:mod:`.smooth_pairs`). SmoothQuant balances the largest input of a channel with the weights that read it; an
input is left as it is if this does not bring the quantized outputs closer to the others, on tokens of the user's data.

Factors are powers of two. So the unquantized model gives the same outputs bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import Unpack

from lightning_obs.calibration.options import CalibrationOptions, OptionKeywords, takes_keywords_of
from lightning_obs.calibration.session import CalibrationSession
from lightning_obs.calibration.token_mask import TokenSelection, find_mask, require_mask
from lightning_obs.choice.smooth_pairs import SmoothPair, find_pairs, is_norm, same_tensors
from lightning_obs.errors import CalibrationError, refuse, warn
from lightning_obs.forward.calls import call_on, first_input
from lightning_obs.forward.extra_runs import left_as_it_was, random_numbers_restored, without_caches
from lightning_obs.model.kinds import is_dispatched, is_transformers_model
from lightning_obs.model.mark import keep_hook_out, make_mark, mark_of
from lightning_obs.model.weight import in_shards, refuse_uninitialized
from lightning_obs.numerics.fake_quantize import fake_quantize, fake_quantize_dynamic
from lightning_obs.schemes.config import SchemeLike, make_observer

Batches: TypeAlias = Iterable[Mapping[str, Any] | torch.Tensor]
#: the tokens on which the outputs of a pair are compared
_TOKENS = 512
#: the largest power of two in a factor
_LARGEST_EXPONENT = 12


@dataclass(frozen=True)
class SmoothedInput:
    """An input that :func:`smooth_inputs` has smoothed.

    Attributes:
        producer: the name of the module whose weight divides the channels.
        readers: the names of the Linears that read the input.
        error_before, error_after: how much quantization changes the outputs of the readers, estimated before and after:
            squared differences relative to the squares of a token's outputs, in the mean over tokens and readers.
    """

    producer: str
    readers: tuple[str, ...]
    error_before: float
    error_after: float


@takes_keywords_of(CalibrationOptions)
def smooth_inputs(
    model: nn.Module,
    batches: Batches,
    scheme: SchemeLike | CalibrationOptions,
    *,
    strength: float = 0.5,
    token_mask: str | Callable[[Any], torch.Tensor] | None = None,
    **options: Unpack[OptionKeywords],
) -> list[SmoothedInput]:
    """Move outliers of inputs into weights, so that quantization changes the outputs of Linears less.

    The weights change in place, and the outputs of the model stay the same bit for bit. Call it after training and
    before the calibration, or before a quantization-aware fit makes its optimizers. The command line calls it with
    ``smooth=true``.

    Args:
        model: a model on the device on which it is to run; it is run in evaluation mode.
        batches: keyword arguments (or one tensor) for each call of the model; the data that calibrate are good ones.
        scheme: the scheme that will be calibrated: the name of a preset, a config, or all options of a calibration.
        strength: how far outliers move into the weights, above 0 and at most 1; with 1 all channels of an input are
            equally large afterwards.
        token_mask: where to find, in a batch, which tokens count, ``(batch, tokens)``: the name of the model's argument
            (``"attention_mask"``) or a function of the batch. Padding is then not looked at. None: all tokens count.
        **options: fields of :class:`~lightning_obs.CalibrationOptions` (``ignore``, ``targets``...).

    Returns:
        The inputs that were smoothed, in the order of their calls; a warning says if there are none. Left alone are
        inputs that no module before can divide exactly (behind GELU or a residual sum), and weights that are shared,
        offloaded, parametrized, packed or under adapters.

    Raises:
        CalibrationError: a wrong ``strength``; the scheme quantizes no input; there are no batches; weights are
            sharded; a batch has no ``token_mask``; the outputs of the model would not stay the same (numbers beyond the
            range of float16, weights that are read elsewhere), and then the weights are given back the numbers that
            they had.

    Reference:
        Xiao et al., SmoothQuant, 2023, arXiv:2211.10438, section 4; Nagel et al., Data-Free Quantization Through Weight
        Equalization and Bias Correction, 2019, arXiv:1906.04721, section 4.1.

    Examples:
        >>> model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
        >>> _ = model[0].weight.data[3].fill_(400.0)  # a channel of outliers, read by small weights
        >>> _ = model[1].weight.data[:, 3].mul_(0.01)
        >>> x = torch.randn(32, 8)
        >>> before = model(x)
        >>> [(smoothed.producer, smoothed.readers) for smoothed in smooth_inputs(model, [x], "INT8_STATIC")]
        [('0', ('1',))]
        >>> torch.equal(model(x), before), bool(model[0].weight[3] < 400)
        (True, True)
    """
    is_number = isinstance(strength, (int, float)) and not isinstance(strength, bool)
    if not (is_number and 0 < strength <= 1):
        raise CalibrationError("strength", got=repr(strength), expected="a number above 0 and at most 1")
    options_of_run = CalibrationOptions.of(scheme, **options)
    require_quantized_inputs(options_of_run)
    refuse_uninitialized(model.named_modules())
    refuse(
        [name for name, module in model.named_modules() if in_shards(module)],
        "inputs cannot be smoothed in a model whose weights are sharded",
        remedy="smooth before the model is distributed.",
    )
    targets = CalibrationSession(model, options_of_run).plan.targets
    args_of = {target.name: target.args for target in targets}
    quantized = [name for name, args in args_of.items() if "input" in args]
    all_batches = list(batches)
    if not all_batches:
        raise CalibrationError("smoothing without data", got="no batch", expected="the batches of the calibration")
    smoothed = []
    undos = []
    with left_as_it_was(model), without_caches(model), torch.no_grad():
        pairs = find_pairs(model, quantized, all_batches[0])
        samples = _observe(model, pairs, all_batches, token_mask)
        outputs = _outputs(model, all_batches[0])
        for pair, sample in zip(pairs, samples, strict=True):
            if sample.low is None:  # no token counts
                continue
            factors = _factors(pair, sample, strength)
            improvement = _improvement(pair, sample, args_of, factors)
            if improvement is not None:
                smoothed.append(improvement)
                undos.append(pair.scale(factors))
        if smoothed and not same_tensors(_outputs(model, all_batches[0]), outputs):
            for undo in reversed(undos):  # a weight may be in two pairs
                undo()
            raise _changed_outputs(smoothed)
    for entry in smoothed:
        for name in entry.readers:
            make_mark(model.get_submodule(name)).reads_smooth_input = True
    if not smoothed:
        warn("no input was smoothed: no module before can divide its channels exactly, or it has no outliers")
    return smoothed


def _improvement(
    pair: SmoothPair,
    sample: _InputSample,
    args_of: Mapping[str, Mapping[str, QuantizationArgs]],
    factors: torch.Tensor,
) -> SmoothedInput | None:
    """What smoothing a pair by these factors brings; None where quantization would change the outputs as much as now.

    :func:`smooth_inputs` asks it for each pair, and scales the pair if there is an improvement. The arguments are those
    of :func:`_mean_error`.
    """
    unsmoothed = torch.ones_like(factors)
    before = _mean_error(pair, sample, args_of, unsmoothed)
    after = _mean_error(pair, sample, args_of, factors)
    if after < before:
        return SmoothedInput(pair.producer_name, tuple(pair.readers), before, after)
    return None


def _changed_outputs(smoothed: Sequence[SmoothedInput]) -> CalibrationError:
    """The error of a model whose outputs are not the same with the scaled weights."""
    return CalibrationError(
        "smoothing would change the outputs of the model",
        where=[entry.producer for entry in smoothed],
        expected="scaled weights in the range of their dtype, weights that only their own modules read, and "
        "equal outputs whenever the model is called with one batch and equal random numbers",
        remedy="load the model in bfloat16 or float32 if it is in float16, or calibrate without smoothing.",
    )


def require_quantized_inputs(options: CalibrationOptions) -> None:
    """Raise a CalibrationError if the scheme quantizes no input; the command line calls it before it runs any data."""
    groups = options.config.config_groups.values()
    if all(group.input_activations is None for group in groups):
        raise CalibrationError(
            "smoothing prepares inputs for quantization, and this scheme quantizes none",
            got=options.label,
            expected="a scheme such as INT8_STATIC, W8A8 or FP8",
        )


def can_smooth(model: nn.Module) -> bool:
    """Whether :func:`smooth_inputs` may help a model: it has norms of tokens, and no input was smoothed yet.

    ``Results.can_run`` (``callbacks/results.py``) asks it before a report proposes smoothing; no data are run.
    """
    modules = list(model.modules())
    marks = [mark_of(module) for module in modules]
    if any(mark is not None and mark.reads_smooth_input for mark in marks):
        return False
    if any(in_shards(module) or is_dispatched(module) for module in modules):
        return False
    norms = [module for module in modules if is_norm(module) and not isinstance(module, _BatchNorm)]
    return bool(norms)


class _InputSample:
    """What smoothing knows of an input: the extremes of its channels, and some tokens.

    :func:`_observe` makes one for each pair, and feeds it in each call of the first reader.

    Args:
        reader: the name of the reader.
        tokens_per_batch: how many tokens of each batch are kept.
        selection: of the tokens that count; all samples share it.

    Attributes:
        low, high: ``(C,)`` float32, the least and the largest value of each channel in all batches; None: no token was
            observed.
        tokens: ``(T, C)`` float32, evenly spaced tokens of all batches.
        mask: of the present batch, nonzero for tokens that count; None: all count.
    """

    def __init__(self, reader: str, tokens_per_batch: int, selection: TokenSelection) -> None:
        self.mask: torch.Tensor | None = None
        self._reader = reader
        self._selection = selection
        self.low: torch.Tensor | None = None
        self.high: torch.Tensor | None = None
        self._tokens_per_batch = tokens_per_batch
        self._tokens: list[torch.Tensor] = []

    @property
    def tokens(self) -> torch.Tensor:
        """The tokens of all batches so far, ``(T, C)``; :func:`_error` reads them."""
        return torch.cat(self._tokens)

    def observe(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Take the input of a call; the forward pre-hook of the pair's first reader."""
        value = first_input(args, kwargs)
        if value is not None and self.mask is not None:
            value = self._selection.of(value, self.mask, self._reader)
        if value is None or value.numel() == 0:
            return
        tokens = value.detach().reshape(-1, value.shape[-1]).float()
        low, high = tokens.aminmax(dim=0)
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)
        step = max(1, len(tokens) // self._tokens_per_batch)
        evenly_spaced = tokens[::step]
        self._tokens.append(evenly_spaced[: self._tokens_per_batch].clone())


def _observe(
    model: nn.Module,
    pairs: Sequence[SmoothPair],
    batches: Sequence[Any],
    token_mask: str | Callable[[Any], torch.Tensor] | None,
) -> list[_InputSample]:
    """Run all batches, and return what was observed of the input of each pair.

    :func:`smooth_inputs` calls this once; the arguments are its own, and the pairs that it has found.
    """
    tokens_per_batch = max(1, _TOKENS // len(batches))
    selection = TokenSelection(batch_first=is_transformers_model(model))
    samples = []
    with ExitStack() as hooks:
        for pair in pairs:
            name, reader = next(iter(pair.readers.items()))
            sample = _InputSample(name, tokens_per_batch, selection)
            hook = reader.register_forward_pre_hook(sample.observe, with_kwargs=True)
            hooks.callback(keep_hook_out(reader, hook))
            samples.append(sample)
        for batch in batches:
            mask = None if token_mask is None else require_mask(find_mask(batch, token_mask), "token_mask").cpu()
            for sample in samples:
                sample.mask = mask
            call_on(model, batch)
    return samples


def _outputs(model: nn.Module, batch: Any) -> Any:
    """The outputs of a batch; a model that draws random numbers draws the same ones each time.

    :func:`smooth_inputs` calls this before it scales weights and afterwards.
    """
    with random_numbers_restored(model):
        return call_on(model, batch)


def _mean_error(
    pair: SmoothPair,
    sample: _InputSample,
    args_of: Mapping[str, Mapping[str, QuantizationArgs]],
    factors: torch.Tensor,
) -> float:
    """The mean of :func:`_error` over the readers of a pair whose inputs are quantized; each pair has such a reader.

    :func:`_improvement` calls this twice for each pair: with factors of 1, and with those that would smooth it.

    Args:
        pair: that may be smoothed.
        sample: of its input.
        args_of: by module name and base name, how tensors are quantized.
        factors: ``(C,)``, by which the channels are divided.
    """
    errors = []
    for name, reader in pair.readers.items():
        if "input" in args_of.get(name, {}):
            errors.append(_error(reader, sample, args_of[name], factors))
    return sum(errors) / len(errors)


def _factors(pair: SmoothPair, sample: _InputSample, strength: float) -> torch.Tensor:
    """The power of two ``(C,)`` by which each channel is divided: 1 in channels of zeros.

    :func:`smooth_inputs` calls this for each pair. SmoothQuant balances the largest input of a channel with the weights
    that read it. Here a weight counts relative to the largest one in its row, which sets the scale of the row, and a
    column by the root of its mean square: a few large weights in a column cost the digits of few rows.
    """
    assert sample.low is not None
    assert sample.high is not None
    inputs = torch.maximum(-sample.low, sample.high).clamp(min=0)
    squares = []
    for reader in pair.readers.values():
        weight = reader.weight.detach().float()
        largest = weight.abs().amax(dim=1, keepdim=True)
        relative = weight / largest.clamp(min=torch.finfo(torch.float32).tiny)
        squares.append(relative.square())
    columns = torch.cat(squares).mean(dim=0).sqrt()
    columns = columns.to(inputs.device)
    of_inputs = strength * inputs.log2()
    of_weights = (1 - strength) * columns.log2()
    exponents = of_inputs - of_weights
    used = (inputs > 0) & (columns > 0)
    if not used.any():
        return torch.ones_like(inputs)
    centered = exponents - exponents[used].median()  # a factor of all channels changes no relation between them
    limited = centered.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT).round()
    return torch.where(used, limited, 0.0).exp2()


def _error(
    reader: nn.Linear, sample: _InputSample, args: Mapping[str, QuantizationArgs], factors: torch.Tensor
) -> float:
    """How much quantization changes the outputs of a Linear whose input channels are divided by ``factors``.

    Returns:
        Squared differences relative to the squares of a token's outputs, in the mean over tokens.
    """
    assert sample.low is not None
    assert sample.high is not None
    weight = reader.weight.detach().float()
    outputs = sample.tokens @ weight.T
    extremes = torch.stack([sample.low, sample.high]) / factors
    inputs = _quantized(sample.tokens / factors, extremes, "input", args["input"])
    scaled = weight * factors
    if "weight" in args:
        scaled = _quantized(scaled, scaled, "weight", args["weight"])
    differences = inputs @ scaled.T - outputs
    squared_differences = differences.square().sum(dim=1)
    squares = outputs.square().sum(dim=1)
    used = squares > 0
    if not used.any():
        return 0.0
    relative = squared_differences[used] / squares[used]
    return float(relative.mean())


def _quantized(value: torch.Tensor, extremes: torch.Tensor, base_name: str, args: QuantizationArgs) -> torch.Tensor:
    """Quantize and dequantize with plain ranges; the observers of the scheme come later, and know more.

    Args:
        value: ``(..., C)`` float32.
        extremes: ``(..., C)``, values that the range covers, if it is static.
        base_name: ``input`` or ``weight``.
        args: how the value is quantized.
    """
    if args.dynamic is True:
        return fake_quantize_dynamic(value, args)
    name = "memoryless_minmax" if base_name == "weight" else "static_minmax"
    plain_args = args.model_copy(update={"observer": name, "observer_kwargs": {}})
    qparams = make_observer(base_name, plain_args)(extremes).get_qparams()
    global_scale = qparams.get("global_scale")
    if args.dynamic:
        return fake_quantize_dynamic(value, args, global_scale=global_scale)
    return fake_quantize(value, qparams["scale"], qparams["zero_point"], args, global_scale=global_scale)
