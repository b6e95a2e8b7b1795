"""The command line with a model that is offloaded: the checkpoint is that of the model in memory."""

import json
import shlex

import pytest

from tests.support.markdown import blocks, commands, page
from tests.support.offloaded import digests, tokens

PAGE = page("docs/guide/offloaded.md")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "device_map"),
    [
        ("fp8", "disk"),
        (
            "w4a16 group_size=32",
            "{model.embed_tokens:cpu,lm_head:cpu,model.layers.0:disk,model.layers.1:cpu,model.norm:cpu,"
            "model.rotary_emb:cpu}",
        ),
    ],
)
def test_an_offloaded_model_is_calibrated_measured_and_shipped(
    command_line, verified_here, tmp_path, scheme, device_map
):
    where = [f"model.device_map={device_map}", f"model.offload_folder={tmp_path / 'offloaded'}"]
    found = []
    for name, options in (("whole", []), ("offloaded", where)):
        done = command_line(*(f"scheme={scheme}".split()), *options, f"output_dir={name}", f"export.folder={name}/out")
        assert done.returncode == 0, done.stderr
        assert "largest difference of logits 0.0" in done.stdout
        report = json.loads((tmp_path / name / "report.json").read_text())
        found.append((digests(tmp_path / name / "out"), report["metrics"], report["size"]))
    assert found[0] == found[1]


@pytest.mark.slow
def test_observers_of_an_offloaded_model_are_chosen_as_in_memory(command_line, tmp_path):
    where, chosen = ["model.device_map=disk", f"model.offload_folder={tmp_path / 'offloaded'}"], []
    for name, options in (("whole", []), ("offloaded", where)):
        done = command_line("task=observers", "scheme=int8_static", *options, f"output_dir={name}", "export=none")
        assert done.returncode == 0, done.stderr
        chosen.append((tmp_path / name / "configs" / "scheme" / "observers.yaml").read_text().splitlines()[2:])
    assert chosen[0] == chosen[1]


def test_device_map_auto_of_a_model_that_fits_changes_nothing(command_line, tmp_path):
    done = command_line("scheme=fp8_dynamic", "model.device_map=auto", "export=none", "evaluate=false")
    assert done.returncode == 0, done.stderr


def test_the_python_of_the_page_runs(tiny_folder, tmp_path):
    [code] = [block for block in blocks(PAGE, "python") if "device_map" in block]
    given = {"folder": tiny_folder, "offload_folder": tmp_path / "offloaded", "out": tmp_path / "out"}
    exec(compile(code, "docs/guide/offloaded.md", "exec"), {**given, "batches": [{"input_ids": tokens()}]})
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in commands(PAGE) if "device_map" in line])
def test_the_commands_of_the_page_run(command, command_line, verified_here, tiny_folder, tmp_path):
    command = command.replace("model.path=<folder>", f"model.path={tiny_folder}").replace(
        "<folder>", str(tmp_path / "o")
    )
    done = command_line(*shlex.split(command)[3:])
    assert done.returncode == 0, done.stderr
