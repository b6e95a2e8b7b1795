"""Mixtures of experts in vLLM: tiny random models, what its loader holds after loading, and what runs.

    python benchmarks/engines/engine_experts.py          # wants the environment of `make engines`

vLLM has no kernel for quantized experts on the CPU. Its loader and scheme classes are run all the same, up to the
kernel: ``w13_*`` (gate and up) and ``w2_*`` (down) of every expert are compared with the checkpoint's tensors. Where
only attention is quantized the model runs, and its log-probabilities are compared with those of ``quantized(model)``.
Exit code 1 where lightning_obs says otherwise than vLLM does, or a tensor differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.engines.engines import difference, first_words, in_vllm
from lightning_obs import CalibrationSession, export_checkpoint, linearize_experts, quantized
from tests.support.moe_models import tiny_moe

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
MODELS = {"Qwen3-MoE": ("qwen3_moe", {"moe_intermediate_size": 256}), "Mixtral": ("mixtral", {})}
SCHEMES = ["W4A16", "W4A8", "W8A8", "INT8_STATIC", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "MXFP4A16", "MXFP8"]
ATTENTION = "W8A8, attention only"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--schemes", nargs="+", default=[*SCHEMES, ATTENTION], metavar="SCHEME")
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    wrong = 0
    print("| model | scheme | lightning_obs says of vLLM | vLLM |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for model in options.models:
            for scheme in options.schemes:
                said, found, right = measure(model, scheme, Path(scratch))
                wrong += not right
                print(f"| {model} | `{scheme}` | {said} | {found} |", flush=True)
    return int(wrong > 0)


def measure(name: str, scheme: str, scratch: Path) -> tuple[str, str, bool]:
    """What is said, what vLLM does, and whether the two agree."""
    kind, own = MODELS[name]
    torch.manual_seed(0)
    model = tiny_moe(kind, torch.bfloat16, **SIZES, **own)
    linearize_experts(model)
    blocks = [torch.randint(3, model.config.vocab_size, (1, 128)) for _ in range(4)]
    only = {"targets": ["re:.*self_attn.*_proj"]} if scheme == ATTENTION else {"ignore": ["lm_head", "re:.*gate$"]}
    args = {"scheme": scheme.partition(",")[0], "engines": "unchecked", **only}
    with CalibrationSession(model, **args) as session, torch.no_grad():
        verdict = session.engines["vLLM"]
        for block in blocks if session.needs_data else ():
            model(block)
    folder = scratch / "checkpoint"
    export_checkpoint(model, folder, overwrite=True)
    job = {"blocks": [block[0].tolist() for block in blocks[:1]], "prompt": [5, 6, 7]}
    answer = in_vllm(folder, {**job, "dtype": "bfloat16"}, scratch, plain=scheme != ATTENTION)
    if "refused" in answer:
        return first_words(verdict.text), f"refused: {first_words(answer['refused'])}", not verdict.loads
    if "experts" in answer:
        differ = [key for key, equal in answer["experts"].items() if not equal]
        text = f"loads; differs: {', '.join(differ)}" if differ else f"loads; equal: {', '.join(answer['experts'])}"
        return verdict.text, text, verdict.loads and not differ
    with quantized(model), torch.no_grad():  # transformers does not load experts in full precision beside W8A8
        all_of = model(blocks[0]).logits[0, :-1].float().log_softmax(-1)
    here = all_of.gather(-1, blocks[0][0, 1:, None])[:, 0].tolist()
    text = f"runs; mean difference of log-probabilities {difference(answer['logprobs'], [here]):.3f}"
    return verdict.text, text, verdict.loads


if __name__ == "__main__":
    sys.exit(main())
