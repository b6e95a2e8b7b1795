"""Safetensors files that are written and read by position."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_obs import CalibrationError
from lightning_obs.files.tensors import INDEX_FILE, WEIGHTS_FILE, TensorReader, TensorWriter

TENSORS = {
    "a.weight": torch.randn(5, 3).bfloat16(),
    "a.scale": torch.randn(5, 1),
    "b": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "c": torch.arange(7),
    "empty": torch.zeros(0, 3),
    "number": torch.tensor(2.0),
    "true": torch.tensor([True, False, True]),
    "ü": torch.arange(6, dtype=torch.int8).view(2, 3),
}


def written(folder, tensors=TENSORS, max_shard_size="5GB"):
    layout = {name: value.to("meta") for name, value in tensors.items()}
    writer = TensorWriter(folder, layout, max_shard_size)
    for name in reversed(tensors):  # the order does not matter
        writer.write(name, tensors[name])
    writer.require_complete()
    writer.close()
    return folder


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert found[name].reshape(-1).view(torch.uint8).equal(value.reshape(-1).view(torch.uint8))


def test_safetensors_reads_what_was_written(tmp_path):
    same(load_file(written(tmp_path) / WEIGHTS_FILE), TENSORS)


def test_what_safetensors_wrote_is_read(tmp_path):
    save_file(TENSORS, tmp_path / WEIGHTS_FILE)
    reader = TensorReader(tmp_path)
    same({name: reader.read(name) for name in reader}, TENSORS)
    assert reader.read("a.weight", 3).equal(TENSORS["a.weight"][3:4])
    reader.close()


def test_shards_have_an_index_that_is_followed(tmp_path):
    written(tmp_path, max_shard_size=40)
    files = json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]
    assert len(set(files.values())) > 2
    same({name: value for file in set(files.values()) for name, value in load_file(tmp_path / file).items()}, TENSORS)
    reader = TensorReader(tmp_path)
    same({name: reader.read(name) for name in reader}, TENSORS)
    reader.close()


def test_rows_are_written_in_any_order(tmp_path):
    x = torch.randn(10, 3)
    writer = TensorWriter(tmp_path, {"x": x.to("meta")}, "1GB")
    for first in (6, 0, 3, 9):
        writer.write("x", x[first : first + 3], first)
    writer.require_complete()
    writer.close()
    same(load_file(tmp_path / WEIGHTS_FILE), {"x": x})


def test_what_is_not_in_the_header_is_refused(tmp_path):
    writer = TensorWriter(tmp_path, {"x": torch.empty(4, 3, device="meta")}, "1GB")
    with pytest.raises(CalibrationError, match=r"differs from its header: x. Got torch.float32 \(5, 3\)"):
        writer.write("x", torch.zeros(5, 3))
    writer.write("x", torch.zeros(3, 3))
    with pytest.raises(CalibrationError, match="were not written: x"):
        writer.require_complete()
    writer.close()


@pytest.mark.parametrize("size", ["5 elephants", "much", None])
def test_a_size_that_is_none_is_refused(tmp_path, size):
    with pytest.raises(CalibrationError, match=r"max_shard_size. Got .*expected a whole number of bytes"):
        TensorWriter(tmp_path, {"x": torch.empty(4, 3, device="meta")}, size)


def cut(folder):
    path = next(folder.glob("*-00002-*"))
    path.write_bytes(path.read_bytes()[:-1])


def change_index(change):
    def changed(folder):
        path = folder / INDEX_FILE
        path.write_text(change(path.read_text()))

    return changed


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: next(folder.glob("*-00002-*")).unlink(), "00002-of-.* is missing"),
        (cut, "00002-of-.* is cut off. Got .* bytes"),
        (change_index(lambda text: text.replace('"number"', '"c"')), "disagree on its tensors"),
        (
            change_index(lambda text: text.replace("model-00001", "../model-00001")),
            "not in its folder: ..",
        ),
        (change_index(lambda text: text.replace('"number"', '"other"')), "disagree on its tensors: number, other"),
        (change_index(lambda text: text[:50]), "index.json cannot be read"),
        (change_index(lambda text: text.replace("weight_map", "map")), "index.json cannot be read"),
        (lambda folder: next(folder.glob("*-00001-*")).write_bytes(b"abc"), "00001-of-.* cannot be read"),
        (lambda folder: next(folder.glob("*-00001-*")).write_bytes(b"\xff" * 64), "00001-of-.* is cut off"),
    ],
)
def test_a_damaged_folder_is_named(tmp_path, damage, message):
    written(tmp_path, max_shard_size=40)
    damage(tmp_path)
    with pytest.raises(CalibrationError, match=message):
        TensorReader(tmp_path)


def change_header(change):
    def changed(folder):
        path = next(folder.glob("*-00001-*"))
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        names = [name for name in header if name != "__metadata__"]
        change(header, *names[:2])
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return changed


def lay_over(header, first, second):
    start, stop = header[first]["data_offsets"]
    assert stop - start >= 2
    header[second] |= {"dtype": "I8", "shape": [1], "data_offsets": [stop - 1, stop]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header, name, _: header[name].update(data_offsets=[0.0, 8.0]), r"data_offsets \[0.0, 8.0\]"),
        (lambda header, name, _: header[name].update(shape=[1.5]), r"shape \[1.5\]"),
        (lambda header, name, _: header[name].update(data_offsets=["0", "8"]), r"data_offsets \['0', '8'\]"),
        (lay_over, r"tensors overlap in .*safetensors: .*Got bytes .*expected bytes of their own"),
    ],
)
def test_a_header_that_no_writer_writes_is_named(tmp_path, change, message):
    written(tmp_path, max_shard_size=60)
    change_header(change)(tmp_path)
    with pytest.raises(CalibrationError, match=message):
        TensorReader(tmp_path)


def test_a_folder_without_safetensors_is_named(tmp_path):
    with pytest.raises(CalibrationError, match=r"model.safetensors is missing"):
        TensorReader(tmp_path)
