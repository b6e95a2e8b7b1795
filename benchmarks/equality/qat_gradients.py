"""The same training through compressed-tensors' own wrapper and through ours: does the loss go down?

    python benchmarks/equality/qat_gradients.py [--steps 60]

A tiny Llama learns one batch by heart. Both are calibrated alike and have the same numbers in the forward; what
differs is the gradient. compressed-tensors' fake quantization runs without gradient, so quantized activations cut the
graph and parameters before them are never updated.

Exit code 1 if, with quantized activations, our loss is more than half of the wrapper's.
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
from compressed_tensors.quantization import set_forward_quantized
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_obs import CalibrationSession
from lightning_obs.fine_tuning.quantized_training import QuantizedTraining
from lightning_obs.model.module_qparams import calibrated_modules

SCHEMES = {
    "INT8 static": "INT8_STATIC",
    "W8A8 (dynamic)": "W8A8",
    "NVFP4": "NVFP4",
    "W4A16": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    plain = LlamaForCausalLM(config)
    tokens = torch.randint(3, 128, (4, 24))
    start, end, _ = train(copy.deepcopy(plain), tokens, options.steps)
    print(f"one batch of {tokens.numel()} tokens, {options.steps} steps of AdamW; loss {start:.3f} at the start")
    print(f"{'float':16s} {end:.4f}")
    good = True
    for name, scheme in SCHEMES.items():
        losses = []
        for ours in (False, True):
            model = copy.deepcopy(plain)
            with CalibrationSession(model, scheme, ignore=["lm_head"], engines="unchecked") as session:
                if session.needs_data:
                    model(tokens)
            if ours:
                QuantizedTraining(session).start()
            else:
                for _, module in list(calibrated_modules(model)):
                    set_forward_quantized(module)
            _, end, still = train(model, tokens, options.steps)
            losses.append(end)
            print(f"{name:16s} {'ours' if ours else 'wrapper':8s} {end:.4f}  parameters never updated: {still}")
        good = good and (name == "W4A16" or losses[1] <= losses[0] / 2)
    return 0 if good else 1


def train(model: nn.Module, tokens: torch.Tensor, steps: int) -> tuple[float, float, int]:
    """First loss, last loss, how many parameters are what they were."""
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    still = sum(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    return losses[0], losses[-1], still


if __name__ == "__main__":
    sys.exit(main())
