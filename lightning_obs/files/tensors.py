"""Safetensors files by position: tensors are written and read one at a time, in any order.

safetensors writes a file from all of its tensors at once, and maps a whole file to read it. Here only one tensor, or
some rows of it, is in memory: exports write by :class:`TensorWriter`, which begins a file with its complete header and
then writes each tensor to its place; loading a checkpoint and quantizing a model from its files read by
:class:`TensorReader`.

The format: the length of the header in 8 bytes; the header in JSON, ``{name: {dtype, shape, data_offsets}}``; tensors.
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

#: called with the name of the tensor that was just written or searched, the bytes done so far, and the bytes in all
Progress: TypeAlias = Callable[[str, int, int], None]

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"

_DTYPES: dict[str, torch.dtype] = {**_TYPES, "F8_E8M0": torch.float8_e8m0fnu}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
#: bytes that are copied at once
_BLOCK = 1 << 24
#: bytes that are written between two calls of :func:`give_back_freed`
_BYTES_BETWEEN_TRIMS = 1 << 26
#: the header's length, as the first bytes of a file
_LENGTH = struct.Struct("<Q")
_DOWNLOAD_AGAIN = "download or copy the checkpoint again."


class _Place(NamedTuple):
    """The place of one tensor: an open file's descriptor, the tensor's first byte there, its shape and dtype.

    A writer makes it when it begins a file, a reader when it opens one; both find a tensor by it later.
    """

    file: int
    start: int
    meta: torch.Tensor


class _OpenFiles:
    """The open files of a :class:`TensorWriter` or :class:`TensorReader`, which closes them together.

    Attributes:
        places: where each tensor is, by its name.
    """

    def __init__(self) -> None:
        self.places: dict[str, _Place] = {}
        self._descriptors: list[int] = []

    def open(self, path: Path, flags: int) -> int:
        """Open a file for the writer or the reader; a new file gets the permissions of the umask."""
        descriptor = os.open(path, flags, 0o666)
        self._descriptors.append(descriptor)
        return descriptor

    def close(self) -> None:
        """Close all files; called when their writer or reader is closed, or fails. A second call does nothing."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


@dataclass
class Tally:
    """Counts the bytes of tensors that were written, or whose ranges were searched, and reports them to ``progress``.

    An export makes one for the tensors that it writes, and finalize makes one for the weights whose ranges it searches.

    Args:
        total: the bytes of all tensors of the job.
        progress: a function that is called after each tensor, or block of rows; None: nothing is reported.
        done: the bytes that were counted so far.
    """

    total: int
    progress: Progress | None = None
    done: int = 0

    def add(self, name: str, size: int) -> None:
        """Count ``size`` bytes of the tensor ``name``; called after they were written or searched."""
        self.done += size
        if self.progress is not None:
            self.progress(name, self.done, self.total)


class TensorWriter:
    """Writes the weight files of a checkpoint.

    Exports make one, and so does the calibration layer by layer for the file of each part. The constructor writes
    the headers, and an index if there are several files; tensors follow in any order, by :meth:`write` or
    :meth:`copy`. :meth:`require_complete` checks that none is missing.

    Args:
        folder: an existing folder.
        layout: a meta tensor for each name, in the order in which tensors are distributed to files.
        max_shard_size: largest size of a file [bytes], or ``"5GB"``; a larger tensor has a file of its own.
        file: name of the file if there is only one.
        tally: counts the bytes that are written.
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
        names_of_files = split.filename_to_tensors or {file: []}
        self._files = _OpenFiles()
        self._tally = tally or Tally(0)
        self._bytes_since_trim = 0
        self._bytes_missing = {name: tensor.nbytes for name, tensor in layout.items()}
        try:
            for file_name, names in names_of_files.items():
                self._begin_file(folder / file_name, {name: layout[name] for name in names})
        except BaseException:
            self.close()
            raise
        if split.is_sharded:
            write_index(folder, split.tensor_to_filename, split.metadata["total_size"])

    def _begin_file(self, path: Path, layout: Mapping[str, torch.Tensor]) -> None:
        """Write a file's header, give it its final size, and keep the place of each tensor.

        Several processes may do this to one file, in which each then writes its share of the tensors: all get the whole
        layout, so they write the same header. ``quantize_checkpoint`` works so. It does not call
        :meth:`require_complete`, but compares the bytes that all processes have written with the size of the layout.

        Args:
            path: the path of the file.
            layout: a meta tensor for each tensor in the file, by name.
        """
        names = sorted(layout, key=lambda name: _order_in_file(name, layout[name]))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            tensor = layout[name]
            start = end
            end += tensor.nbytes
            header[name] = {
                "dtype": _CODES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        data_start = _LENGTH.size + len(text)
        file = self._files.open(path, os.O_RDWR | os.O_CREAT)
        _write_all(file, memoryview(_LENGTH.pack(len(text)) + text), 0)
        os.truncate(file, data_start + end)
        for name in names:
            start, _ = header[name]["data_offsets"]
            self._files.places[name] = _Place(file, data_start + start, layout[name])

    def write(self, name: str, rows: torch.Tensor, first: int = 0) -> None:
        """Write a tensor, or some of its rows, to its place.

        Args:
            name: a name of the layout.
            rows: the tensor, or consecutive rows (items of its first dimension), on any device.
            first: index of the first of these rows.

        Raises:
            CalibrationError: the dtype or shape differs from the layout's.
        """
        place = self._files.places[name]
        size = rows.numel() * rows.itemsize
        is_expected = rows.dtype == place.meta.dtype and rows.shape[1:] == place.meta.shape[1:]
        if not is_expected or size > self._bytes_missing[name]:
            raise CalibrationError(
                "a tensor differs from its header",
                where=[name],
                got=_described(rows),
                expected=_described(place.meta),
            )
        start = place.start
        if first:
            start += first * _row_bytes(place.meta)
        rows = rows.detach().cpu().contiguous()
        _write_all(place.file, _bytes_of(rows), start)
        self._bytes_missing[name] -= size
        self._bytes_since_trim += size
        if self._bytes_since_trim > _BYTES_BETWEEN_TRIMS:
            give_back_freed()
            self._bytes_since_trim = 0
        self._tally.add(name, size)

    def copy(self, name: str, reader: TensorReader, source: str) -> None:
        """Write the tensor ``name`` by copying a tensor of another checkpoint, block by block.

        Called by `QuantizedFiles`, for tensors that are not quantized.

        Args:
            name: a name of the layout.
            reader: the reader of the other checkpoint.
            source: the tensor's name there; its dtype and shape are the same.
        """
        place = self._files.places[name]
        copied = 0
        for block in reader.blocks(source):
            _write_all(place.file, block, place.start + copied)
            copied += len(block)
        self._bytes_missing[name] -= copied
        self._tally.add(name, copied)

    def require_complete(self) -> None:
        """Refuse files that lack tensors, or rows of them.

        For files that this writer has written alone. An export calls it after its last tensor, a calibration layer by
        layer after the last tensor of each part's file.
        """
        incomplete = [name for name, missing in self._bytes_missing.items() if missing]
        refuse(incomplete, "tensors of the checkpoint were not written")

    def close(self) -> None:
        """Close the files, and give freed memory back; an export calls it at its end, also if it has failed."""
        self._files.close()
        give_back_freed()


class TensorReader:
    """Reads the tensors of a folder of safetensors files, by name; iterating over it gives the names.

    The constructor opens the files and checks their headers against their sizes. It is used to load a checkpoint, and
    to quantize one from its files.

    Args:
        folder: holds ``model.safetensors``, or an index and the files that it names.

    Attributes:
        files: names of the files that hold the tensors, and of their index.
        checksums: by a tensor's name and an index of its first dimension (None: the whole tensor), the checksum of
            everything that was read; None before :meth:`watch`.

    Raises:
        CalibrationError: there are no safetensors files; an index that names a tensor twice, or a file that is not in
            the folder; a file that is missing, cut off, or holds other tensors than the index says.
    """

    def __init__(self, folder: Path) -> None:
        self.checksums: dict[tuple[str, int | None], int] | None = None
        self.files = [WEIGHTS_FILE]
        self._open_files = _OpenFiles()
        file_of: dict[str, str] = {}
        try:
            if (folder / INDEX_FILE).exists():
                file_of = _read_index(folder)
                self.files = sorted(set(file_of.values()))
            for file in self.files:
                names = {name for name, its_file in file_of.items() if its_file == file}
                self._open(folder / file, names or None)
        except BaseException:
            self.close()
            raise
        if file_of:
            self.files.append(INDEX_FILE)

    def _open(self, path: Path, expected_names: set[str] | None) -> None:
        """Open a file, check its header, and keep the places of its tensors.

        Args:
            path: the path of the file.
            expected_names: the tensors that it has to hold, by the index; None: there is no index.
        """
        if not path.is_file():
            raise CalibrationError(
                f"{path} is missing",
                expected="weights in safetensors files, named by model.safetensors.index.json if there are several",
                remedy=_DOWNLOAD_AGAIN,
            )
        with naming(path, remedy=_DOWNLOAD_AGAIN):
            file = self._open_files.open(path, os.O_RDONLY)
            header, data_start = _read_header(path, file)
            size = os.fstat(file).st_size
            offsets: dict[str, tuple[int, int]] = {}
            for name, entry in header.items():
                meta = _checked_meta(name, entry)
                start, stop = entry["data_offsets"]
                if data_start + stop > size:
                    raise CalibrationError(
                        f"{path} is cut off",
                        got=f"{size:,} bytes, {name} ends at {data_start + stop:,}",
                        remedy=_DOWNLOAD_AGAIN,
                    )
                offsets[name] = start, stop
                self._open_files.places[name] = _Place(file, data_start + start, meta)
            _refuse_overlaps(path, offsets)
        if expected_names is not None:
            refuse(
                sorted(header.keys() ^ expected_names),
                f"{path} and {INDEX_FILE} disagree on its tensors",
                remedy=_DOWNLOAD_AGAIN,
            )

    def close(self) -> None:
        """Close the files; called when the checkpoint is read, or its reading fails. A second call does nothing."""
        self._open_files.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._open_files.places)

    def __contains__(self, name: str) -> bool:
        return name in self._open_files.places

    def meta(self, name: str) -> torch.Tensor:
        """Return a meta tensor with a tensor's shape and dtype; nothing is read.

        Called before tensors are read, to compare a checkpoint with its model and to lay a new checkpoint out.
        """
        return self._open_files.places[name].meta

    def read(self, name: str, item: int | None = None) -> torch.Tensor:
        """Read a tensor, or one item of its first dimension; raises if a watched tensor has changed (:meth:`watch`).

        Called to load a checkpoint, and to load the modules of a model that is quantized from its files.

        Args:
            name: the name of the tensor.
            item: an index of the first dimension, such as an expert's; None: the whole tensor.

        Returns:
            The tensor, or ``(1, ...)``, on the CPU, in memory of its own.
        """
        data = self._read(name, item)
        if self.checksums is not None:
            self._require_unchanged((name, item), state_checksum(data))
        return data

    def _read(self, name: str, item: int | None) -> torch.Tensor:
        """Read as :meth:`read` does, without comparing checksums."""
        place = self._open_files.places[name]
        start = place.start
        if item is None:
            data = torch.empty_like(place.meta, device="cpu")
        else:
            data = torch.empty_like(place.meta[:1], device="cpu")
            start += item * data.nbytes
        _read_all(place.file, _bytes_of(data), start)
        return data

    def blocks(self, name: str) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in order, in blocks of up to 16 MiB; each block is overwritten by the next.

        :meth:`TensorWriter.copy` copies a tensor by them.
        """
        place = self._open_files.places[name]
        size = place.meta.nbytes
        checksum = form_checksum(place.meta)
        buffer = memoryview(bytearray(min(size, _BLOCK)))
        for start in range(0, size, _BLOCK):
            block = buffer[: min(_BLOCK, size - start)]
            _read_all(place.file, block, place.start + start)
            if self.checksums is not None:
                checksum = zlib.crc32(block, checksum)
            yield block
        if self.checksums is not None:
            self._require_unchanged((name, None), checksum)

    def watch(self, checksums: Mapping[tuple[str, int | None], int] | None = None) -> None:
        """Keep the checksum of everything that is read from now on; reading other bytes later is an error.

        The calibration layer by layer calls it, because it reads a checkpoint several times and may continue a
        killed run.

        Args:
            checksums: the checksums of tensors that were read earlier, perhaps by another process, in the form of
                :attr:`checksums`.
        """
        watched = dict(self.checksums or {})
        watched.update(checksums or {})
        self.checksums = watched

    def _require_unchanged(self, key: tuple[str, int | None], checksum: int) -> None:
        """Keep the checksum of a tensor that was read; raise if it was read before with another one."""
        assert self.checksums is not None
        earlier = self.checksums.setdefault(key, checksum)
        if earlier != checksum:
            name, _ = key
            raise CalibrationError(
                "a checkpoint has changed while it was read",
                where=[name],
                remedy="start over, and leave its files alone meanwhile.",
            )

    def changed(self, checksums: Mapping[tuple[str, int | None], int]) -> list[str]:
        """Read tensors again, and name the ones that differ; called when a run goes on after a killed one.

        Args:
            checksums: the checksums of the killed run, in the form of :attr:`checksums`.
        """
        names = []
        for (name, item), checksum in checksums.items():
            exists = name in self and (item is None or item < len(self.meta(name)))
            if not exists or state_checksum(self._read(name, item)) != checksum:
                names.append(name)
        return list(dict.fromkeys(names))


# ---------------------------------------------------------------------- headers


def _order_in_file(name: str, tensor: torch.Tensor) -> tuple[int, str, str]:
    """The sorting key of a tensor in its file: widest elements first, so that each tensor is aligned."""
    return -tensor.itemsize, _CODES[tensor.dtype], name


def _read_header(path: Path, file: int) -> tuple[dict[str, Any], int]:
    """Read the header of an open file.

    Returns:
        The entry of each tensor by name, and the offset in the file from which ``data_offsets`` count.
    """
    (length,) = _LENGTH.unpack(os.pread(file, _LENGTH.size, 0))
    data_start = _LENGTH.size + length
    size = os.fstat(file).st_size
    if data_start > size:
        raise CalibrationError(f"{path} is cut off", got=f"{size:,} bytes", remedy=_DOWNLOAD_AGAIN)
    header: dict[str, Any] = json.loads(os.pread(file, length, _LENGTH.size))
    header.pop("__metadata__", None)
    return header, data_start


def _checked_meta(name: str, entry: Mapping[str, Any]) -> torch.Tensor:
    """A meta tensor with the shape and dtype of a header's entry.

    A wrong entry raises an error of any class, which the ``naming`` block around the call turns into one of the file.
    """
    shape = entry["shape"]
    start, stop = entry["data_offsets"]
    for number in (start, stop, *shape):
        if not isinstance(number, int):
            raise TypeError(f"{name} has data_offsets {[start, stop]} and shape {shape}")
    meta = torch.empty(shape, dtype=_DTYPES[entry["dtype"]], device="meta")
    if start < 0 or stop - start != meta.nbytes:
        raise ValueError(f"{name} has {stop - start} bytes and shape {shape}")
    return meta


def _refuse_overlaps(path: Path, offsets: Mapping[str, tuple[int, int]]) -> None:
    """Refuse tensors that share bytes of a file; ``offsets``: the first byte of each, and the byte after its last."""
    names = [name for name, (start, stop) in offsets.items() if start < stop]
    names.sort(key=offsets.__getitem__)
    for first, second in pairwise(names):
        _, first_stop = offsets[first]
        second_start, _ = offsets[second]
        if second_start < first_stop:
            raise CalibrationError(
                f"tensors overlap in {path}",
                where=[first, second],
                got=f"bytes {list(offsets[first])} and {list(offsets[second])}",
                expected="bytes of their own for each tensor",
                remedy=_DOWNLOAD_AGAIN,
            )


def _described(tensor: torch.Tensor) -> str:
    """A tensor's dtype and shape, for the error of :meth:`TensorWriter.write`."""
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _row_bytes(tensor: torch.Tensor) -> int:
    """The number of bytes of one row of a tensor."""
    return tensor.nbytes // len(tensor)


# ---------------------------------------------------------------------- several files


def deal_to_files(layout: Mapping[str, torch.Tensor], max_shard_size: int | str, file: str = WEIGHTS_FILE) -> Any:
    """Distribute tensors to files of a limited size, as transformers does.

    The writer of a checkpoint calls this; the command line calls it with no tensors, to check ``max_shard_size``.

    Args:
        layout: a meta tensor for each name, in the order in which tensors are distributed to files.
        max_shard_size: largest size of a file [bytes], or ``"5GB"``; a larger tensor has a file of its own.
        file: name of the file if there is only one.

    Returns:
        huggingface_hub's ``StateDictSplit``.
    """
    pattern = file.replace(".safetensors", "{suffix}.safetensors")
    expected = "a whole number of bytes, or '5GB'"
    if isinstance(max_shard_size, (bool, float)):
        raise CalibrationError("max_shard_size", got=repr(max_shard_size), expected=expected)
    try:
        return split_torch_state_dict_into_shards(dict(layout), filename_pattern=pattern, max_shard_size=max_shard_size)
    except (ValueError, TypeError) as error:
        raise CalibrationError("max_shard_size", got=repr(max_shard_size), expected=expected) from error


def write_index(folder: Path, files: Mapping[str, str], size: int) -> None:
    """Write ``model.safetensors.index.json``, which names the file of each tensor.

    Called where a checkpoint has several files: by :class:`TensorWriter`, and at the end of a calibration layer by
    layer.

    Args:
        folder: the folder of the files.
        files: by a tensor's name, the name of its file.
        size: the bytes of all tensors.
    """
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _read_index(folder: Path) -> dict[str, str]:
    """The name of each tensor's file, by the index in ``folder``; raises for files outside the folder."""
    path = folder / INDEX_FILE
    index = read_json(path, remedy=_DOWNLOAD_AGAIN)
    with naming(path, remedy=_DOWNLOAD_AGAIN):
        file_of = dict(index["weight_map"])
        refuse(
            sorted(str(file) for file in set(file_of.values()) if not _is_name_in_folder(file)),
            f"{path} names files that are not in its folder",
            remedy=_DOWNLOAD_AGAIN,
        )
    return file_of


def _is_name_in_folder(file: str) -> bool:
    """Whether a file's name in an index is a plain name, which cannot lead out of the folder."""
    return file not in ("", ".", "..") and Path(file).name == file


# ---------------------------------------------------------------------- bytes


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU; the tensor must outlive it.

    Not by way of NumPy: FSDP1 cannot free a tensor's memory that NumPy once had.
    """
    size = tensor.numel() * tensor.itemsize
    if size == 0:
        return memoryview(b"")
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def _write_all(file: int, data: memoryview, start: int) -> None:
    """Write all of ``data`` at the offset ``start`` of an open file; the system may take it in several pieces."""
    while data:
        count = os.pwrite(file, data, start)
        data = data[count:]
        start += count


def _read_all(file: int, data: memoryview, start: int) -> None:
    """Fill ``data`` with the bytes at the offset ``start`` of an open file."""
    while data:
        count = os.preadv(file, [data], start)
        if count == 0:
            raise CalibrationError("a safetensors file has become shorter while it was read", remedy=_DOWNLOAD_AGAIN)
        data = data[count:]
        start += count


def give_back_freed() -> None:
    """Let glibc return freed memory to the system.

    Called now and then while tensors are written or searched: between tensors of many sizes glibc keeps most of
    what was freed.
    """
    if sys.platform.startswith("linux"):
        with suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
