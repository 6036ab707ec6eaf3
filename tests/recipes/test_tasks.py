"""Rows are a function of (seed, i); rewards are checked by hand; warm-up demonstrations obey their own grammar."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import subprocess
import sys

import pytest
import tyro
from hypothesis import given
from hypothesis import strategies as st

from actors.environment import Task
from actors.types import Finish
from recipes.make_tiny import CHARACTERS, addition_demo, modmix_demo
from recipes.tasks.addition import Addition
from recipes.tasks.modmix import Modmix


@pytest.mark.parametrize(
    ("completion", "finish", "reward"),
    [
        (";125", "stop", 1.0),
        ("780:5,561:2,1;125", "stop", 1.0),
        ("anything;125", "stop", 1.0),
        (";125", "length", 0.0),
        (";125", "abort", 0.0),
        (";124", "stop", 0.0),
        (";0125", "stop", 0.0),
        (";125 ", "stop", 0.0),
        (";125;125", "stop", 0.0),
        ("125", "stop", 0.0),
        (";", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_addition_reward(completion: str, finish: Finish, reward: float) -> None:
    assert Addition().reward("57+68=", completion, finish=finish, answer="125") == reward


@pytest.mark.parametrize(
    ("completion", "finish", "reward"),
    [
        ("57 53 49 45 41 37 33 29 25 21 17 13 9 5 1;1", "stop", 1.0),
        (";1", "stop", 1.0),
        (";1", "length", 0.0),
        (";01", "stop", 0.0),
        (";5", "stop", 0.0),
        ("1", "stop", 0.0),
    ],
)
def test_modmix_reward(completion: str, finish: Finish, reward: float) -> None:
    assert Modmix().reward("57%4=", completion, finish=finish, answer="1") == reward


@given(st.integers(0, 10**9), st.integers(0, 10**6))
def test_rows_hold_the_answer_to_their_prompt(i: int, seed: int) -> None:
    row = Addition(seed=seed).row(i)
    assert re.fullmatch(r"\d\d\+\d\d=", row["prompt"])
    a, b = row["prompt"][:-1].split("+")
    assert len(row["answer"]) == 3 and int(row["answer"]) == int(a) + int(b)

    row = Modmix(seed=seed).row(i)
    n, k = map(int, row["prompt"][:-1].split("%"))
    assert 1 <= n <= 60 and 1 <= k <= 9 and row["answer"] == str(n - n // k * k)


@pytest.mark.parametrize("task", [Addition, Modmix])
def test_rows_depend_on_seed_and_index_only(task: type[Addition] | type[Modmix]) -> None:
    forward = [task(seed=3).row(i) for i in range(50)]
    other = task(seed=3)
    assert [other.row(i) for i in reversed(range(50))] == forward[::-1]
    assert [task(seed=4).row(i) for i in range(50)] != forward
    assert len({row["prompt"] for row in forward}) > 30


def test_rows_are_the_same_in_every_process_and_release() -> None:
    assert [Addition().row(i)["prompt"] for i in range(3)] == ["43+61=", "96+74=", "98+41="]
    assert [Modmix().row(i)["prompt"] for i in range(3)] == ["22%8=", "49%8=", "50%6="]


def test_the_whole_range_of_sums_is_asked() -> None:
    prompts = {Addition().row(i)["prompt"] for i in range(10_000)}
    assert len(prompts) > 6_000  # 10,000 draws of 10,000 sums leave 1/e of them out
    assert {p[:2] for p in prompts} == {f"{a:02d}" for a in range(100)} == {p[3:5] for p in prompts}


def test_addition_demonstrations() -> None:
    r, task = random.Random(0), Addition()
    pads, guesses = [], []
    for _ in range(4000):
        prompt, text = addition_demo(r)
        a, b = map(int, prompt[:-1].split("+"))
        right = task.reward(prompt, text, finish="stop", answer=f"{a + b:03d}")
        if ":" not in text:
            assert re.fullmatch(r";[01]\d\d", text)
            guesses.append(right)
            continue
        match = re.fullmatch(r"(\d)(\d)0:(\d),(\d)(\d)([01]):(\d),([01]);\d{3}", text)
        assert match is not None and right == 1.0
        x0, y0, s0, x1, y1, carry, s1, last = map(int, match.groups())
        assert (x0, y0, x1, y1) == (a % 10, b % 10, a // 10, b // 10)
        assert x0 + y0 == 10 * carry + s0 and x1 + y1 + carry == 10 * last + s1
        pads.append(right)
    assert 0.22 < len(pads) / 4000 < 0.28
    assert 0.17 < sum(guesses) / len(guesses) < 0.24
    assert all(len(text) + 1 <= Addition.max_tokens for _, text in (addition_demo(r) for _ in range(100)))


def test_modmix_demonstrations() -> None:
    r, task = random.Random(0), Modmix()
    lengths, guesses = [], []
    for _ in range(4000):
        prompt, text = modmix_demo(r)
        n, k = map(int, prompt[:-1].split("%"))
        right = task.reward(prompt, text, finish="stop", answer=str(n % k))
        if text[0] == ";":
            guesses.append(right)
            continue
        numbers = list(map(int, text.partition(";")[0].split(" ")))
        assert right == 1.0 and numbers[0] == n and numbers[-1] == n % k
        assert all(x - y == k for x, y in itertools.pairwise(numbers))
        lengths.append(len(text) + 1)
    assert 0.26 < len(lengths) / 4000 < 0.34
    assert 0.3 < sum(guesses) / len(guesses) < 0.45  # 0.1 + 0.9 * mean of 1/k = 0.383
    assert max(lengths) <= 175 < Modmix.max_tokens
    assert sorted(lengths)[len(lengths) // 2] < 30 < 140 < sorted(lengths)[int(0.99 * len(lengths))]


def test_every_character_has_a_token() -> None:
    r = random.Random(1)
    texts = "".join(p + t for demo in (addition_demo, modmix_demo) for p, t in (demo(r) for _ in range(200)))
    assert set(texts) <= set(CHARACTERS) and len(set(CHARACTERS)) == len(CHARACTERS)


def test_tasks_are_subcommands() -> None:
    def pick(task: Addition | Modmix) -> Addition | Modmix:
        return task

    assert tyro.cli(pick, args=["task:addition", "--task.seed", "7"]) == Addition(seed=7)
    assert tyro.cli(pick, args=["task:modmix", "--task.rows", "9"]) == Modmix(rows=9)


@pytest.mark.parametrize("task", [Addition(), Modmix()])
def test_an_episode_scores_the_rows_own_answer(task: Task) -> None:
    async def play(completion: str) -> float:
        episode = task.environment()
        assert await episode.reset(row) == row["prompt"]
        outcome = await episode.step(completion, "stop")
        assert outcome.observation is None
        return outcome.reward

    row = task.row(5)
    assert asyncio.run(play(f";{row['answer']}")) == 1.0
    assert asyncio.run(play(f";{row['answer']}1")) == 0.0


def test_tasks_import_no_torch() -> None:
    code = (
        "import sys, recipes.make_tiny, recipes.tasks.addition, recipes.tasks.modmix; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
