"""``model=timm``, with the packages timm and torchvision in a folder of their own.

torchvision's wheels are built for torch with CUDA: on a machine without it, importing them fails, and other packages
import torchvision as soon as they find it. So the two lie in ``<environment>/timm``, which only the processes of this
file see. Of torchvision's operators, which cannot be loaded here, timm's models use none.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_digits

TIMM = Path(sys.prefix) / "timm"

pytestmark = pytest.mark.skipif(not TIMM.is_dir(), reason="make test installs timm and torchvision in .venv/timm")

# What torchvision's Python files declare a fake for even where its operators cannot be loaded.
LAUNCH = """
import runpy, sys
import torch
folder = sys.argv.pop(1)
sys.path.append(folder)
try:
    torch.ops.load_library(folder + "/torchvision/_C.so")
except OSError:
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
RUN = LAUNCH + 'runpy.run_module("lightning_obs", run_name="__main__", alter_sys=True)'
MODEL = "test_efficientnet"
SAVE = f"""{LAUNCH}
import timm
torch.manual_seed(0)
torch.save(timm.create_model("{MODEL}", num_classes=10).state_dict(), sys.argv[1])
"""


def in_a_process(code, *arguments, folder):
    command = [sys.executable, "-W", "ignore", "-c", code, str(TIMM), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "weights.pth"
    done = in_a_process(SAVE, path, folder=path.parent)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Four scanned digits of each class, one folder for each."""
    folder = tmp_path_factory.mktemp("digits")
    found = load_digits()
    for i, (pixels, target) in enumerate(zip(found.images[:40], found.target[:40], strict=True)):
        (folder / str(target)).mkdir(exist_ok=True)
        Image.fromarray((pixels * 15).astype("uint8")).convert("RGB").save(folder / str(target) / f"{i}.png")
    return folder


def calibrate(weights, images, folder, *overrides):
    return in_a_process(
        RUN,
        *("model=timm", f"model.name={MODEL}", f"model.path={weights}", "model.num_classes=10", f"data.path={images}"),
        *("data.batches=2", "data.eval_batches=2", "trainer=cpu", "trainer.enable_progress_bar=false"),
        *(f"output_dir={folder / 'run'}", *overrides),
        folder=folder,
    )


@pytest.mark.slow
def test_convolutions_are_calibrated_exported_and_loaded_again(weights, digits, tmp_path):
    done = calibrate(weights, digits, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stdout
    assert "loaded by load_checkpoint into a new model: largest difference of outputs 0.0" in done.stdout
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    before, after = report["accuracy"]
    assert re.search(r"accuracy [01]\.\d+ -> [01]\.\d+", done.stdout)
    checkpoint = tmp_path / "run" / "checkpoint"
    assert sum(path.stat().st_size for path in checkpoint.iterdir()) < 0.5 * weights.stat().st_size
    again = calibrate(checkpoint, digits, tmp_path, "task=evaluate")
    assert again.returncode == 0, again.stderr
    found = json.loads((tmp_path / "run" / "report.json").read_text())
    assert found["accuracy"] == [None, after]
    assert 0 <= before <= 1


@pytest.mark.slow
def test_images_in_folders_that_are_no_classes_have_no_labels(weights, digits, tmp_path):
    done = calibrate(weights, digits.parent, tmp_path, "export=none", f"data.path={digits / '0'}", "data.batch_size=1")
    assert done.returncode == 0, done.stderr
    assert "images without labels: 1/1 folders to calibrate/measure on, 10 classes" in done.stdout
    assert re.search(r"similarity 1\.000 -> 0\.9\d+", done.stdout)


def test_without_timm_the_error_says_what_to_install(command_line):
    done = command_line("model=timm", "model.name=resnet18", "data.path=.", "trainer=cpu", tiny=False)
    assert done.returncode == 1
    assert "model=timm needs the package timm" in done.stderr
    assert "pip install timm" in done.stderr


@pytest.mark.slow
def test_a_folder_without_images_is_named(weights, tmp_path):
    (tmp_path / "empty").mkdir()
    done = calibrate(weights, "empty", tmp_path)
    assert done.returncode == 1
    assert "data.path=empty holds no images" in done.stderr
    assert "Traceback" not in done.stderr
