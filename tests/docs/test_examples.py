"""Every example runs, on a tiny model, under either name of Lightning."""

import re
from pathlib import Path

import pytest

from tests.support.in_process import run_script
from tests.support.lightning_package import under_the_chosen_name
from tests.support.lightning_ranks import run_script_on_ranks
from tests.support.tiny_model import save_tiny_llama

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
EXPECTED = {
    "01_weights_only": "14 modules",
    "02_fp8_in_validate": "largest difference of logits after reloading: 0.0",
    "03_own_module": "largest difference after loading: 0.0",
    "07_fine_tune": "largest difference after loading: 0.0",
    "08_fine_tune_images": "largest difference of logits after loading: 0.0",
    "09_lora": "difference after loading: 0.0",
    "04_own_observer": "two_sigma {'0': '[",
    "05_ddp": "14 modules on 2 ranks in 5 collectives",
    "06_fsdp2": "14 modules on 2 ranks",
    "13_fabric": "largest difference after loading: 0.0",
    "10_bit_budget": "largest difference of logits after loading: 0.0",
    "12_program": "the same answers: True",
    "14_lightning_cli": "",
    "15_packed_lora": "difference after loading: 0.0",
    "11_lm_eval": "accuracy: full precision 0.",
}


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES} == set(EXPECTED)


SMALL = {"--epochs": "8", "--steps": "3", "--tokens": "32", "--bits": "7"}
ON_RANKS = {"05_ddp", "06_fsdp2"}
SLOW = {"08_fine_tune_images", "11_lm_eval"}


def run(example, folder, *arguments):
    text = example.read_text()
    path = folder / example.name
    path.write_text(under_the_chosen_name(text))
    if '"--model"' in text:
        arguments += ("--model", str(save_tiny_llama(folder / "tiny")))
    if '"--out"' in text:
        arguments += ("--out", str(folder / "out"))
    if example.with_suffix(".yaml").exists():
        arguments = ("fit", "--config", str(example.with_suffix(".yaml")))
    if path.stem in ON_RANKS:
        processes = run_script_on_ranks(2, path, *arguments, folder=folder)
    else:
        processes = [run_script(path, *arguments, folder=folder)]
    for done in processes:
        assert done.returncode == 0, done.stderr
    return "".join(done.stdout for done in processes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=[pytest.mark.slow] * (p.stem in SLOW), id=p.stem) for p in EXAMPLES]
)
def test_the_example_runs(path, tmp_path, own_registry):
    small = [word for pair in SMALL.items() if f'"{pair[0]}"' in path.read_text() for word in pair]
    output = run(path, tmp_path, *small)
    assert EXPECTED[path.stem] in output
    if path.stem == "14_lightning_cli":  # it prints nothing, and the YAML names the folder
        assert (tmp_path / "stripes_int8" / "model.safetensors").is_file()
    if path.stem == "08_fine_tune_images":
        fine_tuning_brings_back_most_of_what_calibration_lost(output)


def fine_tuning_brings_back_most_of_what_calibration_lost(output):
    line = next(line for line in output.splitlines() if line.startswith("accuracy on"))
    full, calibrated, tuned, again = (float(number) for number in re.findall(r"[a-z] (\d[.]\d+)", line))
    assert full - calibrated > 0.1
    assert full - tuned < 0.03
    assert again == tuned
