"""Tiny mixtures of experts: transformers' own, and two blocks whose routing a test decides."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.conftest import VOCAB

EXPERTS, HIDDEN, INNER = 4, 32, 32


_FULL = {"layer_types": ["full_attention", "full_attention"]}
_NEMOTRON = {"layers_block_type": ["moe", "full_attention"], "n_routed_experts": EXPERTS}
_NEMOTRON |= {"moe_shared_expert_intermediate_size": INNER}
_JAMBA = {"expert_layer_period": 1, "expert_layer_offset": 0, "attn_layer_period": 1, "attn_layer_offset": 0}
_LLAMA4 = ("Llama4", {"num_local_experts": EXPERTS, "intermediate_size_mlp": INNER, "num_experts_per_tok": 1})
#: one architecture for every other way in which transformers stores experts
FAMILY = {
    "qwen3_next": ("Qwen3Next", {"num_experts": EXPERTS, "shared_expert_intermediate_size": INNER, **_FULL}),
    "qwen3_5_moe_text": ("Qwen3_5Moe", {"num_experts": EXPERTS, "shared_expert_intermediate_size": INNER, **_FULL}),
    "minimax": ("MiniMax", {"num_local_experts": EXPERTS, "block_size": 16, **_FULL}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": EXPERTS, "rotary_dim": 32}),
    "phimoe": ("Phimoe", {"num_local_experts": EXPERTS}),
    "lfm2_moe": ("Lfm2Moe", {"num_experts": EXPERTS, "num_dense_layers": 1, **_FULL}),
    "jamba": ("Jamba", {"num_experts": EXPERTS, **_JAMBA}),
    "nemotron_h": ("NemotronH", _NEMOTRON),
}


def tiny_moe(kind: str, dtype: torch.dtype = torch.float32, **options) -> nn.Module:
    """A random two-layer model of one of transformers' architectures, experts run ``eager``."""
    import transformers as t

    base = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "experts_implementation": "eager",
    }
    configs = {
        "qwen3_moe": (t.Qwen3MoeForCausalLM, t.Qwen3MoeConfig, {"num_experts": EXPERTS, "head_dim": 16}),
        "qwen2_moe": (t.Qwen2MoeForCausalLM, t.Qwen2MoeConfig, {"num_experts": EXPERTS}),
        "olmoe": (t.OlmoeForCausalLM, t.OlmoeConfig, {"num_experts": EXPERTS}),
        "mixtral": (t.MixtralForCausalLM, t.MixtralConfig, {"num_local_experts": EXPERTS}),
        "granitemoe": (t.GraniteMoeForCausalLM, t.GraniteMoeConfig, {"num_local_experts": EXPERTS}),
        "gpt_oss": (t.GptOssForCausalLM, t.GptOssConfig, {"num_local_experts": EXPERTS, "head_dim": 16}),
        "deepseek_v3": (
            t.DeepseekV3ForCausalLM,
            t.DeepseekV3Config,
            {
                "n_routed_experts": EXPERTS,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "q_lora_rank": 32,
                "kv_lora_rank": 32,
                "qk_rope_head_dim": 16,
                "qk_nope_head_dim": 16,
                "v_head_dim": 16,
            },
        ),
    }
    if kind in FAMILY or kind == "llama4_text":
        name, own = FAMILY.get(kind, _LLAMA4)
        model = getattr(t, f"{name}ForCausalLM")
        config = model.config_class
        base |= {"moe_intermediate_size": INNER, "head_dim": 32}
    else:
        model, config, own = configs[kind]
    if kind in ("qwen2_moe", "qwen3_moe", "deepseek_v3"):
        own["moe_intermediate_size"] = INNER
    if kind == "qwen2_moe":
        own["shared_expert_intermediate_size"] = INNER
    built = model(config(**{**base, **own, **options})).eval()
    for parameter in built.parameters():
        parameter.data = parameter.data.to(dtype)  # not the buffers: loading leaves them in float32
        # Biases start at zero; a lost one would not be seen.
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return built


class StackedExperts(nn.Module):
    """Experts in 3-D parameters, run one by one."""

    def __init__(self, experts: int = EXPERTS):
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * INNER, HIDDEN) / 4)
        self.down_proj = nn.Parameter(torch.randn(experts, HIDDEN, INNER) / 4)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        output = torch.zeros_like(hidden_states)
        for i in range(self.num_experts):
            place, rows = torch.where(top_k_index.T.eq(i))
            if len(rows):
                gate, up = F.linear(hidden_states[rows], self.gate_up_proj[i]).chunk(2, dim=-1)
                found = F.linear(self.act_fn(gate) * up, self.down_proj[i])
                output.index_add_(0, rows, found * top_k_weights[rows, place, None])
        return output


class StackedBlock(nn.Module):
    """A block that sends tokens where the caller says."""

    def __init__(self, experts: int = EXPERTS):
        super().__init__()
        self.experts = StackedExperts(experts)

    def forward(self, x, index, attention_mask=None):
        flat = x.reshape(-1, x.shape[-1])
        weights = torch.full(index.shape, 0.5, dtype=x.dtype)
        return self.experts(flat, index, weights).view(x.shape)


class GatedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.down_proj(self.dropout(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class ListBlock(nn.Module):
    """Experts in a ModuleList, as in models whose code comes with the checkpoint."""

    def __init__(self, experts: int = EXPERTS):
        super().__init__()
        self.experts = nn.ModuleList(GatedMLP() for _ in range(experts))

    def forward(self, x, index, attention_mask=None):
        flat = x.reshape(-1, x.shape[-1])
        output = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            _, rows = torch.where(index.T.eq(i))
            if len(rows):
                output.index_add_(0, rows, expert(flat[rows]))
        return output.view(x.shape)


def by_hand(block: nn.Module, expert: int, tokens: torch.Tensor) -> dict[str, tuple[float, float]]:
    """The input ranges of one expert's projections for these tokens ``(n, hidden)``."""
    own = block.experts.get_submodule(str(expert))
    inner = F.silu(tokens @ own.gate_proj.weight.T) * (tokens @ own.up_proj.weight.T)
    return {
        "gate_proj": (tokens.min().item(), tokens.max().item()),
        "up_proj": (tokens.min().item(), tokens.max().item()),
        "down_proj": (inner.min().item(), inner.max().item()),
    }


KINDS = ["qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "deepseek_v3"]
W4A16_32 = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}}
W4A16_ASYM = {"weights": {**W4A16_32["weights"], "symmetric": False}}
FP8_BLOCK = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 16]}}
