"""Tiny random models with a character tokenizer, saved as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

Family = Literal["qwen3_tied", "qwen3", "llama"]

CHARS = "0123456789+-*/%=,;: >?abcdefghijklmnopqrstuvwxyz\n"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '>' }}{% endif %}"
)


def save_tiny(folder: Path, family: Family = "qwen3_tied", seed: int = 0, layers: int = 2) -> str:
    """A model of 64 tokens and head_dim 32 whose logits are peaked enough that sampling is not uniform."""
    common = {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**common, tie_word_embeddings=False))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common, tie_word_embeddings=family == "qwen3_tied"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return str(folder)


def char_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; 0, 1 and 2 are pad, bos and eos."""
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {c: i + 3 for i, c in enumerate(CHARS)}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    outer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    outer.chat_template = TEMPLATE
    return outer
