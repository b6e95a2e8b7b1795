"""Containers of Python that people keep outputs in."""

import collections
import enum
import pathlib

from tests.callbacks.second_pass.kinds.base import drain, kind, mean


class Point(collections.namedtuple("Point", "parts")):
    __slots__ = ()


class Color(enum.Enum):
    RED = 1


def container_kinds():
    """Lists, tuples, dicts, sets and deques of floats."""

    def simple(name, new, add, value):
        def make(self):
            self.kept = new()

        return name, kind(make, lambda self, out: add(self.kept, float(out.sum())), lambda self: value(self.kept))

    yield simple("list of outputs", list, list.append, drain)
    yield simple("list never cleared", list, list.append, mean)
    yield simple("deque", lambda: collections.deque(maxlen=3), lambda d, x: d.append(x), drain)
    yield simple("set", set, lambda s, x: s.add(x), lambda s: drain(s))
    yield simple("dict", dict, lambda d, x: d.update({len(d): x}), lambda d: mean(d.values()))
    yield simple(
        "defaultdict of lists",
        lambda: collections.defaultdict(list),
        lambda d, x: d["a"].append(x),
        lambda d: drain(d["a"]),
    )
    yield simple(
        "defaultdict of defaultdicts",
        lambda: collections.defaultdict(lambda: collections.defaultdict(float)),
        lambda d, x: d["a"].__setitem__("b", d["a"]["b"] + x),
        lambda d: d["a"]["b"],
    )
    yield simple("Counter", collections.Counter, lambda c, x: c.update([x > 0, round(x)]), lambda c: sum(c.values()))
    yield simple("OrderedDict", collections.OrderedDict, lambda d, x: d.update({x: 1}), lambda d: sum(d))
    yield simple("tuple of lists", lambda: ([], []), lambda t, x: t[0].append(x), lambda t: drain(t[0]))
    yield simple("namedtuple", lambda: Point([]), lambda p, x: p.parts.append(x), lambda p: drain(p.parts))
    yield simple(
        "dict with an enum", lambda: {Color.RED: []}, lambda d, x: d[Color.RED].append(x), lambda d: drain(d[Color.RED])
    )
    yield simple(
        "path",
        lambda: {pathlib.Path("a"): []},
        lambda d, x: d[pathlib.Path("a")].append(x),
        lambda d: len(d[pathlib.Path("a")]),
    )

    def knot():
        outputs = []
        outputs.append(outputs)
        return outputs

    yield simple(
        "list that holds itself",
        knot,
        lambda outputs, x: outputs[0].append(x),
        lambda outputs: sum(outputs[1:]),
    )
    yield simple(
        "two names for one list",
        lambda: [outputs := [], outputs],
        lambda pair, x: pair[0].append(x),
        lambda pair: drain(pair[1]),
    )
