"""The same learning in one process and one loop: a reference for results and for speed.

Synchronous GRPO with DIS on a Hugging Face model: sample a static batch whose finished rows leave, score, train on
right-padded rows, repeat. It shares with the actors the seed of each request, the drawing of a token and the order of
rows, so tokens and rewards must come out equal; batching, packing, loss, clipping and schedule are written anew.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from actors.config import Sampling, TrainerConfig
from actors.engines.sampling import draw, uniforms
from actors.pretrained import load_model
from actors.tickets import RowOrder
from actors.tokenizer import Tokenizer
from actors.types import derive_seed
from recipes.tasks.addition import Addition
from recipes.tasks.modmix import Modmix

MICROBATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step sampled and what came of it; rollouts are ordered by (ticket, member)."""

    completions: list[np.ndarray]
    """int64 tokens each, the end included."""
    rewards: np.ndarray
    """float64 [groups, members]."""
    grad_norm: float
    """Before the clip."""
    sampled: float
    """Seconds of sampling."""
    trained: float
    """Seconds of the update."""


class Reference:
    """Holds the model; every `step` makes the next version."""

    def __init__(
        self,
        folder: str,
        task: Addition | Modmix,
        sampling: Sampling,
        config: TrainerConfig,
        *,
        steps: int,
        seed: int = 0,
        groups: int = 16,
        members: int = 16,
    ) -> None:
        self.model, self.tokenizer = load_model(folder, "float32"), Tokenizer.load(folder)
        self.task, self.sampling, self.config, self.steps = task, sampling, config, steps
        self.seed, self.groups, self.members, self.version = seed, groups, members, 0
        self.order = RowOrder(task.rows, seed)
        betas = (config.beta1, config.beta2)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=betas, weight_decay=config.weight_decay, fused=True
        )

    def step(self) -> Step:
        """Sample with the weights held, train once on all of it."""
        start = time.perf_counter()
        tickets = range(self.version * self.groups, (self.version + 1) * self.groups)
        rows = [self.task.row(self.order(ticket)) for ticket in tickets]
        prompts = [self.tokenizer.encode(row["prompt"], specials=True) for row in rows]
        seeds = [derive_seed(self.seed, ticket, member, 0) for ticket in tickets for member in range(self.members)]
        eos = min(self.tokenizer.eos_ids)
        completions, behaviour = sample(self.model, prompts, self.members, seeds, self.sampling, eos)
        rewards = np.zeros((self.groups, self.members))
        for i, tokens in enumerate(completions):
            row = rows[i // self.members]
            rewards[divmod(i, self.members)] = self.task.reward(
                row["prompt"],
                self.tokenizer.decode(tokens),
                finish="stop" if tokens[-1] == eos else "length",
                answer=row["answer"],
            )
        sampled = time.perf_counter()
        centred = rewards - rewards.mean(1, keepdims=True)
        advantages = (centred / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)).flatten()
        norm = self.update([p for p in prompts for _ in range(self.members)], completions, behaviour, advantages)
        self.version += 1
        return Step(
            completions=completions,
            rewards=rewards,
            grad_norm=norm,
            sampled=sampled - start,
            trained=time.perf_counter() - sampled,
        )

    def update(
        self,
        prompts: Sequence[np.ndarray],
        completions: Sequence[np.ndarray],
        behaviour: Sequence[np.ndarray],
        advantages: np.ndarray,
    ) -> float:
        """One AdamW update on DIS over all generated tokens; returns the gradient's norm."""
        lengths = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
        for part in np.array_split(np.argsort(lengths, kind="stable"), MICROBATCHES):
            width = max(lengths[i] for i in part)
            ids = torch.zeros(len(part), width, dtype=torch.int64)
            old, mask = torch.zeros(len(part), width), torch.zeros(len(part), width, dtype=torch.bool)
            for at, i in enumerate(part):
                here = slice(len(prompts[i]), lengths[i])
                ids[at, : lengths[i]] = torch.from_numpy(np.concatenate([prompts[i], completions[i]]))
                old[at, here], mask[at, here] = torch.from_numpy(behaviour[i]), True
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits / self.sampling.temperature
            logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            ratio = (logprobs.detach() - old[:, 1:]).exp()
            weight = ratio * ((ratio > 0.8) & (ratio < 1.28) & mask[:, 1:])
            (-(weight * torch.from_numpy(advantages[part]).float()[:, None] * logprobs).sum()).backward()
        tokens = sum(map(len, completions))
        for p in self.model.parameters():
            p.grad /= tokens
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item()

    def learning_rate(self) -> float:
        """Linear warm-up, then from the peak down to `final_lr` of it at the last step."""
        c, step = self.config, self.version
        if step < c.warmup_steps:
            return c.lr * (step + 1) / c.warmup_steps
        return float(np.interp(step, [c.warmup_steps, self.steps - 1], [c.lr, c.lr * c.final_lr]))


@torch.inference_mode()
def sample(
    model: nn.Module, prompts: Sequence[np.ndarray], members: int, seeds: Sequence[int], sampling: Sampling, eos: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """`members` completions of each prompt: int64 tokens and float32 logprobs of each.

    A prompt is read once for all its members. Rows that ended are taken out when they are a fifth of the batch.
    """
    width, count = max(map(len, prompts)), len(prompts) * members
    ids, mask = torch.zeros(2, len(prompts), width, dtype=torch.int64)
    for at, prompt in enumerate(prompts):
        ids[at, width - len(prompt) :], mask[at, width - len(prompt) :] = torch.from_numpy(prompt), 1
    padded = not mask.all()
    cache = DynamicCache()

    def forward(ids: Tensor, mask: Tensor) -> Tensor:
        """Logits [rows, vocabulary] after the last of `ids`; `mask` is of all tokens so far."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return model(
            input_ids=ids,
            attention_mask=mask if padded else None,
            position_ids=positions,
            past_key_values=cache,
            logits_to_keep=1,
        ).logits[:, -1]

    logits = forward(ids, mask).repeat_interleave(members, 0)
    cache.batch_repeat_interleave(members)
    mask = mask.repeat_interleave(members, 0)
    tokens = np.zeros((count, sampling.max_tokens), np.int64)
    logprobs = np.zeros((count, sampling.max_tokens), np.float32)
    lengths, rows, ended = np.zeros(count, np.int64), np.arange(count), np.zeros(count, bool)
    keys = np.array(seeds, np.uint64)
    for at in range(sampling.max_tokens):
        settings = [np.full(len(rows), x) for x in (sampling.temperature, sampling.top_p, sampling.top_k)]
        drawn, logprob, _ = draw(logits, uniforms(keys[rows], np.full(len(rows), at)), *settings)
        here = rows[~ended]
        tokens[here, at], logprobs[here, at] = drawn.numpy()[~ended], logprob.numpy()[~ended]
        lengths[here] = at + 1
        ended |= drawn.numpy() == eos
        if ended.all() or at + 1 == sampling.max_tokens:
            break
        if ended.mean() > 0.2:
            stay = torch.from_numpy(np.flatnonzero(~ended))
            cache.batch_select_indices(stay)
            drawn, mask, rows, ended = drawn[stay], mask[stay], rows[~ended], ended[~ended]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        logits = forward(drawn[:, None], mask)
    return [row[:n] for row, n in zip(tokens, lengths, strict=True)], [
        row[:n] for row, n in zip(logprobs, lengths, strict=True)
    ]
