"""Remainders by repeated subtraction: completions from 2 to 180 tokens, so a static batch waits for stragglers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from recipes.tasks.scratchpad import Scratchpad


@dataclass(frozen=True, kw_only=True)
class Modmix(Scratchpad):
    """Remainders `n % k` with n in 1..60 and k in 1..9. The prompt is `57%4=`; the answer follows the first `;`.

    A scratchpad subtracts until it can no more (`57 53 ... 5 1;1`), which takes n / k numbers: lengths have a long
    tail, and a batch that ends together mostly waits.
    """

    max_tokens: ClassVar[int] = 200
    """The longest honest completion is 175 tokens, its end included."""
    checkpoint: ClassVar[Path] = Path(__file__).parents[1] / "assets" / "tiny" / "modmix"
    """Made by `python -m recipes.make_tiny modmix`."""

    def row(self, i: int) -> dict[str, str]:
        """Row i: the prompt and the answer."""
        r = random.Random(f"{self.seed}/{i}")
        n, k = r.randint(1, 60), r.randint(1, 9)
        return {"prompt": f"{n}%{k}=", "answer": str(n % k)}
