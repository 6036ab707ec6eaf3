"""The reference itself: its sampler against the engine and a full forward, and that it learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.config import NativeEngine, Sampling, TrainerConfig
from actors.engines.native import Native
from actors.pretrained import load_model
from actors.tokenizer import Tokenizer
from actors.types import Request, RequestId, derive_seed
from recipes.tasks.addition import Addition
from recipes.tasks.modmix import Modmix
from tests.golden.reference import Reference, sample


@pytest.mark.parametrize("task", [Addition(), Modmix()], ids=lambda task: type(task).__name__)
def test_the_engine_draws_the_same_tokens(task: Addition | Modmix) -> None:
    folder, sampling = str(task.checkpoint), Sampling(max_tokens=task.max_tokens)
    tokenizer = Tokenizer.load(folder)
    prompts = [tokenizer.encode(task.row(i)["prompt"], specials=True) for i in range(6)]
    seeds = [derive_seed(5, ticket, member, 0) for ticket in range(6) for member in range(4)]
    tokens, logprobs = sample(load_model(folder, "float32"), prompts, 4, seeds, sampling, 2)

    engine = Native(NativeEngine(slots=24, max_length=256), folder)
    for i, seed in enumerate(seeds):
        engine.add(Request(id=RequestId(*divmod(i, 4), 0, 0), prompt=prompts[i // 4], sampling=sampling, seed=seed))
    done = {}
    while engine.unfinished:
        done.update({4 * id.ticket + id.attempt: completion for id, completion in engine.step()})
    for i in range(24):
        assert done[i].tokens.tolist() == tokens[i].tolist()
        np.testing.assert_allclose(done[i].logprobs, logprobs[i], atol=2e-5)


def test_logprobs_are_those_of_a_full_forward() -> None:
    """Prompts of different lengths and members that end apart: padding and leaving rows change nothing."""
    folder = str(Modmix.checkpoint)
    model, tokenizer = load_model(folder, "float32"), Tokenizer.load(folder)
    prompts = [tokenizer.encode(text, specials=True) for text in ("7%9=", "57%4=", "9%2=")]
    sampling = Sampling(max_tokens=80, temperature=0.7)
    tokens, logprobs = sample(model, prompts, 8, list(range(24)), sampling, 2)
    assert len({len(row) for row in tokens}) > 4
    with torch.no_grad():
        for i in range(24):
            ids = torch.from_numpy(np.concatenate([prompts[i // 8], tokens[i]]))[None]
            full = (model(input_ids=ids).logits[0, :-1] / 0.7).log_softmax(-1)
            expected = full.gather(1, ids[0, 1:, None])[-len(tokens[i]) :, 0]
            np.testing.assert_allclose(logprobs[i], expected.numpy(), atol=2e-5)
            assert 2 not in tokens[i][:-1] and (tokens[i][-1] == 2 or len(tokens[i]) == 80)


@pytest.mark.slow
def test_it_learns() -> None:
    reference = Reference(str(Addition.checkpoint), Addition(), Sampling(max_tokens=22), TrainerConfig(), steps=50)
    rewards = [reference.step().rewards.mean() for _ in range(16)]
    assert np.mean(rewards[:3]) < 0.4
    assert np.mean(rewards[-3:]) > 0.75
