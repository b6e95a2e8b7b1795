"""Accuracy before export: lm-evaluation-harness runs the quantized model, on a task from a local file.

python examples/11_lm_eval.py --model <folder or hub name> --scheme W8A8

Any task of the harness does: ``tasks=["arc_easy"]`` without ``task_manager`` fetches one from the hub. The harness sees
an ordinary transformers model (its own HFLM); inside ``quantized`` every forward is fake-quantized, bit for bit as in
the exported checkpoint.
"""

import argparse
import json
import tempfile
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from lightning_obs import CalibrationSession, quantized
from lightning_obs.app.models.pretrained import load_pretrained

parser = argparse.ArgumentParser()
parser.add_argument("--model", default=None, help="folder or hub name; default: SmolLM2-135M-Instruct")
parser.add_argument("--scheme", default="W8A8", help="one that needs no data: W8A8, FP8_DYNAMIC, W4A16...")
options = parser.parse_args()

QUESTIONS = [
    ("The capital of France is", ["Paris", "Rome", "Madrid"], 0),
    ("Water freezes into", ["steam", "ice", "sand"], 1),
    ("The opposite of hot is", ["warm", "cold", "red"], 1),
    ("Bees make", ["milk", "wool", "honey"], 2),
    ("Two plus two is", ["four", "nine", "seven"], 0),
    ("The sun rises in the", ["north", "east", "cellar"], 1),
]

model, tokenizer = load_pretrained(options.model)
with CalibrationSession(model, options.scheme):
    pass

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "questions.jsonl"
    rows = ({"question": q, "choices": choices, "answer": answer} for q, choices, answer in QUESTIONS)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "local_questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": folder},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    local_tasks = TaskManager(include_defaults=False)  # without it, the harness's own tasks are indexed, for seconds
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)

    def accuracy() -> float:
        evaluation = simple_evaluate(
            model=harness, tasks=[task], task_manager=local_tasks, bootstrap_iters=0, verbosity="ERROR"
        )
        return float(evaluation["results"]["local_questions"]["acc,none"])

    full = accuracy()
    with quantized(model):
        calibrated = accuracy()

print(f"accuracy: full precision {full:.2f}, {options.scheme} {calibrated:.2f}")
