"""A recipe of one's own: reward, loss, advantage and flags in one file.

python -m recipes.custom --model recipes/assets/tiny/addition --steps 30
"""

import random
from dataclasses import dataclass, field

from actors import RunConfig, Sampling, SingleTurn, command_line, launch
from losses import LossInputs, Terms


def reward(prompt, completion, *, finish, answer, price):
    """Right answers count 1, each character costs; a plain number would do too."""
    right = float(finish == "stop" and completion.partition(";")[2] == answer)
    return {"reward": right - price * len(completion), "right": right}  # logged as reward/right


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Rows and who judges them: any object with `rows`, `row(i)` and `environment()`."""

    rows: int = 5000
    """Rows of one epoch."""
    price: float = 0.005
    """What a character of the completion costs."""

    def row(self, i):
        r = random.Random(i)
        a, b = r.randrange(100), r.randrange(100)
        return {"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}", "price": self.price}

    def environment(self):
        return SingleTurn(reward=reward)


@dataclass(frozen=True, kw_only=True)
class CappedIS:
    """-sg(min(r, cap)) A log pi with r = pi / behaviour: truncated importance sampling."""

    cap: float = 2.0
    """Largest weight of a token."""

    def __call__(self, inputs: LossInputs) -> Terms:
        ratio_T = (inputs.logprobs_T.detach() - inputs.behaviour_T).exp()
        weight_T = ratio_T.clamp(max=self.cap) * inputs.advantages_T
        return Terms(
            loss_T=-weight_T * inputs.logprobs_T,  # one value per token: no mask, no sum, no mean
            diagnostics_T={"ratio": ratio_T, "capped": (ratio_T > self.cap).float()},  # logged as policy/capped
        )


def leave_one_out(rewards_N, groups_N):
    """Reward minus the mean of the others in its group (RLOO)."""
    _, member_N, size_G = groups_N.unique(return_inverse=True, return_counts=True)
    total_G = rewards_N.new_zeros(len(size_G)).index_add(0, member_N, rewards_N)
    others_N = (size_G[member_N] - 1).clamp(min=1)
    return rewards_N - (total_G[member_N] - rewards_N) / others_N


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Own flags beside those of every run: --task.price, --loss.cap."""

    task: Sums = field(default_factory=Sums)
    loss: CappedIS = field(default_factory=CappedIS)
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=22))


async def train(config: Config):
    async with launch(config, task=config.task, loss=config.loss, advantage=leave_one_out) as run:
        async for batch in run.batches():  # the next one is fetched while this one trains
            step = await run.train(batch)  # a dict of metrics: add your own
            await run.publish(step)  # to the generators, which go on meanwhile
    return run.summary


if __name__ == "__main__":
    command_line(Config, train)
