"""llama.cpp itself: its converter's files are bases, and it computes what the quantized model does.

`make .venv-llama-cpp/.installed` builds it; without that these tests are skipped.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_obs import export_gguf, linearize_experts
from lightning_obs.app.models.pretrained import load_pretrained
from lightning_obs.model.module_qparams import calibrated_modules
from tests.gguf.test_gguf_file import calibrate, read, weights_of
from tests.support.gguf_base import ARCHITECTURES, default_base, gguf_weights, tiny
from tests.support.tiny_model import tiny_tokenizer

ROOT = Path(__file__).parents[2]
LLAMA_CPP = Path(os.environ.get("LLAMA_CPP", ROOT / ".venv-llama-cpp" / "llama.cpp"))
PERPLEXITY = LLAMA_CPP / "build" / "bin" / "llama-perplexity"
CHUNKS = 2
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PERPLEXITY.exists(), reason="llama.cpp is not built: make .venv-llama-cpp/.installed"),
]


def converted(*folders):
    """The GGUF files that llama.cpp's converter writes of folders of tiny models."""
    paths = [LLAMA_CPP / "gguf-py", LLAMA_CPP / "packages", LLAMA_CPP]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    script = ROOT / "tests" / "support" / "llama_cpp_converter.py"
    done = subprocess.run([sys.executable, script, *folders], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [folder.with_name(f"{folder.name}.gguf") for folder in folders]


def test_files_of_its_converter_are_bases_of_every_architecture(tmp_path):
    folders = []
    for kind in ARCHITECTURES:
        tiny(kind).save_pretrained(tmp_path / kind)
        tiny_tokenizer().save_pretrained(tmp_path / kind)
        folders.append(tmp_path / kind)
    for folder, base in zip(folders, converted(*folders), strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        expected = gguf_weights(model)
        of_base = read(base)
        for name, value in expected.items():  # the helper of the other tests writes what the converter does
            if value.ndim > 1 and "gate_inp" not in name:
                value = value.half().float()
            torch.testing.assert_close(of_base[name], value, atol=0, rtol=0)
        is_mixture = "moe" in folder.name or folder.name == "mixtral"
        ignore = ["lm_head"]
        if is_mixture:
            linearize_experts(model)
            ignore.append("re:.*mlp.gate$")
        calibrate(model, ignore=ignore)
        values = read(export_gguf(model, tmp_path / "model.gguf", base, overwrite=True))
        with torch.no_grad():
            for name, weight in weights_of(model).items():
                model.get_submodule(name).weight.copy_(weight)
        if is_mixture:
            replaced = [name for name, _ in calibrated_modules(model)]
            assert len(replaced) == 2 * (4 + 3 * 4)
            continue
        for name, value in gguf_weights(model).items():
            if value.ndim > 1 and name.startswith("blk."):
                torch.testing.assert_close(values[name], value, atol=0, rtol=0)


@pytest.fixture(scope="module")
def benchmark():
    """The script that measures larger models in the same way."""
    file = ROOT / "benchmarks" / "engines" / "gguf_quality.py"
    spec = importlib.util.spec_from_file_location("gguf_quality", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("scheme", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4A16"])
def test_its_perplexity_is_that_of_the_quantized_model(tmp_path, scheme, benchmark):
    model, tokenizer = load_pretrained(dtype="float32")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(topics[key] for key in sorted(topics))[: 512 * CHUNKS * 8])
    calibrate(model, scheme)
    file = export_gguf(model, tmp_path / "model.gguf", default_base())
    ids = benchmark.token_ids(tokenizer, text.read_text())
    expected = benchmark.perplexity(model, ids, CHUNKS)
    unrounded = benchmark.in_float32(file, tmp_path / "in_float32.gguf")
    assert its_perplexity(unrounded, text, benchmark) == pytest.approx(expected, rel=5e-4)
    # it multiplies with the quantized weights of the file itself only after it has rounded the inputs to 8 bits
    assert its_perplexity(file, text, benchmark) == pytest.approx(expected, rel=0.02)


def its_perplexity(file, text, benchmark):
    words = [PERPLEXITY, "-m", file, "-f", text, "-c", 512, "--chunks", CHUNKS, "-t", 1]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=True)
    return benchmark.number_after(done.stdout + done.stderr, "Final estimate: PPL =")
