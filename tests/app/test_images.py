"""``model=timm``, with the packages timm and torchvision in a folder of their own.

torchvision's wheels are built for torch with CUDA: on a machine without it, importing them fails, and other packages
import torchvision as soon as they find it. So the two lie in ``<environment>/timm``, which only the processes of this
file see. Of torchvision's operators, which cannot be loaded here, timm's models use none.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.support.in_process import Done

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
MODEL = "test_efficientnet"
#: saves weights, then runs each command line, all in one process; prints what each printed
RUN = f"""{LAUNCH}
import json, timm
from pathlib import Path
from tests.support.in_process import run_command_line

weights, runs = sys.argv[1:]
torch.manual_seed(0)
torch.save(timm.create_model("{MODEL}", num_classes=10).state_dict(), weights)
done = {{name: vars(run_command_line(*words, folder=Path.cwd())) for name, words in json.loads(runs).items()}}
print(json.dumps(done))
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Four scanned digits of each class, one folder for each."""
    folder = tmp_path_factory.mktemp("digits")
    found = load_digits()
    for i, (pixels, target) in enumerate(zip(found.images[:40], found.target[:40], strict=True)):
        (folder / str(target)).mkdir(exist_ok=True)
        Image.fromarray((pixels * 15).astype("uint8")).convert("RGB").save(folder / str(target) / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def runs(digits, folder):
    """What four runs returned and printed."""
    (folder / "empty").mkdir()
    weights = folder / "weights.pth"
    common = [
        *("model=timm", f"model.name={MODEL}", f"model.path={weights}", "model.num_classes=10", f"data.path={digits}"),
        *("data.batches=2", "data.eval_batches=2", "trainer=cpu", "trainer.enable_progress_bar=false"),
    ]
    lines = {
        "whole": ["output_dir=whole"],
        "again": ["output_dir=again", "task=evaluate", "model.path=whole/checkpoint"],
        "no classes": ["output_dir=none", "export=none", f"data.path={digits / '0'}", "data.batch_size=1"],
        "empty": ["output_dir=empty_run", "data.path=empty"],
    }
    given = json.dumps({name: [*common, *words] for name, words in lines.items()})
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(TIMM), str(weights), given]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return {name: Done(**found) for name, found in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.slow
def test_convolutions_are_calibrated_exported_and_loaded_again(runs, folder):
    done, again = runs["whole"], runs["again"]
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stdout
    assert "loaded by load_checkpoint into a new model: largest difference of outputs 0.0" in done.stdout
    before, after = json.loads((folder / "whole" / "report.json").read_text())["accuracy"]
    assert re.search(r"accuracy [01]\.\d+ -> [01]\.\d+", done.stdout)
    checkpoint = folder / "whole" / "checkpoint"
    assert sum(path.stat().st_size for path in checkpoint.iterdir()) < 0.5 * (folder / "weights.pth").stat().st_size
    assert again.returncode == 0, again.stderr
    assert json.loads((folder / "again" / "report.json").read_text())["accuracy"] == [None, after]
    assert 0 <= before <= 1


@pytest.mark.slow
def test_images_in_folders_that_are_no_classes_have_no_labels(runs):
    done = runs["no classes"]
    assert done.returncode == 0, done.stderr
    assert "images without labels: 1/1 folders to calibrate/measure on, 10 classes" in done.stdout
    assert re.search(r"similarity 1\.000 -> 0\.9\d+", done.stdout)


@pytest.mark.slow
def test_a_folder_without_images_is_named(runs):
    assert runs["empty"].returncode == 1
    assert "data.path=empty holds no images" in runs["empty"].stderr
    assert "Traceback" not in runs["empty"].stderr


def test_without_timm_the_error_says_what_to_install(command_line):
    done = command_line("model=timm", "model.name=resnet18", "data.path=.", "trainer=cpu", tiny=False)
    assert done.returncode == 1
    assert "model=timm needs the package timm" in done.stderr
    assert "pip install timm" in done.stderr
