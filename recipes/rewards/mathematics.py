"""Mathematical answers, compared as values by math-verify: 1/2 is 0.5. Needs the extra `math`."""

from __future__ import annotations

import logging
from typing import Any

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ImportError("the reward `math` needs math-verify: pip install -e '.[math]'") from error

SECONDS = 2
"""Longest time for reading an answer, and for a comparison; math-verify measures by SIGALRM, in the main thread."""

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs every answer that it gives up


def math(completion: str, answer: Any) -> float:
    """1 if the completion's answer equals the row's, else 0.

    The completion's answer is what stands in its last `\\boxed{}`, or else its last expression or number. It counts by
    its value: `16 - 9` is 7. One that takes too long to read or to compare is wrong. The row has a number or an
    expression, in LaTeX or not; of a solution that ends with `#### 18`, as GSM8K's do, what follows the mark.

    Raises:
        ValueError: the row's answer holds no mathematical value.
    """
    text = str(answer)
    gold = parse(text if "$" in text or "\\boxed" in text else f"${text}$", parsing_timeout=SECONDS)
    if not gold:
        raise ValueError(f"the row's answer {answer!r:.80} holds no number or expression")
    return float(verify(gold, parse(completion, parsing_timeout=SECONDS), timeout_seconds=SECONDS))
