"""Safetensors files by position: the header is known first, and each tensor is read and written by itself.

safetensors writes a file from all of its tensors at once, and maps a whole file to read it. Here tensors, or rows of
them, are written to their places in any order, and one tensor, or an item of it, is read: nothing else is held.

The format: 8 bytes, the length of the header; the header, JSON, ``{name: {dtype, shape, data_offsets}}``; the tensors.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import _TYPES

from lightning_obs.errors import CalibrationError, refuse
from lightning_obs.files.read import naming, read_json
from lightning_obs.files.sealed import form_checksum, state_checksum

#: called with the name of the tensor that was written or searched, the bytes done so far, and the bytes in all
Progress: TypeAlias = Callable[[str, int, int], None]

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"

_DTYPES: dict[str, torch.dtype] = {**_TYPES, "F8_E8M0": torch.float8_e8m0fnu}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
#: bytes that are copied at once
_BLOCK = 1 << 24
#: bytes after which freed memory is given back to the system
_TRIMMED = 1 << 26
_DAMAGED = "download or copy the checkpoint again."


class _Place(NamedTuple):
    """Where one tensor lies."""

    file: int  # an open one
    start: int  # its first byte
    meta: torch.Tensor  # its shape and dtype


class _Tensors:
    """Open files, and where tensors lie in them."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        self._files: list[int] = []

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


@dataclass
class Tally:
    """Counts the bytes of tensors that were written or searched, of ``total``, and tells ``progress``."""

    total: int
    progress: Progress | None = None
    done: int = 0

    def add(self, name: str, size: int) -> None:
        """Count ``size`` bytes of a tensor."""
        self.done += size
        if self.progress is not None:
            self.progress(name, self.done, self.total)


class TensorWriter(_Tensors):
    """The weight files of a checkpoint, in ``folder``: headers, and an index where there are several files.

    Args:
        layout: a meta tensor for each name, in the order in which they are dealt to files.
        max_shard_size: bytes of one file, or ``"5GB"``; a larger tensor has a file of its own.
        file: the name of the file, where there is one.
    """

    def __init__(
        self,
        folder: Path,
        layout: Mapping[str, torch.Tensor],
        max_shard_size: int | str,
        file: str = WEIGHTS_FILE,
        tally: Tally | None = None,
    ) -> None:
        split = deal_to_files(layout, max_shard_size, file)
        super().__init__()
        #: bytes of each tensor that are not written yet
        self._left = {name: tensor.nbytes for name, tensor in layout.items()}
        self._untrimmed, self._tally = 0, tally or Tally(0)
        try:
            for each, names in (split.filename_to_tensors or {file: []}).items():
                self._begin(folder / each, {name: layout[name] for name in names})
        except BaseException:
            self.close()
            raise
        if split.is_sharded:
            write_index(folder, split.tensor_to_filename, split.metadata["total_size"])

    def _begin(self, path: Path, layout: Mapping[str, torch.Tensor]) -> None:
        """Write the header, the same in every process: widest elements first, so that each tensor is aligned."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        names = sorted(layout, key=lambda name: (-layout[name].itemsize, _CODES[layout[name].dtype], name))
        file, end = os.open(path, os.O_RDWR | os.O_CREAT, 0o666), 0
        self._files.append(file)
        for name in names:
            tensor, start, end = layout[name], end, end + layout[name].nbytes
            header[name] = {"dtype": _CODES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        _write_all(file, memoryview(struct.pack("<Q", len(text)) + text), 0)
        os.truncate(file, 8 + len(text) + end)
        for name in names:
            start = 8 + len(text) + header[name]["data_offsets"][0]
            self._places[name] = _Place(file, start, layout[name])

    def write(self, name: str, rows: torch.Tensor, first: int = 0) -> None:
        """Write a tensor, or rows of it from ``first`` on, to its place."""
        place, meta, size = self._places[name], self._places[name].meta, rows.numel() * rows.itemsize
        if rows.dtype != meta.dtype or rows.shape[1:] != meta.shape[1:] or size > self._left[name]:
            raise CalibrationError(
                "a tensor differs from its header",
                where=[name],
                got=f"{rows.dtype} {tuple(rows.shape)}",
                expected=f"{meta.dtype} {tuple(meta.shape)}",
            )
        rows = rows.detach().cpu().contiguous()
        start = place.start + (first * (meta.nbytes // len(meta)) if first else 0)
        _write_all(place.file, _bytes_of(rows), start)
        self._left[name] -= size
        self._untrimmed += size
        if self._untrimmed > _TRIMMED:
            give_back_freed()
            self._untrimmed = 0
        self._tally.add(name, size)

    def copy(self, name: str, reader: TensorReader, source: str) -> None:
        """Copy a tensor as bytes."""
        place, start = self._places[name], 0
        for block in reader.blocks(source):
            _write_all(place.file, block, place.start + start)
            start += len(block)
        self._left[name] -= start
        self._tally.add(name, start)

    def require_complete(self) -> None:
        """Refuse files that lack tensors."""
        refuse([name for name, left in self._left.items() if left], "tensors of the checkpoint were not written")

    def close(self) -> None:
        """Close the files, and give freed memory back."""
        super().close()
        give_back_freed()


class TensorReader(_Tensors):
    """The tensors of a folder of safetensors files, by name. Headers are read, and checked against file sizes.

    Raises:
        CalibrationError: there are no safetensors files; an index that names a tensor twice, or a file that is not in
            the folder; a file that is missing, cut off, or holds other tensors than the index says.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        #: of each tensor, or item of one, that was read: the checksum; None: nobody asked for them (:meth:`watch`)
        self.checksums: dict[tuple[str, int | None], int] | None = None
        #: names of the files that hold the tensors, and of their index
        self.files = [WEIGHTS_FILE]
        index = {}
        try:
            if (folder / INDEX_FILE).exists():
                index = _read_index(folder)
                self.files = sorted(set(index.values()))
            for file in self.files:
                expected = {name for name, its in index.items() if its == file}
                self._open(folder / file, expected or None)
        except BaseException:
            self.close()
            raise
        if index:
            self.files.append(INDEX_FILE)

    def _open(self, path: Path, expected: set[str] | None) -> None:
        if not path.is_file():
            raise CalibrationError(
                f"{path} is missing",
                expected="weights in safetensors files, named by model.safetensors.index.json if there are several",
                remedy=_DAMAGED,
            )
        with naming(path, remedy=_DAMAGED):
            file = os.open(path, os.O_RDONLY)
            self._files.append(file)
            size = os.fstat(file).st_size
            (length,) = struct.unpack("<Q", os.pread(file, 8, 0))
            if 8 + length > size:
                raise CalibrationError(f"{path} is cut off", got=f"{size:,} bytes", remedy=_DAMAGED)
            header = json.loads(os.pread(file, length, 8))
            header.pop("__metadata__", None)
            ends: dict[str, tuple[int, int]] = {}
            for name, entry in header.items():
                start, stop = entry["data_offsets"]
                if not all(isinstance(number, int) for number in (start, stop, *entry["shape"])):
                    raise TypeError(f"{name} has data_offsets {[start, stop]} and shape {entry['shape']}")
                meta = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]], device="meta")
                if start < 0 or stop - start != meta.nbytes:
                    raise ValueError(f"{name} has {stop - start} bytes and shape {entry['shape']}")
                if 8 + length + stop > size:
                    bytes_ = f"{size:,} bytes, {name} ends at {8 + length + stop:,}"
                    raise CalibrationError(f"{path} is cut off", got=bytes_, remedy=_DAMAGED)
                ends[name] = start, stop
                self._places[name] = _Place(file, 8 + length + start, meta)
            _refuse_overlaps(path, ends)
        refuse(
            sorted(header.keys() ^ expected) if expected is not None else [],
            f"{path} and {INDEX_FILE} disagree on its tensors",
            remedy=_DAMAGED,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def meta(self, name: str) -> torch.Tensor:
        """A tensor's shape and dtype."""
        return self._places[name].meta

    def read(self, name: str, item: int | None = None) -> torch.Tensor:
        """A tensor, or one item ``(1, ...)`` of its first dimension, in memory of its own."""
        data = self._read(name, item)
        if self.checksums is not None:
            self._remember((name, item), state_checksum(data))
        return data

    def _read(self, name: str, item: int | None) -> torch.Tensor:
        place, meta = self._places[name], self._places[name].meta
        data = torch.empty_like(meta if item is None else meta[:1], device="cpu")
        _read_all(place.file, _bytes_of(data), place.start + (item or 0) * data.nbytes)
        return data

    def blocks(self, name: str) -> Iterator[memoryview]:
        """The bytes of a tensor, in order; each block is overwritten by the next."""
        place = self._places[name]
        size = place.meta.nbytes
        checksum = form_checksum(place.meta)
        buffer = memoryview(bytearray(min(size, _BLOCK)))
        for done in range(0, size, _BLOCK):
            block = buffer[: min(_BLOCK, size - done)]
            _read_all(place.file, block, place.start + done)
            if self.checksums is not None:
                checksum = zlib.crc32(block, checksum)
            yield block
        if self.checksums is not None:
            self._remember((name, None), checksum)

    def watch(self, checksums: Mapping[tuple[str, int | None], int] | None = None) -> None:
        """Keep the checksums of all that is read from now on; what differs when it is read again is an error.

        ``checksums``: of tensors that were read before.
        """
        self.checksums = {**(self.checksums or {}), **(checksums or {})}

    def _remember(self, key: tuple[str, int | None], checksum: int) -> None:
        assert self.checksums is not None
        if self.checksums.setdefault(key, checksum) != checksum:
            raise CalibrationError(
                "a checkpoint has changed while it was read",
                where=[key[0]],
                remedy="start over, and leave its files alone meanwhile.",
            )

    def changed(self, checksums: Mapping[tuple[str, int | None], int]) -> list[str]:
        """Names of the tensors that are not as they were when their ``checksums`` were kept; all are read again."""
        names: dict[str, None] = {}
        for (name, item), checksum in checksums.items():
            is_there = name in self and (item is None or item < len(self.meta(name)))
            if not is_there or state_checksum(self._read(name, item)) != checksum:
                names[name] = None
        return list(names)


def _refuse_overlaps(path: Path, ends: Mapping[str, tuple[int, int]]) -> None:
    """Refuse tensors that share bytes of a file; ``ends``: the first byte of each, and the one after its last."""
    in_order = sorted((name for name, (start, stop) in ends.items() if start < stop), key=ends.__getitem__)
    for first, second in pairwise(in_order):
        if ends[second][0] < ends[first][1]:
            raise CalibrationError(
                f"tensors overlap in {path}",
                where=[first, second],
                got=f"bytes {list(ends[first])} and {list(ends[second])}",
                expected="bytes of their own for each tensor",
                remedy=_DAMAGED,
            )


def deal_to_files(layout: Mapping[str, torch.Tensor], max_shard_size: int | str, file: str = WEIGHTS_FILE) -> Any:
    """Which tensors each file holds, as transformers deals them; see :class:`TensorWriter`."""
    pattern = file.replace(".safetensors", "{suffix}.safetensors")
    try:
        return split_torch_state_dict_into_shards(dict(layout), filename_pattern=pattern, max_shard_size=max_shard_size)
    except (ValueError, TypeError) as error:
        expected = "a number of bytes, or '5GB'"
        raise CalibrationError("max_shard_size", got=repr(max_shard_size), expected=expected) from error


def write_index(folder: Path, files: Mapping[str, str], size: int) -> None:
    """Write the index: ``files``, the file of each tensor, and ``size``, the bytes of all tensors."""
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX_FILE
    found = read_json(path, remedy=_DAMAGED)
    with naming(path, remedy=_DAMAGED):
        files = dict(found["weight_map"])
        refuse(
            sorted(str(file) for file in set(files.values()) if Path(file).name != file or file in ("", ".", "..")),
            f"{path} names files that are not in its folder",
            remedy=_DAMAGED,
        )
    return files


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, which must outlive it. (FSDP1 cannot free memory once given to numpy.)"""
    size = tensor.numel() * tensor.itemsize
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")


def _write_all(file: int, data: memoryview, start: int) -> None:
    while data:
        done = os.pwrite(file, data, start)
        data, start = data[done:], start + done


def _read_all(file: int, data: memoryview, start: int) -> None:
    while data:
        done = os.preadv(file, [data], start)
        if not done:
            raise CalibrationError("a safetensors file has become shorter while it was read", remedy=_DAMAGED)
        data, start = data[done:], start + done


def give_back_freed() -> None:
    """Let glibc return freed memory to the system: between tensors of many sizes it keeps most of it."""
    if sys.platform.startswith("linux"):
        with suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
