"""The completion is the answer, character by character."""

from __future__ import annotations

from typing import Any


def exact(completion: str, answer: Any) -> float:
    """1 if the completion is the row's answer, white space around either left out, else 0."""
    return float(completion.strip() == str(answer).strip())
