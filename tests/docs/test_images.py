"""The guide "Images": its files are written, its commands run in its order on less data, and print what it shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tests.support.markdown import page
from tests.support.tutorial import Tutorial

#: where make test installs OpenVINO, apart from the other packages
OPENVINO = Path(sys.prefix) / "openvino"
PAGE = page("docs/guide/images.md")
LESS = {"max_epochs=6": "max_epochs=1", "max_epochs=3": "max_epochs=1"}
LESS |= {
    "            Block(64),\n": "",
    "            Block(128),\n": "",
}  # the time of an export is that of tracing layers
LESS |= {"self.images[:1200], self.labels[:1200]": "self.images[:256], self.labels[:256]"}
TUTORIAL = Tutorial(PAGE, LESS)


@pytest.mark.slow
def test_its_files_and_commands_run_in_order_and_print_what_it_shows(tmp_path, caplog):
    TUTORIAL.run(tmp_path, caplog)
    assert PAGE.count("```text") == len(TUTORIAL.contents("bash")) - 1  # training prints nothing of its own
    images = np.random.default_rng(0).random((7, 1, 16, 16), dtype=np.float32)
    expected = onnxruntime.InferenceSession(tmp_path / "digits.onnx").run(None, {"images": images})[0]
    if OPENVINO.is_dir():
        logits = in_openvino(tmp_path, images)
        assert np.abs(logits - expected).max() < 0.1 * np.abs(expected).max()


def in_openvino(folder, images):
    """What the page's lines for OpenVINO give."""
    (code,) = re.findall(r"^    import openvino\n(?:    .*\n|\n)*", PAGE, flags=re.MULTILINE)
    np.save(folder / "images.npy", images)
    lines = ["import numpy", "images = numpy.load('images.npy')"]
    lines += [line.strip() for line in code.splitlines()]
    lines += ["numpy.save('logits.npy', logits)"]
    environment = {**os.environ, "PYTHONPATH": str(OPENVINO)}
    script = [sys.executable, "-W", "ignore", "-c", "\n".join(lines)]
    done = subprocess.run(
        script, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return np.load(folder / "logits.npy")


def test_no_file_of_it_is_left_unrun():
    assert not TUTORIAL.files_left_unrun()
