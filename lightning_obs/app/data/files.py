"""Read texts, and objects that hold texts, from files: the text data of the command line (``TextData``).

``datasets.load_dataset`` reports only that a table cannot be parsed; these readers name file and line.
"""

from __future__ import annotations

import csv
import json
import os
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

from lightning_obs.errors import CalibrationError, likely
from lightning_obs.files.read import naming
from lightning_obs.packages import import_package

#: the place of an object (file and line), and the object
Row = tuple[str, Any]


def read_rows(
    path: str | os.PathLike[str] | None, text_field: str = "text", option: str = "data.path"
) -> Iterator[Row]:
    """Yield the objects of a file or folder in a fixed order, each with its place; at least one.

    ``TextData`` reads its texts by it, and the first row to check the data before the model is loaded.

    Args:
        path: a text file in UTF-8 (an object is a paragraph); a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file; a
            folder of such files, or one saved by ``datasets``. None: Python's own documentation.
        text_field: the field under which the texts of a file without fields are yielded.
        option: the name of ``path`` in errors.

    Raises:
        CalibrationError: no such file; an empty one; an unreadable row, by file and line.
    """
    is_empty = True
    for row in _rows(path, text_field, option):
        is_empty = False
        yield row
    if is_empty:
        raise CalibrationError(f"{option}={path} is empty", remedy="give a file or folder that holds text.")


def _rows(path: str | os.PathLike[str] | None, text_field: str, option: str) -> Iterator[Row]:
    """Yield the rows as :func:`read_rows` does, but none for an empty file, which that function refuses."""
    if path is None:
        yield from _default_rows(text_field)
        return
    path = Path(path)
    if not path.exists():
        raise CalibrationError(f"{option}={path} does not exist")
    if not path.is_dir():
        yield from _rows_of_file(path, text_field)
    elif (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        yield from _saved_dataset(path)
    else:
        for file in _files_in(path, option):
            yield from _rows_of_file(file, text_field)


def _default_rows(text_field: str) -> Iterator[Row]:
    """The default text: Python's documentation of its topics, in the order of their names."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"the topic {name}", {text_field: topics[name]}


def _rows_of_file(file: Path, text_field: str) -> Iterator[Row]:
    """The objects of a file, read as its suffix says; the paragraphs of a file with another suffix."""
    reader = _READERS.get(file.suffix.lower())
    if reader is not None:
        yield from reader(file)
        return
    for paragraph in _decoded(file).split("\n\n"):
        if paragraph.strip():
            yield str(file), {text_field: paragraph}


def _files_in(folder: Path, option: str) -> list[Path]:
    """The files to read in a folder, at any depth, in the order of their paths; at least one."""
    suffixes = (".txt", ".md", ".rst", *_READERS)
    files = []
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in suffixes and path.is_file():
            files.append(path)
    if not files:
        expected = f"files ending in {', '.join(suffixes)}"
        raise CalibrationError(f"{option}={folder} holds nothing to read", expected=expected)
    return files


def value_of(place: str, row: Any, field: str) -> str:
    """Return the text in a field of a row.

    ``text_of`` (``chats.py``) calls it for each row that is no chat, and ``TextData.check`` for the first row.

    Args:
        place: file and line of the row, for errors.
        row: an object of a file.
        field: the name of the field.

    Raises:
        CalibrationError: a row without a text in this field; a text that is not Unicode.
    """
    fields = row if isinstance(row, dict) else {}
    text = fields.get(field)
    if not isinstance(text, str):
        raise CalibrationError(
            f"{place} has no text in the field {field!r}{likely(field, fields)}",
            got=repr(row)[:80],
            remedy="name the field: data.text_field=...",
        )
    _refuse_surrogates(place, field, text)
    return text


def _refuse_surrogates(place: str, field: str, text: str) -> None:
    """Raise for a text with half of a UTF-16 pair, which JSON can hold and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CalibrationError(
            f"{place} has a lone surrogate in the field {field!r}, which is no character",
            got=ascii(text[error.start : error.end]),
            expected="text that can be written as UTF-8",
            remedy="write the file again as UTF-8 (json.dumps(..., ensure_ascii=False)), without this row.",
        ) from error


def _decoded(path: Path) -> str:
    """The text of a file in UTF-8, with Unix line ends.

    Raises:
        CalibrationError: other bytes, or a null byte, which decodes but stands in no text.
    """
    data = path.read_bytes().removeprefix(BOM_UTF8)
    try:
        text = data.decode("utf-8")
        wrong_byte = data.find(b"\0")
    except UnicodeDecodeError as error:
        wrong_byte = error.start
    if wrong_byte >= 0:
        line = data.count(b"\n", 0, wrong_byte) + 1
        if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            remedy = "convert it (iconv -f utf-16 -t utf-8)."
        elif b"\0" in data:
            remedy = "give a text, jsonl, json, csv or parquet file; null bytes are in no text."
        else:
            remedy = "convert it (iconv -f latin1 -t utf-8), or give a text, jsonl, json, csv or parquet file."
        raise CalibrationError(f"{path}:{line} is not valid UTF-8", got=f"byte 0x{data[wrong_byte]:02x}", remedy=remedy)
    return text.replace("\r\n", "\n")


def _json(path: Path) -> Iterator[Row]:
    """The rows of a file that is one JSON list, or that has one JSON object in each line, whatever its suffix."""
    text = _decoded(path)
    if not text.lstrip().startswith("["):
        yield from _json_lines(path, text)
        return
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise _invalid(f"{path}:{line}", "JSON", error) from error
    for index, row in enumerate(rows):
        yield f"{path}[{index}]", row


def _json_lines(path: Path, text: str) -> Iterator[Row]:
    """The object of each line of ``text`` that is not empty; ``path`` is for places and errors."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _invalid(f"{path}:{number}", "JSON", error) from error
        yield f"{path}:{number}", row


def _csv(path: Path) -> Iterator[Row]:
    """A dict for each row, by the names in the first one."""
    rows = csv.DictReader(StringIO(_decoded(path), newline=""), strict=True)
    try:
        for row in rows:
            yield f"{path}:{rows.line_num}", row
    except csv.Error as error:
        raise _invalid(f"{path}:{rows.reader.line_num}", "CSV", error) from error


def _parquet(path: Path) -> Iterator[Row]:
    """A dict for each row."""
    import_package("pyarrow", str(path))
    from pyarrow import parquet

    index = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                yield f"{path}[{index}]", row
                index += 1
    except (OSError, ValueError) as error:  # pyarrow's errors are among them
        raise _invalid(str(path), "Parquet", error) from error


def _invalid(place: str, kind: str, error: Exception) -> CalibrationError:
    """The error to raise for a file that a parser refuses."""
    return CalibrationError(
        f"{place} is not valid {kind}", got=str(error)[:200], remedy="fix the file, or leave it out."
    )


def _saved_dataset(path: Path) -> Iterator[Row]:
    """The rows of a data set that ``datasets`` has saved, of all its splits, each with its split and number.

    Raises:
        CalibrationError: ``datasets`` is not installed, or fails to load the folder or to read a row.
    """
    datasets = import_package("datasets", str(path))
    with naming(path):
        loaded = datasets.load_from_disk(str(path))
        splits = {str(path): loaded}
        if isinstance(loaded, datasets.DatasetDict):
            splits = {f"{path}[{name!r}]": split for name, split in loaded.items()}
        for place, split in splits.items():
            for index, row in enumerate(split):
                yield f"{place}[{index}]", row


#: by suffix, the function that reads the rows of a file
_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
