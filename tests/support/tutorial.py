"""A page of the docs that is a project: its files are written, and its commands run, in the page's order."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.in_process import Done, run_script
from tests.support.lightning_package import MESSAGES, under_the_chosen_name


class Tutorial:
    """The blocks of a page: files of Python, the commands that run them, and what each prints.

    Args:
        page: its text. A block of Python begins with a comment that is the file's name. A block of bash is one command
            that runs a file; where a block of text follows it, the command prints its lines.
        less: what makes the project small: texts in its files, and what stands in their place.
        launchers: what runs a file on several ranks, by its name.
    """

    def __init__(
        self, page: str, less: Mapping[str, str], launchers: Mapping[str, Callable[..., list[Done]]] | None = None
    ) -> None:
        #: (language, content) of every block, in order
        self.blocks: list[tuple[str, str]] = re.findall(r"```(python|bash|text)\n(.*?)```", page, flags=re.DOTALL)
        self._less = less
        self._launchers = launchers or {}

    def contents(self, language: str) -> list[str]:
        """The blocks of one language."""
        return [content for of_block, content in self.blocks if of_block == language]

    def run(self, folder: Path, caplog: Any, *, skip: int = 0) -> None:
        """Write every file, run every command, and compare what it prints with the block behind it.

        Args:
            folder: to work in.
            caplog: of pytest.
            skip: how many of the first blocks are left out.

        Raises:
            AssertionError: a command failed, or did not print a line that the page shows.
        """
        printed = ""
        for language, content in self.blocks[skip:]:
            if language == "python":
                self._write(content, folder)
            elif language == "bash":
                caplog.clear()
                with caplog.at_level("INFO", logger=MESSAGES):
                    printed = self._run(content, folder)
                printed += "\n" + "\n".join(record.message for record in caplog.records)
            else:
                missing = [line for line in _shape(content) if line not in _shape(printed)]
                assert not missing, f"{missing} is not in what was printed:\n{printed}"

    def files_left_unrun(self) -> set[str]:
        """The files that no command runs and no other file imports."""
        codes = self.contents("python")
        files = {_file_name(code).removesuffix(".py") for code in codes}
        imported = set(re.findall(r"^from (\w+) import", "\n".join(codes), flags=re.MULTILINE))
        run = set(re.findall(r"^python (\w+)[.]py", "\n".join(self.contents("bash")), flags=re.MULTILINE))
        return files - run - imported

    def _write(self, code: str, folder: Path) -> None:
        code = under_the_chosen_name(code)
        for text, less in self._less.items():
            code = code.replace(text, less)
        (folder / _file_name(code)).write_text(code)

    def _run(self, command: str, folder: Path) -> str:
        """What a command prints, on both channels."""
        python, name, *arguments = shlex.split(command)
        assert python == "python"
        if name in self._launchers:
            processes = self._launchers[name](folder / name, *arguments, folder=folder)
        else:
            processes = [run_script(folder / name, *arguments, folder=folder)]
        for done in processes:
            assert done.returncode == 0, done.stderr
        return "\n".join(done.stdout + done.stderr for done in processes)


def _file_name(code: str) -> str:
    name = re.match(r"# (\w+[.]py)\n", code)
    assert name, f"a block of Python begins with the name of its file: {code[:80]}"
    return name[1]


def _shape(text: str) -> list[str]:
    """The lines without their numbers, names of layers and widths of columns, which differ on less data."""
    text = re.sub(r"transformer[.][\w.]+", "layer", text)
    text = re.sub(r"\b1 batch\b", "1 batches", text)
    lines = [re.sub(r"-?\d[\d.,]*(e-?\d+)?", "0", line) for line in text.splitlines()]
    return [" ".join(line.split()) for line in lines]
