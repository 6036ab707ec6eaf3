"""Every objective against its formula in plain Python.

A formula is written once, with complex numbers: values are its real part, and the derivative by one logprob is the
imaginary part after a step of 1e-30 i, exact to rounding. What a formula takes from `now` is behind a stop-gradient.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from losses import (
    CISPO,
    DIS,
    DPPO,
    GSPO,
    TOPR,
    Corrected,
    Corrections,
    Distill,
    DistillForward,
    Kimi15,
    KLPenalty,
    Objective,
    OnlineDPO,
    PolicyGradient,
    PPOClip,
)
from tests.losses.tables import OBJECTIVES, inputs_of, label, loss_and_gradient

STEP = 1e-30
DEFAULT = {"tv": 0.2, "ipo": 0.1}


class Tok(NamedTuple):
    theta: complex
    now: float
    mu: float
    old: float | None
    ref: float
    teacher: float
    advantage: float
    age: int
    rollout: int
    group: int

    @property
    def anchor(self) -> float:
        return self.mu if self.old is None else self.old


def lim(x: complex) -> complex:
    real = complex(x).real
    return x if -20 <= real <= 20 else math.copysign(20.0, real)


def smaller(a: complex, b: complex) -> complex:
    return a if complex(a).real <= complex(b).real else b


def larger(a: complex, b: complex) -> complex:
    return b if smaller(a, b) is a else a


def clip(x: complex, low: float, high: float) -> complex:
    return smaller(larger(x, low), high)


def capped(log: float, cap: float) -> float:
    return min(math.exp(log), cap) if cap < math.exp(20) else math.exp(log) * (log < 20)


def surrogate(r: complex, a: float, low: float, high: float, dual: float | None = None) -> complex:
    value = smaller(r * a, clip(r, low, high) * a)
    if dual is not None and a < 0:
        value = larger(value, dual * a)
    return -value


def peers(token: Tok, tokens: Sequence[Tok]) -> list[Tok]:
    return [other for other in tokens if other.rollout == token.rollout]


def mean(values: Sequence[complex]) -> complex:
    return sum(values) / len(values)


def one(objective: Objective, t: Tok, tokens: Sequence[Tok]) -> complex:
    """The loss of token t."""
    a, mine = t.advantage, peers(t, tokens)
    to_mu = lim(t.now - t.mu).real
    match objective:
        case PolicyGradient():
            return -a * t.theta
        case PPOClip(clip_low=low, clip_high=high, dual_clip=dual):
            return surrogate(cmath.exp(lim(t.theta - t.anchor)), a, 1 - low, 1 + high, dual)
        case GSPO(clip_low=low, clip_high=high, level="sequence"):
            s = cmath.exp(mean([lim(p.theta - p.anchor) for p in mine]))
            return surrogate(s, a, 1 - low, 1 + high)
        case GSPO(clip_low=low, clip_high=high):
            s = math.exp(mean([lim(p.now - p.anchor) for p in mine]).real)
            return surrogate(s * cmath.exp(lim(t.theta - t.anchor) - lim(t.now - t.anchor)), a, 1 - low, 1 + high)
        case DIS(low=low, high=high, one_sided=one_sided, detach=detach):
            r = math.exp(to_mu)
            inside = low < r < high if not one_sided else not ((a > 0 and r >= high) or (a < 0 and r <= low))
            if not inside or abs(to_mu) == 20:
                return 0.0
            return -(r if detach else cmath.exp(t.theta - t.mu)) * a * t.theta
        case CISPO(high=high, low=low):
            w = capped(lim(t.now - t.anchor).real, high)
            return -(w if low is None else max(w, low)) * a * t.theta
        case TOPR(level=level):
            log = to_mu if level == "token" else lim(sum(lim(p.now - p.mu) for p in mine)).real
            return -(min(math.exp(log), 1.0) if a < 0 else 1.0) * a * t.theta
        case Kimi15(tau=tau):
            return -a * t.theta + tau / 2 * lim(t.theta - t.anchor) ** 2
        case DPPO(mask=mask, threshold=threshold, square=square):
            most = DEFAULT[mask] if threshold is None else threshold
            moved = math.exp(t.now) - math.exp(t.mu)
            dropped = abs(moved) > most and (mask == "ipo" or moved * a > 0)
            log_r = lim(t.theta - t.mu)
            return (0 if dropped else -a * cmath.exp(log_r)) + square * log_r**2
        case KLPenalty(coefficient=c, kind=kind):
            x = lim(t.ref - t.theta)
            k3 = smaller(cmath.exp(x) - x - 1, 10.0)
            r = cmath.exp(lim(t.theta - t.anchor))
            return c * {"k1": -x, "k2": x * x / 2, "k3": k3, "unbiased": r * k3}[kind]
        case DistillForward(cap=cap):
            return capped(lim(t.teacher - t.mu).real, cap) * lim(t.teacher - t.theta)
        case Distill(base=base, teacher=teacher, reward=reward):
            moved_to = [
                p._replace(advantage=reward * p.advantage + teacher * lim(p.teacher - p.now).real) for p in tokens
            ]
            return one(base, moved_to[tokens.index(t)], moved_to)
        case Corrected(base=base, corrections=corrections, kl=kl):
            weight = factor(corrections, t, mine)
            own = tokens
            if t.old is None and {corrections.token_cap, corrections.token_band, corrections.sequence_cap} != {None}:
                own = [p._replace(old=p.now) for p in tokens]
            penalty = one(kl, t, tokens) if kl.coefficient else 0.0
            return weight * one(base, own[tokens.index(t)], own) + penalty
        case OnlineDPO(beta=beta):
            return preference(beta, t, tokens)
    raise AssertionError(objective)


def factor(c: Corrections, t: Tok, mine: Sequence[Tok]) -> float:
    def log(p: Tok) -> float:
        return lim((p.now if p.old is None else p.old) - p.mu).real

    total, rho = math.fsum(map(log, mine)), math.exp(log(t))
    weight = 1.0
    if c.token_cap is not None:
        weight *= capped(log(t), c.token_cap)
    if c.token_band is not None:
        weight *= rho if c.token_band[0] <= rho <= c.token_band[1] and log(t) < 20 else 0.0
    if c.sequence_cap is not None:
        weight *= capped(lim(total).real, c.sequence_cap)
    if c.sequence_reject is not None and total > math.log(c.sequence_reject):
        return 0.0
    if c.geometric_band is not None:
        geometric = math.exp(total / len(mine))
        if geometric < c.geometric_band[0] or geometric > c.geometric_band[1]:
            return 0.0
    if c.k3_reject is not None and mean([math.exp(log(p)) - 1 - log(p) for p in mine]).real > c.k3_reject:
        return 0.0
    if c.opsm is not None and t.advantage < 0 and mean([lim(p.mu - p.now) for p in mine]).real > c.opsm:
        return 0.0
    if c.max_staleness is not None and t.age > c.max_staleness:
        return 0.0
    return weight


def preference(beta: float, t: Tok, tokens: Sequence[Tok]) -> complex:
    h: dict[int, complex] = {}
    advantage, size = {}, {}
    for p in tokens:
        if p.group == t.group:
            h[p.rollout] = h.get(p.rollout, 0.0) + lim(p.theta - p.ref)
            size[p.rollout] = size.get(p.rollout, 0) + 1
            advantage[p.rollout] = p.advantage
    pairs = [(i, j) for i in h for j in h if advantage[i] > advantage[j]]
    share: complex = 0.0
    for pair in pairs:
        if t.rollout in pair:
            z = beta * (h[pair[0]] - h[pair[1]])
            # log(1 + e^-z) without overflow
            share += (cmath.log(1 + cmath.exp(-z)) if z.real > 0 else cmath.log(1 + cmath.exp(z)) - z) / 2
    return share / max(1, len(pairs)) / size[t.rollout]


def reference(objective: Objective, tokens: Sequence[Tok]) -> tuple[float, list[float]]:
    loss = math.fsum(complex(one(objective, t, tokens)).real for t in tokens)
    gradient = []
    for i, t in enumerate(tokens):
        stepped = [*tokens[:i], t._replace(theta=t.theta + STEP * 1j), *tokens[i + 1 :]]
        gradient.append(math.fsum(complex(one(objective, p, stepped)).imag for p in stepped) / STEP)
    return loss, gradient


near, far = st.floats(-2, 0), st.floats(-30, 0)
logprob = near | far


@st.composite
def batches(draw: st.DrawFn) -> list[Tok]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    with_old = draw(st.booleans())
    tokens = []
    for rollout, size in enumerate(sizes):
        advantage = draw(st.floats(-3, 3))
        for _ in range(size):
            now, mu, old, ref, teacher = (draw(logprob) for _ in range(5))
            tokens.append(
                Tok(
                    now,
                    now,
                    mu,
                    old if with_old else None,
                    ref,
                    teacher,
                    advantage,
                    draw(st.integers(0, 4)),
                    rollout,
                    rollout // 2,
                )
            )
    return tokens


@pytest.mark.parametrize("objective", OBJECTIVES, ids=label)
@settings(max_examples=15, deadline=None)
@given(tokens=batches())
def test_value_and_gradient_equal_the_formula(objective: Objective, tokens: list[Tok]) -> None:
    inputs = inputs_of(
        [t.now for t in tokens],
        [t.mu for t in tokens],
        [t.advantage for t in tokens],
        old=None if tokens[0].old is None else [t.old for t in tokens if t.old is not None],
        ref=[t.ref for t in tokens],
        teacher=[t.teacher for t in tokens],
        segments=[t.rollout for t in tokens],
        groups=[t.group for t in tokens],
        staleness=[t.age for t in tokens],
    )
    loss, gradient = loss_and_gradient(objective, inputs)
    expected_loss, expected = reference(objective, tokens)
    scale = max(1.0, *map(abs, expected))
    assert loss == pytest.approx(expected_loss, rel=1e-9, abs=1e-9)
    assert gradient == pytest.approx(expected, rel=1e-9, abs=1e-10 * scale)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    "objective", [GSPO(clip_low=0.2, clip_high=0.3), GSPO(clip_low=0.2, clip_high=0.3, level="token")]
)
def test_forms_of_gspo_differ_with_advantages_per_token(objective: Objective, advantage: float) -> None:
    tokens = [Tok(-1.0, -1.0, -1.1, None, 0, 0, advantage, 0, 0, 0), Tok(-0.9, -0.9, -0.8, None, 0, 0, 3.0, 0, 0, 0)]
    inputs = inputs_of([-1.0, -0.9], [-1.1, -0.8], [advantage, 3.0])
    assert loss_and_gradient(objective, inputs)[1] == pytest.approx(reference(objective, tokens)[1], rel=1e-9)
    turned = replace(inputs, advantages_T=inputs.advantages_T.flip(0))
    assert (loss_and_gradient(objective, turned)[1] == pytest.approx(reference(objective, tokens)[1])) is (
        objective == GSPO(clip_low=0.2, clip_high=0.3)
    )
