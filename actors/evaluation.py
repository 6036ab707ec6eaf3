"""Evaluation on held-out rows: a generator that keeps one version, the workers that play, and the figures."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from actors.types import Judged, Sampling


async def evaluate(
    workers: Any, generators: Sequence[Any], *, rows: int, version: int, samples: int, sampling: Sampling
) -> list[Judged]:
    """Play the first `rows` held-out rows `samples` times each, spread over the ranks of `workers` and over
    `generators` (rank 0 of each replica), which must keep `version` until this returns. In the order of the rows."""
    ranks = workers.sizes["ranks"]
    units = max(ranks, len(generators))
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(
                _share(
                    workers.slice(ranks=unit % ranks),
                    generators[unit % len(generators)],
                    share,
                    version,
                    samples,
                    sampling,
                )
            )
            for unit in range(units)
            if (share := list(range(unit, rows, units)))
        ]
    return sorted((judged for task in running for judged in task.result()), key=lambda judged: judged.row)


async def _share(worker: Any, *arguments: Any) -> list[Judged]:
    judged: list[Judged] = await worker.evaluate.call_one(*arguments)
    return judged


def figures(judged: Sequence[Judged], samples: int, solved: float) -> dict[str, float]:
    """Figures of an evaluation.

    `eval/reward` is the mean over all rollouts and `eval/reward_error` its standard error over rows, `eval/pass@k` for
    k = 1, 2, 4, ... up to `samples` counts a reward of `solved` or more as right, `eval/length` and `eval/truncated`
    are means, `eval/failed` counts rollouts that got no reward, `eval/reward_<part>` is the mean of a part of the
    reward. A figure of nothing is nan.
    """
    rollouts = [rollout for row in judged for rollout in row.rollouts]
    means = [_mean([r.reward for r in row.rollouts]) for row in judged if row.rollouts]
    out = {
        "eval/reward": _mean([r.reward for r in rollouts]),
        "eval/reward_error": _error(means),
        "eval/length": _mean([float(r.mask.sum()) for r in rollouts]),
        "eval/truncated": _mean([float(r.truncated) for r in rollouts]),
        "eval/rows": float(len(judged)),
        "eval/failed": float(sum(len(row.failures) for row in judged)),
    }
    k = 1
    while k <= samples:
        rows = [
            pass_at_k(len(row.rollouts), sum(r.reward >= solved for r in row.rollouts), k)
            for row in judged
            if len(row.rollouts) >= k
        ]
        out[f"eval/pass@{k}"] = _mean(rows)
        k *= 2
    for name in dict.fromkeys(name for r in rollouts for name in r.parts):
        out[f"eval/reward_{name}"] = _mean([r.parts[name] for r in rollouts if name in r.parts])
    return out


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that one of k completions drawn from these n without replacement is right: 1 - C(n - c, k) / C(n, k), the
    unbiased estimate of Chen et al. (arXiv 2107.03374, eq. 1)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _error(values: Sequence[float]) -> float:
    """Standard error of the mean."""
    if len(values) < 2:
        return math.nan
    mean = _mean(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
