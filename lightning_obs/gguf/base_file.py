"""The GGUF file that a model's weights are written into: its header, its tensors, and which of them is which module's.

The names are those of llama.cpp's converter, by the tables of the package ``gguf``. The converter also reorders rows of
q and k, for architectures whose rotary embedding is computed in pairs of neighbours there (Llama, Mistral) and in two
halves by transformers. The order of a file is found by comparison: the file holds the model in float, so its rows are
the model's in one of the two orders. Rows that fit neither order are of another model.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lightning_obs.errors import CalibrationError
from lightning_obs.files.read import naming
from lightning_obs.model.conversions import names_in_files

_EXPECTED = "a GGUF file of the same model in float16, bfloat16 or float32"
_CONVERT = "python convert_hf_to_gguf.py <the model's folder> --outtype f16 --outfile base.gguf (of llama.cpp)"
#: an expert's number in a name: the experts of a layer are one tensor
_EXPERT = re.compile(r"(?<=\.experts)\.\d+(?=\.)")


class BaseFile:
    """The GGUF file in float whose weights an export replaces (the "base"); :func:`.check_files` opens it.

    Args:
        file: the path of the file.

    Attributes:
        path: the path of the file.
        tensors: ``gguf``'s reader of each tensor, by the tensor's name.

    Raises:
        CalibrationError: the file cannot be read; it is one of several parts, in another byte order, or of an
            architecture that the installed ``gguf`` does not know.
    """

    def __init__(self, file: Path) -> None:
        import gguf

        self.path = file
        if not file.is_file():
            raise CalibrationError(f"{file} does not exist", expected=_EXPECTED, remedy=_CONVERT)
        with naming(file, expected=_EXPECTED, remedy=_CONVERT):
            self._reader = gguf.GGUFReader(file)
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if self._reader.byte_order != "I":
            raise CalibrationError(f"{file} has another byte order than this machine", remedy="convert it here.")
        if int(self._value("split.count", 1)) > 1:
            raise CalibrationError(
                f"{file} is one of several parts", remedy="join them: llama-gguf-split --merge (of llama.cpp)."
            )
        if not self.tensors:
            raise CalibrationError(f"{file} holds no tensors", expected=_EXPECTED, remedy=_CONVERT)
        self._architecture = str(self._value("general.architecture", ""))
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        number = numbers.get(self._architecture)
        if number is None:
            raise CalibrationError(
                f"{file}: the installed package gguf has no names for its architecture",
                got=repr(self._architecture),
                remedy="pip install -U gguf",
            )
        blocks = int(self._value(f"{self._architecture}.block_count", 0))
        self._names = gguf.get_tensor_name_map(number, blocks)

    def _value(self, key: str, default: Any) -> Any:
        """The value of a key of the metadata; ``default`` if the file does not have the key."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    # ------------------------------------------------------------------ tensors of modules

    def names_of(self, model: nn.Module, module_names: Sequence[str]) -> dict[str, str]:
        """Return the name of the tensor that holds each module's weight in this file, by module name.

        ``gguf_file.py`` calls it for the calibrated modules and for embeddings. The experts of a layer share a tensor.

        Args:
            model: a model of transformers.
            module_names: names of modules in ``model``. A module that has no tensor in this file is left out of the
                result.
        """
        names = {}
        for module_name, file_name in names_in_files(model, module_names).items():
            joined = _EXPERT.sub("", file_name)
            # gguf's tables may have a name without the prefix of a model's language part, or with "model." before it
            for candidate in (joined, joined.replace("language_model.", ""), f"model.{joined}"):
                tensor = self._names.get_name(f"{candidate}.weight", try_suffixes=(".weight",))
                if tensor in self.tensors:
                    names[module_name] = tensor
                    break
        return names

    def row_order(
        self, name: str, weight: torch.Tensor, values: torch.Tensor | None = None
    ) -> NDArray[np.int64] | None:
        """Return the order in which a tensor of this file has the rows of a module's weight.

        ``gguf_file.py`` calls it for each calibrated module, and reorders the new data by the result. It also calls it
        for each embedding, to refuse a base that holds another one.

        Args:
            name: the name of the tensor.
            weight: the matrix ``(R, C)`` in the model.
            values: one expert's matrix ``(R, C)``, if the tensor holds several experts; None: the whole tensor.

        Returns:
            ``(R,)``, the numbers of the model's rows in the order of the file; None: the tensor holds another weight.
        """
        if values is None:
            values = self.values(name)
        orders = [np.arange(len(weight))]
        heads = self._rotated_heads(name)
        if heads and len(weight) % (2 * heads) == 0:
            orders.append(_pairs_of_neighbours(len(weight), heads))
        dtype = self._dtype(name)
        for order in orders:
            reordered = weight[torch.from_numpy(order)]
            if _is_rounded(reordered, values, dtype):
                return order
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in torch's order of dimensions: experts (of a layer's tensor), rows, columns.

        ``gguf_file.py`` compares it with the shapes of the model's weights.
        """
        sizes = self.tensors[name].shape
        return tuple(int(size) for size in reversed(sizes))

    def values(self, name: str) -> torch.Tensor:
        """Return a tensor of this file in float32, to compare it with the model's weights.

        Raises:
            CalibrationError: ``gguf`` cannot read the type of the tensor.
        """
        import gguf

        tensor = self.tensors[name]
        with naming(f"{self.path}: {name}", expected=_EXPECTED, remedy=_CONVERT):
            dequantized = gguf.dequantize(tensor.data, tensor.tensor_type)
        values = np.array(dequantized, dtype=np.float32)
        return torch.from_numpy(values)

    def _dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a tensor in torch; None: it is quantized."""
        dtypes = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
        tensor = self.tensors[name]
        return dtypes.get(tensor.tensor_type.name)

    def _rotated_heads(self, name: str) -> int:
        """How many heads a tensor of q or k has; 0: it is another tensor."""
        keys = {"attn_q": "head_count", "attn_k": "head_count_kv"}
        place = name.removeprefix("blk.").removesuffix(".weight")
        block, _, role = place.partition(".")
        if role not in keys:
            return 0
        prefix = f"{self._architecture}.attention"
        count = self._value(f"{prefix}.{keys[role]}", None)
        if count is None:  # without a number of its own k has as many as q
            count = self._value(f"{prefix}.head_count", 0)
        if isinstance(count, list):  # a number for each block
            count = count[int(block)]
        return int(count)

    # ------------------------------------------------------------------ bytes

    def write(
        self, file: Path, types: Mapping[str, int], numbers: Mapping[str, int], data: Callable[[str], bytes]
    ) -> None:
        """Write a copy of this file with other data for some tensors, one tensor at a time.

        ``export_gguf`` calls it last. Names, order and shapes of the tensors stay the same. The metadata stay the same
        byte for byte, except ``numbers``.

        Args:
            file: path of the file to write.
            types: the ``gguf.GGMLQuantizationType`` of each tensor with other data, by the tensor's name.
            numbers: new values of metadata by their keys, written as unsigned 32-bit integers whatever type the old
                value has; absent keys are added.
            data: ``data(name)`` returns the bytes of a tensor in ``types``.
        """
        import gguf

        metadata, added = self._metadata(numbers)
        version = self._value("GGUF.version", gguf.GGUF_VERSION)
        kept = int(self._value("GGUF.kv_count", 0))
        header = struct.pack("<IIQQ", gguf.GGUF_MAGIC, version, len(self.tensors), kept + added)
        table = self._table(types)
        with file.open("wb") as output:
            output.write(header + metadata + table)
            for name, tensor in self.tensors.items():
                self._pad(output)
                if name in types:
                    output.write(data(name))
                else:
                    stop = tensor.data_offset + tensor.n_bytes
                    output.write(self._reader.data[tensor.data_offset : stop])
            self._pad(output)

    def _table(self, types: Mapping[str, int]) -> bytearray:
        """The table of tensors: name, shape, type and place of each; :meth:`write` calls it with its ``types``."""
        import gguf

        table = bytearray()
        offset = 0
        for name, tensor in self.tensors.items():
            shape = [int(size) for size in tensor.shape]
            kind = types.get(name, int(tensor.tensor_type))
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
            encoded = name.encode()
            table += struct.pack("<Q", len(encoded))
            table += encoded
            table += struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
            blocks = tensor.n_elements // block_size
            offset = self._aligned(offset + blocks * block_bytes)
        return table

    def _pad(self, output: BinaryIO) -> None:
        """Write zeros up to the position where a tensor may begin; :meth:`write` calls it around each tensor."""
        position = output.tell()
        padding = self._aligned(position) - position
        output.write(bytes(padding))

    def _aligned(self, position: int) -> int:
        """The first position at or behind ``position`` where a tensor may begin."""
        alignment = int(self._reader.alignment)
        return -(-position // alignment) * alignment

    def _metadata(self, numbers: Mapping[str, int]) -> tuple[bytes, int]:
        """The bytes of the metadata with other ``numbers``, and how many keys were added; :meth:`write` calls it."""
        import gguf

        # behind the header: magic and version of 4 bytes each, the counts of tensors and of keys of 8 bytes each
        begin = 24
        end = min(tensor.field.offset for tensor in self.tensors.values())
        metadata = bytearray(self._reader.data[begin:end])
        added = 0
        replacements: list[tuple[int, int, bytes]] = []  # place and length of the old entry, and the new entry
        for key, value in numbers.items():
            field = self._reader.get_field(key)
            entry = struct.pack("<Q", len(key)) + key.encode()
            entry += struct.pack("<II", gguf.GGUFValueType.UINT32, value)
            if field is None:
                metadata += entry
                added += 1
            else:
                length = sum(part.nbytes for part in field.parts)
                place = field.offset - begin
                replacements.append((place, length, entry))
        # the last one first: a new entry of another length moves all entries behind it
        for place, length, entry in sorted(replacements, reverse=True):
            metadata[place : place + length] = entry
        return bytes(metadata), added


def _pairs_of_neighbours(rows: int, heads: int) -> NDArray[np.int64]:
    """The rows of q or k, whose rotary embedding pairs the halves of a head, in the order that pairs neighbours.

    >>> _pairs_of_neighbours(8, heads=1).tolist()
    [0, 4, 1, 5, 2, 6, 3, 7]
    """
    halves = np.arange(rows).reshape(heads, 2, -1)
    return halves.swapaxes(1, 2).reshape(-1)


def _is_rounded(weight: torch.Tensor, values: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Whether a weight and the values in a file are the same numbers, up to one rounding.

    Args:
        weight: the weight in the model's dtype.
        values: the values in the file, in float32.
        dtype: the dtype of the values in the file; None: they are quantized, and the model was made of them.
    """
    weight = weight.detach().cpu()
    if dtype is not None and torch.equal(weight.to(dtype).float(), values):
        return True
    return torch.equal(values.to(weight.dtype), weight)
