"""Tasks of other libraries, played by a rollout worker: no hub, no network."""

from __future__ import annotations

import asyncio
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tyro

from actors import payload
from actors.tokenizer import Tokenizer
from recipes.adapters.reasoning_gym import ReasoningGym
from recipes.adapters.verifiers import Verifiers
from recipes.tasks.addition import Addition
from tests.actors.test_rollout import Buffer, Replica, done, leases, run, worker

TASKSET = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 3 and not trace.is_truncated)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(len(trace.messages))

class SumConfig(vf.TasksetConfig):
    size: int = 5

class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for i in range(self.config.size):
            yield SumTask(SumData(prompt=f"{i}+{i}=", system_prompt="add: ", answer=str(2 * i)), self.config.task)

__all__ = ["Sums"]
"""


@pytest.fixture
def sums(tmp_path, monkeypatch):
    """A taskset of verifiers under a name of its own."""
    name = f"sums_{tmp_path.name}".replace("-", "_").lower()
    (tmp_path / f"{name}.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def played(task, tmp_path: Path, completion: str, row: int = 0):
    """A group of two by a worker, whose generator says the same thing always; and the prompt that it was asked."""
    folder = tmp_path / "model"
    shutil.copytree(Addition.checkpoint, folder)
    tokenizer = Tokenizer.load(str(folder))

    class Only:
        rows = 1

        def row(self, i):
            return task.row(row)

        def environment(self):
            return task.environment()

    buffer = Buffer([leases((0, 0)), done])
    replica = Replica({0: [*tokenizer.encode(completion).tolist(), *tokenizer.eos_ids]})
    run(worker(folder, Only(), buffer, [replica]))
    prompt = tokenizer.decode(replica.requests[0].prompt)
    return buffer.metas[0], payload.read(buffer.metas[0].handle).rollouts, prompt


def score(task, i: int, completion: str, finish="stop") -> float:
    async def go() -> float:
        environment = task.environment()
        await environment.reset(task.row(i))
        return (await environment.step(completion, finish)).reward

    return asyncio.run(go())


def test_reasoning_gym_gives_rows_by_seed_and_scores_by_its_own_rule():
    task = ReasoningGym(name="chain_sum", rows=20, options={"max_terms": 2, "max_digits": 1})
    row = task.row(3)
    assert row == ReasoningGym(name="chain_sum", rows=20, options={"max_terms": 2, "max_digits": 1}).row(3)
    assert row != ReasoningGym(name="chain_sum", rows=20, seed=1, options={"max_terms": 2, "max_digits": 1}).row(3)
    expression = row["prompt"].split(": ")[1].removesuffix(" =")
    answer = str(eval(expression))
    assert row["entry"]["answer"] == answer and len(expression.split()) == 3
    assert task.held_out_row(1) == task.row(21)
    assert score(task, 3, answer) == score(task, 3, f" {answer}\n") == 1.0
    assert score(task, 3, f"well <answer>1</answer> no, <answer> {answer} </answer> it is") == 1.0
    assert score(task, 3, str(int(answer) + 1)) < 1.0 and score(task, 3, answer, finish="length") == 0.0
    assert score(pickle.loads(pickle.dumps(task)), 3, answer) == 1.0


def test_reasoning_gym_is_played_by_a_worker(tmp_path):
    task = ReasoningGym(name="chain_sum", system="sum up. ", options={"max_terms": 2})
    answer = task.row(0)["entry"]["answer"]
    meta, rollouts, prompt = played(task, tmp_path, answer)
    assert meta.rewards.tolist() == [1.0, 1.0] and rollouts[0].mask.sum() == len(answer) + 1
    assert prompt.startswith("sum up. ") and prompt.endswith("=")


def test_reasoning_gyms_other_datasets_fit_too():
    for name in ("countdown", "spell_backward", "number_sorting"):
        task = ReasoningGym(name=name, rows=5)
        answer = task.row(2)["entry"]["answer"] or "1"
        assert 0.0 <= score(task, 2, answer) <= 1.0
    task = ReasoningGym(name="spell_backward", rows=5)
    assert score(task, 0, task.row(0)["entry"]["answer"]) == 1.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "no_such"}, "name no_such"),
        ({"options": {"max_term": 2}}, "max_term"),
        ({"options": {"min_terms": 9}}, "max_terms must be >= min_terms"),
        ({"rows": 0}, "task.rows must be at least 1"),
    ],
)
def test_reasoning_gym_refuses_in_one_line(settings, words):
    with pytest.raises(ValueError, match=words) as error:
        ReasoningGym(**settings)
    assert "\n" not in str(error.value)


def test_options_come_from_the_command_line():
    args = ["--name", "chain_sum", "--options", "max_terms", "3", "allow_negation", "True"]
    task = tyro.cli(ReasoningGym, args=args)
    assert task.options == {"max_terms": 3, "allow_negation": True}


@pytest.mark.slow
def test_verifiers_scores_a_trace_of_one_turn(sums, tmp_path):
    task = Verifiers(name=sums, options={"size": 8}, held_out=2)
    assert task.rows == 6 and task.held_out_rows == 2
    assert [m["content"] for m in task.held_out_row(1)["prompt"]] == ["add: ", "1+1="]
    meta, rollouts, prompt = played(task, tmp_path, "6", row=1)
    # Row 1 after two held-out ones is 3 + 3: right and short give 2 * 1 + 0.5 * 1.
    assert prompt == "add: 3+3=" and meta.rewards.tolist() == [2.5, 2.5]
    assert rollouts[0].parts == {"right": 1.0, "short": 1.0, "turns": 3.0}
    np.testing.assert_array_equal(meta.parts["right"], [1.0, 1.0])
    assert score(task, 1, "123") == 0.0 and score(task, 1, "7") == 0.5
    assert score(task, 1, "6", finish="length") == 2.0
    assert score(pickle.loads(pickle.dumps(task)), 1, "6") == 2.5


@pytest.mark.slow
def test_verifiers_refuses_what_one_answer_does_not_settle(sums, tmp_path):
    with pytest.raises(ValueError, match="no_such_taskset") as error:
        Verifiers(name="no_such_taskset")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="leaves no row"):
        Verifiers(name=sums, held_out=5)
    for i, (old, new, words) in enumerate(
        [
            ("    @vf.metric\n", "    NEEDS_CONTAINER = True\n    @vf.metric\n", "needs a container"),
            ("def turns(self, trace: vf.Trace)", "def turns(self, trace, runtime)", "needs a runtime for turns"),
            ('prompt=f"{i}+{i}=", ', "", "needs a user who begins"),
        ]
    ):
        assert old in TASKSET
        (tmp_path / f"{sums}_{i}.py").write_text(TASKSET.replace(old, new))
        with pytest.raises(ValueError, match=words):
            Verifiers(name=f"{sums}_{i}")


@pytest.mark.parametrize(
    ("library", "make"),
    [
        ("reasoning_gym", "from recipes.adapters.reasoning_gym import ReasoningGym as T; T()"),
        ("verifiers", "from recipes.adapters.verifiers import Verifiers as T; T(name='x')"),
    ],
)
def test_without_the_extra_one_line_says_how_to_get_it(library, make):
    code = f"import sys\nsys.modules[{library!r}] = None\ntry:\n    {make}\nexcept ValueError as e:\n    print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert "is not installed: pip install -e '.[tasks]'" in done.stdout and done.stdout.count("\n") == 1


def test_importing_the_adapters_imports_no_library():
    code = "import sys, recipes.adapters.reasoning_gym, recipes.adapters.verifiers; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert not {"torch", "transformers", "reasoning_gym", "verifiers", "pydantic"} & set(done.stdout.split())
