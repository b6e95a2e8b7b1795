"""Tiny vision-language models with random weights, saved under the names of the hub."""

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from tests.support.tiny_model import tiny_tokenizer

_TEXT = {
    "vocab_size": 264, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_VISION = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 14}
KINDS = ["llava", "qwen2_5_vl"]


def save_vision_model(folder, kind):
    """A model with a processor's file and a licence beside it."""
    torch.manual_seed(0)
    if kind == "llava":
        vision = CLIPVisionConfig(**_VISION, num_hidden_layers=2, num_attention_heads=2, image_size=28)
        config = LlavaConfig(text_config=LlamaConfig(**_TEXT), vision_config=vision, image_token_index=260)
        model = LlavaForConditionalGeneration(config)
    else:
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
        vision = {**_VISION, "depth": 2, "num_heads": 2, "out_hidden_size": 64, "fullatt_block_indexes": [1]}
        tokens = {
            "image_token_id": 260,
            "video_token_id": 261,
            "vision_start_token_id": 262,
            "vision_end_token_id": 263,
        }
        config = Qwen2_5_VLConfig(text_config={**_TEXT, "rope_parameters": rope}, vision_config=vision, **tokens)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.bfloat16().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    (folder / "LICENSE").write_text("free")
    return folder
