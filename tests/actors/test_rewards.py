"""Reward functions in scorer processes: arguments, sums, errors, and what happens to one that never returns."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from actors.environment import SingleTurn
from actors.rewards import FromFile, RewardError, Rewards, batched
from actors.scorer import name_of

USER = """
import asyncio, os, re, sys, threading
import numpy as np
from actors import batched

def exact(completion, answer):
    return completion == answer

def length(prompt, completion, *, finish, scale=1.0, **row):
    return {"reward": scale * len(completion), "prompt": len(prompt), "stopped": finish == "stop", "n": len(row)}

async def later(completion):
    await asyncio.sleep(0)
    return 0.25

def hang(completion):
    while True: pass

def hang_after(completion, fifo):
    open(fifo, "w").close()
    while True: pass

def sometimes(completion, hang):
    while hang: pass
    return 1.0

def regex(completion):
    re.match("(a+)+$", "a" * 60 + "b")

def leave(completion):
    os._exit(7)

class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(a)
        self.lock = threading.Lock()

def raises(completion):
    numbers = [1]
    raise Odd(numbers[0], 2)  # a line of the user's own

def gives(completion, value):
    return value

def pid(completion):
    return os.getpid()

def quits(completion):
    sys.exit(3)

def reward(completion):
    return 1

def interrupts(completion):
    raise KeyboardInterrupt("now")

async def closes(completion):
    raise GeneratorExit

def shouts(completion):
    raise ValueError("x" * 30_000 + "the end")

class Mute:
    def __repr__(self):
        raise KeyError("no repr")
    __str__ = __repr__
    def __float__(self):
        return float(self.number)

class MuteError(Exception):
    __str__ = Mute.__repr__

def mute(completion):
    raise MuteError

ODD = {"two": np.array([1.0, 2.0]), "huge": 10**400, "mute": Mute(), "key": {"reward": 1.0, Mute(): 2.0}}

def odd(completion, value):
    return ODD[value]

def trl(completions, prompts, answer):
    return [float(completions == answer)]

in_file = batched(trl)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "user.py"
    path.write_text(USER)
    return str(path)


@pytest.fixture(scope="module")
def opened() -> Iterator[list[Rewards]]:
    """What was called; equal ones share their scorers."""
    rewards: list[Rewards] = []
    yield rewards
    for one in rewards:
        one.close()


def of(opened: list[Rewards], file: str, *names: str, **settings: Any) -> Rewards:
    made = Rewards(functions=tuple(FromFile(path=file, function=name) for name in names), **settings)
    opened.append(made)
    return made


def trl_lengths(prompts, completions, answer, finish):
    """As TRL calls it: lists of one row here."""
    assert finish == ["stop"]
    if answer == ["skip"]:
        return [None]
    text = completions[0] if isinstance(prompts[0], str) else completions[0][0]["content"]
    return [len(text) + len(prompts[0])]


async def trl_later(completions, **columns):
    return [float(sorted(columns) == ["answer", "finish", "prompts"])]


def test_values_sums_and_parts_by_hand(file, opened):
    rewards = of(opened, file, "exact", "length", "later", weights=(2.0, 0.5, -4.0))

    async def score(completion: str, **row: Any) -> dict[str, float]:
        return await rewards("ab", completion, finish="stop", **row)

    # 2 * 1 + 0.5 * 10 * 3 - 4 * 0.25; length's row has answer and level, scale being its own parameter
    assert asyncio.run(score("xyz", answer="xyz", scale=10.0, level=3)) == {
        "reward": 16.0,
        "exact": 1.0,
        "length": 30.0,
        "length.prompt": 2.0,
        "length.stopped": 1.0,
        "length.n": 1.0 + 1.0,
        "later": 0.25,
    }
    assert asyncio.run(score("", answer="a"))["reward"] == -1.0


def test_lists_of_one_for_functions_of_trl(opened):
    rewards = Rewards(functions=(batched(trl_lengths), batched(trl_later)), weights=(1.0, 10.0))
    opened.append(rewards)
    chat = [{"role": "user", "content": "q"}, {"role": "user", "content": "r"}, {"role": "user", "content": "s"}]
    text = asyncio.run(rewards("pr", "abc", finish="stop", answer="x"))
    assert text == {"reward": 15.0, "trl_lengths": 5.0, "trl_later": 1.0}
    assert asyncio.run(rewards(chat, "abcd", finish="stop", answer="x"))["trl_lengths"] == 7.0
    # None adds nothing and is not in the mean of the function
    assert asyncio.run(rewards("pr", "abc", finish="stop", answer="skip")) == {"reward": 10.0, "trl_later": 1.0}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (math.nan, "its reward is nan: it must be finite"),
        (-math.inf, "its reward is -inf: it must be finite"),
        (None, "its reward is None, a NoneType: a number was expected"),
        ("1.0", "its reward is '1.0', a str: a number was expected"),
        ([1.0], "its reward is [1.0], a list: a number was expected"),
        ({"score": 1}, "it returned a mapping without 'reward': it has score"),
        ({"reward": 1, "part": math.inf}, "its part is inf: it must be finite"),
    ],
)
def test_what_is_no_reward_is_an_error(file, opened, value, why):
    with pytest.raises(RewardError) as caught:
        asyncio.run(of(opened, file, "gives")("p", "c", finish="stop", value=value))
    assert str(caught.value) == f"reward gives: {why}"


@pytest.mark.parametrize(("value", "number"), [(True, 1.0), (np.float32(0.5), 0.5), (np.int64(-3), -3.0)])
def test_numbers_of_other_types(file, opened, value, number):
    scores = asyncio.run(of(opened, file, "gives")("p", "c", finish="stop", value=value))
    assert scores == {"reward": number, "gives": number}


def test_an_error_shows_the_users_own_line(file, opened):
    """Also one of a class that cannot be pickled, and SystemExit, which would end the process."""
    rewards = of(opened, file, "raises")
    with pytest.raises(RewardError) as caught:
        asyncio.run(rewards("p", "c", finish="stop"))
    first, *trace = str(caught.value).splitlines()
    assert first == "reward raises: Odd: 1"
    line = USER.splitlines().index("    raise Odd(numbers[0], 2)  # a line of the user's own") + 1
    assert trace[1] == f'  File "{file}", line {line}, in raises'
    assert "raise Odd(numbers[0], 2)  # a line of the user's own" in trace[2]
    assert "scorer.py" not in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
    with pytest.raises(RewardError, match=r"^reward quits: SystemExit: 3\n"):
        asyncio.run(of(opened, file, "quits")("p", "c", finish="stop"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("interrupts", "KeyboardInterrupt: now"),
        ("closes", "GeneratorExit: "),
        ("mute", "MuteError: an exception without str"),
    ],
)
def test_whatever_a_function_raises_is_a_reward_error(file, opened, name, why):
    with pytest.raises(RewardError) as caught:
        asyncio.run(of(opened, file, name)("p", "c", finish="stop"))
    assert str(caught.value).splitlines()[0] == f"reward {name}: {why}"


def test_the_middle_of_a_long_error_is_left_out(file, opened):
    with pytest.raises(RewardError) as caught:
        asyncio.run(of(opened, file, "shouts")("p", "c", finish="stop"))
    text = str(caught.value)
    assert text.startswith("reward shouts: ValueError: xxx") and text.endswith("xxthe end")
    assert 20_000 < len(text) < 20_100 and " characters ...]" in text


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("two", "its reward is array([1., 2.]), a ndarray, which is no number: TypeError: "),
        ("huge", f"its reward is 1{'0' * 79}, a int, which is no number: OverflowError: "),
        ("mute", "its reward is an object without repr, a Mute, which is no number: AttributeError: "),
        ("key", "what it returned, a dict, cannot be read: KeyError: 'no repr'\n"),
    ],
)
def test_values_that_cannot_be_read_name_their_function(file, opened, value, why):
    with pytest.raises(RewardError) as caught:
        asyncio.run(of(opened, file, "odd")("p", "c", finish="stop", value=value))
    assert str(caught.value).startswith(f"reward odd: {why}")


class Fragile:
    """Cannot be sent, with an error that is none of pickle's own."""

    def __reduce__(self):
        raise RuntimeError("stays here")


def test_a_row_that_cannot_be_sent(file, opened):
    rewards = of(opened, file, "exact", "later")
    with pytest.raises(RewardError) as caught:
        asyncio.run(rewards("p", "c", finish="stop", answer=Fragile()))
    assert str(caught.value) == "rewards exact, later: the row cannot be sent to a scorer: RuntimeError: stays here"


def test_functions_of_trl_in_a_file(file, opened):
    rewards = of(opened, file, "in_file")
    rewards.check(("answer",))
    assert asyncio.run(rewards("p", "c", finish="stop", answer="c")) == {"reward": 1.0, "in_file": 1.0}
    why = "reward trl: it takes 'completions', lists as TRL's functions do: wrap it, f = actors.batched(f)"
    with pytest.raises(ValueError) as caught:
        of(opened, file, "trl").check(("answer",))
    assert str(caught.value) == why


@pytest.mark.slow
def test_one_that_never_returns_costs_its_call_alone(file, opened):
    late = "no answer within its deadline of 0.4 s, so its process was killed"
    why = {"hang": late, "regex": late, "leave": "its process died with exit code 7"}
    rewards = [of(opened, file, name, deadline=0.4) for name in why]
    other = of(opened, file, "exact")

    async def all_of_them() -> tuple[list[Any], list[Any]]:
        bad = [asyncio.create_task(one("p", "c", finish="stop")) for one in rewards]
        good = [await other("p", "c", finish="stop", answer="c") for _ in range(20)]
        return good, await asyncio.gather(*bad, return_exceptions=True)

    for _ in range(2):  # each second call needs a new process
        good, errors = asyncio.run(all_of_them())
        assert [one["reward"] for one in good] == [1.0] * 20
        assert {type(error) for error in errors} == {RewardError}
        assert [str(error) for error in errors] == [f"reward {name}: {text}" for name, text in why.items()]


def test_scorers_are_kept_restarted_and_closed(file, opened):
    rewards = of(opened, file, "pid")

    async def pid() -> int:
        return int((await rewards("p", "c", finish="stop"))["pid"])

    async def after_a_death() -> int:
        """A scorer that dies between calls breaks its pool; calls that meet it fail, a new pool is made."""
        for _ in range(20):
            try:
                return await pid()
            except RewardError as error:
                assert "a scorer died outside a call" in str(error)
        raise AssertionError("no new pool")

    first = asyncio.run(pid())
    assert {asyncio.run(pid()) for _ in range(3)} == {first}
    process = psutil.Process(first)
    process.send_signal(signal.SIGINT)
    assert asyncio.run(pid()) == first
    process.kill()
    second = asyncio.run(after_a_death())
    assert second != first
    rewards.close()
    assert not psutil.pid_exists(second)
    assert asyncio.run(pid()) not in (first, second)


def test_a_call_that_is_given_up_frees_its_scorer(file, opened):
    """One scorer serves both: it is killed, not waited for."""
    rewards = of(opened, file, "sometimes", deadline=100.0)

    async def give_up() -> dict[str, float]:
        assert (await rewards("p", "c", finish="stop", hang=False))["reward"] == 1.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await rewards("p", "c", finish="stop", hang=True)
        async with asyncio.timeout(50):
            return await rewards("p", "c", finish="stop", hang=False)

    assert asyncio.run(give_up())["reward"] == 1.0


def test_an_error_of_one_function_ends_the_others(file, opened):
    """The second call's first function would else wait for the first call's second one."""
    rewards = of(opened, file, "raises", "sometimes", deadline=100.0)

    async def twice() -> None:
        for _ in range(2):
            async with asyncio.timeout(50):
                with pytest.raises(RewardError, match=r"^reward raises: Odd: 1\n"):
                    await rewards("p", "c", finish="stop", hang=True)

    asyncio.run(twice())


@pytest.mark.slow
def test_scorers_die_with_a_killed_parent(file, tmp_path):
    """Even while their code holds the interpreter."""
    fifo = tmp_path / "running"
    os.mkfifo(fifo)
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio
        from actors.rewards import FromFile, Rewards

        async def main():
            idle = Rewards(functions=(FromFile(path={file!r}, function="exact"),))
            await idle("p", "c", finish="stop", answer="c")
            hung = Rewards(functions=(FromFile(path={file!r}, function="hang_after"),), deadline=600)
            await hung("p", "c", finish="stop", fifo={str(fifo)!r})

        if __name__ == "__main__":
            asyncio.run(main())
        """)
    )
    parent = subprocess.Popen([sys.executable, script])
    fifo.read_text()  # returns when the hanging function runs
    scorers = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait()
    assert len(scorers) >= 2
    assert not psutil.wait_procs(scorers, timeout=20)[1]


def test_functions_that_are_defined_in_the_script_itself(tmp_path):
    """They go by value: the scorers cannot import them."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import asyncio
        from actors.rewards import Rewards

        if __name__ == "__main__":
            def mine(completion):
                return factor * len(completion)
            factor = 3
            rewards = Rewards(functions=(mine,))
            rewards.check(("answer",))
            print(asyncio.run(rewards("p", "four", finish="stop")))
        """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["{'reward': 12.0, 'mine': 12.0}"], done.stderr
    assert not done.stderr


def test_a_rollout_is_scored(file, opened):
    environment = SingleTurn(reward=of(opened, file, "exact", "length", weights=(1.0, 0.0)))

    async def episode():
        await environment.reset({"prompt": "p", "answer": "c", "completion": "not this", "level": 1})
        return await environment.step("c", "length")

    outcome = asyncio.run(episode())
    assert outcome.reward == 1.0 and outcome.observation is None
    assert outcome.parts["length.stopped"] == 0.0 and outcome.parts["length.n"] == 2.0  # answer and level


UNUSABLE = [
    (None, "ValueError: there is no file {path}"),
    ("g = 1", "ValueError: {path} has no function 'f1'"),
    ("f2 = 1", "ValueError: {path} has no function 'f2'"),
    ("import nothing_at_all", "{path}:1: ModuleNotFoundError: No module named 'nothing_at_all'"),
    ("x = 1\n1 / 0", "{path}:2: ZeroDivisionError: division by zero"),
    ("def f(:", "SyntaxError: invalid syntax (bad5.py, line 1)"),
    ("import sys; sys.exit(1)", "{path}:1: SystemExit: 1"),
    ("def f7(x, /): ...", "ValueError: its parameter 'x' is positional only, but arguments go by keyword"),
    (
        "def f8(completion, solution): ...",
        "it takes 'solution', which is not there: there are answer, completion, finish, prompt",
    ),
]


def test_functions_that_cannot_be_used_are_refused_in_one_line(tmp_path):
    functions, why = [], []
    for i, (source, text) in enumerate(UNUSABLE):
        path = tmp_path / f"bad{i}.py"
        if source is not None:
            path.write_text(source)
        functions.append(FromFile(path=str(path), function=f"f{i}"))
        why.append(f"reward f{i}: {text}".format(path=path))
    with pytest.raises(ValueError) as caught:
        Rewards(functions=tuple(functions)).check(("answer",))
    assert str(caught.value).split("; ") == why


def test_a_file_that_ends_its_process_is_refused(tmp_path):
    (tmp_path / "ends.py").write_text("import os\nos._exit(1)")
    with pytest.raises(ValueError, match=r"^rewards f: importing them ended the process$"):
        Rewards(functions=(FromFile(path=str(tmp_path / "ends.py"), function="f"),)).check()


def test_a_file_imports_what_lies_beside_it(tmp_path, opened):
    (tmp_path / "helper_beside.py").write_text("VALUE = 4")
    (tmp_path / "main.py").write_text("from helper_beside import VALUE\ndef f(completion): return VALUE")
    rewards = of(opened, str(tmp_path / "main.py"), "f")
    rewards.check(None)
    assert asyncio.run(rewards("p", "c", finish="stop"))["f"] == 4.0


def test_settings_that_contradict_each_other():
    one, two = FromFile.parse("a.py:one"), FromFile.parse("b/a.py:two")
    for settings, why in (
        ({"functions": ()}, "functions is empty"),
        ({"functions": (one, two), "weights": (1.0,)}, "weights has 1 numbers for 2 functions"),
        ({"functions": (one,), "weights": (math.nan,)}, "weights must be finite"),
        ({"functions": (one, one)}, "'one' does not tell"),
        ({"functions": (one,), "deadline": 0.0}, r"rewards\.deadline must be"),
        ({"functions": (one,), "scorers": 0}, r"rewards\.scorers must be"),
    ):
        with pytest.raises(ValueError, match=why):
            Rewards(**settings)
    for text in ("a.py", "a:b", "a.py:", "a.py:b c", "a.txt:b"):
        with pytest.raises(ValueError, match=r"write file\.py:function"):
            FromFile.parse(text)


def test_names(file):
    assert name_of(FromFile.parse("x/good.py:reward")) == "good"
    assert name_of(batched(trl_lengths)) == "trl_lengths"
    assert name_of(Rewards.check) == "check"
    with pytest.raises(ValueError, match="'reward' does not tell"):
        Rewards(functions=(FromFile.parse("reward.py:reward"),))
