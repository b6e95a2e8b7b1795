"""Attention states and the kv cache of the tiny Llama: every way to quantize them, and what hooking could leave."""

import torch
from compressed_tensors.modeling import QuantizedAttentionImpl

from lightning_obs import CalibrationSession

FLOAT8 = {"num_bits": 8, "type": "float"}
LAYERS, HEADS, KV_HEADS = 2, 4, 2
NAMES = [f"model.layers.{i}.self_attn" for i in range(LAYERS)]


def attention(strategy="tensor", target="LlamaAttention", **kwargs):
    """A group that quantizes q, k and v."""
    args = {**FLOAT8, "strategy": strategy, "observer": "static_minmax", **kwargs}
    return {"attention": {"targets": [target], "input_activations": args}}


CASES = {
    "FP8 and kv": {"scheme": "FP8", "kv_cache": "FP8", "ignore": ["lm_head"]},
    "FP8 and kv per head": {"scheme": "FP8", "kv_cache": "FP8_HEAD", "ignore": ["lm_head"]},
    "kv": {"scheme": None, "kv_cache": "FP8"},
    "kv per head": {"scheme": None, "kv_cache": "FP8_HEAD"},
    "q, k, v": {"scheme": attention()},
    "q, k, v per head": {"scheme": attention("attn_head")},
    "q, k, v and Linear": {"scheme": {**attention("attn_head"), "FP8": ["re:.*_proj$"]}},
}


def calibrate(model, batches, scheme=None, **kwargs):
    with torch.no_grad(), CalibrationSession(model, scheme, **kwargs) as session:
        for batch in batches:
            model(**batch)
    return session


def logits(model, batch, **kwargs):
    with torch.no_grad():
        return model(**batch, **kwargs).logits


def interrupt(model, batch):
    logits(model, batch)
    raise KeyboardInterrupt


def cached_states(model, batches):
    """``{"k": [per layer, (all batches, heads, tokens, head_dim)], "v": ...}``, from transformers' own cache."""
    with torch.no_grad():
        caches = [model(**batch, use_cache=True).past_key_values for batch in batches]
    return {
        "k": [torch.cat([cache.layers[i].keys for cache in caches]) for i in range(LAYERS)],
        "v": [torch.cat([cache.layers[i].values for cache in caches]) for i in range(LAYERS)],
    }


def traces(model):
    """Everything that hooking can change."""
    return [
        list(model.state_dict()),
        [name for name, _ in model.named_modules()],
        [(len(m._forward_pre_hooks), len(m._forward_hooks), "forward" in vars(m)) for m in model.modules()],
        ["quantization_enabled" in vars(m) or "register_forward_pre_hook" in vars(m) for m in model.modules()],
        {id(m.config): m.config._attn_implementation for m in model.modules() if hasattr(m, "config")},
        QuantizedAttentionImpl._original_impl,
    ]
