"""Files appear whole under their name; what killed writers left is put back or removed, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_obs.errors import CalibrationError
from lightning_obs.files.write import (
    CONTENTS_FILE,
    Staging,
    clean_up_after_killed_writers,
    require_free,
    require_new_file,
    whole_file,
    write_contents,
    write_text,
)


def hidden(folder):
    return [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_planted_link_is_not_followed(tmp_path):
    (victim := tmp_path / "victim").write_text("precious")
    for name in ("report.html", ".report.html.partial"):
        (tmp_path / name).symlink_to(victim)
    write_text(tmp_path / "report.html", "page")
    assert victim.read_text() == "precious"
    assert (tmp_path / "report.html").read_text() == "page"
    assert not (tmp_path / "report.html").is_symlink()


def test_what_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    write_text(tmp_path / "a", "old")
    with pytest.raises(ZeroDivisionError), whole_file(tmp_path / "a") as partial:
        partial.write_bytes(b"half" * (1 // partial.write_bytes(b"")))
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_that_appears_meanwhile_is_not_replaced_unasked(tmp_path, monkeypatch):
    for can_link in (True, False):
        with pytest.raises(CalibrationError, match="a is already there"), whole_file(tmp_path / "a", False) as partial:
            partial.write_text((tmp_path / "a").write_text("theirs") * "o")
        assert (tmp_path / "a").read_text() == "theirs"
        (tmp_path / "a").unlink()
        with whole_file(tmp_path / "a", overwrite=False) as partial:
            partial.write_text("ours")
        assert (tmp_path / "a").read_text() == "ours"
        (tmp_path / "a").unlink()
        if can_link:
            monkeypatch.setattr(os, "link", no_links)
    assert not os.listdir(tmp_path)


def no_links(one, other):
    if os.path.lexists(other):
        raise FileExistsError(17, "File exists")
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("name", ["file/report.html", "a\0b", "folder", "n" * 300, "a\udfff"])
def test_a_name_that_cannot_be_written_is_named(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CalibrationError, match="cannot be written"):
        write_text(tmp_path / name, "text")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc is a place that nobody can write to")
@pytest.mark.parametrize("require", [require_free, require_new_file])
@pytest.mark.parametrize("path", ["/proc/out", "/proc/absent/out"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_made(require, path):
    with pytest.raises(CalibrationError, match=f"{path} cannot be written"):
        require(Path(path), overwrite=False)


@pytest.mark.parametrize("require", [require_free, require_new_file])
def test_a_place_that_can_be_written_is_left_as_it_is(require, tmp_path):
    require(tmp_path / "absent" / "out", overwrite=False)
    assert not list(tmp_path.iterdir())


def test_missing_parents_are_made_and_lone_surrogates_escaped(tmp_path):
    write_text(tmp_path / "a" / "b" / "c.txt", "layer\ud800")
    assert (tmp_path / "a" / "b" / "c.txt").read_text() == r"layer\ud800"


def killed(folder, *lines):
    """Run lines in a process that is then killed, with a writer of the name `out` in hand."""
    code = [
        "import os; from pathlib import Path; from lightning_obs.files.write import Staging",
        f"writer = Staging(Path({str(folder / 'out')!r}))",
        *lines,
        "os.kill(os.getpid(), 9)",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(code)], check=False, timeout=60)


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    killed(tmp_path, "writer.partial.write_text('half')")
    assert len(hidden(tmp_path)) == 1
    alive = Staging(tmp_path / "other")
    alive.partial.write_text("going on")
    clean_up_after_killed_writers(tmp_path)
    assert hidden(tmp_path) == [alive.partial.parent.parent]
    alive.replace_file(overwrite=True)
    alive.close()
    assert os.listdir(tmp_path) == ["other"]


HIDDEN = "writer.partial.parent.parent"
TAKE = [f"({HIDDEN} / 'replaced').mkdir()", f"os.rename(writer.target, {HIDDEN} / 'replaced' / 'out')"]


def export(folder):
    folder.mkdir()
    (folder / "model").write_text("weights")
    write_contents(folder)
    return folder


def test_what_a_killed_writer_took_is_put_back(tmp_path):
    export(tmp_path / "out")
    killed(tmp_path, *TAKE)
    assert len(hidden(tmp_path)) == len(os.listdir(tmp_path)) == 1
    clean_up_after_killed_writers(tmp_path)
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out" / "model").read_text() == "weights"


def test_what_a_killed_writer_took_is_deleted_where_another_has_written_the_name_since(tmp_path):
    out = export(tmp_path / "out")
    killed(tmp_path, *TAKE)
    export(out)
    (out / "model").write_text("new")
    clean_up_after_killed_writers(tmp_path)
    assert os.listdir(tmp_path) == ["out"]
    assert (out / "model").read_text() == "new"


def test_folders_of_that_name_that_are_links_or_somebody_elses_stay(tmp_path, monkeypatch):
    (victim := tmp_path / "victim").mkdir()
    (victim / "precious").write_text("")
    (tmp_path / ".lightning_obs.a.partial").symlink_to(victim)
    clean_up_after_killed_writers(tmp_path)
    (tmp_path / ".lightning_obs.b.partial").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    clean_up_after_killed_writers(tmp_path)
    assert len(hidden(tmp_path)) == 2
    assert os.listdir(victim) == ["precious"]


def test_the_list_of_files_is_not_part_of_itself(tmp_path):
    assert CONTENTS_FILE not in Path(export(tmp_path / "out") / CONTENTS_FILE).read_text()
