"""What a report draws, as plain data: curves, a timeline that fits a page, sample rollouts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

from actors.timeline import Span
from recipes.folder import Rollout, Row, RunFiles, finite, visible, whole

SPANS = 20_000
"""Most spans that the page embeds; it says so if there are more."""
WINDOWS = 8
"""Stretches out of the middle of a longer run of which all spans are embedded."""
GAP = 60.0
"""Seconds without any span, as between two processes of a resumed run, from which the axis leaves the time out."""
STEPS = 24
"""Steps whose rollouts the page embeds, spread evenly."""
TOKENS = 3000
"""Most tokens of a rollout that the page embeds."""


@dataclass(frozen=True)
class Chart:
    """Metrics that share an axis. A name that ends with `*` takes what no other chart names."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    about: str
    log: bool = False


CHARTS = (
    Chart("Reward", "", ("reward/mean", "reward/trained"), "all scored rollouts, trained ones"),
    Chart("Parts of the reward", "", ("reward/*",), "mean of each over the scored rollouts"),
    Chart("Completion length", "tokens", ("rollout/length", "rollout/length_max"), "what the model drew"),
    Chart("Staleness", "versions", ("staleness/mean", "staleness/max"), "version trained from minus a token's own"),
    Chart(
        "Engine gap",
        "nats",
        ("policy/engine_gap_mean", "policy/engine_gap_max"),
        "a token's logprob, engine against trainer at one version",
        log=True,
    ),
    Chart(
        "Age of rollouts",
        "versions",
        ("staleness/age", "staleness/age_positive", "staleness/age_negative", "buffer/age"),
        "of the oldest token: trained ones by sign of the advantage, all that were finished",
    ),
    Chart("Lag", "nats", ("policy/lag_kl",), "divergence of the trained policy from those that drew the tokens"),
    Chart(
        "Ratio",
        "",
        ("policy/ratio_p01", "policy/ratio_p50", "policy/ratio_p99"),
        "trainer's probability of a token over that it was drawn with: quantiles",
        log=True,
    ),
    Chart(
        "Shares",
        "share",
        ("policy/masked", "policy/ess", "rollout/truncated", "reward/zero_variance", "rollout/quarantined"),
        "tokens without gradient, effective sample, completions cut, groups of equal rewards, rollouts left out",
    ),
    Chart("Masked by age", "share", ("policy/masked_age_*",), "tokens without gradient, by versions of age"),
    Chart("Throughput", "tokens/s", ("generated", "trained"), "tokens between two steps over the step's seconds"),
    Chart("Time of a step", "s", ("time/step", "time/train", "time/wait_batch", "sync/seconds"), "and of its parts"),
    Chart("Idle", "share", ("idle/trainer", "idle/generator"), "of a step's time"),
    Chart("Gradient norm", "", ("policy/grad_norm",), "before clipping"),
    Chart("Entropy", "nats", ("policy/entropy",), "of the next token"),
    Chart("Loss", "", ("policy/loss",), "per token of the denominator"),
)
EVALUATIONS = (
    Chart("Evaluation", "", ("eval/reward", "eval/pass@*"), "held-out rows: reward, pass@k"),
    Chart("Evaluated parts of the reward", "", ("eval/reward_*",), "mean of each over the held-out rows"),
    Chart("Evaluated length", "tokens", ("eval/length",), "what the model drew for held-out rows"),
    Chart("Evaluated shares", "share", ("eval/truncated",), "completions cut"),
    Chart("Failed in evaluation", "rollouts", ("eval/failed",), "got no reward"),
)
UNDRAWN = ("eval/rows", "eval/reward_error")
"""What no `*` takes: a constant, and the spread of another metric."""


def curves(rows: list[Row], charts: Sequence[Chart], axis: str) -> list[Row]:
    """The charts that have a value to show; a point for each row, null where the row has no finite value."""
    named = {*UNDRAWN, *(name for chart in charts for name in chart.metrics)}
    present = sorted({name for row in rows for name, value in row.items() if finite(value) is not None})
    drawn = []
    for chart in charts:
        taken = [
            name
            for wanted in chart.metrics
            for name in present
            if name == wanted or (wanted.endswith("*") and fnmatchcase(name, wanted) and name not in named)
        ]
        if taken:
            series = [{"name": visible(name), "values": [_short(row.get(name)) for row in rows]} for name in taken]
            about = {"title": chart.title, "unit": chart.unit, "about": chart.about, "log": chart.log}
            drawn.append(about | {"axis": axis, "x": [row[axis] for row in rows], "series": series})
    return drawn


def _short(value: Any) -> float | None:
    number = finite(value)
    return None if number is None else float(f"{number:.6g}")


def by(key: str, rows: Iterable[Row]) -> list[Row]:
    """Rows in the order of a whole number that they have; of several with one number the last."""
    return [row for _, row in sorted({row[key]: row for row in rows if whole(row.get(key))}.items())]


def with_throughput(row: Row) -> Row:
    """A row of metrics with tokens per second."""
    seconds = finite(row.get("time/step"))
    tokens = {name: finite(row.get(f"perf/{name}_tokens")) for name in ("generated", "trained")}
    return row | {name: count / seconds for name, count in tokens.items() if count is not None and seconds}


def spans_of(files: RunFiles) -> list[Span]:
    """The spans of `timeline.jsonl` that have times, by their begin."""
    spans = []
    for row in files.lines("timeline.jsonl", "timeline"):
        begin, end, version = finite(row.get("begin")), finite(row.get("end")), row.get("version")
        if begin is not None and end is not None and begin <= end:
            role, name = visible(str(row.get("role"))), visible(str(row.get("name")))
            known = version if whole(version) else None
            spans.append(Span(role=role, name=name, begin=begin, end=end, version=known))
    return sorted(spans, key=lambda span: (span.begin, span.end))


def timeline(spans: list[Span], limit: int = SPANS) -> Row:
    """Spans as the page draws them: times in seconds on an axis without long gaps, and the holes in what is embedded.

    Of more than `limit` spans those of the first and of the last third of that number stay, and those of `WINDOWS`
    stretches between, each whole, so that shares of time within them are true. Spans that reach into a stretch come
    on top.
    """
    placed, holes = _without_gaps(spans)
    kept = placed
    if len(placed) > limit:
        third = limit // 3
        part, room = third // WINDOWS, len(placed) - 2 * third
        starts = [third + (room - part) * (2 * i + 1) // (2 * WINDOWS) for i in range(WINDOWS)]
        ranges = [(0, third), *((start, start + part) for start in starts), (len(placed) - third, len(placed))]
        chosen: set[int] = set()
        for first, last in ranges:
            edge = placed[first][0]
            chosen.update(range(first, last), (i for i in range(first) if placed[i][1] > edge))
        kept = [placed[i] for i in sorted(chosen)]
        holes += [
            {"begin": placed[last][0], "end": placed[first][0], "text": "not embedded"}
            for (_, last), (first, _) in pairwise(ranges)
            if placed[last][0] < placed[first][0]
        ]
    roles = sorted(
        {span.role for span in spans}, key=lambda role: [_natural(part) for part in re.split(r"(\d+)", role)]
    )
    names = sorted({span.name for span in spans})
    return {
        "roles": roles,
        "names": names,
        "spans": [
            [roles.index(span.role), names.index(span.name), round(begin, 6), round(end, 6), span.version]
            for begin, end, span in kept
        ],
        "holes": sorted(holes, key=lambda hole: hole["begin"]),
        "end": max((end for _, end, _ in placed), default=0.0),
        "total": len(spans),
    }


def _natural(part: str) -> tuple[int, int, str]:
    order = ("trainer", "sync", "generator", "worker", "buffer", "evaluator")
    if part.isdigit():
        return (0, int(part), "")
    return (1, order.index(part) if part in order else len(order), part)


def _without_gaps(spans: list[Span]) -> tuple[list[tuple[float, float, Span]], list[Row]]:
    """Begin, end and span, in seconds since the first; a time of more than `GAP` without spans becomes one second."""
    placed, holes = [], []
    start = reached = spans[0].begin if spans else 0.0
    for span in spans:
        if span.begin - reached > GAP:
            holes.append({"begin": reached - start, "end": reached - start + 1, "text": _gap(span.begin - reached)})
            start += span.begin - reached - 1
        reached = max(reached, span.end)
        placed.append((span.begin - start, span.end - start, span))
    return placed, holes


def _gap(seconds: float) -> str:
    amount = f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
    return f"{amount} without spans left out"


def samples(files: RunFiles) -> list[Row]:
    """Rollouts of at most `STEPS` steps, spread evenly, first and last included."""
    steps = sorted({rollout.step for rollout in files.rollouts()})
    if len(steps) > STEPS:
        files.notes.append(f"Rollouts of {STEPS} of {len(steps)} steps are embedded; recipes.view shows all.")
        steps = [steps[round(i * (len(steps) - 1) / (STEPS - 1))] for i in range(STEPS)]
    wanted = set(steps)
    return sorted((_embedded(r) for r in files.rollouts() if r.step in wanted), key=lambda row: row["step"])


def _embedded(rollout: Rollout) -> Row:
    """A rollout as the page shows it, cut at `TOKENS`."""
    parts = [[visible(name), _short(value)] for name, value in rollout.parts.items()]
    turns = [
        {name: visible(str(turn.get(name))) for name in ("kind", "finish")}
        | {"reward": _short(turn.get("reward")), "start": turn["start"], "end": min(turn["end"], TOKENS)}
        for turn in rollout.turns
        if turn["start"] < TOKENS
    ]
    logprobs = (finite(value) for value in rollout.logprobs[:TOKENS])
    return {
        "title": f"{visible(rollout.rank)}, ticket {rollout.ticket}",
        "step": rollout.step,
        "row": rollout.row,
        "reward": _short(rollout.reward),
        "parts": parts,
        "turns": turns,
        "pieces": [visible(piece, keep="\n\t") for piece in rollout.pieces[:TOKENS]],
        "tokens": rollout.tokens[:TOKENS],
        "logprobs": [None if value is None else round(value, 3) for value in logprobs],
        "versions": rollout.versions[:TOKENS],
        "drawn": rollout.drawn,
        "length": len(rollout.pieces),
    }
