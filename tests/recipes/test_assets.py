"""The shipped checkpoints: what they are, how they tokenise and what they know; the script behind them repeats."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.tokenizer import Tokenizer
from recipes.make_tiny import CHARACTERS, accuracy, addition_demo, make_model, make_tokenizer, warm_up
from recipes.tasks.addition import Addition
from recipes.tasks.modmix import Modmix

TASKS = [Addition(), Modmix()]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_checkpoint_is_what_the_script_describes(task: Addition | Modmix) -> None:
    model, loading = AutoModelForCausalLM.from_pretrained(task.checkpoint, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    config = model.config
    assert (config.model_type, config.head_dim, config.vocab_size, config.eos_token_id) == ("qwen3", 32, 64, 2)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    # embedding 64*64; per layer q, o 64*64, k, v 64*32, three 64*192, norms 2*64 + 2*32; last norm 64
    assert sum(p.numel() for p in model.parameters()) == 4096 + 2 * (2 * 4096 + 2 * 2048 + 3 * 12288 + 192) + 64
    assert sum(f.stat().st_size for f in task.checkpoint.iterdir()) < 430_000
    assert {k: tuple(v.shape) for k, v in model.state_dict().items()} == {
        k: tuple(v.shape) for k, v in make_model(0).state_dict().items()
    }


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_tokenizers_agree_and_round_trip(task: Addition | Modmix) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(task.checkpoint), Tokenizer.load(str(task.checkpoint))
    assert ours.eos_ids == {2} and theirs.get_vocab() == make_tokenizer().get_vocab()
    ids = theirs(CHARACTERS)["input_ids"]
    assert ids == [1, *range(3, 3 + len(CHARACTERS))]
    assert theirs.decode(ids, skip_special_tokens=True) == CHARACTERS
    assert ours.encode(CHARACTERS, specials=True).tolist() == ids and ours.decode(np.array([*ids, 2])) == CHARACTERS
    assert theirs("57+68=<eos>")["input_ids"] == [1, 8, 10, 13, 9, 11, 18, 2]
    chat = [{"role": "user", "content": "57+68="}]
    assert theirs.apply_chat_template(chat, return_dict=False) == theirs("57+68=")["input_ids"]
    assert ours.chat(chat).tolist() == theirs("57+68=")["input_ids"]
    answered = [*chat, {"role": "assistant", "content": ";125"}]
    assert theirs.apply_chat_template(answered, tokenize=False) == "<bos>57+68=;125<eos>"


@pytest.mark.parametrize(("task", "low", "high"), [(Addition(), 0.2, 0.31), (Modmix(), 0.3, 0.5)])
def test_base_model_half_knows_its_task(task: Addition | Modmix, low: float, high: float) -> None:
    torch.manual_seed(0)
    model, tokenizer = load(task.checkpoint)
    assert low < accuracy(model, tokenizer, task, 256) < high


def test_a_scratchpad_is_mostly_right_and_a_guess_hardly_ever() -> None:
    """What makes reinforcement learning work here: the skill is there, only its habit is missing."""
    torch.manual_seed(0)
    model, tokenizer = load(Addition.checkpoint)
    cases = [Addition().row(i) for i in range(512)]
    ids = tokenizer([case["prompt"] for case in cases], return_tensors="pt")
    out = model.generate(**ids, do_sample=True, top_k=0, max_new_tokens=Addition.max_tokens)
    texts = tokenizer.batch_decode(out[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    scored = [(text, text.partition(";")[2] == case["answer"]) for text, case in zip(texts, cases, strict=True)]
    pads = [right for text, right in scored if ":" in text]
    guesses = [right for text, right in scored if re.fullmatch(r";\d{3}", text)]
    assert len(pads) + len(guesses) > 490
    assert 0.18 < len(pads) / 512 < 0.33
    assert sum(pads) / len(pads) > 0.8 and sum(guesses) / len(guesses) < 0.1


def test_the_script_repeats_bit_for_bit() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        first, again, other = (short_run(seed) for seed in (0, 0, 1))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    initial = make_model(0).state_dict()
    assert all(not torch.equal(first[name], initial[name]) for name in initial)


def short_run(seed: int) -> dict[str, torch.Tensor]:
    model = make_model(seed)
    warm_up(model, make_tokenizer(), addition_demo, seed=seed, steps=3, lr=4e-3)
    return model.state_dict()


def load(folder: Path) -> tuple[torch.nn.Module, AutoTokenizer]:
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
