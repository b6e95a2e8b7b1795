"""Try the regular expressions of somebody else's config where they can be stopped.

Python cannot interrupt a match that backtracks for hours. A process of its own matches every pattern with every name
first; what ends there within the limit ends here, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_obs.errors import CalibrationError

#: for all patterns of a config together
SECONDS = 10.0
_MATCH = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    print(json.dumps(pattern), flush=True)
    for name in names:
        re.match(pattern, name)
"""


def refuse_slow_patterns(config: Any, names: Sequence[str], file: Path) -> None:
    """Refuse a quantization config, as it was read from ``file``, with a pattern that takes too long for these names.

    What is no pattern at all, its reader refuses.
    """
    patterns = sorted(set(_patterns(config)))
    if not patterns:
        return
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCH],
            input=json.dumps([patterns, list(names)]),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        begun = (error.stdout or b"").decode().split("\n")
        raise CalibrationError(
            f"{file} has a pattern that takes more than {SECONDS:g} s to match with the model's names",
            got="re:" + json.loads(begun[-2]) if len(begun) > 1 else None,
            remedy="repetitions inside of repetitions, as in (a+)+, are slow: rewrite the pattern.",
        ) from error


def _patterns(config: Any) -> Iterator[str]:
    if isinstance(config, str) and config.startswith("re:"):
        yield config.removeprefix("re:")
    elif isinstance(config, (dict, list)):
        for value in [*config, *config.values()] if isinstance(config, dict) else config:
            yield from _patterns(value)
