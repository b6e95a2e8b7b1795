"""A run with export=onnx, program or gguf writes that file; what would keep it from that is said before any data."""

import re

import gguf
import onnxruntime
import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_obs import quantized
from lightning_obs.app.tasks.calibrate import Calibrate
from tests.support.gguf_base import tiny, write_base
from tests.support.tiny_model import save_tiny_llama

MEASURE_NOTHING = ("evaluate=false", "report.layer_error_batches=0")
QUICK = (*MEASURE_NOTHING, "export=gguf")


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    """Of one layer: torch takes seconds to trace each for a file."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), layers=1)


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
        shape = {"vocab_size": 259, "intermediate_size": 128, "num_hidden_layers": 1, "tie_word_embeddings": True}
        other = tiny("llama", initializer_range=0.2, **shape)
        write_base(other, tmp_path / "other.gguf")
    done = command_line(*QUICK, *words)
    assert done.returncode == 1
    assert message in done.stderr
    assert "calibrating Q4_0" not in done.stdout
    assert "calibrating FP8" not in done.stdout
    needs_model = message.startswith(("GGUF cannot", "other", "holds"))
    assert ("loading the model" in done.stdout) == needs_model


# ---------------------------------------------------------------------- traced files


def padded_batch():
    """Three texts of 20 tokens, of which the first has five tokens of padding."""
    ids = torch.randint(3, 100, (3, 20))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return ids, mask


@pytest.mark.slow
def test_a_run_writes_an_onnx_file_for_any_batch_and_says_what_onnxruntime_makes_of_it(command_line, tmp_path):
    done = command_line(*MEASURE_NOTHING, "export=onnx", "scheme=int8_onnx", "model.dtype=float32", "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert re.search(r"wrote run/model\.onnx  \(ONNX; [\d.]+ \w+\)", done.stdout)
    measured = (
        r"onnxruntime [\d.]+: 7 of 10 products in integers, [\d.]+x the speed of float \([\d.]+ ms -> [\d.]+ ms\)"
    )
    assert re.search(measured, done.stdout)
    assert "Export it" not in done.stdout
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        *("layers.csv", "model.onnx", "report.html", "report.json")
    ]
    session = onnxruntime.InferenceSession(tmp_path / "run/model.onnx", providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == ["input_ids", "attention_mask"]
    ids, mask = padded_batch()
    [logits] = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    assert logits.shape == (3, 20, 259)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "kind", "name"), [("int8_dynamic", "onnx", "m.onnx"), ("int8_onnx", "program", "m.pt2")]
)
def test_a_traced_file_has_the_answers_of_the_quantized_model(composed, scheme, kind, name, tmp_path):
    words = (*MEASURE_NOTHING, f"export={kind}", f"export.file={tmp_path / name}", f"scheme={scheme}")
    task = Calibrate(composed(*words, "model.dtype=float32"))
    task.check()
    task.run()
    ids, mask = padded_batch()
    with torch.no_grad(), quantized(task.job.model):
        expected = task.job.model(ids, attention_mask=mask, use_cache=False).logits
    if kind == "onnx":
        session = onnxruntime.InferenceSession(tmp_path / name, providers=["CPUExecutionProvider"])
        logits = torch.from_numpy(session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0])
    else:
        program = torch.export.load(tmp_path / name).module()
        with torch.no_grad():  # with gradients torch's attention takes another kernel
            logits = program(input_ids=ids, attention_mask=mask, use_cache=False).logits
    own_tokens = mask.bool()
    differences = (logits - expected)[own_tokens].abs().amax(-1) / expected.abs().max()
    if scheme == "int8_dynamic":
        assert differences.max() < 0.05
    else:  # a value at the border between two integers may fall on the other side, and moves its token's logits
        assert (differences < 1e-4).float().mean() > 0.9
        assert differences.max() < 0.02


@pytest.mark.slow
def test_sizes_may_be_fixed(command_line, tmp_path):
    words = ("export=onnx", "scheme=int8_dynamic", "model.dtype=float32", "export.dynamic=[]", "export.measure=false")
    done = command_line(*MEASURE_NOTHING, *words, "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert "onnxruntime" not in done.stdout
    session = onnxruntime.InferenceSession(tmp_path / "run/model.onnx", providers=["CPUExecutionProvider"])
    assert [value.shape for value in session.get_inputs()] == [[1, 32], [1, 32]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export=onnx", "scheme=w8a8"], "QDQ ONNX cannot hold ranges per token that are found at run time"),
        (["export=onnx", "scheme=fp8"], "QDQ ONNX cannot hold 8-bit floating point"),
        (
            ["export=program", "scheme=int8_dynamic"],
            "a program cannot hold activations whose range is found at run time",
        ),
        (["export=onnx", "scheme=int8_onnx", "kv_cache=fp8"], "an ONNX file has no quantized attention states"),
        (["export=onnx", "scheme=int8_onnx", "model.dtype=bfloat16"], "not in float32.*model.dtype=float32"),
        (
            ["export=onnx", "scheme=int8_onnx", "export.file=there.onnx"],
            "there.onnx is already there.*export.overwrite=true",
        ),
        (["export=program", "scheme=int8_onnx", "export.file=m.onnx"], "the name of a program. Got m.onnx, expected"),
        (["export=program", "scheme=int8_onnx", "export.backend=xnpack"], "did you mean `xnnpack`"),
        (["export=onnx", "scheme=int8_onnx", "export.dynamic=[batch]"], "export.dynamic. Got .*numbers of dimensions"),
        (["export=onnx", "task=plan", "+task.candidates.fp8=FP8_DYNAMIC"], "QDQ ONNX cannot hold 8-bit floating point"),
    ],
)
def test_what_a_traced_file_cannot_hold_is_refused_before_any_data(command_line, words, message, tmp_path):
    (tmp_path / "there.onnx").write_text("precious")
    done = command_line(
        *MEASURE_NOTHING, *(() if "model.dtype=bfloat16" in words else ("model.dtype=float32",)), *words
    )
    assert done.returncode == 1
    assert re.search(message, done.stderr), done.stderr
    assert not re.search("calibrating (INT8|FP8|W8A8|int8)", done.stdout)
