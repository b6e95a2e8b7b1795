"""A checkpoint appears whole or not at all, and nothing that is no checkpoint is deleted for it."""

import errno
import os
import shutil
from contextlib import suppress

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_obs import CalibrationError, CalibrationSession, export_checkpoint, load_checkpoint


class Meanwhile:
    """A tokenizer whose saving is the moment when something else happens."""

    def __init__(self, happens=lambda: None):
        self.happens = happens

    def save_pretrained(self, folder):
        with open(f"{folder}/vocabulary.txt", "w") as file:
            file.write("a b c")
        self.happens()


@pytest.fixture
def model():
    model = nn.Sequential(nn.Linear(4, 4))
    with CalibrationSession(model, "W8A8"):
        pass
    return model


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def loads(folder):
    return load_checkpoint(nn.Sequential(nn.Linear(4, 4)), folder) is not None


@pytest.mark.parametrize("name", ["train.py", "sub/notes.txt", "config.json", "model.safetensors"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a checkpoint"])
def test_what_no_export_wrote_is_never_deleted(model, tmp_path, name, beside):
    out = tmp_path / "out"
    if beside:
        export_checkpoint(model, out)
        name = f"my_{name}"
    (out / name).parent.mkdir(exist_ok=True, parents=True)
    (out / name).write_text("precious")
    before = names(out)
    with pytest.raises(CalibrationError, match=rf"overwrite=True would delete them: .*{name}"):
        export_checkpoint(model, out, overwrite=True)
    assert names(out) == before
    assert (out / name).read_text() == "precious"
    assert names(tmp_path) == sorted(["out", *(f"out/{name}" for name in before)])


def test_what_is_added_while_it_works_is_not_deleted(model, tmp_path):
    out = export_checkpoint(model, tmp_path / "out")
    with pytest.raises(CalibrationError, match=r"would delete them: mine\.txt"):
        export_checkpoint(
            model, out, overwrite=True, tokenizer=Meanwhile(lambda: (out / "mine.txt").write_text("precious"))
        )
    assert (out / "mine.txt").read_text() == "precious"
    assert loads(out)
    assert os.listdir(tmp_path) == ["out"]


def test_a_checkpoint_is_replaced_whole_with_what_belongs_to_it(model, tmp_path):
    out = export_checkpoint(model, tmp_path / "out", tokenizer=Meanwhile())
    assert "vocabulary.txt" in names(out)
    export_checkpoint(model, out, overwrite=True)
    assert "vocabulary.txt" not in names(out)
    assert loads(out)
    assert os.listdir(tmp_path) == ["out"]


def test_a_model_that_the_user_saved_over_an_export_is_not_replaced(model, tmp_path):
    out = export_checkpoint(model, tmp_path / "out")
    save_file({"weight": torch.ones(4, 4)}, out / "model.safetensors")
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(CalibrationError, match=r"would delete them: model\.safetensors \(changed since\)"):
        export_checkpoint(model, out, overwrite=True)
    assert (out / "model.safetensors").read_bytes() == before
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_file_any_more_is_not_ours(model, tmp_path, kind):
    out = export_checkpoint(model, tmp_path / "out")
    (out / "config.json").unlink()
    (out / "config.json").symlink_to("nowhere") if kind == "link" else os.mkfifo(out / "config.json")
    with pytest.raises(CalibrationError, match=r"would delete them: config\.json"):
        export_checkpoint(model, out, overwrite=True)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_decides_who_may_read(model, tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        out = export_checkpoint(model, tmp_path / "out", tokenizer=Meanwhile())
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in out.iterdir()} == dict.fromkeys(names(out), mode)
    assert out.stat().st_mode & 0o777 == 0o777 & ~mask


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_not_replaced_by_a_folder(model, tmp_path, overwrite):
    (tmp_path / "out").write_text("precious")
    with pytest.raises(CalibrationError, match="out is already there, and is not a folder"):
        export_checkpoint(model, tmp_path / "out", overwrite=overwrite)
    assert (tmp_path / "out").read_text() == "precious"


@pytest.mark.parametrize("kind", ["checkpoint", "file"])
def test_what_appears_under_the_name_meanwhile_stays(model, tmp_path, kind):
    out = tmp_path / "out"
    appears = {"checkpoint": lambda: export_checkpoint(model, out), "file": lambda: out.write_text("precious")}[kind]
    with pytest.raises(CalibrationError, match="out is already there"):
        export_checkpoint(model, out, tokenizer=Meanwhile(appears))
    assert loads(out) if kind == "checkpoint" else out.read_text() == "precious"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("existing", [False, True])
def test_a_symlink_stays_one(model, tmp_path, existing):
    if existing:
        export_checkpoint(model, tmp_path / "disk" / "run")
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "run")
    export_checkpoint(model, tmp_path / "out", overwrite=existing, tokenizer=Meanwhile())
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "run" / "vocabulary.txt").is_file()
    assert loads(tmp_path / "out")


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        (".", "is the working folder"),
        ("..", "is the working folder"),
        ("/dev", "is a mount point"),
        ("/proc/out", "cannot be written"),
        ("file/out", "cannot be written"),
        ("n" * 256, "cannot be written. Got .*name too long"),
        ("a\0b", "cannot be written. Got .*a path cannot hold a NUL"),
        ("a\ud800b", r"a\\ud800b cannot be written. Got .*surrogates not allowed"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_place_that_cannot_take_it_is_named_before_the_work(model, tmp_path, monkeypatch, folder, message, overwrite):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "file").write_text("")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr("lightning_obs.checkpoint.export.store", None)
    with pytest.raises(CalibrationError, match=message):
        export_checkpoint(model, folder, overwrite=overwrite)
    assert names(tmp_path) == ["work", "work/file"]


def test_a_name_as_long_as_names_can_be(model, tmp_path):
    assert loads(export_checkpoint(model, tmp_path / ("n" * 255)))


def test_a_disk_without_room_is_named_before_anything_is_written(model, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    monkeypatch.setattr("lightning_obs.checkpoint.export.TensorWriter", None)
    with pytest.raises(CalibrationError, match=r"out cannot be written. Got .*10 bytes are free"):
        export_checkpoint(model, tmp_path / "out")
    assert not names(tmp_path)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")], ids=str)
@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("can_exchange", [True, False])
def test_whatever_ends_it_at_a_rename_one_whole_checkpoint_is_there(
    model, tmp_path, monkeypatch, error, at, after, can_exchange
):
    out = export_checkpoint(model, tmp_path / "out")
    calls, rename = [], os.rename

    def interrupted(*paths):
        calls.append(paths)
        if len(calls) != at:
            return rename(*paths)
        if after:
            rename(*paths)
        raise error

    monkeypatch.setattr(os, "rename", interrupted)
    if not can_exchange:
        monkeypatch.setattr("lightning_obs.files.write._exchange", lambda one, other: False)
    with suppress(KeyboardInterrupt, CalibrationError):
        export_checkpoint(model, out, overwrite=True)
    assert loads(out)
    assert os.listdir(tmp_path) == ["out"]


def test_an_interrupt_while_the_replaced_one_is_deleted_leaves_nothing(model, tmp_path, monkeypatch):
    out = export_checkpoint(model, tmp_path / "out")
    delete, calls = shutil.rmtree, []

    def interrupted(path, **options):
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        delete(path, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(model, out, overwrite=True)
    assert loads(out)
    assert os.listdir(tmp_path) == ["out"]
