"""LoRA on the command line: adapters on a packed checkpoint, served beside it or merged and quantized again."""

import json
import re
import shlex

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightning_obs import CalibrationError, CalibrationSession, export_checkpoint, keep_packed
from lightning_obs.app.from_config import load_module
from lightning_obs.app.main import run
from lightning_obs.model.packed_weight import has_packed
from tests.support.markdown import commands, page
from tests.support.tiny_model import tiny_tokenizer

#: peft asks for it
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

#: of docs/guide/lora.md: to train, to merge, to train through the quantization of the sum
TRAIN, MERGE, TRAIN_THROUGH = commands(page("docs/guide/lora.md"))
TRAINING = ["data.train_batches=6", "trainer.max_steps=6", "model.lora.r=4", "model.learning_rate=1e-2"]


@pytest.fixture(scope="module")
def base(tiny_folder, tmp_path_factory):
    """A checkpoint in int4, in groups of 64."""
    folder = tmp_path_factory.mktemp("packed") / "base"
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    scheme = {"weights": {"num_bits": 4, "strategy": "group", "group_size": 64}}
    with CalibrationSession(model, scheme, ignore=["lm_head"]):
        pass
    export_checkpoint(model, folder, tokenizer=tiny_tokenizer())
    return folder


@pytest.fixture
def typed(base, command_line, tmp_path):
    """Run a command of the guide on the tiny checkpoint: ``typed(TRAIN, "data.batches=2")``."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"paragraph {number} " * 30 for number in range(32)))

    def run_words(command, *more):
        command = command.replace("<folder>", str(base)).replace("<text, jsonl or folder>", str(text))
        words = shlex.split(command)
        assert words[:3] == ["python", "-m", "lightning_obs"]
        done = command_line(*words[3:], *more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_words


def perplexities(text):
    """The numbers of the line with the perplexities, in its order."""
    (stages,) = re.findall(r"^perplexity on held-out data: (.*)$", text, flags=re.MULTILINE)
    return [float(number) for number in re.findall(r" (\d+\.\d+)", stages)]


@pytest.mark.slow
def test_adapters_on_a_packed_checkpoint_are_trained_written_served_and_merged(typed, base, tmp_path):
    printed = typed(TRAIN, *TRAINING, "output_dir=lora")
    untrained, tuned, again = perplexities(printed)
    assert tuned < untrained
    assert again == tuned
    folder = tmp_path / "adapters"
    assert f"serve both: vllm serve {base} --enable-lora --lora-modules mine=adapters" in printed
    assert all("lora_" in name for name in load_file(folder / "adapter_model.safetensors"))
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
    report = json.loads((tmp_path / "lora" / "report.json").read_text())
    assert report["perplexity"] == pytest.approx([untrained, tuned], abs=1e-3)

    (next_command,) = re.findall(r"^one checkpoint of both: (.*) scheme=\.\.\.$", printed, re.MULTILINE)
    assert MERGE.replace("<folder>", str(base)).startswith(next_command)
    text = f"data.path={tmp_path / 'text.txt'}"
    typed(MERGE, text, "export.folder=merged", "export.verify=false", "output_dir=both")
    report = json.loads((tmp_path / "both" / "report.json").read_text())
    assert report["perplexity"][0] == pytest.approx(tuned, abs=1e-3)
    with torch.no_grad():
        ids = torch.arange(20)[None]
        adapted = keep_packed(AutoModelForCausalLM.from_pretrained(base))
        adapted = peft.PeftModel.from_pretrained(adapted, folder)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
        without_adapters = AutoModelForCausalLM.from_pretrained(base)(ids).logits
        trained = adapted(ids).logits
        assert (merged - trained).norm() < 0.5 * (without_adapters - trained).norm()


@pytest.mark.slow
@pytest.mark.usefixtures("verified_here")
def test_adapters_are_trained_through_the_quantization_of_the_sum(typed, tmp_path):
    _, calibrated, tuned, reloaded = perplexities(typed(TRAIN_THROUGH, *TRAINING, "export.folder=both"))
    assert tuned < calibrated
    assert reloaded == tuned
    assert not any("lora" in name for name in load_file(tmp_path / "both" / "model.safetensors"))


def test_the_model_has_adapters_on_packed_weights(composed, base):
    module = load_module(composed("task=lora", f"model.path={base}", "model.keep_packed=true", *TRAINING))
    assert has_packed(module)
    assert {name.split(".")[-2] for name, p in module.named_parameters() if p.requires_grad} == {"default"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task=lora", "+model.lora.rank=8"], r"LoraConfig does not know: rank"),
        (["task=lora", "model.lora.target_modules=[nothing]"], r"peft does not take model\.lora.*nothing"),
        (["task=lora", "model=causal_lm"], r"trains adapters. Got a CausalLM without any. Remedy: model=lora"),
        (["task=lora", "model.adapters=nowhere"], r"model\.lora makes new ones. Got both"),
        (["model.adapters=nowhere"], r"model\.adapters=nowhere has no adapter_config\.json"),
        (["model.keep_packed=true"], r"was not loaded from a compressed checkpoint"),
        (["task=lora", "export.folder=null"], r"writes adapters: export\.folder. Got none"),
        (["task=lora", "trainer.max_steps=0"], r"trainer\.max_steps=0 trains nothing"),
        (["task=lora", "data.train_batches=0"], r"data\.train_batches. Got 0, expected one or more"),
        (["task=lora", "trainer.precision=bf16-true"], r"training needs weights in the precision"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_runs(composed, words, message):
    with pytest.raises(CalibrationError, match=message):
        run(composed(*words))


@pytest.mark.parametrize("words", [["task=lora"], ["model=lora"]])
def test_adapters_on_a_checkpoint_that_would_be_decompressed_are_refused(composed, base, words):
    with pytest.raises(CalibrationError, match=r"do not stay packed: .*q_proj.*Remedy: model\.keep_packed=true"):
        run(composed(*words, f"model.path={base}"))


def test_a_folder_that_exists_is_refused_and_kept(composed, base, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("text")
    words = [f"model.path={base}", "model.keep_packed=true", f"export.folder={tmp_path / 'there'}"]
    with pytest.raises(CalibrationError, match="there"):
        run(composed("task=lora", *words))
    assert (tmp_path / "there" / "mine").read_text() == "text"
