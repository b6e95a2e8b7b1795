"""Which modules an inference engine fuses into one matrix, and what they must therefore share.

vLLM multiplies q, k, v (and gate, up) as one matrix. With two-level scales (tensor_group, NVFP4) the fused matrix has
one global scale, for the weight and for the input, so the members' observers compute it together. Members with two
different schemes cannot be fused at all; that is an error before calibration, not a refused checkpoint after it.

Experts: gate and up of one expert are fused. Different experts keep their own scales: vLLM's kernels take one scale per
expert, or, where they have room for one only, the widest of the layer's, so nothing is clipped that was not before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lightning_obs.errors import CalibrationError, refuse

#: attribute names, under one parent, of the modules that are fused
FUSED_GROUPS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)


def fused_groups_with(own: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """:data:`FUSED_GROUPS` and the user's own. A name that stands in both belongs to the user's.

    Raises:
        CalibrationError: a group is not two or more attribute names, or a name stands in two of the user's groups.

    >>> fused_groups_with([["a_proj", "b_proj"]])[-1]
    ('a_proj', 'b_proj')
    """
    if isinstance(own, str) or any(isinstance(group, str) for group in own):
        raise CalibrationError("fused_groups", got=repr(own), expected="a list of lists of names, [['a', 'b']]")
    names = [name for group in own for name in group]
    bad = [name for name in names if not isinstance(name, str) or not name or "." in name]
    short = [str(list(group)) for group in own if len(set(group)) < 2]
    refuse(
        [*map(str, bad), *short],
        "a fused group is not a group",
        expected="two or more attribute names under one parent, without dots: ['gate_proj', 'up_proj']",
    )
    twice = sorted({name for name in names if names.count(name) > 1})
    refuse(twice, "a name stands in two fused groups", remedy="make them one group.")
    return (*FUSED_GROUPS, *(tuple(group) for group in own))


def find_fused(names: Iterable[str], groups: Sequence[Sequence[str]] = FUSED_GROUPS) -> list[list[str]]:
    """Group module names that are fused: same parent, last parts in one of ``groups``. Missing members are fine.

    >>> find_fused(["l.0.q_proj", "l.0.k_proj", "l.0.o_proj", "l.1.up_proj", "l.1.gate_proj"])
    [['l.0.q_proj', 'l.0.k_proj'], ['l.1.gate_proj', 'l.1.up_proj']]
    """
    rank = {member: (index, place) for index, group in enumerate(groups) for place, member in enumerate(group)}
    by_group: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        if leaf in rank:
            index, place = rank[leaf]
            by_group.setdefault((parent, index), []).append((place, name))
    return [[name for _, name in sorted(members)] for members in by_group.values() if len(members) > 1]


def require_one_scheme(schemes: Mapping[str, object], fused: Sequence[Sequence[str]]) -> None:
    """Refuse fused groups whose members have different schemes.

    Raises:
        CalibrationError: naming the members of every mixed group.
    """
    mixed = [name for group in fused if len({repr(schemes[name]) for name in group}) > 1 for name in group]
    refuse(
        mixed,
        "modules that are fused at inference have different schemes",
        expected="one scheme for all members of a fused group (q, k, v; gate, up; your fused_groups)",
        remedy="target or ignore them together.",
    )
