"""Containers of Python, and classes that people write."""

import array
import collections
import dataclasses
import enum
import functools
import pathlib
import sys
import threading
import types

from tests.callbacks.kinds.base import drain, kind, mean


@dataclasses.dataclass
class Sums:
    total: float = 0.0
    count: int = 0
    history: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class SlotSums:
    total: float = 0.0
    parts: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class FrozenSums:
    parts: list = dataclasses.field(default_factory=list)


class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value):
        self.total += float(value)
        self.count += 1
        return self

    def compute(self):
        return self.total / max(1, self.count)


class Slots:
    __slots__ = ("count", "total")

    def __init__(self):
        self.total, self.count = 0.0, 0


class MixedSlots(Slots):
    def __init__(self):
        super().__init__()
        self.parts = []


class Locked(Meter):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def update(self, value):
        with self.lock:
            super().update(value)


class WithFile(Meter):
    def __init__(self):
        super().__init__()
        self.file = sys.__stderr__


class WithGenerator(Meter):
    def __init__(self):
        super().__init__()
        self.numbers = (i for i in range(3))


class WithLambda(Meter):
    def __init__(self):
        super().__init__()
        self.scale = lambda x: 2 * x


class Property:
    def __init__(self):
        self._parts = []

    @property
    def part(self):
        return sum(self._parts)

    @part.setter
    def part(self, value):
        self._parts.append(value)


class Cached:
    def __init__(self):
        self.parts = []

    @functools.cached_property
    def first(self):
        return self.parts[0]


class Reduced(Meter):
    def __reduce__(self):
        return _reduced, (self.total, self.count)


def _reduced(total, count):
    meter = Reduced()
    meter.total, meter.count = total, count
    return meter


class OwnDeepCopy(Meter):
    def __deepcopy__(self, memo):
        copied = OwnDeepCopy()
        copied.total, copied.count = self.total, self.count
        return copied


class DictOfOwn(dict):
    def __init__(self):
        super().__init__()
        self.calls = 0


class ListOfOwn(list):
    calls = 0


class Point(collections.namedtuple("Point", "parts")):
    __slots__ = ()


class Color(enum.Enum):
    RED = 1


class Knot:
    def __init__(self):
        self.parts, self.me = [], self


def own_kinds():
    """Containers and classes of Python and of the user."""

    def simple(name, new, add, value):
        def make(self):
            self.kept = new()

        return name, kind(make, lambda self, out: add(self.kept, float(out.sum())), lambda self: value(self.kept))

    def add_to_meter(meter, x):
        meter.update(x)

    def sums(kept, x):
        kept.total += x
        kept.parts.append(x)

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
    yield simple("UserDict", collections.UserDict, lambda d, x: d.update({len(d): x}), lambda d: mean(d.values()))
    yield simple("UserList", collections.UserList, lambda d, x: d.append(x), lambda d: mean(d))
    yield simple("ChainMap", collections.ChainMap, lambda d, x: d.update({len(d): x}), lambda d: mean(d.values()))
    yield simple("bytearray", bytearray, lambda b, x: b.append(round(abs(x)) % 256), lambda b: sum(b))
    yield simple("array", lambda: array.array("d"), lambda a, x: a.append(x), mean)
    yield simple("tuple of lists", lambda: ([], []), lambda t, x: t[0].append(x), lambda t: drain(t[0]))
    yield simple("namedtuple", lambda: Point([]), lambda p, x: p.parts.append(x), lambda p: drain(p.parts))
    yield simple(
        "dict with an enum", lambda: {Color.RED: []}, lambda d, x: d[Color.RED].append(x), lambda d: drain(d[Color.RED])
    )
    yield simple("SimpleNamespace", lambda: types.SimpleNamespace(total=0.0, parts=[]), sums, lambda s: s.total)

    def add_sums(s, x):
        s.total += x
        s.count += 1
        s.history.append(x)

    yield simple("dataclass", Sums, add_sums, lambda s: s.total / s.count)
    yield simple("dataclass cleared", Sums, add_sums, lambda s: drain(s.history))
    yield simple("dataclass with slots", SlotSums, sums, lambda s: s.total)
    yield simple("frozen dataclass", FrozenSums, lambda s, x: s.parts.append(x), lambda s: drain(s.parts))
    yield simple("dataclass in a dict", lambda: {"a": Sums()}, lambda d, x: add_sums(d["a"], x), lambda d: d["a"].total)
    yield simple("own class", Meter, add_to_meter, Meter.compute)
    yield simple("own class in a list", lambda: [Meter()], lambda m, x: m[0].update(x), lambda m: m[0].compute())
    yield simple("class with slots", Slots, lambda s, x: setattr(s, "total", s.total + x), lambda s: s.total)
    yield simple("class with slots and a dict", MixedSlots, sums, lambda s: s.total + drain(s.parts))
    yield simple("class with a lock", Locked, add_to_meter, Meter.compute)
    yield simple("class with an open file", WithFile, add_to_meter, Meter.compute)
    yield simple("class with a generator", WithGenerator, add_to_meter, Meter.compute)
    yield simple("class with a lambda", WithLambda, lambda m, x: m.update(m.scale(x)), Meter.compute)
    yield simple("class with a property", Property, lambda p, x: setattr(p, "part", x), lambda p: p.part)
    yield simple("class with __reduce__", Reduced, add_to_meter, Meter.compute)
    yield simple("class with __deepcopy__", OwnDeepCopy, add_to_meter, Meter.compute)
    yield simple("cached property", Cached, lambda c, x: c.parts.append(x) or c.first, lambda c: c.first)
    yield simple("dict of one's own", DictOfOwn, lambda d, x: setattr(d, "calls", d.calls + 1), lambda d: d.calls)
    yield simple("list of one's own", ListOfOwn, lambda d, x: setattr(d, "calls", d.calls + 1), lambda d: d.calls)
    yield simple("object that holds itself", Knot, lambda k, x: k.me.parts.append(x), lambda k: drain(k.parts))
    yield simple("iterator", lambda: iter(range(10000)), lambda c, x: next(c), lambda c: next(c))
    yield simple(
        "path",
        lambda: {pathlib.Path("a"): []},
        lambda d, x: d[pathlib.Path("a")].append(x),
        lambda d: len(d[pathlib.Path("a")]),
    )
