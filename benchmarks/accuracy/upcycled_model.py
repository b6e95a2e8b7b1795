"""Make a mixture of experts that predicts text: what quantized experts are measured on.

    python benchmarks/accuracy/upcycled_model.py               # prints its folder
    python benchmarks/accuracy/accuracy.py --model experts

No package brings a mixture of experts with trained weights. So SmolLM2 off its lattice (``unquantized_model.py``) is
upcycled: every fifth of its 30 layers gets 8 experts, of which 2 run for each token, beside a shared one (transformers'
Qwen2-MoE). A third of the neurons of the layer's MLP becomes every expert, the others become the shared expert. Each
expert's weights get Gaussian noise of their own, and the router's are Gaussian, so that experts differ, and some get
many times the tokens of others. Nothing is trained after that: experts have no subjects of their own.

Seeded. It is made once, in a few seconds, and kept beside SmolLM2 ($LIGHTNING_OBS_CACHE).

Reference:
    Komatsuzaki et al., Sparse Upcycling, 2022, arXiv:2212.05055.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM
from unquantized_model import NAME as ORIGINAL

from lightning_obs.app.models.pretrained import cache_folder, load_pretrained
from lightning_obs.files.write import whole_folder

NAME = "SmolLM2-135M-Instruct-experts"
EXPERTS, EXPERTS_PER_TOKEN, EVERY = 8, 2, 5
#: one in so many neurons of the MLP goes to the experts
SHARE = 3
#: of an expert's noise, beside that of its weights
DEVIATION = 0.5
#: of the router's weights; its logits then have a deviation of 0.5 to 1.5
ROUTER_DEVIATION = 0.2


def main() -> int:
    folder = cache_folder() / NAME
    if not (folder / "config.json").is_file():
        with redirect_stdout(sys.stderr):
            make(cache_folder() / ORIGINAL, folder)
    print(folder)
    return 0


def make(original: Path, folder: Path) -> None:
    """Write the model, the whole folder or nothing.

    Args:
        original: the folder of a Llama in full precision.
        folder: to write.

    Raises:
        SystemExit: the original is absent.
    """
    if not original.is_dir():
        raise SystemExit("make it first: python benchmarks/accuracy/unquantized_model.py")
    seed_everything(0, verbose=False)
    llama, tokenizer = load_pretrained(original, dtype="float32")
    model = upcycled(llama)
    with whole_folder(folder, overwrite=True) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


@torch.no_grad()
def upcycled(llama: Any) -> Any:
    """A mixture of experts with the weights of a Llama."""
    original = llama.config
    routed = len(range(0, original.intermediate_size, SHARE))
    config = Qwen2MoeConfig(
        vocab_size=original.vocab_size,
        hidden_size=original.hidden_size,
        intermediate_size=original.intermediate_size,
        num_hidden_layers=original.num_hidden_layers,
        num_attention_heads=original.num_attention_heads,
        num_key_value_heads=original.num_key_value_heads,
        max_position_embeddings=original.max_position_embeddings,
        rms_norm_eps=original.rms_norm_eps,
        rope_parameters=original.rope_parameters,
        tie_word_embeddings=original.tie_word_embeddings,
        bos_token_id=original.bos_token_id,
        eos_token_id=original.eos_token_id,
        pad_token_id=original.pad_token_id,
        qkv_bias=False,
        decoder_sparse_step=EVERY,
        num_experts=EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        norm_topk_prob=True,
        moe_intermediate_size=routed,
        shared_expert_intermediate_size=original.intermediate_size - routed,
        dtype="float32",
    )
    model = Qwen2MoeForCausalLM(config).eval()
    model.load_state_dict(llama.state_dict(), strict=False)
    for layer, llama_layer in zip(model.model.layers, llama.model.layers, strict=True):
        if hasattr(layer.mlp, "experts"):
            _fill(layer.mlp, llama_layer.mlp)
    return model


def _fill(mixture: Any, mlp: Any) -> None:
    """Give a layer's experts, shared expert and router their first weights: those of an MLP, and noise."""
    is_routed = torch.arange(mlp.up_proj.out_features) % SHARE == 0
    shared = mixture.shared_expert
    shared.gate_proj.weight.copy_(mlp.gate_proj.weight[~is_routed])
    shared.up_proj.weight.copy_(mlp.up_proj.weight[~is_routed])
    shared.down_proj.weight.copy_(2 * mlp.down_proj.weight[:, ~is_routed])  # its gate lets half of it pass
    mixture.shared_expert_gate.weight.zero_()
    gate_and_up = torch.cat([mlp.gate_proj.weight[is_routed], mlp.up_proj.weight[is_routed]])
    mixture.experts.gate_up_proj.copy_(_with_noise(gate_and_up))
    mixture.experts.down_proj.copy_(_with_noise(mlp.down_proj.weight[:, is_routed]))
    mixture.gate.weight.normal_(std=ROUTER_DEVIATION)


def _with_noise(weight: torch.Tensor) -> torch.Tensor:
    """One weight ``(R, C)`` for each expert, ``(experts, R, C)``, with noise of its own."""
    noise = torch.randn(EXPERTS, *weight.shape)
    return weight + DEVIATION * weight.std() * noise


if __name__ == "__main__":
    sys.exit(main())
