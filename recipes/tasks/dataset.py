"""Training data of the user's own: a file, or a dataset of the Hugging Face hub, with reward functions by name."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.environment import Environment, Prompt, Row, SingleTurn
from actors.rewards import FromFile, Rewards
from actors.tokenizer import Tokenizer
from actors.types import require
from recipes.tasks.rows import Picked, Rows, Stream, open_rows, open_stream, part

CHECKED, FORWARD = 20_000, 16
"""Most rows that `check` reads of those to train on, and of those held out; of a stream."""
BATCH = 256
"""Rows that `check` has in memory at a time."""
LETTERS = 100
"""Most characters of a token, as good as always: a prompt with more of them per token of room is not encoded."""
UNBOUNDED = 1000
"""The room that this takes where there is no bound."""
TAKEN = ("prompt", "completion", "finish")
"""Names that a reward knows from the rollout."""
BUILT_IN = {
    name: FromFile(path=str(Path(__file__).parents[1] / "rewards" / file), function=name)
    for name, file in (("exact", "exact.py"), ("math", "mathematics.py"))
}
"""Rewards that need no path."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Prompts from a dataset, completions judged by reward functions.

    A reward function gets `prompt`, `completion`, `finish` and the row's other columns, by the names that it takes;
    columns that are themselves called so are left out.
    """

    path: str
    """File (.jsonl, .json, .parquet, .csv), folder of `datasets.save_to_disk`, or name on the Hugging Face hub. All
    that a CSV file holds is text, as it stands there: 069 keeps its zero, an empty cell is an empty text."""
    split: str = "train"
    """Of a dataset with several."""
    subset: str | None = None
    """Configuration of a dataset on the hub, such as `main`."""
    streaming: bool = False
    """Read forwards and never count the rows: endless, in stored order."""
    prompt: str = "prompt"
    """Column with the prompt: text, or chat messages, a list of {"role": ..., "content": ...}."""
    chat: bool = False
    """Make text a user's message, laid out by the model's chat template. Otherwise the model continues it."""
    system: str | None = None
    """System message before each prompt without one; implies `--task.chat`."""
    answer: str = "answer"
    """Column that rewards get as `answer`."""
    held_out: float = 0.0
    """Rows kept from training for evaluation: a share below 1, or how many. Of a stream how many, the first ones."""
    seed: int = 0
    """Of the choice of held-out rows: one row's depends on this and its index only."""
    limit: int | None = None
    """First rows that are used, held-out ones included."""
    reward: tuple[str, ...] = ("exact",)
    """Functions that judge a completion: `exact` (is the answer), `math` (its value is the answer's), or
    file.py:function."""
    weights: tuple[float, ...] = ()
    """Of the rewards in their sum, one each. All 1 unless given."""
    deadline: float = 10.0
    """Seconds of one call of a reward function; then its process is killed and the rollout is counted as failed."""
    scorers: int = 1
    """Processes per rollout worker that run reward functions, each one call at a time."""

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise ValueError("task.path is empty: give a file, a folder or a name on the Hugging Face hub")
        require("task", 0, held_out=self.held_out)
        if self.held_out >= 1 and self.held_out != int(self.held_out):
            raise ValueError(f"task.held_out must be a share below 1 or a whole number, not {self.held_out}")
        if self.streaming and 0 < self.held_out < 1:
            raise ValueError("task.held_out of a stream must be a number of rows: nobody knows how many there are")
        if self.limit is not None:
            require("task", 1, limit=self.limit)
        self.rewards()

    @property
    def rows(self) -> int | None:
        """Rows to train on; None is endless. Opens the dataset.

        Raises:
            OSError, ValueError: it cannot be read; one line.
        """
        return _load(self).rows

    @property
    def held_out_rows(self) -> int:
        """Rows that are never trained."""
        return _load(self).held_out_rows

    def row(self, i: int) -> Row:
        """Row i to train on: `prompt`, and the other columns.

        Raises:
            ValueError: it cannot be used; says which and why.
        """
        return self._made(_load(self).trained, i)

    def held_out_row(self, i: int) -> Row:
        """Row i of those that are never trained, in an order that does not follow the file's."""
        return self._made(_load(self).held_out, i)

    def environment(self) -> Environment:
        """An episode of one answer."""
        return SingleTurn(reward=self.rewards())

    def rewards(self) -> Rewards:
        """What judges a completion.

        Raises:
            ValueError: a function's text is of no known form, or the weights do not match.
        """
        functions = tuple(BUILT_IN[text] if text in BUILT_IN else FromFile.parse(text) for text in self.reward)
        return Rewards(functions=functions, weights=self.weights, deadline=self.deadline, scorers=self.scorers)

    def check(self, model: str, room: int | None = None) -> None:
        """Read the rows, lay out and count their prompts and load the rewards, to fail before a run starts.

        Of a dataset the first 20,000 rows to train on are read, and as many held-out ones; 16 of a stream.

        Args:
            model: folder with the tokenizer.
            room: most tokens of a prompt; None is no bound.

        Raises:
            OSError, ValueError: something cannot be used, or prompts are longer than `room`; one line.
        """
        loaded, tokenizer = _load(self), Tokenizer.load(model)
        most = FORWARD if self.streaming else CHECKED
        columns: tuple[str, ...] = ()
        seen, over, first = 0, 0, ""
        for rows, stored in ((loaded.trained, loaded.rows), (loaded.held_out, loaded.held_out_rows)):
            count = most if stored is None else min(stored, most)
            for start in range(0, count, BATCH):
                made = [self._made(rows, i) for i in range(start, min(start + BATCH, count))]
                columns = columns or tuple(made[0])
                seen += len(made)
                prompts = {start + i: row["prompt"] for i, row in enumerate(made)}
                for i, length in _lengths(rows, prompts, tokenizer, room).items():
                    if room is not None and (length is None or length > room):
                        over += 1
                        size = f"more than {LETTERS * room} characters" if length is None else f"{length} tokens"
                        first = first or f"{rows.where(i)}: the {self.prompt} has {size}"
        if over:
            raise ValueError(
                f"{first}, but at most {room} tokens fit beside a completion; so it is with {over} of {seen} rows: "
                "raise --generator.engine.max-length, lower --sampling.max-tokens, or leave these rows out"
            )
        self.rewards().check(columns)

    def _made(self, rows: Rows, i: int) -> dict[str, Any]:
        """A stored row as rollouts see it."""
        stored = rows.row(i)
        try:
            for column, flag in ((self.prompt, "prompt"), (self.answer, "answer")):
                if column not in stored and (flag == "prompt" or column != "answer"):
                    raise ValueError(f"no column {column!r}, there are {', '.join(stored)}: give --task.{flag}")
            row = {name: value for name, value in stored.items() if name not in (*TAKEN, self.prompt, self.answer)}
            if self.answer in stored:
                row["answer"] = stored[self.answer]
            return {"prompt": self._laid_out(stored[self.prompt]), **row}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{rows.where(i)}: {error}") from None

    def _laid_out(self, prompt: Any) -> Prompt:
        """Text or chat messages, checked."""
        if isinstance(prompt, str):
            if not prompt.strip():
                raise ValueError(f"the {self.prompt} is empty")
            if not self.chat and self.system is None:
                return _utf8(prompt, self.prompt)
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, list):
            raise ValueError(
                f"the {self.prompt} is a {type(prompt).__name__}: text or a list of chat messages was expected"
            )
        if not prompt:
            raise ValueError(f"the {self.prompt} has no messages")
        for message in prompt:
            if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
                raise ValueError(f'the {self.prompt} has {message!r:.80}, not {{"role": text, "content": text}}')
        if prompt[-1]["role"] == "assistant":
            raise ValueError(f"the {self.prompt} ends with a message of the assistant, which the model is to write")
        if self.system is not None and prompt[0]["role"] != "system":
            prompt = [{"role": "system", "content": self.system}, *prompt]
        for message in prompt:
            _utf8(message["content"], self.prompt)
        return prompt


def _lengths(rows: Rows, prompts: dict[int, Prompt], tokenizer: Tokenizer, room: int | None) -> dict[int, int | None]:
    """Tokens of the prompts of some rows, by row.

    None where a prompt is not encoded: it is far too long, or it is text and there is no bound.

    Raises:
        ValueError: the chat template refuses one; says which.
    """
    longest = LETTERS * (UNBOUNDED if room is None else room)
    lengths: dict[int, int | None] = dict.fromkeys(prompts)
    texts = {}
    for i, prompt in prompts.items():
        if isinstance(prompt, str):
            if room is not None and len(prompt) <= longest:
                texts[i] = prompt
        elif sum(len(message["content"]) for message in prompt) <= longest:
            try:
                lengths[i] = len(tokenizer.chat(prompt))
            except Exception as error:  # a template is code, which fails in its own ways
                why = " ".join(str(error).split())
                raise ValueError(f"cannot lay out a chat prompt of {rows.where(i)}: {why}") from None
    encodings = tokenizer.inner.encode_batch_fast(list(texts.values()))
    return lengths | {i: len(encoding.ids) for i, encoding in zip(texts, encodings, strict=True)}


def _utf8(text: str, name: str) -> str:
    """The text, if a tokenizer can read it: JSON may hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the {name} is no text: half a surrogate pair at character {error.start}") from None
    return text


@dataclass(frozen=True)
class _Loaded:
    """What one process holds of a dataset."""

    trained: Rows
    """Rows to train on."""
    held_out: Rows
    """Rows that are never trained."""
    rows: int | None
    """How many there are to train on; None is endless."""
    held_out_rows: int
    """How many are held out."""


@functools.cache
def _load(task: Dataset) -> _Loaded:
    """Once per process: a task travels without its rows."""
    if task.streaming:
        start, kept = open_stream(task.path, task.subset, task.split), int(task.held_out)
        left = (
            f"{task.path}: all rows are held out by task.held_out {kept}, none are left to train on" if kept else None
        )
        passes = Stream(lambda: itertools.islice(start(), kept, task.limit), left or f"{task.path} has no rows")
        return _Loaded(passes, Stream(lambda: itertools.islice(start(), kept), f"{task.path} has no rows"), None, kept)
    stored = open_rows(task.path, task.subset, task.split)
    count = min(len(stored), task.limit or len(stored))
    if not count:
        raise ValueError(f"{task.path} has no rows")
    trained, held_out = part(count, task.held_out, task.seed)
    if not len(trained) or (task.held_out and not len(held_out)):
        raise ValueError(
            f"task.held_out {task.held_out:g} keeps {len(held_out)} of the {count} rows of {task.path} from training: "
            "choose another number"
        )
    return _Loaded(Picked(stored, trained), Picked(stored, held_out), len(trained), len(held_out))
