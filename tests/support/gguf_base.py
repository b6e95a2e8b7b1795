"""GGUF files of tiny models in float, as llama.cpp's converter writes them: what a calibrated model is written into."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import nn

#: names of modules of transformers and of tensors of GGUF, both without the number of the layer
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
#: by transformers' model type, llama.cpp's architecture
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
_FLOATS = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}


def tiny(kind: str, dtype: torch.dtype = torch.float32, **options: object) -> nn.Module:
    """A random causal model of two layers of one of :data:`ARCHITECTURES`."""
    import transformers

    torch.manual_seed(0)
    shape = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind not in ("mixtral", "phi3"):
        shape["head_dim"] = 16
    if kind == "qwen3_moe":
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if kind == "mixtral":
        shape |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.AutoConfig.for_model(kind, **{**shape, **options})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def gguf_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a model by their names in GGUF, with rows in the order that llama.cpp wants."""
    kind = model.config.model_type
    names = {**_NAMES, **(_GEMMA_NAMES if kind.startswith("gemma") else {})}
    weights = {}
    for name, value in model.state_dict().items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        block = f"blk.{layer[1]}." if layer else ""
        module, _, suffix = name.removeprefix(layer[0] if layer else "").rpartition(".")
        if suffix in ("gate_up_proj", "down_proj"):  # stacks of experts
            parts = {"ffn_down_exps": value} if suffix == "down_proj" else {}
            if suffix == "gate_up_proj":
                parts["ffn_gate_exps"], parts["ffn_up_exps"] = value.chunk(2, dim=1)
            weights |= {f"{block}{part}.weight": tensor for part, tensor in parts.items()}
            continue
        if kind in ("llama", "mistral", "mixtral") and module in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = model.config.num_attention_heads
            if module == "self_attn.k_proj":
                heads = model.config.num_key_value_heads
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        if kind.startswith("gemma") and "norm" in module:
            value = value + 1
        weights[f"{block}{names[module]}.{suffix}"] = value
    if model.config.tie_word_embeddings:
        del weights["output.weight"]
    return weights


def write_base(model: nn.Module, file: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write a model as a GGUF file: matrices in ``dtype``, the rest in float32."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_F16))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {number}" for number in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    for name, value in gguf_weights(model).items():
        kept = dtype if value.ndim > 1 else torch.float32
        data = value.detach().to(kept)
        if kept == torch.bfloat16:
            data = data.view(torch.uint8)
        writer.add_tensor(name, np.ascontiguousarray(data.numpy()), raw_dtype=_FLOATS[kept])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
