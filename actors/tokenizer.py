"""Text to token ids and back, from a Hugging Face folder, without transformers or torch: rollouts start fast."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """What `tokenizer.json`, the chat template and the configured end tokens of one folder say."""

    inner: tokenizers.Tokenizer
    eos_ids: frozenset[int]
    """Tokens that end a completion; empty if the folder names none."""
    template: jinja2.Template | None
    """The chat template; None if the folder has none."""
    names: dict[str, str]
    """Special tokens that a template may use: `bos_token`, `eos_token` and so on."""

    @classmethod
    def load(cls, folder: str) -> Tokenizer:
        """Read a folder's files.

        Raises:
            FileNotFoundError: there is no tokenizer.json.
            ValueError: a file cannot be parsed.
        """
        path = Path(folder)
        if not (path / "tokenizer.json").is_file():
            raise FileNotFoundError(f"no tokenizer in {folder!r}: tokenizer.json is missing")
        try:
            # The library raises plain Exception, nothing narrower, for a file that it cannot use.
            inner = tokenizers.Tokenizer.from_str(json.dumps(_read(path / "tokenizer.json")))
        except Exception as error:
            raise ValueError(f"cannot read the tokenizer in {folder!r}: {error}") from error
        inner.no_padding()
        inner.no_truncation()
        config = {**_read(path / "special_tokens_map.json"), **_read(path / "tokenizer_config.json")}
        names = {key: text for key, value in config.items() if key.endswith("_token") and (text := _content(value))}
        source = _template(path, config)
        return cls(
            inner=inner,
            eos_ids=_eos_ids(path, inner, names),
            template=_environment().from_string(source) if source else None,
            names=names,
        )

    def encode(self, text: str, *, specials: bool = False) -> np.ndarray:
        """Ids of `text`, int32 [n].

        Args:
            specials: add what the tokenizer puts around a whole text, such as bos. For a prompt without chat template;
                not for the later parts of a conversation.
        """
        return np.array(self.inner.encode(text, add_special_tokens=specials).ids, np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids` (integers [n]), special tokens left out."""
        return self.inner.decode(ids.tolist(), skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Ids (int32 [n]) of a conversation laid out by the chat template, up to where the model answers.

        Args:
            messages: `{"role": ..., "content": ...}` each, oldest first.

        Raises:
            ValueError: the folder has no chat template, or the template refuses the messages.
        """
        if self.template is None:
            raise ValueError("the tokenizer has no chat template: encode the prompt as plain text")
        try:
            text = self.template.render(messages=messages, add_generation_prompt=True, **self.names)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return self.encode(text)


class _Generation(Extension):
    """Lets `{% generation %}` blocks through: they mark the model's own text and add none."""

    tags = {"generation"}  # noqa: RUF012, jinja2 declares it so

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates may rely on: no block newlines, loop controls, unescaped JSON and two functions."""

    def to_json(value: Any, ensure_ascii: bool = False, **kwargs: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **kwargs)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    written = config.get("chat_template")
    if isinstance(written, list):
        return next((t["template"] for t in written if t["name"] == "default"), None)
    return written


def _eos_ids(path: Path, inner: tokenizers.Tokenizer, names: Mapping[str, str]) -> frozenset[int]:
    for file in ("generation_config.json", "config.json"):
        ids = _read(path / file).get("eos_token_id")
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    token = inner.token_to_id(names["eos_token"]) if "eos_token" in names else None
    return frozenset() if token is None else frozenset([token])


def _read(file: Path) -> dict[str, Any]:
    """A JSON file's object; empty if the file does not exist."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text())
    except ValueError as error:  # not JSON, or not even UTF-8
        raise ValueError(f"{str(file)!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{str(file)!r} must hold a JSON object, not a {type(value).__name__}")
    return value


def _content(value: Any) -> str | None:
    """A special token is written as text or as an object."""
    return value.get("content") if isinstance(value, dict) else value
