"""What experts cost: linearizing them, and letting all of them observe all tokens.

python benchmarks/cost/experts.py
"""

import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lightning_obs import CalibrationSession, linearize_experts

EXPERTS, CHOSEN, LAYERS, BATCHES, TOKENS = 16, 2, 2, 8, (4, 128)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    batches = [torch.randint(0, 512, TOKENS) for _ in range(BATCHES)]

    def run(**options) -> float:
        def all_batches() -> None:
            for batch in batches:
                model(batch, use_cache=False)

        started = time.perf_counter()
        with torch.inference_mode():
            if options:
                with CalibrationSession(model, "INT8_STATIC", ignore=["lm_head"], engines="unchecked", **options):
                    all_batches()
            else:
                all_batches()
        return time.perf_counter() - started

    def best(**options) -> float:
        return min(run(**options) for _ in range(5))

    best()  # warm up
    rows = []
    for implementation in ("grouped_mm", "eager"):
        model.set_experts_implementation(implementation)
        rows.append((f"forward, stacked experts ({implementation})", best()))
    started = time.perf_counter()
    linearize_experts(model)
    linearizing = time.perf_counter() - started
    rows += [
        ("forward, linearized experts", best()),
        ("calibration, routed tokens", best(on_missing="siblings")),
        ("calibration, calibrate_all_experts", best(calibrate_all_experts=True)),
    ]
    table = Table(
        title=f"{LAYERS} layers of {EXPERTS} experts, {CHOSEN} per token; {BATCHES} batches of {TOKENS}; "
        f"best of 5 runs; {torch.get_num_threads()} thread; linearize_experts took {1000 * linearizing:.0f} ms"
    )
    for title in ("what", "seconds", "of the forward"):
        table.add_column(title, justify="left" if title == "what" else "right")
    reference = rows[2][1]
    for what, seconds in rows:
        table.add_row(what, f"{seconds:.3f}", f"{seconds / reference:.2f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
