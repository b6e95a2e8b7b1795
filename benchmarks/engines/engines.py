"""Every scheme in a real engine: exported, loaded by vLLM, and compared with transformers on the same tokens.

    make engines                                         # the environment with vLLM, then this, on the default model
    python benchmarks/engines/engines.py --rows W8A8 W4A16 --speed

One row per scheme: what lightning_obs says of vLLM (`engines/vllm.py`), what vLLM does on this machine's CPU,
perplexity in both (bfloat16, the same held-out tokens), and the mean difference of the tokens' log-probabilities in
float32, beside the difference that transformers has with itself when its embeddings move by 1e-6. "plain": vLLM has no
kernel for the CPU; its loader and scheme classes were run with a plain kernel in place of the missing one. Exit code
1 where lightning_obs says otherwise than vLLM does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from lightning_obs import CalibrationSession, QuantizationAwareTraining, export_checkpoint
from lightning_obs.app.data.module import TextData
from lightning_obs.app.models.language import CausalLM
from lightning_obs.app.models.pretrained import default_model_folder, load_pretrained
from lightning_obs.engines import Verdict
from lightning_obs.report.numbers import folder_size, human_size

HERE = Path(__file__).parent
ENGINE = HERE.parents[1] / ".venv-engines" / "bin" / "python"
PROMPT = "The capital of France is"
MOVED, STEPS = 1e-6, 4
COLUMNS = (
    *("scheme", "lightning_obs says of vLLM", "kernel here", "size", "perplexity in vLLM", "in transformers"),
    *("difference [nats]", "transformers' own", "load [s]"),
)
SPEED = ("prefill [tokens/s]", "decode, 1 sequence", "decode, 4 sequences")


def weights(**args: Any) -> dict[str, Any]:
    return {"weights": {"num_bits": 4, "group_size": 64, **args}}


TOKEN8 = {"num_bits": 8, "strategy": "token", "dynamic": True}
ROWS: dict[str, dict[str, Any]] = {
    "none": {},
    "INT8_STATIC": {"scheme": "INT8_STATIC"},
    "INT8_STATIC_ASYM": {"scheme": "INT8_STATIC_ASYM"},
    "W8A8": {"scheme": "W8A8"},
    "W8A16 group 64": {"scheme": weights(num_bits=8)},
    "W4A16 group 64": {"scheme": weights()},
    "W4A16_ASYM group 64": {"scheme": weights(symmetric=False)},
    "W4A8 group 64": {"scheme": {**weights(), "input_activations": TOKEN8}},
    "W4AFP8 group 64": {"scheme": {**weights(), "input_activations": {**TOKEN8, "type": "float"}}},
    "FP8": {"scheme": "FP8"},
    "FP8, join_fused_scales": {"scheme": "FP8", "join_fused_scales": True},
    "FP8_DYNAMIC": {"scheme": "FP8_DYNAMIC"},
    "FP8 weights": {"scheme": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
    "NVFP4": {"scheme": "NVFP4"},
    "NVFP4A16": {"scheme": "NVFP4A16"},
    "MXFP4": {"scheme": "MXFP4"},
    "MXFP4A16": {"scheme": "MXFP4A16"},
    "MXFP8": {"scheme": "MXFP8"},
    "MXFP8A16": {"scheme": "MXFP8A16"},
    "kv_cache=FP8": {"scheme": None, "kv_cache": "FP8"},
    "kv_cache=FP8_HEAD": {"scheme": None, "kv_cache": "FP8_HEAD"},
    "W8A8, kv_cache=FP8": {"scheme": "W8A8", "kv_cache": "FP8"},
    "FP8, kv_cache=FP8": {"scheme": "FP8", "kv_cache": "FP8"},
    "W8A8 and W4A16": {
        "scheme": {
            "attention": {"targets": ["re:.*self_attn.*_proj"], "weights": {"num_bits": 8, "strategy": "channel"}}
            | {"input_activations": TOKEN8},
            "mlp": {"targets": ["re:.*mlp.*_proj"], **weights()},
        }
    },
    "W8A8, fine-tuned": {"scheme": "W8A8", "steps": STEPS},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--model", help="folder or hub name; default: the default model")
    parser.add_argument("--batches", type=int, default=4, help="to calibrate on")
    parser.add_argument("--blocks", type=int, default=2, help="to measure on")
    parser.add_argument("--tokens", type=int, default=256, help="of each; less than 512")
    parser.add_argument("--perplexity", action="store_true", help="only that, in bfloat16")
    parser.add_argument("--speed", action="store_true", help="tokens per second too; nothing else should run")
    parser.add_argument("--keep", type=Path, help="leave the answers of every row here")
    options = parser.parse_args()
    if not ENGINE.exists():
        sys.exit(f"{ENGINE} does not exist: make engines")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")

    source = options.model or default_model_folder()
    tokenizer = load_pretrained(source)[1]
    text = TextData(
        tokenizer, batches=options.batches, eval_batches=options.blocks, tokens=options.tokens, train_batches=STEPS
    )
    blocks = [batch["input_ids"] for batch in text.test_dataloader()]
    job = {"blocks": [block[0].tolist() for block in blocks], "prompt": tokenizer(PROMPT)["input_ids"]}
    wrong, texts = 0, {}
    columns = [*COLUMNS, *SPEED] if options.speed else COLUMNS
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.rows:
            row = measure(name, source, text, tokenizer, job, options, Path(scratch))
            if options.keep:
                options.keep.mkdir(parents=True, exist_ok=True)
                (options.keep / f"{name.replace(' ', '_')}.json").write_text(json.dumps(row))
            wrong += not row["as_said"]
            print(line(row, options.speed), flush=True)
            if "greedy" in row["vllm"]:
                texts[name] = tokenizer.decode(row["vllm"]["greedy"])
    print(f"\n| scheme | {PROMPT!r} goes on, greedily |\n|---|---|")
    print("\n".join(f"| `{name}` | {text!r} |" for name, text in texts.items()))
    return int(wrong > 0)


def measure(
    name: str, source: Any, text: TextData, tokenizer: Any, job: dict[str, Any], options: Any, scratch: Path
) -> dict[str, Any]:
    """Export one row and run it in both."""
    folder = scratch / "checkpoint"
    verdict = exported(name, source, text, folder)
    row: dict[str, Any] = {"name": name, "says": verdict.text, "size": folder_size(folder)}
    row["vllm"] = in_vllm(folder, {**job, "dtype": "bfloat16"}, scratch, options.speed)
    row["plain"] = lacks_a_kernel(row["vllm"])
    if row["plain"]:
        row["missing"] = row["vllm"]["refused"]
        row["vllm"] = in_vllm(folder, {**job, "dtype": "bfloat16"}, scratch, plain=True)
    row["as_said"] = verdict.loads == ("refused" not in row["vllm"])
    row["transformers"] = in_transformers(folder, job, torch.bfloat16)
    if "logprobs" in row["vllm"] and not options.perplexity:
        exact = in_vllm(folder, {**job, "dtype": "float32"}, scratch, plain=row["plain"])
        if lacks_a_kernel(exact):  # some have one for bfloat16 only
            exact = in_vllm(folder, {**job, "dtype": "float32"}, scratch, plain=True)
        here = in_transformers(folder, job, torch.float32)
        if "logprobs" in exact and "logprobs" in here:
            moved = in_transformers(folder, job, torch.float32, MOVED)
            row["difference"] = difference(exact["logprobs"], here["logprobs"])
            row["own_difference"] = difference(moved["logprobs"], here["logprobs"])
    return row


def exported(name: str, source: Any, text: TextData, folder: Path) -> Verdict:
    """Write one row's checkpoint; what lightning_obs says of it."""
    shutil.rmtree(folder, ignore_errors=True)
    if "steps" in ROWS[name]:
        return fine_tuned(ROWS[name], source, text, folder)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    if not ROWS[name]:
        model.save_pretrained(folder)
        return Verdict(True)
    with CalibrationSession(model, engines="unchecked", **without_head(name)) as session, torch.no_grad():
        for batch in text.val_dataloader() if session.needs_data else ():
            model(**batch, use_cache=False)
    export_checkpoint(model, folder)
    return session.engines["vLLM"]


def fine_tuned(row: dict[str, Any], source: Any, text: TextData, folder: Path) -> Verdict:
    callback = QuantizationAwareTraining(row["scheme"], ignore=["lm_head"], observe="train", calibration_batches=2)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
    }
    trainer = Trainer(max_steps=row["steps"], callbacks=[callback], limit_val_batches=1, accelerator="cpu", **quiet)
    trainer.fit(CausalLM(source), text)  # and validate, at the end of these steps: that is what is exported
    callback.export(folder)
    return callback.result.plan.engines["vLLM"]


def lacks_a_kernel(answer: dict[str, Any]) -> bool:
    """Whether vLLM's loader took the checkpoint, and nothing was there to run it on this CPU."""
    text = answer.get("refused", "")
    return "kernel" in text.lower() or any(word in text for word in ("_C::", "backend", "not implemented for"))


def without_head(name: str) -> dict[str, Any]:
    """The head is tied to the embedding; patterns may not match it."""
    return {**ROWS[name], "ignore": [] if "kv_cache" in name and ROWS[name]["scheme"] is None else ["lm_head"]}


def in_vllm(
    folder: Path, job: dict[str, Any], scratch: Path, speed: bool = False, plain: bool = False
) -> dict[str, Any]:
    question, answer = scratch / "job.json", scratch / "answer.json"
    question.write_text(json.dumps(job))
    answer.unlink(missing_ok=True)
    command = [str(ENGINE), str(HERE / "in_vllm.py"), str(folder), str(question), str(answer)]
    command += ["--speed"] * speed + ["--plain"] * plain
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=clean)
    if not answer.exists():
        return {"refused": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


@torch.no_grad()
def in_transformers(folder: Path, job: dict[str, Any], dtype: torch.dtype, move: float = 0.0) -> dict[str, Any]:
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        embedding = model.get_input_embeddings().weight
        generator = torch.Generator().manual_seed(0)
        embedding.mul_(1 + move * torch.randn(embedding.shape, generator=generator).to(dtype))
        logprobs = []
        for block in job["blocks"]:
            ids = torch.tensor([block])
            all_of = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            logprobs.append(all_of.gather(-1, ids[0, 1:, None])[:, 0].tolist())
        return {"logprobs": logprobs}
    except Exception as error:  # the table says so
        return {"refused": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def perplexity(found: dict[str, Any]) -> float:
    values = [value for block in found["logprobs"] for value in block]
    return math.exp(-sum(values) / len(values))


def difference(one: list[list[float]], other: list[list[float]]) -> float:
    pairs = [(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def first_words(text: str) -> str:
    """An error's first sentence, without where and what."""
    return re.split(" for layer_name|: num_bits| in this scheme", text, maxsplit=1)[0]


def line(row: dict[str, Any], speed: bool) -> str:
    vllm, here = row["vllm"], row["transformers"]
    runs = (
        f"refused: {first_words(vllm['refused'])}"
        if "refused" in vllm
        else "plain"
        if row["plain"]
        else ", ".join(vllm["kernels"]) or "yes"
    )
    cells = [f"`{row['name']}`", first_words(row["says"]), runs, human_size(row["size"])]
    cells += [f"{perplexity(each):.2f}" if "logprobs" in each else "refused" for each in (vllm, here)]
    cells += [f"{row[key]:.3f}" if key in row else "" for key in ("difference", "own_difference")]
    keys = ("load", *(("prefill", "decode_1", "decode_4") if speed else ()))
    cells += [f"{vllm[key]:.0f}" if key in vllm else "" for key in keys]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
