"""Metrics of torchmetrics, wherever they are held."""

import collections
import itertools

from torch import nn
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAccuracy
from torchmetrics.wrappers import MetricTracker, MinMaxMetric

from tests.callbacks.second_pass.kinds.base import kind


def reset(metric):
    result = metric.compute()
    metric.reset()
    return result


def metric_kinds():
    """torchmetrics, wherever it is held."""

    def with_metric(get, make):
        def add(self, out):
            metric = get(self)
            if isinstance(metric, (MeanSquaredError, BinaryAccuracy)):
                metric.update(out.sigmoid(), (out > 0.1).to(out.dtype if isinstance(metric, MeanSquaredError) else int))
            else:
                metric.update(out)

        return kind(make, add, lambda self: reset(get(self)))

    def attribute(metric):
        def make(self):
            self.metric = metric()

        return with_metric(lambda self: self.metric, make)

    yield "metric attribute", attribute(MeanMetric)
    yield "metric attribute accuracy", attribute(BinaryAccuracy)
    yield "metric attribute sum", attribute(SumMetric)
    holders = {
        "plain dict": (lambda m: {"a": m}, lambda h: h["a"]),
        "plain list": (lambda m: [m], lambda h: h[0]),
        "tuple": (lambda m: (m,), lambda h: h[0]),
        "nested dict": (lambda m: {"val": {"a": [m]}}, lambda h: h["val"]["a"][0]),
        "ModuleDict": (lambda m: nn.ModuleDict({"a": m}), lambda h: h["a"]),
        "ModuleList": (lambda m: nn.ModuleList([m]), lambda h: h[0]),
        "defaultdict": (lambda m: collections.defaultdict(MeanMetric, a=m), lambda h: h["a"]),
    }
    metrics = itertools.cycle([MeanMetric, BinaryAccuracy])
    for (name, (hold, get)), metric in zip(holders.items(), metrics, strict=False):

        def make(self, hold=hold, metric=metric):
            self.held = hold(metric())

        yield f"metric {metric.__name__} in {name}", with_metric(lambda self, get=get: get(self.held), make)

    def collection(self):
        self.both = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()})

    yield (
        "MetricCollection",
        kind(
            collection, lambda self, out: self.both.update(out), lambda self: sum(map(float, reset(self.both).values()))
        ),
    )

    def hidden(self):
        self.both = {"val": MetricCollection([MeanSquaredError(), MeanMetric()], compute_groups=False)}

    def add_hidden(self, out):
        self.both["val"]["MeanSquaredError"].update(out, out * 0)
        self.both["val"]["MeanMetric"].update(out)

    yield (
        "MetricCollection in a dict",
        kind(hidden, add_hidden, lambda self: sum(map(float, reset(self.both["val"]).values()))),
    )

    def groups(self):
        self.both = [MetricCollection({"a": MeanSquaredError(), "b": MeanSquaredError(squared=False)})]

    yield (
        "MetricCollection with compute groups in a list",
        kind(
            groups,
            lambda self, out: self.both[0].update(out, out * 0.5),
            lambda self: sum(map(float, reset(self.both[0]).values())),
        ),
    )

    def tracker(self):
        self.tracker = MetricTracker(MeanMetric(), maximize=False)

    def track(self, out):
        if not getattr(self, "open", False):
            self.tracker.increment()
            self.open = True
        self.tracker.update(out)

    def tracked(self):
        self.open = False
        return float(self.tracker.compute_all().sum())

    yield "MetricTracker", kind(tracker, track, tracked)

    def minmax(self):
        self.minmax = [MinMaxMetric(MeanMetric())]

    yield (
        "MinMaxMetric in a list",
        kind(minmax, lambda self, out: self.minmax[0].update(out), lambda self: self.minmax[0].compute()["max"]),
    )

    def logged(self):
        self.metric = MeanMetric()

    def log(self, out):
        self.metric(out)
        self.log("val_metric", self.metric, on_step=False, on_epoch=True)

    yield "metric that self.log resets", kind(logged, log)
