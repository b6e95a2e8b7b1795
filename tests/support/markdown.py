"""What a page of the docs shows: its pieces of Python and its commands, so that tests can run them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def page(path: str) -> str:
    """The text of a page, by its path in the repository."""
    return (ROOT / path).read_text()


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def commands(text: str) -> list[str]:
    """The lines of the bash blocks, without comments."""
    lines = [line.split("  #")[0].strip() for block in blocks(text, "bash") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]
