"""The calculator: turns and rewards by hand, what is trained of them, what its checkpoint knows, and a real run."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import shutil
import traceback
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors import payload
from actors.config import BufferConfig, RolloutConfig
from actors.environment import Outcome
from actors.tokenizer import Tokenizer
from actors.types import Finish
from recipes.agent_async import Config, train
from recipes.make_tiny import accuracy, calculator_demo, labelled, make_tokenizer
from recipes.tasks.calculator import Calculator, CalculatorEpisode
from tests.actors.test_rollout import Buffer, Replica, done, leases, run, worker

ROW = {"prompt": "34*58=", "answer": "1972"}


def episode(*actions: str, finish: str = "stop", **task: float) -> list[Outcome]:
    """What the calculator says to each action."""

    async def go() -> list[Outcome]:
        environment = Calculator(**task).environment()
        assert await environment.reset(ROW) == "34*58="
        outcomes = [await environment.step(action, finish) for action in actions]
        await environment.close()
        return outcomes

    return asyncio.run(go())


def test_a_call_costs_and_a_right_answer_after_it_pays():
    call, answer = episode("?34*58", ";1972")
    assert (call.reward, call.observation) == (-0.05, "[1972]")
    assert call.parts == {"right": 0.0, "calls": 1.0, "malformed": 0.0}
    assert (answer.reward, answer.observation) == (1.0, None)
    assert answer.parts == {"right": 1.0, "calls": 0.0, "malformed": 0.0, "penalty": 0.0}


@pytest.mark.parametrize(
    ("call", "said"), [("?9*9", "[0081]"), ("?99+1", "[0100]"), ("?10-20", "[-010]"), ("?999999*9", "[8999991]")]
)
def test_the_calculator_calculates_what_it_is_asked(call, said):
    assert episode(call)[0].observation == said


@pytest.mark.parametrize("call", ["?", "?34*", "?34*58=", "34*58", "?34/58", "?2**3", "?1234567*1", "", "?34*58;1972"])
def test_a_malformed_call_costs_twice_and_says_so(call):
    (outcome,) = episode(call)
    assert (outcome.reward, outcome.observation) == (-0.1, "[error]") and outcome.parts["malformed"] == 1.0


@pytest.mark.parametrize("answer", [";1973", ";01972", "; 1972", ";", ";1972;"])
def test_a_wrong_answer_ends_with_nothing(answer):
    (outcome,) = episode(answer)
    assert (outcome.reward, outcome.observation) == (0.0, None)


@pytest.mark.parametrize("action", [";1972", "?34*58"])
def test_an_action_that_was_cut_ends_with_nothing(action):
    (outcome,) = episode(action, finish="length")
    assert (outcome.reward, outcome.observation) == (0.0, None)


def test_one_call_too_many_ends_the_episode():
    outcomes = episode("?34*58", "?34*58", "?34*58", calls=2)
    assert [o.observation for o in outcomes] == ["[1972]", "[1972]", None]
    assert [o.reward for o in outcomes] == [-0.05] * 3


@pytest.mark.parametrize(
    ("actions", "penalty"),
    [
        ([";1972"], 0.5),  # no call
        (["?34*", ";1972"], 1.0),
        (["?34*", "?34*58", ";1972"], 0.5),
        (["?34*", "?34*58", "?34*58"], 1 / 3),  # ended by one call too many
    ],
)
def test_the_penalty_is_the_share_of_malformed_calls_and_comes_once(actions, penalty):
    outcomes = episode(*actions)
    assert ["penalty" in o.parts for o in outcomes] == [False] * (len(actions) - 1) + [True]
    assert outcomes[-1].parts["penalty"] == penalty
    assert episode("?34*", finish="length")[0].parts["penalty"] == 0.5  # a cut action is no call


def test_only_actions_are_trained_and_rewards_stand_at_their_turns(tmp_path):
    shutil.copytree(Calculator.checkpoint, tmp_path, dirs_exist_ok=True)
    tokenizer = Tokenizer.load(str(tmp_path))
    (eos,) = tokenizer.eos_ids

    class OneRow(Calculator):
        def row(self, i):
            return ROW

    said = [[*tokenizer.encode(text).tolist(), eos] for text in ("?34*58", ";1972")]
    buffer = Buffer([leases((0, 0)), done])
    run(worker(tmp_path, OneRow(), buffer, [Replica(dict(enumerate(said)))], group_size=2))
    for rollout in payload.read(buffer.metas[0].handle).rollouts:
        assert tokenizer.decode(rollout.tokens) == "34*58=?34*58[1972];1972"
        assert tokenizer.decode(rollout.tokens[rollout.mask]) == "?34*58;1972" and rollout.mask.sum() == 7 + 6
        assert tokenizer.decode(rollout.tokens[~rollout.mask]) == "34*58=[1972]"
        assert [(t.kind, t.reward) for t in rollout.turns] == [
            ("prompt", 0.0),
            ("action", -0.05),
            ("observation", 0.0),
            ("action", 1.0),
        ]
        assert rollout.reward == pytest.approx(0.95)
        assert rollout.parts == {"right": 1, "calls": 1, "malformed": 0, "penalty": 0}
    assert buffer.metas[0].parts["calls"].tolist() == [1.0, 1.0]


def test_rows_repeat_and_those_held_out_are_others():
    task = Calculator(rows=10, seed=3)
    for i in range(10):
        row = task.row(i)
        a, b = re.fullmatch(r"(\d\d)\*(\d\d)=", row["prompt"]).groups()
        assert row == Calculator(rows=10, seed=3).row(i) and int(row["answer"]) == int(a) * int(b)
        assert len(row["answer"]) == 4
    assert task.held_out_row(2) == task.row(12) and Calculator(seed=4).row(0) != task.row(0)


def test_a_demonstration_trains_actions_alone():
    vocabulary = make_tokenizer().get_vocab()
    tokens, labels = labelled(("1=", "?1", "[1]", ";1"), vocabulary)
    names = {i: name for name, i in vocabulary.items()}
    assert [names[t] for t in tokens] == ["<bos>", *"1=?1", "<eos>", *"[1];1", "<eos>"]
    assert [names[t] if t >= 0 else "-" for t in labels] == [*"---?1", "<eos>", *"---;1", "<eos>"]


def test_demonstrations_of_calls_are_right_and_guesses_are_not():
    r, answers = random.Random(0), {"call": [], "guess": []}
    for _ in range(500):
        prompt, *turns = calculator_demo(r)
        row_prompt = prompt.removesuffix("?")
        a, b = re.fullmatch(r"(\d\d)\*(\d\d)=", row_prompt).groups()
        answers["call" if len(turns) == 3 else "guess"].append(turns[-1] == f";{int(a) * int(b):04d}")
    assert all(answers["call"]) and sum(answers["guess"]) <= 2


def test_the_checkpoint_mostly_guesses_but_can_call():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(Calculator.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(Calculator.checkpoint)
    rows = [Calculator().row(i) for i in range(256)]
    ids = tokenizer([row["prompt"] for row in rows], return_tensors="pt")
    out = model.generate(**ids, do_sample=True, top_k=0, max_new_tokens=Calculator.max_tokens)
    texts = tokenizer.batch_decode(out[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    calls = [text == f"?{row['prompt'][:-1]}" for text, row in zip(texts, rows, strict=True) if text[0] == "?"]
    guesses = [text == f";{row['answer']}" for text, row in zip(texts, rows, strict=True) if text[0] == ";"]
    assert 0.05 < len(calls) / 256 < 0.25 and sum(calls) / len(calls) > 0.85
    assert len(calls) + len(guesses) > 250 and sum(guesses) / len(guesses) < 0.03
    assert 0.05 < accuracy(model, tokenizer, Calculator(), 256) < 0.25
    assert sum(f.stat().st_size for f in Calculator.checkpoint.iterdir()) < 430_000


ACTIONS = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Brittle(Calculator):
    """A calculator that breaks at every 25th action of its process."""

    def environment(self) -> CalculatorEpisode:
        return BrittleEpisode(self)


class BrittleEpisode(CalculatorEpisode):
    async def step(self, action: str, finish: Finish) -> Outcome:
        if next(ACTIONS) % 25 == 24:
            raise ZeroDivisionError(action)
        return await super().step(action, finish)


@pytest.mark.slow
def test_a_run_learns_to_call_and_leaves_out_what_breaks(tmp_path):
    config = Config(
        task=Brittle(),
        steps=16,
        output_dir=tmp_path / "run",
        rollout=RolloutConfig(quarantine=0.3),
        buffer=BufferConfig(groups_per_step=12, max_staleness=1),
    )
    summary = asyncio.run(train(config))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, last = (np.mean([[r["reward/mean"], r["reward/calls"]] for r in part], 0) for part in (rows[:3], rows[-3:]))
    assert first[0] < 0.25 and last[0] > first[0] + 0.15
    assert first[1] < 0.3 and last[1] > first[1] + 0.15
    # Engine and trainer agree on every turn, so the observations stand where they were read.
    assert max(r["policy/engine_gap_max"] or 0 for r in rows) < 1e-4
    # One to two actions per rollout; the last failures come after the last take.
    failed = [r["rollout/quarantined"] for r in rows]
    assert 16 * 192 / 25 <= sum(failed) <= summary["quarantined"] and min(failed) > 0
    assert summary["trained"] == 16 * 12


@pytest.mark.slow
def test_too_much_that_breaks_ends_the_run_with_the_users_line(tmp_path):
    config = Config(
        task=Brittle(),
        steps=2,
        probe=0,
        output_dir=tmp_path / "run",
        rollout=RolloutConfig(quarantine=0.01),
        buffer=BufferConfig(groups_per_step=4, max_staleness=0),
    )
    with pytest.raises(ExceptionGroup) as error:
        asyncio.run(train(config))
    text = "".join(traceback.format_exception(error.value))
    assert "of 64 that a step has: more than --rollout.quarantine 0.01 allows; the first: ticket " in text
    assert "environment step: ZeroDivisionError(" in text and "raise ZeroDivisionError(action)" in text
