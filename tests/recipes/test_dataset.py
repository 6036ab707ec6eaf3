"""Rows of files, their split and their errors; rewards by name; a run on them."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tyro
from hypothesis import given
from hypothesis import strategies as st

from actors.environment import Checked, HeldOut
from actors.tokenizer import Tokenizer
from recipes.rewards.exact import exact
from recipes.rewards.mathematics import math
from recipes.tasks import dataset
from recipes.tasks import rows as rows_module
from recipes.tasks.addition import Addition
from recipes.tasks.dataset import Dataset
from recipes.tasks.rows import JsonLines, Stream, part

ROWS = [{"prompt": f"What is {i}?", "answer": i, "level": "é" * (i % 3)} for i in range(20)]
ROOT = Path(__file__).parents[2]
TINY = str(Addition.checkpoint)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Iterator[dict[str, str]]:
    """ROWS in every form that can be read, by its name."""
    import datasets

    folder = tmp_path_factory.mktemp("data")
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_list(ROWS)
    (folder / "a.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    (folder / "lines.json").write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n")
    (folder / "list.json").write_text("\n " + json.dumps(ROWS))
    table.to_parquet(folder / "a.parquet")
    table.select_columns(["prompt", "answer"]).to_csv(folder / "a.csv")
    table.save_to_disk(folder / "disk")
    datasets.DatasetDict(train=table, test=table.select([7])).save_to_disk(folder / "splits")
    yield {path.name: str(path) for path in folder.iterdir()}
    dataset._load.cache_clear()  # while what it holds can still be closed


@pytest.mark.parametrize("name", ["a.jsonl", "lines.json", "list.json", "a.parquet", "a.csv", "disk", "splits"])
def test_the_same_rows_from_every_kind_of_file(files, name):
    task = Dataset(path=files[name])
    assert task.rows == 20 and task.held_out_rows == 0
    rows = [{"prompt": row["prompt"], "answer": str(row["answer"])} for row in ROWS] if name == "a.csv" else ROWS
    for i in (7, 0, 19, 7):
        assert task.row(i) == rows[i]
    if name != "list.json":
        stream = Dataset(path=files[name], streaming=True, limit=5)
        assert stream.rows is None
        assert [int(stream.row(i)["answer"]) for i in (0, 4, 5, 23, 21)] == [0, 4, 0, 3, 1]


@pytest.mark.parametrize("streaming", [False, True])
def test_cells_of_csv_are_text_as_they_stand(tmp_path, streaming):
    (tmp_path / "a.csv").write_text('prompt,answer,more\n069,0.50,NA\n"1,\n2",None,\n')
    task = Dataset(path=str(tmp_path / "a.csv"), streaming=streaming)
    assert task.row(0) == {"prompt": "069", "answer": "0.50", "more": "NA"}
    assert task.row(1) == {"prompt": "1,\n2", "answer": "None", "more": ""}


def test_a_split_and_a_limit(files):
    assert Dataset(path=files["splits"], split="test").row(0)["answer"] == 7
    assert Dataset(path=files["a.jsonl"], limit=3).rows == 3


def test_a_task_travels_without_its_rows(files):
    task = Dataset(path=files["a.jsonl"], held_out=3, reward=("math", "exact"))
    before = len(pickle.dumps(task))
    task.row(0)
    again = pickle.loads(pickle.dumps(task))
    assert len(pickle.dumps(task)) == before < 1000
    assert again == task and again.row(5) == task.row(5)
    assert isinstance(task, HeldOut) and isinstance(task, Checked)
    assert pickle.loads(pickle.dumps(task.environment())).reward == task.rewards()


def test_prompts_as_text_and_as_messages(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    mine = [{"role": "system", "content": "own"}, *chat]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": p, "finish": 1, "completion": 2}) for p in ("hi", chat, mine)))

    def prompts(**settings: Any) -> list[Any]:
        task = Dataset(path=str(path), **settings)
        assert all(set(task.row(i)) == {"prompt"} for i in range(3))  # the other names are the rollout's own
        return [task.row(i)["prompt"] for i in range(3)]

    assert prompts() == ["hi", chat, mine]
    assert prompts(chat=True) == [chat, chat, mine]
    system = [{"role": "system", "content": "be"}, *chat]
    assert prompts(system="be") == [system, system, mine]


def test_other_columns_as_prompt_and_answer(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "old", "question": "q", "completion": "c", "answer": "a", "more": [1]}))
    assert Dataset(path=str(path), prompt="question").row(0) == {"prompt": "q", "answer": "a", "more": [1]}
    assert Dataset(path=str(path), prompt="question", answer="completion").row(0) == {
        "prompt": "q",
        "answer": "c",
        "more": [1],
    }


@given(st.integers(1, 400), st.floats(0, 0.99), st.integers(0, 500), st.integers(-3, 2**70))
def test_held_out_rows_are_never_trained(rows, share, number, seed):
    for held_out in (share, number):
        trained, held = part(rows, held_out, seed)
        assert sorted([*trained, *held]) == list(range(rows))
        assert list(trained) == sorted(trained)
    assert len(held) == min(number, rows)


@given(st.integers(1, 300), st.integers(1, 300), st.floats(0, 0.99), st.integers(0, 100))
def test_a_rows_fate_does_not_depend_on_how_many_there_are(rows, more, share, seed):
    few, many = part(rows, share, seed)[1], part(rows + more, share, seed)[1]
    assert set(few) == {i for i in many if i < rows}


def test_the_split_is_random_of_its_size_and_of_its_seed():
    held = part(100_000, 0.1, 0)[1]
    assert abs(len(held) - 10_000) < 5 * 95  # standard deviation sqrt(100000 * 0.1 * 0.9) = 95
    both = np.intersect1d(held, part(100_000, 0.1, 1)[1])
    assert abs(len(both) - 1000) < 5 * 32
    assert abs(np.mean(held) - 50_000) < 5 * 289  # 100000 / sqrt(12) / sqrt(10000)
    # splitmix64 of seed 0 begins with this number in every implementation
    assert rows_module._splitmix64(np.zeros(1, np.uint64))[0] == 0xE220A8397B1DCDAF


def test_held_out_rows_of_files_and_streams(files):
    task = Dataset(path=files["a.jsonl"], held_out=0.3, seed=1)
    held = [task.held_out_row(i)["answer"] for i in range(task.held_out_rows)]
    assert sorted(held + [task.row(i)["answer"] for i in range(task.rows or 0)]) == list(range(20))
    assert 0 < len(held) < 20 and held != sorted(held)
    stream = Dataset(path=files["a.jsonl"], held_out=4, streaming=True)
    assert [stream.held_out_row(i)["answer"] for i in range(stream.held_out_rows)] == [0, 1, 2, 3]
    assert [stream.row(i)["answer"] for i in (0, 15, 16)] == [4, 19, 4]


@given(st.integers(1, 60), st.lists(st.integers(0, 300), max_size=30), st.integers(1, 9))
def test_a_stream_answers_as_an_endless_list(length, wanted, window):
    """Whatever order rows are asked for in, and however small the window is."""

    def start() -> Iterator[tuple[str, dict[str, Any]]]:
        return ((f"row {i}", {"i": i}) for i in range(length))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "WINDOW", window)
        stream = Stream(start)
        for i in wanted:
            assert stream.row(i) == {"i": i % length}
            assert stream.where(i) == f"row {i % length}"


def test_a_stream_reads_each_row_about_once_where_old_rows_are_asked_for_in_between():
    """Probes ask for rows far behind the newest: they must not throw the reader back."""
    read = 0

    def start() -> Iterator[tuple[str, dict[str, Any]]]:
        nonlocal read
        for i in count():
            read += 1
            yield "", {"i": i}

    stream = Stream(start)
    for version in range(500):
        for row in range(16 * version, 16 * version + 16):
            stream.row(row)
        stream.row(version)
    assert read <= 16 * 500 + 500


def test_lines_are_not_held_and_blank_ones_do_not_count(tmp_path):
    path = tmp_path / "big.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "x" * 500, "i": i}) + "\n" for i in range(3000)))
    lines = JsonLines(path)
    assert len(lines) == 3000 and lines.row(2999)["i"] == 2999 and lines.where(2999) == f"{path}, line 5999"
    assert sum(sys.getsizeof(v) for v in vars(lines).values()) < 200_000 < path.stat().st_size


@pytest.mark.parametrize(
    ("content", "settings", "why"),
    [
        ('{"prompt": "a"}\n{"prompt": ', {}, "{path}, line 2: not valid JSON (Expecting value: line 1 column 12"),
        ('\n\n["a"]', {}, "{path}, line 3: a JSON object was expected, not a list"),
        (
            '{"question": "a", "level": 1}',
            {},
            "{path}, line 1: no column 'prompt', there are question, level: give --",
        ),
        (
            '{"prompt": "a"}',
            {"answer": "gold"},
            "{path}, line 1: no column 'gold', there are prompt: give --task.answ",
        ),
        ('{"prompt": " "}', {}, "{path}, line 1: the prompt is empty"),
        ('{"prompt": 3}', {}, "{path}, line 1: the prompt is a int: text or a list of chat messages was expected"),
        ('{"prompt": null}', {}, "{path}, line 1: the prompt is a NoneType"),
        ('{"prompt": []}', {}, "{path}, line 1: the prompt has no messages"),
        ('{"prompt": [{"role": "user"}]}', {}, "{path}, line 1: the prompt has {{'role': 'user'}}, not"),
        (
            '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            {},
            "{path}, line 1: the prompt ends with a message of the assistant",
        ),
        ("", {}, "{path} has no rows"),
        ('{"prompt": "a"}', {"held_out": 1.0}, "task.held_out 1 keeps 1 of the 1 rows of {path} from training"),
        ('{"prompt": "a"}', {"held_out": 0.1, "seed": 1}, "task.held_out 0.1 keeps 0 of the 1 rows of {path}"),
        ("", {"streaming": True}, "{path} has no rows"),
        ('{"prompt": "a"}', {"streaming": True, "held_out": 1}, "{path}: all rows are held out by task.held_out 1"),
        ('{"prompt": "a\\ud800"}', {}, "{path}, line 1: the prompt is no text: half a surrogate pair at character 1"),
        ('{"prompt": "\\ud800"}', {"chat": True}, "{path}, line 1: the prompt is no text: half a surrogate pair"),
        ('{"prompt": ' + "[" * 100_000, {}, "{path}, line 1: not valid JSON (maximum recursion depth"),
        ('{"prompt": "a"}\n' * 300 + "{}", {}, "{path}, line 301: no column 'prompt'"),
        ('{"prompt": "a"}\n7', {"streaming": True}, "{path}, line 2: a JSON object was expected, not a int"),
    ],
)
def test_errors_say_where_and_what(tmp_path, content, settings, why):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError) as caught:
        Dataset(path=str(path), **settings).check(TINY)
    text = str(caught.value)
    assert text.startswith(why.format(path=path)) and "\n" not in text


def test_files_and_datasets_that_are_not_there(files, tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "list.json").write_text('[{"prompt": "a"}, 3]')
    (tmp_path / "bad.parquet").write_text("no parquet")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "ragged.csv").write_text("prompt,answer\n1,2\n1,2,3\n")
    for name, file in (("state", "state.json"), ("info", "dataset_info.json")):
        shutil.copytree(files["disk"], tmp_path / name)
        (tmp_path / name / file).write_text("[]")
    for path, settings, kind, why in (
        ("gone.jsonl", {}, FileNotFoundError, "there is no file 'gone.jsonl'"),
        ("gone.parquet", {"streaming": True}, FileNotFoundError, "there is no file 'gone.parquet'"),
        ("./gone", {}, FileNotFoundError, "there is no file or folder './gone'"),
        ("nobody/nothing", {}, ValueError, "dataset 'nobody/nothing' is not on this machine and the Hugging Face hub"),
        (str(tmp_path / "a.txt"), {}, ValueError, f"{tmp_path}/a.txt is of a kind that is not read: .jsonl, .ndjson"),
        (files["splits"], {"split": "dev"}, ValueError, f"cannot read dataset '{files['splits']}': it has no split"),
        (str(tmp_path / "bad.parquet"), {}, ValueError, f"cannot read dataset '{tmp_path}/bad.parquet': "),
        (
            str(tmp_path / "state"),
            {},
            ValueError,
            f"cannot read dataset '{tmp_path}/state': the folder is damaged (Ty",
        ),
        (str(tmp_path / "info"), {}, ValueError, f"cannot read dataset '{tmp_path}/info': the folder is damaged (Att"),
        (str(tmp_path / "deep.json"), {}, ValueError, f"{tmp_path}/deep.json is not valid JSON: maximum recursion"),
        (
            str(tmp_path / "ragged.csv"),
            {"streaming": True},
            ValueError,
            f"{tmp_path}/ragged.csv cannot be read: Error",
        ),
        (str(tmp_path / "list.json"), {}, ValueError, f"{tmp_path}/list.json, row 1: a JSON object was expected"),
        (files["list.json"], {"streaming": True}, ValueError, f"{files['list.json']} is one JSON array"),
    ):
        with pytest.raises(kind) as caught:
            Dataset(path=path, **settings).row(0)
        assert str(caught.value).startswith(why) and "\n" not in str(caught.value)


def test_settings_that_contradict_each_other():
    for settings, why in (
        ({"held_out": 1.5}, "share below 1 or a whole number"),
        ({"held_out": -1.0}, r"task\.held_out must be at least 0"),
        ({"held_out": 0.1, "streaming": True}, "nobody knows how many"),
        ({"limit": 0}, r"task\.limit must be at least 1"),
        ({"path": ""}, r"task\.path is empty"),
        ({"reward": ("maths",)}, "'maths' names no reward function"),
        ({"reward": ("math",), "weights": (1.0, 2.0)}, "2 numbers for 1 functions"),
    ):
        with pytest.raises(ValueError, match=why):
            Dataset(**{"path": "a.jsonl", **settings})


def test_flags():
    flags = "--path a.jsonl --reward math b.py:f --weights 1 0.5 --held-out 0.1 --chat --limit 7"
    made = tyro.cli(Dataset, args=flags.split())
    assert made == Dataset(
        path="a.jsonl", reward=("math", "b.py:f"), weights=(1.0, 0.5), held_out=0.1, chat=True, limit=7
    )
    assert made.rewards().names == ("math", "f")


def test_check_lays_out_prompts_and_loads_rewards(files, tmp_path):
    (tmp_path / "r.py").write_text("def f(completion, solution): return 1.0")
    Dataset(path=files["a.jsonl"], reward=("exact", "math")).check(TINY)
    with pytest.raises(ValueError, match=r"^reward f: it takes 'solution', which is not there: there are answer"):
        Dataset(path=files["a.jsonl"], reward=(f"{tmp_path}/r.py:f",)).check(TINY)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "tokenizer.json").write_text((Path(TINY) / "tokenizer.json").read_text())
    Dataset(path=files["a.jsonl"]).check(str(plain))
    with pytest.raises(ValueError, match=r"^cannot lay out a chat prompt of .* has no chat template"):
        Dataset(path=files["a.jsonl"], chat=True).check(str(plain))
    (plain / "chat_template.jinja").write_text("{{ messages + 1 }}")
    with pytest.raises(ValueError, match=r"^cannot lay out a chat prompt of .*a\.jsonl, line 1: can only concatenate"):
        Dataset(path=files["a.jsonl"], chat=True).check(str(plain))


@pytest.mark.parametrize("chat", [False, True])
def test_check_counts_the_tokens_of_all_rows(tmp_path, monkeypatch, chat):
    path = tmp_path / "a.jsonl"
    lengths = [*[3] * 300, 5, 3, 9, 4]
    path.write_text("\n\n".join(json.dumps({"prompt": "1" * n, "answer": 1}) for n in lengths))
    task = Dataset(path=str(path), chat=chat)
    tokenizer = Tokenizer.load(TINY)
    own = len(tokenizer.chat([{"role": "user", "content": ""}]) if chat else tokenizer.encode("", specials=True))

    def refused(task: Dataset, room: int) -> str:
        with pytest.raises(ValueError) as caught:
            task.check(TINY, room)
        return str(caught.value).partition(": raise --generator.engine.max-length, lower --sampling.max-tokens")[0]

    task.check(TINY, own + 9)
    task.check(TINY, room=None)
    assert refused(task, own + 4) == (
        f"{path}, line 601: the prompt has {own + 5} tokens, but at most {own + 4} tokens fit beside a completion; so "
        "it is with 2 of 304 rows"
    )
    # held-out rows count as well: all but one are
    assert "so it is with 1 of 304 rows" in refused(Dataset(path=str(path), chat=chat, held_out=303), own + 8)
    monkeypatch.setattr(dataset, "CHECKED", 302)
    task.check(TINY, own + 5)
    # What is far too long is not encoded
    path.write_text(json.dumps({"prompt": "1" * 5_000_000, "answer": 1}))
    monkeypatch.setattr(dataset, "LETTERS", 10)
    dataset._load.cache_clear()
    assert f"{path}, line 1: the prompt has more than 200 characters, but" in refused(task, 20)
    task.check(TINY)


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("So she has 7 apples.", 7, 1.0),
        ("7 + 5 = 12 apples", 12, 1.0),
        ("12 apples of which 3 are red", 12, 0.0),
        (r"either 12 or \boxed{13}, so 12", "13", 1.0),
        ("0.5", r"\frac{1}{2}", 1.0),
        (r"\boxed{x^2+1}", "1+x^2", 1.0),
        ("2", "1+x^2", 0.0),
        ("1,234", 1234, 1.0),
        ("-3", "3", 0.0),
        ("", "3", 0.0),
        ("it is 18", "She sold 48/2 = 24 clips.\n#### 18", 1.0),
        ("it is 24", "She sold 48/2 = 24 clips.\n#### 18", 0.0),
    ],
)
def test_math(completion, answer, reward):
    assert math(completion, answer) == reward


def test_math_gives_up_on_towers_and_refuses_rows_without_an_answer():
    assert math(r"\boxed{9^{9^{9^{9}}}}", 3) == 0.0
    with pytest.raises(ValueError, match="holds no number or expression"):
        math("3", "")


def test_exact():
    assert exact(" 7\n", 7) == exact("a b", " a b") == 1.0
    assert exact("7.0", 7) == exact("a", "A") == 0.0


def test_the_word_problems_are_well_formed():
    rows = [json.loads(line) for line in (ROOT / "recipes/assets/word_problems.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) >= 60
    assert all(set(row) == {"prompt", "answer"} and isinstance(row["answer"], int) for row in rows)
    task = Dataset(path=str(ROOT / "recipes/assets/word_problems.jsonl"), reward=("math",))
    row = task.row(0)
    outcome = asyncio.run(task.rewards()("", f"It is {row['answer']}", finish="stop", **dict(row, prompt=0)))
    task.rewards().close()
    assert outcome == {"reward": 1.0, "math": 1.0}


@pytest.mark.slow
def test_a_run_on_a_file_with_rewards_of_ones_own(tmp_path):
    """Sums from a file instead of the task that makes them; one reward hangs now and then."""
    with (tmp_path / "sums.jsonl").open("w") as file:
        for row in (Addition().row(i) for i in range(200)):
            print(json.dumps({"question": row["prompt"], "answer": row["answer"]}), file=file)
    (tmp_path / "mine.py").write_text(
        "def right(completion, answer, finish):\n"
        "    return float(finish == 'stop' and completion.partition(';')[2] == answer)\n"
        "async def short(completion):\n"
        "    return {'reward': -len(completion) / 100, 'letters': len(completion)}\n"
    )
    flags = f"""--model {TINY} --steps 2 --group-size 8 --buffer.groups-per-step 4 --sampling.max-tokens 22
        --generator.engine.slots 64 --generator.engine.max-length 32 --output-dir {tmp_path}/run task:dataset
        --task.path {tmp_path}/sums.jsonl --task.prompt question --task.held-out 20
        --task.reward {tmp_path}/mine.py:right {tmp_path}/mine.py:short --task.weights 1 0.5"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "recipes.grpo_async", *flags.split()],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["reward/mean"] == pytest.approx(row["reward/right"] + 0.5 * row["reward/short"], abs=1e-6)
        assert row["reward/short"] == pytest.approx(-row["reward/short.letters"] / 100, abs=1e-6)
        assert 0 < row["reward/right"] < 1
