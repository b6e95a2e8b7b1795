"""A tiny Llama with a tokenizer, on disk: what the application and the examples run on in tests.

python tests/support/tiny_model.py FOLDER
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens; 0 is padding, 1 begins, 2 ends."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def save_tiny_llama(folder: Path, dtype: torch.dtype = torch.float32, layers: int = 2) -> Path:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,  # the default of data.tokens
        initializer_range=0.1,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _save(LlamaForCausalLM(config).to(dtype), tokenizer, folder)


def save_tiny_bert(folder: Path, classes: tuple[str, ...] = ()) -> Path:
    """A classifier; of no classes, a model without a head."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    labels = {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
        **(labels if classes else {}),
    )
    return _save((BertForSequenceClassification if classes else BertModel)(config), tokenizer, folder)


def save_tiny_t5(folder: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        initializer_factor=0.3,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    return _save(T5ForConditionalGeneration(config), tokenizer, folder)


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(save_tiny_llama(Path(sys.argv[1])))
