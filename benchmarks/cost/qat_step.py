"""What fake quantization costs in a training step: forward, backward, optimizer; ratio to the float step.

    python benchmarks/cost/qat_step.py [--hidden 512] [--layers 4] [--tokens 128] [--batch 4] [--rounds 15] [--compile]

One process; the float model and every scheme take turns, a round each, so that a slow moment of the machine meets all.
Printed is the median over rounds of each scheme's step divided by the float step of the same round.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_obs import CalibrationSession
from lightning_obs.forward.quantized_forward import quantize_training_forward, set_learned_scale
from lightning_obs.forward.quantized_module import Switch

SCHEMES = {
    "W4A16 (group 64)": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "strategy": "group", "group_size": 64},
    },
    "W4A16 (group 64), learned scales": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "strategy": "group", "group_size": 64},
    },
    "W8A8": "W8A8",
    "INT8_STATIC": "INT8_STATIC",
    "INT8_STATIC, learned scales": "INT8_STATIC",
    "FP8": "FP8",
    "NVFP4": "NVFP4",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    tokens = torch.randint(0, 1024, (options.batch, options.tokens))
    plain = LlamaForCausalLM(config).train()
    steps = {"float": make_step(plain, tokens, options.compile)}
    for name, scheme in SCHEMES.items():
        model = quantize(copy.deepcopy(plain), scheme, tokens, learn="learned" in name)
        steps[name] = make_step(model, tokens, options.compile)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():  # compile and warm up
        step()
        step()
    for _ in range(options.rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    print(f"{options.layers} layers, {options.hidden} wide, {options.batch} x {options.tokens} tokens,", end=" ")
    print(f"float32, {torch.get_num_threads()} threads{', torch.compile' if options.compile else ''}")
    print(f"{'float':36s} {statistics.median(seconds['float']) * 1e3:8.1f} ms")
    for name, taken in seconds.items():
        if name != "float":
            ratio = statistics.median(a / b for a, b in zip(taken, seconds["float"], strict=True))
            print(f"{name:36s} {statistics.median(taken) * 1e3:8.1f} ms  {ratio:5.2f} x float")


def quantize(model: nn.Module, scheme: object, tokens: torch.Tensor, learn: bool) -> nn.Module:
    with CalibrationSession(model, scheme, ignore=["lm_head"], engines="unchecked") as session:
        if session.needs_data:
            model(tokens)
    for target in session.plan.targets:
        quantize_training_forward(target.module, Switch())
        for base_name, args in target.args.items() if learn else ():
            if not args.dynamic:
                scale = getattr(target.module, f"{base_name}_scale")
                factor = nn.Parameter(torch.zeros_like(scale))
                model.register_parameter(f"{target.name}_{base_name}".replace(".", "_"), factor)
                set_learned_scale(target.module, base_name, scale, factor)
    return model


def make_step(model: nn.Module, tokens: torch.Tensor, compiled: bool):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    run = torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad()
        run(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
