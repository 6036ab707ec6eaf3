"""Settings of every role. Torch-free, so that `--help` is instant; the text under a field is its help."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import subcommand

from actors.types import Sampling, require

Order = Literal["oldest", "fifo", "window", "finish", "freshest"]
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class BufferConfig:
    """The replay buffer: which finished groups a step takes, and how stale they may be."""

    groups_per_step: int = 16
    """Groups that one training step consumes (P)."""
    max_staleness: int = 2
    """Hard bound S on version trained from minus a token's version; 0 is synchronous training; -1 is no bound."""
    order: Order = "oldest"
    """Which finished groups a step takes: lowest tickets, strictly next tickets, within a window of the oldest open
    ticket, by completion, or newest version first."""
    window: int = 16
    """W of `--buffer.order window`: only tickets below oldest open + W are taken."""
    depth: int | None = None
    """Steps of work open ahead of the trainer; open groups never exceed (depth + 1) * groups_per_step. Default: what
    max_staleness allows; -1 is no bound."""
    in_flight: int | None = None
    """Most groups generated at once. Default: what depth allows; four steps of work where that is no bound."""
    stale: Literal["drop", "mask"] = "drop"
    """Too old at take: drop the group, or train it with the gradient of the too old tokens masked."""
    reuse: int = 1
    """Times that a group may be trained."""
    zero_variance: Literal["keep", "filter", "refill"] = "keep"
    """Groups whose rewards are all equal: train them (they count in the denominator), drop them, or drop and replace
    them so that the batch stays full."""
    refill_cap: int = 4
    """With `--buffer.zero-variance refill`: at most this many times groups_per_step are looked at for one step."""
    attempts: int = 3
    """Times that a group is tried before its ticket is dropped."""

    def __post_init__(self) -> None:
        require("buffer", 1, groups_per_step=self.groups_per_step, window=self.window, reuse=self.reuse)
        require("buffer", 1, refill_cap=self.refill_cap, attempts=self.attempts)
        require("buffer", -1, max_staleness=self.max_staleness)
        if self.depth is not None:
            require("buffer", -1, depth=self.depth)
        if self.in_flight is not None:
            require("buffer", 1, in_flight=self.in_flight)


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Which rollouts of a finished group are trained, and with which rewards. A group of which fewer than two are left
    (none, where there is one per prompt) is dropped and replaced. Evaluation filters nothing."""

    on_truncated: Literal["reward", "zero", "drop", "bootstrap"] = "reward"
    """What a rollout counts as whose last action ran into max_tokens: its reward as judged; 0; nothing, advantages are
    then of the others; or bootstrap: the value of the state where it was cut stands in for the outcome that did not
    come. Without a critic that value is the mean reward of the group's other, untruncated rollouts; where there are
    none, it is left out."""
    overlong_cache: int = 0
    """Takes up to 1 from the rewards of long answers: evenly more over the last so many tokens before max_tokens, by
    the length of the last action (DAPO's soft overlong punishment); 0 takes nothing."""
    oversample: int = 1
    """Draws so many times group_size rollouts per prompt, of which group_size stay (GRPO-RoC): right ones (eval.solved
    or more) and wrong ones in proportion, of the right ones those whose part `penalty` of the reward is lowest, of the
    wrong ones any. A group without both is dropped."""

    def __post_init__(self) -> None:
        require("filter", 0, overlong_cache=self.overlong_cache)
        require("filter", 1, oversample=self.oversample)


@dataclass(frozen=True, kw_only=True)
class NativeEngine:
    """A Hugging Face model in plain torch, continuous batching over slots of a KV cache."""

    slots: int = 512
    """Requests decoded together by one replica."""
    max_length: int = 256
    """Tokens that one slot holds: prompt and completion."""
    dtype: Dtype = "float32"
    """Type of weights and activations while generating."""
    deterministic: bool = False
    """Fixed slot per (ticket, member) and fixed padded width: a request's tokens and logprobs do not depend on what
    else is running. Slower; switched on by `--buffer.max-staleness 0`."""

    def __post_init__(self) -> None:
        require("generator.engine", 1, slots=self.slots)
        require("generator.engine", 2, max_length=self.max_length)


@dataclass(frozen=True, kw_only=True)
class VllmEngine:
    """vLLM in the generator's own process: one device per replica, dense models, tokens in and out."""

    slots: int = 256
    """Requests decoded together by one replica."""
    max_length: int = 256
    """Most tokens of one request: prompt and completion."""
    dtype: Dtype = "float32"
    """Type of weights and activations while generating; float32 only."""
    kv_gib: float = 1.0
    """GiB of the KV cache. Requests that do not fit are put off and computed again."""
    eager: bool = True
    """Neither compile nor capture CUDA graphs: a quick start. On CPU the only way, for compiled code keeps the weights
    that it was compiled with."""

    def __post_init__(self) -> None:
        require("generator.engine", 1, slots=self.slots)
        require("generator.engine", 2, max_length=self.max_length)
        require("generator.engine", 1e-3, kv_gib=self.kv_gib)
        if self.dtype != "float32":
            raise ValueError(
                f"generator.engine.dtype {self.dtype} is not offered by the vllm engine: use float32, or "
                "generator.engine:native"
            )


@dataclass(frozen=True, kw_only=True)
class SimulatedEngine:
    """No model: a forward over b running requests takes base + per_request * b seconds."""

    slots: int = 64
    """Requests decoded together by one replica."""
    base: float = 0.02
    """Seconds of a forward."""
    per_request: float = 0.0002
    """Seconds that each running request adds to a forward."""
    median_length: int = 64
    """Median completion length in tokens; lengths are lognormal."""
    sigma: float = 1.0
    """Spread of log length; 0 gives every completion the median length, 0.99 a p99 of 10 x the median."""

    def __post_init__(self) -> None:
        require("generator.engine", 1, slots=self.slots, median_length=self.median_length)
        require("generator.engine", 0, base=self.base, per_request=self.per_request, sigma=self.sigma)


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """Replicas that generate."""

    replicas: int = 2
    """Independent engines; each is a proc mesh of tp ranks."""
    tp: int = 1
    """Ranks of one replica; rank 0 leads."""
    threads: int = 1
    """CPU threads per rank."""
    engine: (
        Annotated[NativeEngine, subcommand("native")]
        | Annotated[VllmEngine, subcommand("vllm")]
        | Annotated[SimulatedEngine, subcommand("simulated")]
    ) = field(default_factory=NativeEngine)
    """What decodes."""

    def __post_init__(self) -> None:
        require("generator", 1, replicas=self.replicas, tp=self.tp, threads=self.threads)
        if self.tp > 1 and isinstance(self.engine, VllmEngine):
            raise ValueError(f"generator.tp must be 1 with generator.engine:vllm, not {self.tp}: use more replicas")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Processes that drive environments and rewards."""

    workers: int = 1
    """CPU processes."""
    timeout: float = 600.0
    """Seconds before a group is given up and issued again."""
    quarantine: float = 0.05
    """Share of a step's rollouts whose environment or reward may fail (raise, hang, give NaN). They are left out of
    their groups and counted; more of them end the run with the first one's traceback."""

    def __post_init__(self) -> None:
        require("rollout", 1, workers=self.workers)
        require("rollout", 1e-3, math.inf, timeout=self.timeout)
        require("rollout", 0, 1, quarantine=self.quarantine)


@dataclass(frozen=True, kw_only=True)
class HfBackend:
    """Any transformers causal language model, sharded by FSDP2 when there are several ranks."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The trainer's ranks and optimizer."""

    ranks: int = 1
    """Data-parallel ranks."""
    threads: int = 1
    """CPU threads per rank."""
    backend: HfBackend = field(default_factory=HfBackend)
    """What trains."""
    dtype: Dtype = "float32"
    """Type of the forward and backward; parameters and optimizer state stay float32."""
    lr: float = 5e-4
    """Peak learning rate of AdamW."""
    warmup_steps: int = 5
    """Optimizer steps of linear warm-up."""
    final_lr: float = 0.1
    """Learning rate at the last step as a share of the peak; the decay is linear. 1 keeps the peak."""
    beta1: float = 0.9
    """AdamW's first moment decay."""
    beta2: float = 0.99
    """AdamW's second moment decay."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    updates_per_step: int = 1
    """Optimizer updates that one step splits its batch into."""
    microbatch_tokens: int = 8192
    """Most tokens of one packed microbatch; a longer rollout is a microbatch of its own."""
    denominator: Literal["tokens", "survivors", "sequences", "rollout_means", "max_tokens"] = "tokens"
    """What the summed loss is divided by, over all ranks: trainable tokens (zero-variance groups too), those of them
    that the objective did not drop, or rollouts; with rollout_means each rollout's tokens are averaged before, as in
    GRPO and GSPO; max_tokens is rollouts times `--sampling.max-tokens`, which no length changes, as in Dr.GRPO."""
    reference: str | None = None
    """Folder of the model that a KL penalty or preferences compare with. Default: the run's first weights."""
    teacher: str | None = None
    """Folder of the model that distillation learns from; it has the tokenizer of `--model`."""

    def __post_init__(self) -> None:
        require("trainer", 1, ranks=self.ranks, threads=self.threads, updates_per_step=self.updates_per_step)
        require("trainer", 1, microbatch_tokens=self.microbatch_tokens)
        require("trainer", 0, lr=self.lr, warmup_steps=self.warmup_steps, weight_decay=self.weight_decay)
        require("trainer", 0, 1, final_lr=self.final_lr)
        require("trainer", 0, 0.999999, beta1=self.beta1, beta2=self.beta2)
        require("trainer", 1e-9, math.inf, clip_norm=self.clip_norm)


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """How weights get from the trainer to the generators."""

    transport: Literal["shm", "torchstore"] = "shm"
    """What moves the bytes: shared memory of one host, or torchstore (RDMA where there is a NIC, else messages)."""
    dtype: Dtype = "float32"
    """Type in which weights are sent."""
    timeout: float = 120.0
    """Seconds before a push, pull or swap fails, naming rank, phase and tensor."""

    def __post_init__(self) -> None:
        require("sync", 1e-3, math.inf, timeout=self.timeout)


Tracker = Literal["wandb", "tensorboard", "trackio"]


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run shows and writes besides its own files."""

    to: tuple[Tracker, ...] = ()
    """Trackers that get every metric too, each through its own library (`pip install -e '.[log]'`)."""
    project: str = "meshrl"
    """Name of the project at the trackers."""
    rollouts: int = 1
    """Groups per step whose best and worst rollout go to `rollouts.jsonl`; 0 is none."""

    def __post_init__(self) -> None:
        require("log", 0, rollouts=self.rollouts)


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    """Checkpoints: `--output-dir X --resume` goes on from the newest."""

    every: int = 0
    """Steps between checkpoints; 0 saves only when a signal ends the run."""
    keep: int = 2
    """Newest checkpoints that stay; the best by evaluation stays too."""

    def __post_init__(self) -> None:
        require("save", 0, every=self.every)
        require("save", 1, keep=self.keep)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out rows while training goes on, by a generator of its own that stands still meanwhile."""

    every: int = 0
    """Steps between evaluations, each of one version of the weights; 0 is none."""
    rows: int = 64
    """Held-out rows of one evaluation, always the first ones."""
    samples: int = 1
    """Completions per row."""
    temperature: float = 0.0
    """Of these completions; 0 is greedy."""
    solved: float = 0.5
    """Reward from which on a completion counts as right in pass@k."""

    def __post_init__(self) -> None:
        require("eval", 0, every=self.every, temperature=self.temperature)
        require("eval", 1, rows=self.rows, samples=self.samples)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every recipe can set; its own settings come on top."""

    model: str | None = None
    """Local Hugging Face folder to start from. A tiny task has its own."""
    steps: int = 60
    """Training steps; the version of the weights counts them."""
    seed: int = 0
    """Of the data order and of every completion."""
    output_dir: Path | None = None
    """Folder for all that the run leaves. A new one under outputs/ unless given."""
    resume: bool = False
    """Go on from the newest checkpoint in output_dir, with its settings where no flag says otherwise."""
    overwrite: bool = False
    """Remove what an earlier run left in output_dir."""
    gpus: int = 0
    """Devices of this host, shared out to trainer and generators; 0 runs on CPU."""
    group_size: int = 16
    """Rollouts per prompt, compared with each other."""
    epochs: int | None = None
    """Passes over the task's rows before the data ends. Endless unless given."""
    probe: int = 8
    """Rollouts per version of a few tokens whose logprobs the trainer recomputes: `policy/engine_gap_*`; 0 is none."""
    sampling: Sampling = field(default_factory=Sampling)
    """How completions are drawn."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        require("config", 1, steps=self.steps, group_size=self.group_size)
        require("config", 0, probe=self.probe, gpus=self.gpus)
        if self.epochs is not None:
            require("config", 1, epochs=self.epochs)
        if self.resume and self.overwrite:
            raise ValueError("config.resume goes on with a folder that config.overwrite removes: give one of them")
        if self.resume and self.output_dir is None:
            raise ValueError("config.resume needs the folder of the run to go on with: give --output-dir")

    @property
    def drawn(self) -> int:
        """Rollouts drawn per prompt, of which `group_size` are trained."""
        return self.group_size * self.filter.oversample


__all__ = [
    "BufferConfig",
    "Dtype",
    "EvalConfig",
    "FilterConfig",
    "GeneratorConfig",
    "HfBackend",
    "LogConfig",
    "NativeEngine",
    "Order",
    "RolloutConfig",
    "RunConfig",
    "Sampling",
    "SaveConfig",
    "SimulatedEngine",
    "SyncConfig",
    "TrainerConfig",
    "VllmEngine",
]
