"""Spend a budget of bits where they matter: 4-bit weights, and 8-bit weights for the layers that need them.

python examples/10_bit_budget.py --model <folder or hub name> --bits 5 --out mixed
"""

import argparse

import torch
from transformers import AutoModelForCausalLM

from lightning_obs import CalibrationSession, export_checkpoint, quantized, sensitivity
from lightning_obs.app.models.pretrained import load_pretrained
from lightning_obs.choice.mixed_precision import choose_schemes, frontier
from lightning_obs.report.summary import frontier_table, print_report

parser = argparse.ArgumentParser()
parser.add_argument("--model", default=None, help="folder or hub name; default: SmolLM2-135M-Instruct")
parser.add_argument("--bits", type=float, default=5.0, help="per weight on average, scales included")
parser.add_argument("--out", required=True)
options = parser.parse_args()

model, tokenizer = load_pretrained(options.model)
text = "A layer that hardly changes what the model says can do with fewer bits. Another one cannot. " * 20
ids = torch.tensor(tokenizer(text).input_ids)[: 8 * 32].view(4, 2, 32)
batches = [{"input_ids": batch, "use_cache": False} for batch in ids]

candidates = {
    "int4": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}},
    "int8": {"weights": {"num_bits": 8, "strategy": "channel"}},
}
measured = sensitivity(model, batches, candidates)  # one forward and one backward a batch
print_report(frontier_table(frontier(measured, points=6)))

plan = choose_schemes(measured, budget=options.bits)
counts = ", ".join(f"{count} x {name}" for name, count in plan.counts.items())
print(f"{plan.bits:.2f} bits per weight: {counts}")

with CalibrationSession(model, plan.config):  # CalibrationCallback takes it too
    pass  # nothing to observe but weights
export_checkpoint(model, options.out, tokenizer=tokenizer)

with torch.no_grad(), quantized(model):
    expected = model(**batches[0]).logits
with torch.no_grad():
    loaded = AutoModelForCausalLM.from_pretrained(options.out)(**batches[0]).logits
print("largest difference of logits after loading:", (loaded - expected).abs().max().item())
