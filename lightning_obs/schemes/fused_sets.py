"""Fused sets: modules that an inference engine multiplies as one matrix, and so must quantize alike.

Which names are fused is the engine's to say (:data:`~lightning_obs.engines.engine.FUSED_SETS`: q, k, v; gate, up). With
two-level scales (tensor_group, NVFP4) the fused matrix has one global scale, for the weight and for the input, so the
members' observers compute it together. Members with two schemes cannot be fused: an error before calibration rather
than a refused checkpoint after it.

Gate and up of one expert are fused. Different experts keep their own scales: vLLM's kernels take one scale per expert,
or the widest of the layer's where they have room for one only, so nothing is clipped that was not before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lightning_obs.errors import CalibrationError, refuse


def check_own_sets(own: Sequence[Sequence[str]]) -> None:
    """Refuse what is not a list of fused sets.

    Raises:
        CalibrationError: a set is not two or more attribute names, or a name stands in two sets.
    """
    if isinstance(own, str) or any(isinstance(fused, str) for fused in own):
        raise CalibrationError("fused_groups", got=repr(own), expected="a list of lists of names, [['a', 'b']]")
    names = [name for fused in own for name in fused]
    bad = [str(name) for name in names if not isinstance(name, str) or not name or "." in name]
    refuse(
        [*bad, *(str(list(fused)) for fused in own if len(set(fused)) < 2)],
        "not a fused set",
        expected="two or more attribute names under one parent, without dots: ['gate_proj', 'up_proj']",
    )
    twice = sorted({name for name in names if names.count(name) > 1})
    refuse(twice, "a name stands in two fused sets", remedy="make them one set.")


def find_fused(names: Iterable[str], sets: Sequence[Sequence[str]]) -> list[list[str]]:
    """The module names that are fused: same parent, last parts in one of ``sets``, of which members may be missing.

    A name that stands in two sets belongs to the later one.

    >>> find_fused(["0.k", "0.q", "0.o", "1.up", "1.gate", "2.up"], [("q", "k", "v"), ("gate", "up")])
    [['0.q', '0.k'], ['1.gate', '1.up']]
    """
    rank = {member: (index, place) for index, fused in enumerate(sets) for place, member in enumerate(fused)}
    found: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        if leaf in rank:
            index, place = rank[leaf]
            found.setdefault((parent, index), []).append((place, name))
    return [[name for _, name in sorted(members)] for members in found.values() if len(members) > 1]


def require_one_scheme(schemes: Mapping[str, object], fused: Sequence[Sequence[str]]) -> None:
    """Refuse fused modules with different schemes."""
    refuse(
        [name for members in fused if len({repr(schemes[name]) for name in members}) > 1 for name in members],
        "modules that are fused at inference have different schemes",
        expected="one scheme for all members of a fused set (q, k, v; gate, up; your fused_groups)",
        remedy="target or ignore them together.",
    )
