"""What measuring each layer is worth: sensitivities against the truth, and mixed plans against uniform schemes.

    python benchmarks/accuracy/mixed_precision.py  # all but the rest, about 20 minutes on two free cores
    python benchmarks/accuracy/mixed_precision.py --only agreement      # or int8, cost
    python benchmarks/accuracy/mixed_precision.py --only rounded \
        --model $(python benchmarks/accuracy/unquantized_model.py)
    python benchmarks/accuracy/mixed_precision.py --only rounded --model FOLDER      # an encoder, as MiniLM is

On the default model, or another. Sensitivities are measured on text that is calibrated on (``rounded``: that is not),
results on text that is not.

``agreement``: Spearman's rank correlation, over every fifth Linear, of the estimate (one forward and one backward a
batch) with the measured KL divergence of the logits, one layer quantized; and of the truth on one half of the text with
the truth on the other. ``int8``: perplexity of plans, with what was estimated. ``rounded``: 4 bits with signed scales,
Hessians and rounding, for weights that were never quantized; such ranges fit the text that they were calibrated on.
``cost``: CPU time of the estimate in forwards of the same batch. What an encoder loses is 1 - cosine of an embedding to
the unquantized model's, estimated and measured.
"""

from __future__ import annotations

import argparse
import math
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pydoc_data.topics import topics
from typing import Any, ClassVar

import torch
from scipy.stats import spearmanr
from torch import nn
from torch.nn import functional as F
from torchmetrics.text import Perplexity
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

from lightning_obs import CalibrationSession, quantized, sensitivity
from lightning_obs.app.data.module import TextData
from lightning_obs.app.data.overlap import HeldOutRuns
from lightning_obs.app.models.pretrained import load_pretrained
from lightning_obs.choice.mixed_precision import MixedPlan, choose_schemes, plan_of
from lightning_obs.choice.sensitivity import Sensitivity
from lightning_obs.forward.quantized_forward import quantize_forward
from lightning_obs.model.module_qparams import calibration_of, put_back
from lightning_obs.report.facts import Report
from lightning_obs.report.layer_errors import measure_layer_errors


def weights(
    bits: int, observer: str | None = None, group: int | None = None, symmetric: bool = True, **kwargs: Any
) -> dict[str, Any]:
    layout = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    args = {"num_bits": bits, "observer": observer, "observer_kwargs": kwargs, "symmetric": symmetric}
    return {"weights": args | layout}


def static_int8(observer: str) -> dict[str, Any]:
    return weights(8) | {"input_activations": {"num_bits": 8, "strategy": "tensor", "observer": observer}}


class Bench:
    """The model, its text, and one way to measure a plan."""

    measures: ClassVar[dict[str, int]] = {"perplexity": 2, "KL": 4}  # digits
    ignore = ("lm_head",)
    unit = 1.0  # of estimates in the table
    # vLLM loads packed weights with zero points beside others, transformers does not.
    engines = "vllm"

    def __init__(self, model: str | None, dtype: str, batches: int, measured: int, eval_batches: int) -> None:
        self.model, tokenizer = load_pretrained(model, dtype=dtype)
        data = TextData(tokenizer, batches=batches, eval_batches=eval_batches)
        self.calibration = [{**batch, "use_cache": False} for batch in data.val_dataloader()]
        self.held_out = [{**batch, "use_cache": False} for batch in data.test_dataloader()]
        self.measured, self.observed, self.logits = self.calibration[:measured], self.calibration[measured:], []

    def sensitivity(self, schemes: dict[str, Any], calibration: list[Any] | None = None) -> Sensitivity:
        calibration = self.calibration if calibration is None else calibration
        options = {"ignore": self.ignore, "engines": self.engines}
        return sensitivity(self.model, self.measured, schemes, calibration=calibration, **options)

    @contextmanager
    def calibrated(self, scheme: Any, **options: Any) -> Iterator[nn.Module]:
        before = calibration_of(self.model)  # a module that this plan leaves out would keep an earlier plan's scales
        try:
            with CalibrationSession(self.model, scheme, engines=self.engines, **options) as session, torch.no_grad():
                for batch in self.calibration if session.needs_data else ():
                    self.model(**batch)
            yield self.model
        finally:
            put_back(before)

    @torch.inference_mode()
    def quality(self, plan: MixedPlan | None) -> tuple[float, ...]:
        if plan is None:
            return self._quality()
        with self.calibrated(plan.config), quantized(self.model):
            return self._quality()

    def _quality(self) -> tuple[float, ...]:
        metric, divergences = Perplexity(), []
        for number, batch in enumerate(self.held_out):
            logits = self.model(**batch).logits
            if number == len(self.logits):
                self.logits.append(logits)  # unquantized: the first that is measured
            metric.update(logits[:, :-1].float(), batch["input_ids"][:, 1:])
            now, plain = (each.float().log_softmax(-1).flatten(0, -2) for each in (logits, self.logits[number]))
            divergences.append(float(F.kl_div(now, plain, log_target=True, reduction="batchmean")))
        return float(metric.compute()), sum(divergences) / len(divergences)

    def print_rows(self, rows: dict[str, MixedPlan]) -> None:
        full = self.quality(None)
        of_text, bits = "perplexity" in self.measures, 8 * next(self.model.parameters()).itemsize
        columns = "perplexity expected from it | " * of_text + " | ".join(self.measures) + " |"
        print(f"| plan | bits per weight | MB | modules | estimated KL | {columns}")
        print("|---|---|---|---|---|" + "---|" * (of_text + len(self.measures)))
        print(f"| full precision | {bits} | | | 0 | {'| ' * of_text}{self._cells(full)}", flush=True)
        for name, plan in rows.items():
            counts = ", ".join(f"{count} {scheme}" for scheme, count in plan.counts.items())
            size = f"{plan.bits:.3f} | {plan.size / 1e6:.1f} | {counts}"
            expected = f"{plan.loss * self.unit:.4f}" + f" | {full[0] * math.exp(plan.loss):.2f}" * of_text
            print(f"| {name} | {size} | {expected} | {self._cells(self.quality(plan))}", flush=True)

    def _cells(self, values: tuple[float, ...]) -> str:
        return "".join(f"{value:.{digits}f} | " for value, digits in zip(values, self.measures.values(), strict=True))


class Coordinates(nn.Module):
    """An encoder whose logits are the coordinates of a text's embedding and their negatives, near 0.

    So all of them are about as likely, and the divergence of an embedding that moves is 1 - cosine over its width.
    """

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder.eval()

    def embedding(self, **text: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.encoder(**text).last_hidden_state.float().mean(1), dim=-1)

    def forward(self, **text: torch.Tensor) -> torch.Tensor:
        embedding = self.embedding(**text)
        return torch.cat([embedding, -embedding], -1)


class EncoderBench(Bench):
    """The same of an encoder. Texts come one by one, so that nothing is padded."""

    measures: ClassVar[dict[str, int]] = {"1 - cosine": 4}
    ignore = ("re:.*pooler.*",)
    engines = "unchecked"

    def __init__(self, model: str, dtype: str, batches: int, measured: int, eval_batches: int) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        texts = [text.strip() for key in sorted(topics) for text in re.split(r"\n\s*\n", topics[key])]
        texts = [text for text in texts if 60 < len(text) < 600]
        read = [dict(tokenizer(text, return_tensors="pt", truncation=True, max_length=128)) for text in texts]
        self.held_out = read[1:2000:6][: 16 * eval_batches]
        self.measured = apart(read[5:2000:6], self.held_out)[: 16 * measured]
        self.calibration = apart(read[0:400:4], self.held_out + self.measured)[: 4 * batches]
        self.observed = self.calibration
        encoder = AutoModel.from_pretrained(model, dtype=getattr(torch, dtype))
        self.model, self.unit = Coordinates(encoder), encoder.config.hidden_size
        with torch.no_grad():
            self.expected = torch.cat([self.model.embedding(**text) for text in self.held_out])

    def _quality(self) -> tuple[float, ...]:
        found = torch.cat([self.model.embedding(**text) for text in self.held_out])
        return (1 - float((found * self.expected).sum(-1).mean()),)


def apart(texts: list[dict[str, torch.Tensor]], held_out: list[dict[str, torch.Tensor]]) -> list[Any]:
    """The texts that are no held-out text and share no run of 32 tokens with one."""
    runs = HeldOutRuns(text["input_ids"][0] for text in held_out)
    return [text for text in texts if not runs.shares(text["input_ids"][0])]


def only(measured: Sensitivity, *names: str) -> Sensitivity:
    """The same with fewer candidates."""
    groups = [
        replace(g, losses={n: g.losses[n] for n in names}, sizes={n: g.sizes[n] for n in names})
        for g in measured.groups
    ]
    return replace(measured, groups=groups)


def int8(bench: Bench) -> None:
    """Static INT8, with dynamic INT8 for a tenth of the weights, or full precision for the bytes of 23 layers."""
    observers = ("static_minmax", "histogram", "minmax")
    found = bench.sensitivity({**{name: static_int8(name) for name in observers}, "dynamic": "W8A8", "none": None})
    with bench.calibrated(static_int8("static_minmax"), ignore=bench.ignore) as model:
        poor = set(Report("", errors=measure_layer_errors(model, bench.held_out[:1])).poor_layers)
    static = plan_of(found, "static_minmax")
    by_hand = plan_of(found, {name: "none" if name in poor else "static_minmax" for name in static.schemes})
    limit = f"{by_hand.size} B"
    bench.print_rows(
        {
            "static INT8": static,
            f"static INT8, {len(poor)} layers below 15 dB in full precision": by_hand,
            "static INT8 or full precision, no more bytes": choose_schemes(only(found, "static_minmax", "none"), limit),
            "static INT8, three observers, or full precision, no more bytes": choose_schemes(
                only(found, *observers, "none"), limit
            ),
            "static or dynamic INT8, 10 % of the weights": choose_schemes(
                only(found, "static_minmax", "dynamic"), at_most={"dynamic": 0.1}
            ),
            "static INT8, three observers, or dynamic INT8, 10 % of the weights": choose_schemes(
                only(found, *observers, "dynamic"), at_most={"dynamic": 0.1}
            ),
        }
    )


def rounded(bench: Bench, budgets: list[float]) -> None:
    """Groups of 64 and 32 with signed scales, Hessians and rounding, with 8-bit weights as the alternative.

    ``imatrix4`` is the best without them.
    """
    imatrix, gptq = {"name": "imatrix_mse", "norm": 2.0}, {"rounding": "gptq"}
    signed, hessian = ({"observers": {"weight": {**each, "signed": True}}} for each in (imatrix, {"name": "hessian"}))
    candidates = {
        "imatrix4": {"scheme": weights(4, group=64), "observers": {"weight": imatrix}},
        "signed imatrix, gptq": {"scheme": weights(4, group=64), **signed, **gptq},
        "signed imatrix, gptq, groups of 32": {"scheme": weights(4, group=32), **signed, **gptq},
        "signed hessian, gptq, groups of 32": {"scheme": weights(4, group=32), **hessian, **gptq},
        "asymmetric imatrix, gptq, groups of 32": {
            "scheme": weights(4, group=32, symmetric=False), "observers": {"weight": imatrix}, **gptq,
        },
        "int8": {"scheme": weights(8)},
    }  # fmt: skip
    found = bench.sensitivity(candidates, bench.observed)
    rows = {name: plan_of(found, name) for name in candidates if name != "int8"}
    most = max(budgets)
    rows[f"{most:g} bits, imatrix4 and int8"] = choose_schemes(only(found, "imatrix4", "int8"), most)
    rows |= {f"{budget:g} bits": choose_schemes(found, budget) for budget in budgets}
    print(flush=True)
    bench.print_rows(rows)


def agreement(bench: Bench, tokens: int = 256, sequences: int = 4) -> None:
    """Spearman of the estimate with the truth, and of the truth with itself."""
    schemes = {"W4A16": weights(4, group=64), "INT8 static": static_int8("static_minmax")}
    found = bench.sensitivity(schemes)
    texts = [batch["input_ids"][:, :tokens] for batch in bench.held_out[:: max(1, len(bench.held_out) // sequences)]]
    texts = texts[:sequences]
    sample = list(found.layers["W4A16"])[::5]
    print("\n| scheme | layers | truth on one half and the other | estimate and truth | median estimate / truth |")
    print("|---|---|---|---|---|")
    for name, scheme in schemes.items():
        with bench.calibrated(scheme, ignore=bench.ignore) as model:
            truth = torch.tensor([divergences(model, layer, texts) for layer in sample], dtype=torch.float64)
        estimate = torch.tensor([found.layers[name][layer] for layer in sample], dtype=torch.float64)
        half = sequences // 2
        halves = spearmanr(truth[:, :half].mean(1), truth[:, half:].mean(1)).statistic
        with_truth = spearmanr(estimate, truth.mean(1)).statistic
        ratio = (estimate / truth.mean(1)).median()
        print(f"| {name} | {len(sample)} | {halves:.3f} | {with_truth:.3f} | {ratio:.2f} |", flush=True)


@torch.inference_mode()
def divergences(model: nn.Module, layer: str, texts: list[torch.Tensor]) -> list[float]:
    """KL divergence in nats per token, of each text, with one layer quantized. What lies before it runs once."""
    found = []
    blocks, start = model.model.layers, int(layer.split(".")[2])
    for ids in texts:
        seen: dict[str, Any] = {}

        def keep(_: nn.Module, args: Any, kwargs: Any, seen: dict[str, Any] = seen) -> None:
            seen.update(args=args, kwargs=kwargs)

        hook = blocks[start].register_forward_pre_hook(keep, with_kwargs=True)
        plain = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        hook.remove()
        hidden, *rest = seen["args"]
        undo = quantize_forward(model.get_submodule(layer))
        for block in blocks[start:]:
            hidden = block(hidden, *rest, **seen["kwargs"])
        undo()
        moved = model.lm_head(model.model.norm(hidden)).log_softmax(-1)
        found.append(float(F.kl_div(moved, plain, log_target=True, reduction="none").sum(-1).mean()))
    return found


def cost(bench: Bench, repeats: int = 3) -> None:
    """CPU time of the estimate for one batch more, in forwards of that batch."""
    candidates = {"W4A16": weights(4, group=64), "W8A16": weights(8), "W8A8": "W8A8", "INT8_STATIC": "INT8_STATIC"}
    print("\n| candidates | forwards a batch |\n|---|---|")
    for count in range(1, len(candidates) + 1):
        chosen = dict(list(candidates.items())[:count])
        ratios = []
        for _ in range(repeats):
            start = time.process_time()
            with torch.inference_mode():
                bench.model(**bench.calibration[0])
            forward = time.process_time() - start
            taken = []
            for batches in (1, 2):
                start = time.process_time()
                sensitivity(bench.model, bench.calibration[:batches], chosen, ignore=bench.ignore)
                taken.append(time.process_time() - start)
            ratios.append((taken[1] - taken[0]) / forward)
        print(f"| {', '.join(chosen)} | {sorted(ratios)[repeats // 2]:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=["agreement", "int8", "rounded", "cost"])
    parser.add_argument("--model", help="folder of a causal language model or an encoder; default: the default model")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32; rounded: bfloat16")
    parser.add_argument("--batches", type=int, default=16, help="calibration batches of 512 tokens")
    parser.add_argument("--measured", type=int, default=8, help="of these, how many sensitivities are measured on")
    parser.add_argument("--eval-batches", type=int, default=16)
    parser.add_argument("--budgets", type=float, nargs="+", default=[4.75, 5.5, 6.5])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers_logging.disable_progress_bar()
    parts = {
        "agreement": agreement,
        "int8": int8,
        "rounded": lambda b: rounded(b, options.budgets),
        "cost": cost,
    }
    texts = options.batches, options.measured, options.eval_batches
    kinds = AutoConfig.from_pretrained(options.model).architectures if options.model else []
    is_encoder = any(kind.endswith("Model") for kind in kinds or [])
    dtype = options.dtype or ("bfloat16" if options.only == ["rounded"] else "float32")
    bench = (EncoderBench if is_encoder else Bench)(options.model, dtype, *texts)
    for name, part in parts.items():
        if name in (options.only or set(parts) - {"rounded"}):
            part(bench)


if __name__ == "__main__":
    main()
