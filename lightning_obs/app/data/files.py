"""Read texts, and objects that hold texts, from files.

Not with ``datasets.load_dataset``: it reports a table that cannot be parsed, where these readers name file and line.
"""

from __future__ import annotations

import csv
import json
import os
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from lightning_obs.errors import CalibrationError, likely, name_list
from lightning_obs.files.read import naming
from lightning_obs.packages import import_package

#: the place of an object (file and line), and the object
Row = tuple[str, Any]


def read_documents(
    path: str | os.PathLike[str] | None, text_field: str = "text", option: str = "data.path"
) -> list[str]:
    """The texts of the rows that :func:`read_rows` reads."""
    return [value_of(*row, text_field) for row in read_rows(path, text_field, option)]


def read_rows(
    path: str | os.PathLike[str] | None, text_field: str = "text", option: str = "data.path"
) -> Iterator[Row]:
    """Objects of a file or folder, in a fixed order, each with the place where it stands; at least one.

    Args:
        path: a text file in UTF-8 (an object is a paragraph); a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file; a
            folder of such files, or one saved by ``datasets``. None: Python's own documentation.
        text_field: the field that holds the text where the file has no fields.
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
    """As :func:`read_rows`, also none."""
    if path is None:
        from pydoc_data.topics import topics

        yield from ((f"the topic {name}", {text_field: topics[name]}) for name in sorted(topics))
        return
    path = Path(path)
    if not path.exists():
        raise CalibrationError(f"{option}={path} does not exist")
    readers = {".jsonl": _json, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    if not path.is_dir():
        if path.suffix.lower() in readers:
            yield from readers[path.suffix.lower()](path)
        else:
            yield from ((str(path), {text_field: text}) for text in _decoded(path).split("\n\n") if text.strip())
    elif (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        yield from _saved_dataset(path)
    else:
        suffixes = (".txt", ".md", ".rst", *readers)
        files = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in suffixes and file.is_file()]
        if not files:
            raise CalibrationError(
                f"{option}={path} holds nothing to read", expected=f"files ending in {', '.join(suffixes)}"
            )
        for file in files:
            yield from _rows(file, text_field, option)


def require_fields(path: Any, asked: Mapping[str, Any], option: str) -> None:
    """Refuse, by the first object alone, a ``path`` without the fields that ``asked`` names as ``*_field``."""
    place, row = next(read_rows(path, asked.get("text_field", "text"), option))
    for name, kind in (("text_field", str), ("target_field", str), ("label_field", object)):
        if asked.get(name) is not None:
            value_of(place, row, asked[name], f"data.{name}", kind)


def value_of(place: str, row: Any, field: str, option: str = "data.text_field", kind: type = str) -> Any:
    """The value in a field of a row, which ``option`` names; an error where there is none of that kind."""
    fields = row if isinstance(row, dict) else {}
    value = fields.get(field)
    if value is None or not isinstance(value, kind):
        raise CalibrationError(
            f"{place} has no {'text in the ' if kind is str else ''}field {field!r}{likely(field, fields)}",
            got=repr(row)[:80] if kind is str else f"the fields {name_list(list(fields))}",
            remedy=f"name the field: {option}=...",
        )
    if isinstance(value, str):
        _refuse_surrogates(place, field, value)
    return value


def _refuse_surrogates(place: str, field: str, text: str) -> None:
    """Refuse half of a pair of UTF-16, which JSON can hold and no tokenizer reads."""
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
    data = path.read_bytes().removeprefix(BOM_UTF8)
    try:
        text = data.decode("utf-8")
        bad = data.find(b"\0")  # which decodes, and is in no text
    except UnicodeDecodeError as error:
        bad = error.start
    if bad >= 0:
        raise CalibrationError(
            f"{path}:{data.count(10, 0, bad) + 1} is not valid UTF-8",
            got=f"byte 0x{data[bad]:02x}",
            remedy="convert it (iconv -f latin1 -t utf-8), or give a text, jsonl, json, csv or parquet file.",
        )
    return text.replace("\r\n", "\n")


def _json(path: Path) -> Iterator[Row]:
    """A list of objects, or an object in each line; either is called JSON."""
    text = _decoded(path)
    is_list = text.lstrip().startswith("[")
    for number, part in enumerate([text] if is_list else text.split("\n"), 1):
        try:
            found: Any = json.loads(part) if part.strip() else None
        except (ValueError, RecursionError) as error:
            raise _invalid(f"{path}:{getattr(error, 'lineno', 1) if is_list else number}", "JSON", error) from error
        if is_list:
            yield from ((f"{path}[{index}]", row) for index, row in enumerate(found))
        elif part.strip():
            yield f"{path}:{number}", found


def _csv(path: Path) -> Iterator[Row]:
    rows = csv.DictReader(StringIO(_decoded(path), newline=""), strict=True)
    try:
        for row in rows:
            yield f"{path}:{rows.line_num}", row
    except csv.Error as error:
        raise _invalid(f"{path}:{rows.reader.line_num}", "CSV", error) from error


def _parquet(path: Path) -> Iterator[Row]:
    import_package("pyarrow", str(path))
    from pyarrow import parquet

    try:
        rows = (row for batch in parquet.ParquetFile(path).iter_batches() for row in batch.to_pylist())
        yield from ((f"{path}[{index}]", row) for index, row in enumerate(rows))
    except (OSError, ValueError) as error:  # pyarrow's errors among them
        raise _invalid(str(path), "Parquet", error) from error


def _invalid(place: str, kind: str, error: Exception) -> CalibrationError:
    return CalibrationError(
        f"{place} is not valid {kind}", got=str(error)[:200], remedy="fix the file, or leave it out."
    )


def _saved_dataset(path: Path) -> Iterator[Row]:
    datasets = import_package("datasets", str(path))
    with naming(path):
        loaded = datasets.load_from_disk(str(path))
        for part in loaded.values() if isinstance(loaded, datasets.DatasetDict) else [loaded]:
            yield from ((f"{path}[{index}]", row) for index, row in enumerate(part))
