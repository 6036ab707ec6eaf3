"""Addition of two numbers, where thinking pays: a written scratchpad is right far more often than a guess."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from recipes.tasks.scratchpad import Scratchpad


@dataclass(frozen=True, kw_only=True)
class Addition(Scratchpad):
    """Two-digit sums. The prompt is `57+68=`; what follows the first `;` of the completion is the answer.

    The shipped checkpoint mostly guesses (`;125`) and sometimes adds digit by digit first (`780:5,561:2,1;125`), so
    reward and completion length rise together: from 8 tokens on average to 18.
    """

    max_tokens: ClassVar[int] = 22
    """The longest honest completion is 18 tokens, its end included."""
    checkpoint: ClassVar[Path] = Path(__file__).parents[1] / "assets" / "tiny" / "addition"
    """Made by `python -m recipes.make_tiny addition`."""

    def row(self, i: int) -> dict[str, str]:
        """Row i: the prompt and the zero-padded answer."""
        r = random.Random(f"{self.seed}/{i}")
        a, b = r.randrange(100), r.randrange(100)
        return {"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"}
