"""What is known of a logged metric: which direction is better, and how two of its values are compared.

A metric of torchmetrics knows its direction (``higher_is_better``). A plain number has only its name, so common names
are listed here. A metric whose direction neither of them tells is shown and not graded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Literal, TypeAlias, TypeVar

#: "perplexity": its logarithm is a loss in nats. "loss": taken for nats, lower is better. "error": lower is better, in
#: an unknown unit. "score": higher is better. "unknown": nothing is known
MetricKind: TypeAlias = Literal["perplexity", "loss", "error", "score", "unknown"]
_Value = TypeVar("_Value")

#: words of names, by kind; two neighbouring words are read as one too, so that ``cross_entropy`` is ``crossentropy``.
#: If a name has words of several kinds for which lower is better, the first of these counts: ``mse_loss`` is an error
_WORDS: dict[MetricKind, set[str]] = {
    "error": {
        *("error", "err", "mse", "rmse", "msle", "rmsle", "mae", "mape", "smape", "l1", "l2", "huber"),
        *("wer", "cer", "eer", "fid", "lpips", "brier"),
    },
    "perplexity": {"perplexity", "ppl"},
    "loss": {"loss", "nll", "crossentropy", "xent", "logloss"},
    "score": {
        *("accuracy", "acc", "top1", "top5", "f1", "fbeta", "precision", "recall", "sensitivity", "specificity"),
        *("auroc", "auc", "auprc", "ap", "map", "iou", "miou", "jaccard", "dice", "mcc", "kappa", "r2"),
        *("pearson", "spearman", "similarity", "ndcg", "mrr", "hitrate", "em", "exactmatch", "psnr", "ssim"),
        *("bleu", "sacrebleu", "rouge", "rouge1", "rouge2", "rougel", "chrf", "meteor"),
    },
}
#: words that also end longer ones, such as ``valloss``
_ENDINGS = ("loss", "accuracy", "perplexity")


def metric_kind(name: str, higher_is_better: bool | None = None) -> MetricKind:
    """The kind of a metric by its name, and by its direction where that is known.

    ``Quality.kind_of`` calls it for the grade and the text of a metric, and ``runs.py`` to find the best runs.

    >>> metric_kind("val_loss"), metric_kind("val/mse_loss"), metric_kind("test_f1"), metric_kind("power")
    ('loss', 'error', 'score', 'unknown')
    >>> metric_kind("power", higher_is_better=False), metric_kind("precision_loss")
    ('error', 'unknown')
    """
    words = _words_of(name)
    is_score = bool(words & _WORDS["score"])
    falling: MetricKind | None = None
    for kind, words_of_kind in _WORDS.items():
        if kind != "score" and words & words_of_kind:
            falling = kind
            break
    if higher_is_better is True:
        return "score"
    if higher_is_better is False:
        return falling or "error"
    if is_score:
        return "unknown" if falling else "score"
    return falling or "unknown"


def sorted_metrics(metrics: Mapping[str, _Value], higher_is_better: Mapping[str, bool]) -> dict[str, _Value]:
    """Metrics in an order that does not depend on that of ``self.log``: by kind, unknown ones last, then by name.

    The ``Quality`` of a report calls it when it is made.

    >>> list(sorted_metrics({"power": 1, "val_loss": 2, "acc": 3, "perplexity": 4}, {}))
    ['perplexity', 'val_loss', 'acc', 'power']
    """
    order = ["perplexity", "loss", "score", "error", "unknown"]

    def place(name: str) -> tuple[int, str]:
        return order.index(metric_kind(name, higher_is_better.get(name))), name

    return {name: metrics[name] for name in sorted(metrics, key=place)}


def _words_of(name: str) -> set[str]:
    """The words of a metric's name, and its neighbouring words as one; Lightning's number of the loader is left out."""
    name, _, _ = name.partition("/dataloader_idx_")
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    words = re.findall(r"[a-z0-9]+", spaced.lower())
    all_words = set(words)
    for first, second in pairwise(words):
        all_words.add(first + second)
    for word in words:
        for ending in _ENDINGS:
            if word.endswith(ending):
                all_words.add(ending)
    return all_words
