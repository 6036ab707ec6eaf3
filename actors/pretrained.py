"""Hugging Face models from local folders. The one file that imports transformers: import it late, it takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from actors.config import Dtype

Attention = Callable[..., tuple[Tensor, Tensor | None]]


def load_model(folder: str, dtype: Dtype, attention: str = "sdpa") -> nn.Module:
    """The causal language model of a local folder, in eval mode on the CPU, from safetensors files only.

    Args:
        folder: holds `config.json` and `*.safetensors`, named as Hugging Face names them.
        dtype: of all parameters, whatever the files hold.
        attention: a name that transformers knows or that `register_attention` gave.

    Raises:
        FileNotFoundError: the folder or one of these files is missing.
        ValueError: the files cannot be read, or do not fill the model exactly.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"no model in {folder!r}: config.json is missing; give a local Hugging Face folder")
    if not any(path.glob("*.safetensors")):
        raise FileNotFoundError(f"no weights in {folder!r}: it has no *.safetensors file (other formats are not read)")
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"cannot load the model in {folder!r}: {error}") from error
    model, report = loaded
    if absent := sorted(report["missing_keys"]):
        raise ValueError(
            f"the weights in {folder!r} lack {len(absent)} tensors of its config.json, such as {absent[0]}"
        )
    model.eval()
    return model


def parameter_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters that `load_model` would give, without weights; one that is tied to another
    goes under the first name only.

    Raises:
        ValueError: the folder's config.json cannot be used.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"cannot read the model's config.json in {folder!r}: {error}") from error
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def register_attention(name: str, attention: Attention) -> None:
    """Make `attention` selectable, by `load_model(..., attention=name)`, in every model of transformers.

    Each layer calls `attention(module, query, key, value, attention_mask, *, scaling, dropout, ...)`: query is
    [batch, heads, length, head_dim], key and value [batch, kv_heads, length, head_dim], after the rotary embedding;
    `module.layer_idx` is the layer. It returns ([batch, length, heads, head_dim], None), where the last two axes may
    be flattened. Models pass keywords of their own too: `sliding_window`, `softcap`, `s_aux`, `position_ids`.

    A keyword that the model's forward does not know reaches every layer's call: `my_lengths=l` of
    `model(ids, position_ids=p, my_lengths=l, use_cache=False)` arrives as `my_lengths=l`. No mask is registered under
    the name, so `attention_mask` is None and the function masks by itself, from such keywords. With `use_cache=False`
    and no `past_key_values`, key and value hold the tokens of this call alone.
    """
    AttentionInterface.register(name, attention)
