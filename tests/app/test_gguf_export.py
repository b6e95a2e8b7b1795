"""A run with export=gguf writes a GGUF file; what would keep it from that is said before any data is read."""

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.gguf_base import tiny, write_base

QUICK = ("evaluate=false", "report.layer_error_batches=0", "export=gguf")


@pytest.fixture
def base(tiny_folder, tmp_path):
    return write_base(AutoModelForCausalLM.from_pretrained(tiny_folder), tmp_path / "base.gguf", torch.float16)


def test_a_run_writes_a_gguf_file(command_line, base, tmp_path):
    scheme = ("scheme=q4_0", "weight_observer=imatrix_mse", "weight_observer.signed=true")
    done = command_line(*QUICK, *scheme, f"export.base={base}", "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert "calibrating Q4_0" in done.stdout or "calibrating int4" in done.stdout
    assert "wrote run/model.gguf  (llama.cpp; " in done.stdout
    types = {tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "run/model.gguf").tensors}
    assert types == {"Q4_0", "F16", "F32"}
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        *("layers.csv", "model.gguf", "report.html", "report.json")
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scheme=q4_0"], "export=gguf needs a GGUF file of the same model in float, whose weights it replaces"),
        (["scheme=q4_0", "export.base=none.gguf"], "none.gguf does not exist"),
        (["scheme=q4_0", "export.base=base.gguf", "export.file=base.gguf"], "base.gguf is already there"),
        (["scheme=fp8", "export.base=base.gguf"], "GGUF cannot hold float8 tensor weights, float8 tensor inputs"),
        (["scheme=q4_0", "export.base=other.gguf"], "other.gguf holds other weights than the model"),
        (["scheme=q4_0", "export.base=base.gguf", "task=finetune"], "holds the weights from before the training"),
    ],
)
def test_what_cannot_be_written_is_refused_before_any_data(command_line, base, tmp_path, words, message):
    if "export.base=other.gguf" in words:
        other = tiny("llama", vocab_size=259, intermediate_size=128, initializer_range=0.2, tie_word_embeddings=True)
        write_base(other, tmp_path / "other.gguf")
    done = command_line(*QUICK, *words)
    assert done.returncode == 1
    assert message in done.stderr
    assert "calibrating Q4_0" not in done.stdout
    assert "calibrating FP8" not in done.stdout
    needs_model = message.startswith(("GGUF cannot", "other", "holds"))
    assert ("loading the model" in done.stdout) == needs_model
