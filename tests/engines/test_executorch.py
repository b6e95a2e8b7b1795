"""ExecuTorch with XNNPACK on programs of export_program, in an environment of its own (`make executorch`)."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("EXECUTORCH_PYTHON", ROOT / ".venv-executorch" / "bin" / "python"))
SCRIPT = ROOT / "benchmarks" / "engines" / "executorch_xnnpack.py"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON.exists(), reason="make executorch installs ExecuTorch in .venv-executorch"),
]


def test_xnnpack_takes_each_net_as_one_delegate_and_gives_the_answers_of_quantized():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [str(PYTHON), "-W", "ignore", str(SCRIPT), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    names = ["residual net", "vision transformer", "language model", "language model with biases"]
    assert [result["model"] for result in results] == names
    for result in results:
        assert result["delegates"] == 1
        assert result["operations outside"] == result["model"].startswith("language model")  # the embedding
        assert result["other answers of ExecuTorch"] <= 0.01
        assert result["other answers of the program"] <= 0.001
        assert result["bytes"] < 0.5 * result["bytes of float"]
        assert result["ms"] < result["ms of float"]
