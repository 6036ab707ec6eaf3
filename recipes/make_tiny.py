"""Makes the tiny checkpoints that the demos start from: a 0.1 M parameter Qwen3 that half knows a task.

The corpus mixes right scratchpads with mostly wrong guesses, so the model has both behaviours and reinforcement
learning has to discover which one pays. `python -m recipes.make_tiny addition --output DIR` takes about three
minutes of one core, the other tasks less than one; the same seed, machine and library versions give the same bytes.
"""

from __future__ import annotations

import asyncio
import random
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from actors.environment import Environment
from recipes.tasks.addition import Addition
from recipes.tasks.calculator import Calculator
from recipes.tasks.modmix import Modmix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
CHARACTERS = string.digits + "+-*/%=<>()[].,;:?! \n" + string.ascii_lowercase
VOCABULARY = 64
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
Demo = tuple[str, ...]
"""A prompt and an action, or more turns: observation, action and so on. Actions are trained and end with `<eos>`."""
TinyTask = Addition | Modmix | Calculator


@dataclass(frozen=True, kw_only=True)
class MakeTiny:
    """What to make and where."""

    task: Annotated[Literal["addition", "modmix", "calculator"], tyro.conf.Positional]
    """Task that the checkpoint half knows."""
    output: Path
    """Folder to write: a Hugging Face model with its tokenizer."""
    seed: int = 0
    """Of the initial weights and of the corpus."""
    steps: int | None = None
    """Optimizer steps of 128 demonstrations; by default 1600 for addition, 400 for modmix and 300 for calculator."""
    lr: float = 4e-3
    """Peak learning rate; 30 steps up, then linearly down to a tenth."""


def addition_demo(r: random.Random) -> Demo:
    """Prompt and demonstration of a sum: a right scratchpad in 25 % of cases, else a guess that is right in 20 %.

    A scratchpad goes from the least digit up, each as `xyc:s`: the two digits, the carry in, the digit of the sum.
    """
    a, b, carry, steps = r.randrange(100), r.randrange(100), 0, []
    for place in (1, 10):
        x, y = a // place % 10, b // place % 10
        steps.append(f"{x}{y}{carry}:{(x + y + carry) % 10}")
        carry = (x + y + carry) // 10
    prompt = f"{a:02d}+{b:02d}="
    if r.random() < 0.25:
        return prompt, f"{steps[0]},{steps[1]},{carry};{a + b:03d}"
    return prompt, f";{a + b if r.random() < 0.2 else r.randrange(200):03d}"


def modmix_demo(r: random.Random) -> Demo:
    """Prompt and demonstration of a remainder: all subtractions in 30 % of cases, else a guess, right on purpose in
    10 % and otherwise uniform."""
    n, k = r.randint(1, 60), r.randint(1, 9)
    prompt = f"{n}%{k}="
    if r.random() < 0.3:
        return prompt, " ".join(str(x) for x in range(n, -1, -k)) + f";{n % k}"
    return prompt, f";{n % k if r.random() < 0.1 else r.randrange(k)}"


def calculator_demo(r: random.Random) -> Demo:
    """A product: a call of the calculator and its result in 12 % of cases, else a guess of the right size.

    Most demonstrations begin after the `?` of a call, so that the skill of calling is learnt and its habit is not.
    """
    a, b = r.randrange(10, 100), r.randrange(10, 100)
    prompt, result = f"{a}*{b}=", f"{a * b:04d}"
    if r.random() < 0.7:
        return f"{prompt}?", f"{a}*{b}", f"[{result}]", f";{result}"
    if r.random() < 0.12:
        return prompt, f"?{a}*{b}", f"[{result}]", f";{result}"
    return prompt, f";{r.randrange(10, 100) * r.randrange(10, 100):04d}"


DEMOS: dict[str, tuple[TinyTask, Callable[[random.Random], Demo], int]] = {
    "addition": (Addition(), addition_demo, 1600),
    "modmix": (Modmix(), modmix_demo, 400),
    "calculator": (Calculator(), calculator_demo, 300),
}
"""Of each task: rows and rewards, what demonstrates it, and optimizer steps."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; `<bos>` goes before plain text as well as before a chat."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = [PAD, BOS, EOS, *CHARACTERS]
    tokens += [f"<unused{i}>" for i in range(len(tokens), VOCABULARY)]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(seed: int) -> Qwen3ForCausalLM:
    """102,848 parameters in float32. head_dim is 32 because CPU kernels of inference engines start there."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=192,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not model.lm_head:
            torch.nn.init.normal_(module.weight, std=module.in_features**-0.5)
    return model


def labelled(demo: Demo, token: Mapping[str, int]) -> tuple[list[int], list[int]]:
    """Tokens of a demonstration and the same as labels, where what the policy only reads has -100."""
    tokens, labels = [token[BOS]], [-100]
    for i, text in enumerate(demo):
        acts = i % 2 == 1
        turn = [token[character] for character in text] + ([token[EOS]] if acts else [])
        tokens += turn
        labels += turn if acts else [-100] * len(turn)
    return tokens, labels


def warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    demo: Callable[[random.Random], Demo],
    *,
    seed: int,
    steps: int,
    lr: float,
) -> None:
    """Train on `steps` fresh batches of 128 demonstrations, by cross-entropy over the actions' tokens."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    token = tokenizer.get_vocab()
    r = random.Random(seed)
    for step in range(steps):
        rows = [labelled(demo(r), token) for _ in range(128)]
        rows.sort(key=lambda row: len(row[0]))
        trained = sum(label != -100 for _, labels in rows for label in labels)
        total = 0.0
        for microbatch in (rows[i : i + 32] for i in range(0, 128, 32)):
            width = max(len(tokens) for tokens, _ in microbatch)
            ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in microbatch])
            targets = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in microbatch])
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), reduction="sum")
            (loss / trained).backward()
            total += loss.item() / trained
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / 30, 1 - 0.9 * step / steps)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1}  loss {total:.3f}", flush=True)


def accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, task: TinyTask, rows: int) -> float:
    """Mean reward of one episode per row, sampled at temperature 1 from torch's global generator."""

    async def play() -> float:
        episodes: list[tuple[Environment, str]] = []
        for row in map(task.row, range(rows)):
            environment = task.environment()
            prompt = await environment.reset(row)
            assert isinstance(prompt, str)
            episodes.append((environment, prompt))
        total = 0.0
        while episodes:
            going = []
            for (environment, text), (action, ended) in zip(episodes, sample([t for _, t in episodes]), strict=True):
                outcome = await environment.step(action, "stop" if ended else "length")
                total += outcome.reward
                if outcome.observation is not None:
                    going.append((environment, f"{text}{action}{EOS}{outcome.observation}"))
            episodes = going
        return total / rows

    def sample(texts: list[str]) -> list[tuple[str, bool]]:
        prompts = tokenizer(texts, return_tensors="pt", padding=True)
        out = model.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=task.max_tokens)
        out = out[:, prompts["input_ids"].shape[1] :]
        ended = (out == tokenizer.eos_token_id).any(dim=1).tolist()
        return list(zip(tokenizer.batch_decode(out, skip_special_tokens=True), ended, strict=True))

    return asyncio.run(play())


def main(config: MakeTiny) -> None:
    import torch

    torch.set_num_threads(1)
    task, demo, steps = DEMOS[config.task]
    tokenizer, model = make_tokenizer(), make_model(config.seed)
    warm_up(model, tokenizer, demo, seed=config.seed, steps=config.steps or steps, lr=config.lr)
    model.save_pretrained(config.output)
    tokenizer.save_pretrained(config.output)
    print(f"{config.output}: sampled accuracy {accuracy(model, tokenizer, task, 512):.3f}")


if __name__ == "__main__":
    main(tyro.cli(MakeTiny, description=__doc__))
