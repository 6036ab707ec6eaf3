"""Filters of finished groups: hand-made groups, what holds for any group, and what a worker gives the buffer."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors import payload
from actors.checks import check, resolve
from actors.config import BufferConfig, FilterConfig, GeneratorConfig, NativeEngine, RunConfig, SimulatedEngine
from actors.environment import SingleTurn
from actors.filters import survivors
from actors.rollout import RolloutWorker
from actors.types import Rollout, Sampling, Turn
from losses import group_norm
from recipes.tasks.addition import Addition
from tests.actors.test_rollout import Buffer, Replica, Task, call, done, leases, model, run, worker

__all__ = ["model"]

MOST = 10


def member(reward: float, length: int = 3, *, cut: bool = False, penalty: float | None = None) -> Rollout:
    """An action of 2 tokens, an observation of 20 and a last action of `length`, at most 10."""
    ends = np.cumsum([1, 2, 20, length]).tolist()
    turns = (
        Turn(start=0, end=ends[0], kind="prompt"),
        Turn(start=ends[0], end=ends[1], kind="action", finish="length"),  # not the last one
        Turn(start=ends[1], end=ends[2], kind="observation"),
        Turn(start=ends[2], end=ends[3], kind="action", finish="length" if cut else "stop", reward=reward),
    )
    n = ends[3]
    return Rollout(
        tokens=np.zeros(n, np.int32),
        mask=np.ones(n, bool),
        logprobs=np.zeros(n, np.float32),
        versions=np.zeros(n, np.int32),
        turns=turns,
        reward=reward,
        sampling=Sampling(max_tokens=MOST),
        parts={} if penalty is None else {"penalty": penalty},
    )


def cut(reward: float = 0.0) -> Rollout:
    return member(reward, MOST, cut=True)


def trained(rollouts, *, group_size=4, seed=0, solved=0.5, **config) -> list[tuple[int, float]]:
    """Which rollouts stay, by number, and with which rewards."""
    kept = survivors(rollouts, FilterConfig(**config), group_size=group_size, solved=solved, seed=seed)
    numbers = {id(rollout.tokens): i for i, rollout in enumerate(rollouts)}
    return [(numbers[id(rollout.tokens)], rollout.reward) for rollout in kept]


# By hand


def test_without_a_filter_a_group_is_what_it_was():
    group = (member(1.0), cut(0.25))
    assert survivors(group, FilterConfig(), group_size=4, solved=0.5, seed=0) == group
    # One that failures left alone is trained as before: no filter took its peers.
    assert trained(group[:1]) == trained(group[:1], on_truncated="zero", overlong_cache=2) == [(0, 1.0)]


def test_a_truncated_rollout_counts_as_the_setting_says():
    group = [member(1.0), cut(0.5), member(0.25), cut(-3.0), member(0.0)]
    assert trained(group) == [(0, 1.0), (1, 0.5), (2, 0.25), (3, -3.0), (4, 0.0)]
    assert trained(group, on_truncated="zero") == [(0, 1.0), (1, 0.0), (2, 0.25), (3, 0.0), (4, 0.0)]
    assert trained(group, on_truncated="drop") == [(0, 1.0), (2, 0.25), (4, 0.0)]
    # (1 + 0.25 + 0) / 3 = 5 / 12, whatever the truncated ones were judged.
    assert trained(group, on_truncated="bootstrap") == [
        (0, 1.0),
        (1, pytest.approx(5 / 12)),
        (2, 0.25),
        (3, pytest.approx(5 / 12)),
        (4, 0.0),
    ]


def test_the_others_are_compared_as_if_a_bootstrapped_rollout_were_not_there():
    """Its advantage is 0, those of the others keep their proportion: 7/12, -2/12 and -5/12."""
    kept = trained([member(1.0), cut(), member(0.25), member(0.0)], on_truncated="bootstrap")
    advantages = group_norm(torch.tensor([r for _, r in kept], dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
    assert (12 / 7 * advantages / advantages[0]).tolist() == pytest.approx([12 / 7, 0, -24 / 49, -60 / 49], abs=1e-12)


@pytest.mark.parametrize("on_truncated", ["drop", "bootstrap"])
def test_a_group_without_an_end_teaches_nothing(on_truncated):
    assert trained([cut(1.0), cut(), cut()], on_truncated=on_truncated) == []


def test_one_alone_has_no_peer_but_where_groups_are_of_one():
    assert trained([member(1.0), cut(), cut()], on_truncated="drop") == []
    assert trained([member(1.0), cut()], on_truncated="bootstrap") == [(0, 1.0), (1, 1.0)]
    assert trained([member(1.0)], group_size=1, on_truncated="drop") == [(0, 1.0)]
    assert trained([cut(1.0)], group_size=1, on_truncated="drop") == []
    assert trained([cut(1.0)], on_truncated="drop") == []


def test_long_last_actions_pay_over_the_cache():
    """Of 10 tokens the last 4 count: up to 6 nothing, 8 half, 10 all; what came before does not count."""
    group = [member(1.0, n) for n in (2, 6, 7, 8, 10)]
    assert trained(group, overlong_cache=4) == [(0, 1.0), (1, 1.0), (2, 0.75), (3, 0.5), (4, 0.0)]
    # The penalty of a truncated one comes on top of what it counts as.
    both = [member(1.0), member(0.5), cut(7.0)]
    assert trained(both, overlong_cache=4, on_truncated="zero")[2] == (2, -1.0)
    assert trained(both, overlong_cache=4, on_truncated="bootstrap")[2] == (2, -0.25)


RESAMPLED = [(1.0, 0.9), (0.0, 0.0), (0.8, 0.1), (1.0, 0.5), (0.9, 0.3), (0.4, 0.0), (1.0, 0.2), (1.0, 0.7)]
"""Rewards and penalties of eight: of six right and two wrong ones 4 * 6/8 = 3 and 1 stay."""


def test_oversampling_keeps_the_right_ones_of_lowest_penalty_and_any_wrong_ones():
    group = [member(reward, penalty=penalty) for reward, penalty in RESAMPLED]
    seen = {tuple(trained(group, oversample=2, seed=seed)) for seed in range(30)}
    right = [(2, 0.8), (4, 0.9), (6, 1.0)]
    assert seen == {tuple(sorted([*right, wrong])) for wrong in [(1, 0.0), (5, 0.4)]}
    assert trained([member(0.5), member(0.49)], oversample=2) == [(0, 0.5), (1, 0.49)], "0.5 is right"
    # At 0.95 four are right: 0, 3, 6, 7; the two of lowest penalty are 6 and 3.
    assert {3, 6} <= {i for i, _ in trained(group, oversample=2, solved=0.95)}
    assert trained(group[2:5], oversample=2) == [] and trained([group[1], group[5]], oversample=2) == []


def test_a_penalty_counts_whichever_reward_function_gave_it():
    def judged(reward, penalty):
        return replace(member(reward), parts={"f.penalty": penalty, "g.penalty": 0.1, "f": 9.0})

    group = [judged(1.0, 0.9), judged(1.0, 0.0), judged(0.0, 0.0), judged(0.0, 0.0)]
    kept = survivors(group, FilterConfig(oversample=2), group_size=2, solved=0.5, seed=0)
    assert [r.parts["f.penalty"] for r in kept if r.reward] == [0.0]


def test_a_rollout_without_a_penalty_has_none():
    group = [member(1.0, penalty=0.1), member(1.0), member(1.0, penalty=0.2), member(0.0)]
    assert {tuple(i for i, _ in trained(group, group_size=2, oversample=2, seed=s)) for s in range(9)} == {(1, 3)}


def test_fewer_than_a_group_stay_as_they_are_if_some_are_right_and_some_wrong():
    assert trained([member(1.0), member(0.0), member(1.0)], oversample=2) == [(0, 1.0), (1, 0.0), (2, 1.0)]
    assert trained([member(1.0)], oversample=2) == []


def test_oversampling_chooses_among_what_truncation_leaves_and_before_length_counts():
    group = [member(1.0), cut(1.0), member(0.0), cut(1.0), member(1.0, 9), member(0.0, 9)]
    assert trained(group, group_size=4, oversample=2, on_truncated="drop") == [(0, 1.0), (2, 0.0), (4, 1.0), (5, 0.0)]
    # With 0 a truncated one is wrong, so no more than two are right and both stay.
    for seed in range(9):
        kept = dict(trained(group, group_size=5, oversample=2, on_truncated="zero", seed=seed))
        assert {0, 4} <= kept.keys() and kept.keys() & {1, 3} and kept[4] == 1.0
    # A right answer of 10 tokens is trained with 1 - 1 = 0 and is right nevertheless.
    assert trained([member(1.0, 10), member(0.0)], oversample=2, overlong_cache=4) == [(0, 0.0), (1, 0.0)]


# Any group

members = st.lists(
    st.tuples(st.sampled_from([-1.0, 0.0, 0.3, 1.0]), st.integers(1, MOST), st.booleans(), st.sampled_from([0, 0.5])),
    min_size=1,
    max_size=12,
)
filters = st.builds(
    FilterConfig,
    on_truncated=st.sampled_from(["reward", "zero", "drop", "bootstrap"]),
    overlong_cache=st.integers(0, MOST),
    oversample=st.integers(1, 3),
)


@settings(max_examples=100, deadline=None)
@given(rows=members, config=filters, group_size=st.integers(2, 5), seed=st.integers(0, 99))
def test_survivors_of_any_group(rows, config, group_size, seed):
    group = [member(reward, n, cut=end, penalty=p) for reward, n, end, p in rows][: group_size * config.oversample]
    rows = rows[: len(group)]
    settings = {**vars(config), "group_size": group_size}
    kept = trained(group, seed=seed, **settings)
    assert kept == trained(group, seed=seed, **settings), "the seed alone chooses"
    whole = [reward for reward, _, end, _ in rows if not end]

    def counted(i):
        reward, _, end, _ = rows[i]
        if end and config.on_truncated != "reward":
            reward = sum(whole) / len(whole) if config.on_truncated == "bootstrap" and whole else 0.0
        return reward

    gone = config.on_truncated == "drop" or (config.on_truncated == "bootstrap" and not whole)
    left = [i for i, (_, _, end, _) in enumerate(rows) if not (end and gone)]
    right = [counted(i) >= 0.5 for i in left]
    expected = len(left)
    if config.oversample > 1:
        expected = min(group_size, len(left)) if any(right) and not all(right) else 0
    if expected < 2 and expected < len(group):
        expected = 0
    numbers = [i for i, _ in kept]
    assert len(kept) == expected and set(numbers) <= set(left) and numbers == sorted(set(numbers))
    for i, reward in kept:
        over = (
            max(0, rows[i][1] - (MOST - config.overlong_cache)) / config.overlong_cache if config.overlong_cache else 0
        )
        assert reward == pytest.approx(counted(i) - over)
    if config.oversample > 1 and kept:
        share = expected * sum(right) / len(left)
        assert abs(sum(counted(i) >= 0.5 for i in numbers) - share) <= 1
        assert 0 < sum(counted(i) >= 0.5 for i in numbers) < expected


# Settings


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"on_truncated": "bootstrap"},
            r"--filter\.on-truncated bootstrap needs other rollouts .* raise --group-size",
        ),
        ({"oversample": 2}, r"--filter\.oversample keeps right and wrong rollouts .* raise --group-size"),
    ],
)
def test_what_compares_rollouts_is_refused_before_the_start_where_groups_are_of_one(config, text):
    run = RunConfig(model=str(Addition.checkpoint), group_size=2, filter=FilterConfig(**config))
    check(resolve(run), Addition())
    with pytest.raises(ValueError, match=text):
        check(resolve(replace(run, group_size=1)), Addition())


@pytest.mark.parametrize("wrong", [{"overlong_cache": -1}, {"oversample": 0}])
def test_filters_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=f"filter.{next(iter(wrong))} must be at least"):
        FilterConfig(**wrong)


def test_a_cache_longer_than_a_completion_is_refused_before_the_start():
    config = RunConfig(model=str(Addition.checkpoint), sampling=Sampling(max_tokens=22))
    check(resolve(replace(config, filter=FilterConfig(overlong_cache=22))), Addition())
    with pytest.raises(ValueError, match=r"--filter\.overlong-cache 23 is more than --sampling\.max-tokens 22"):
        check(resolve(replace(config, filter=FilterConfig(overlong_cache=23))), Addition())


def test_a_synchronous_engine_has_a_slot_for_every_rollout_that_is_drawn():
    config = RunConfig(
        group_size=8,
        filter=FilterConfig(oversample=2),
        buffer=BufferConfig(groups_per_step=5, max_staleness=0),
        generator=GeneratorConfig(replicas=2, engine=NativeEngine()),
    )
    assert resolve(config).generator.engine.slots == 3 * 16
    simulated = replace(config, generator=GeneratorConfig(engine=SimulatedEngine()))
    assert resolve(simulated).generator.engine == SimulatedEngine()


# What a worker gives the buffer


class Cut(Replica):
    """Members named in `cut` run into their 4 tokens; the others say 1, 2 and stop."""

    def __init__(self, cut):
        super().__init__({0: [1, 2]})
        self.cut = set(cut)

    async def _generate(self, batch):
        out = await super()._generate(batch)
        ends = [request.id.member in self.cut for request in batch.unpack()]
        lengths = np.where(ends, 4, 2).astype(np.int32)
        n = int(lengths.sum())
        return replace(
            out,
            lengths=lengths,
            tokens=np.ones(n, np.int32),
            logprobs=np.full(n, -0.5, np.float32),
            versions=np.zeros(n, np.int32),
            finishes=tuple("length" if end else "stop" for end in ends),
        )


def judge(prompt, completion, *, finish, i):
    return {"reward": 0.25 if finish == "length" else 1.0, "penalty": 0.125}


def hand_over(model, cut, reward=judge, **play):
    """A worker plays one group of which these members are cut; returns the buffer."""
    buffer = Buffer([leases((3, 1)), done])
    run(worker(model, Task(lambda: SingleTurn(reward=reward)), buffer, [Cut(cut)], **play))
    return buffer


def payloads(folder):
    return [name for name in os.listdir(folder) if name.startswith("group-")]


def test_a_worker_stores_what_survives_and_tells_what_was_judged(model):
    buffer = hand_over(model, {1}, group_size=4, filter=FilterConfig(on_truncated="drop"))
    (meta,) = buffer.metas
    assert meta.rewards.tolist() == [1.0, 1.0, 1.0] and meta.actions.tolist() == [2, 2, 2]
    assert meta.judged.tolist() == [1.0, 0.25, 1.0, 1.0] and meta.truncated.tolist() == [False, True, False, False]
    assert meta.parts["penalty"].tolist() == [0.125] * 4 and meta.quarantined == 0
    assert [len(r.tokens) for r in payload.read(meta.handle).rollouts] == [3, 3, 3]


def test_a_worker_trains_rewards_as_filtered(model):
    buffer = hand_over(model, {1}, group_size=2, filter=FilterConfig(on_truncated="zero", overlong_cache=4))
    (meta,) = buffer.metas
    # 2 of 4 tokens cost a half, 4 of 4 all.
    assert meta.rewards.tolist() == [0.5, -1.0] and meta.judged.tolist() == [1.0, 0.25]
    assert [r.reward for r in payload.read(meta.handle).rollouts] == [0.5, -1.0]


def test_a_group_that_no_filter_touched_is_handed_over_as_ever(model):
    (meta,) = hand_over(model, {1}, group_size=2).metas
    assert meta.judged is None and meta.rewards.tolist() == [1.0, 0.25] and meta.truncated.tolist() == [False, True]


def test_a_filtered_group_leaves_no_payload_and_says_what_it_was(model):
    buffer = hand_over(model, {0, 1, 3}, group_size=4, filter=FilterConfig(on_truncated="drop"))
    assert not buffer.metas and not buffer.failures and not payloads(model)
    (group,) = buffer.filtered_groups
    assert (group.ticket, group.attempt, group.quarantined) == (3, 1, 0)
    assert group.judged.tolist() == [0.25, 0.25, 1.0, 0.25] and group.judged.dtype == np.float32
    assert group.parts["penalty"].tolist() == [0.125] * 4
    assert group.seen == "3 of 4 rollouts truncated, 1 right"


def test_what_failed_is_told_of_a_filtered_group_too(model):
    def broken(prompt, completion, *, finish, i):
        if finish == "length":
            raise ZeroDivisionError("no reward")
        return 1.0

    buffer = hand_over(model, {0, 1}, reward=broken, group_size=2, filter=FilterConfig(oversample=2))
    (group,) = buffer.filtered_groups  # two of four are left, half of those drawn, and both are right
    assert group.quarantined == 2 and group.judged.tolist() == [1.0, 1.0] and "no reward" in buffer.reasons[0]


def test_oversampling_draws_more_than_it_stores_and_by_ticket_alone(model):
    def kept(seed):
        config = {"group_size": 4, "seed": seed, "filter": FilterConfig(oversample=3)}
        buffer = hand_over(model, {1, 4, 6, 7, 9, 11}, **config)
        (meta,) = buffer.metas
        assert len(meta.judged) == 12 and sorted(meta.rewards.tolist()) == [0.25, 0.25, 1.0, 1.0]
        return [len(r.tokens) for r in payload.read(meta.handle).rollouts]

    orders = [kept(seed) for seed in range(12)]
    assert orders == [kept(seed) for seed in range(12)] and len(set(map(tuple, orders))) > 1


def test_evaluation_filters_nothing(model):
    class Held(Task):
        held_out_rows = 1

        def held_out_row(self, i):
            return {"prompt": "ab", "i": i}

    replica, reward = Cut({0, 2}), judge
    config = FilterConfig(on_truncated="drop", oversample=2, overlong_cache=4)
    actor = worker(model, Held(lambda: SingleTurn(reward=reward)), None, [], filter=config)
    (row,) = call(RolloutWorker.evaluate, actor, replica, [0], 5, 3, Sampling(max_tokens=4))
    assert [r.reward for r in row.rollouts] == [0.25, 1.0, 0.25]
