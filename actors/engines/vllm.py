"""vLLM, driven step by step inside the generator's process. The one file that imports vllm: import it late.

vLLM schedules, computes and draws; here are its start, weights that change in place under Hugging Face names, and the
stamping of tokens. What it is asked beyond its documented interface stands in `_keep_weights_live` and `close`.
"""

from __future__ import annotations

import math
import os
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from actors import pretrained
from actors.config import VllmEngine
from actors.engines.base import EMPTY, check, check_ends, check_room, check_weights, hits_stop
from actors.tokenizer import Tokenizer
from actors.types import Completion, Finish, Request, RequestId
from actors.weights import Box

if TYPE_CHECKING:
    from torch import Tensor

VERSION = "0.32.0"
"""Of vLLM, whose inner names this file uses."""
COLDEST = 0.01
HOTTEST = 2.0
"""vLLM raises temperatures between 0 and the one without a word, and takes none above the other."""
_PREFILL_TOKENS = 8192
"""Most tokens of one forward, unless a single prompt is longer."""


@dataclass(slots=True)
class _Running:
    """A request that vLLM holds."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    """So far: vLLM's own list, which grows."""
    logprobs: list[float] = field(default_factory=list)
    """Likewise."""
    starts: list[tuple[int, int]] = field(default_factory=list)
    """(version, first token) of each run of tokens."""
    made: int = 0
    """Tokens after the last step."""

    def take(self, output: Any, version: int) -> None:
        """What a step added."""
        self.tokens, self.logprobs = output.token_ids, output.logprobs.logprobs
        if not self.starts or self.starts[-1][0] != version:
            self.starts.append((version, self.made))
        self.made = len(self.tokens)

    def spans(self) -> list[tuple[int, int, int]]:
        """(version, first token, first token after) of each run."""
        ends = [start for _, start in self.starts[1:]] + [self.made]
        return [(version, start, end) for (version, start), end in zip(self.starts, ends, strict=True)]

    def completion(self, finish: Finish) -> Completion:
        if not self.made:
            return EMPTY
        return Completion(
            tokens=np.array(self.tokens[: self.made], np.int32),
            logprobs=np.array(self.logprobs[: self.made], np.float32),
            versions=np.concatenate([np.full(end - start, v, np.int32) for v, start, end in self.spans()]),
            finish=finish,
        )


class Vllm:
    """`actors.engines.base.Engine` over vLLM's synchronous engine.

    A request draws from a random generator of its own, so its tokens do not depend on what else runs, as far as its
    logits do not: vLLM's kernels round otherwise in other batches.
    """

    def __init__(self, config: VllmEngine, folder: str, *, device: str = "cpu") -> None:
        """Start vLLM with the folder's weights, which count as version 0.

        Raises:
            FileNotFoundError, ValueError: the folder or a setting cannot be used.
            RuntimeError: another version of vLLM is installed, or it keeps weights where they cannot be changed.
        """
        self.version = 0
        self.config = config
        self.tokenizer = Tokenizer.load(folder)
        self.shapes = pretrained.parameter_shapes(folder)
        self.engine = _start(config, folder, device)
        self.vocabulary: int = self.engine.model_config.get_vocab_size()
        check_ends(self.tokenizer.eos_ids, self.vocabulary, folder)
        self.queue: deque[Request] = deque()
        """Added, and not yet given to vLLM."""
        self.running: dict[str, _Running] = {}
        """By vLLM's name of the request."""
        self.resets = 0

    @property
    def unfinished(self) -> int:
        """Requests added and not yet returned."""
        return len(self.queue) + len(self.running)

    @property
    def free(self) -> int:
        """Slots that no request runs in or waits for."""
        return max(0, self.config.slots - self.unfinished)

    def add(self, request: Request) -> None:
        """Queue a request, first come first served.

        Raises:
            ValueError: empty prompt, a token that the model lacks, prompt + max_tokens beyond `max_length`, weights
                older than `min_version`, or a temperature that vLLM does not take.
        """
        check(request, self.version)
        check_room(request, self.vocabulary, self.config.max_length)
        temperature = request.sampling.temperature
        if temperature and not COLDEST <= temperature <= HOTTEST:
            raise ValueError(
                f"request {tuple(request.id)} has temperature {temperature}, and vLLM draws at 0 and at "
                f"{COLDEST}..{HOTTEST:g} only: change --sampling.temperature, or use generator.engine:native"
            )
        self.queue.append(request)

    def step(self) -> list[tuple[RequestId, Completion]]:
        """Admit what fits, run one forward, return the requests that it finished.

        Raises:
            FloatingPointError: the model gave logits that are not finite.
            RuntimeError: vLLM counts other versions than this class, or gave a request up.
        """
        while self.queue and len(self.running) < self.config.slots:
            self._admit(self.queue.popleft())
        if not self.running:
            return []
        self.engine.set_weight_version(str(self.version))
        ended: dict[str, Finish] = {}
        for output in self.engine.step():
            name, drawn = output.request_id, output.outputs[0]
            running = self.running[name]
            running.take(drawn, self.version)
            if not math.isfinite(drawn.cumulative_logprob):
                raise FloatingPointError(
                    f"logits of request {tuple(running.request.id)} at version {self.version} are not finite"
                )
            if output.finished:
                ended[name] = _finish(running, drawn)
            stop = running.request.sampling.stop
            if stop and ended.get(name) != "stop" and hits_stop(self.tokenizer, running.tokens, stop):
                if not output.finished:
                    self.engine.abort_request([name])
                ended[name] = "stop"
        return [self._leave(name, finish) for name, finish in ended.items()]

    def abort(self, ids: Iterable[RequestId]) -> list[tuple[RequestId, Completion]]:
        """Stop these requests and return what they have so far, finish `abort`. Unknown ids are ignored."""
        unwanted = set(ids)
        waiting = [(r.id, EMPTY) for r in self.queue if r.id in unwanted]
        self.queue = deque(r for r in self.queue if r.id not in unwanted)
        names = [name for name, running in self.running.items() if running.request.id in unwanted]
        self.engine.abort_request(names)
        return waiting + [self._leave(name, "abort") for name in names]

    def wanted(self) -> dict[str, Box]:
        """All of every parameter; one that is tied to another goes under the first name only."""
        return {name: Box((0,) * len(shape), shape) for name, shape in self.shapes.items()}

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copy new weights in place and stamp later tokens with `version`; running requests keep their KV.

        A request that has no token yet starts anew, and so reads no prefix that older weights computed.

        Raises:
            ValueError: a tensor is missing or has another shape; nothing was copied then.
            RuntimeError: vLLM left some of its own weights as they were.
        """
        check_weights(tensors, self.shapes, version)
        weights = [(name, tensors[name]) for name in self.shapes]
        (left,) = self.engine.apply_model(lambda model: _copy(model, weights))
        if left:
            raise RuntimeError(f"vLLM took version {version} without {left[0]}: it would mix two versions")
        self.version = version
        unbegun = [name for name, running in self.running.items() if not running.made]
        self.engine.abort_request(unbegun)
        self.queue.extendleft(self.running.pop(name).request for name in reversed(unbegun))

    def reset_cache(self) -> None:
        """Let no later request find the prefixes that are cached now; they make room when room is needed."""
        self.resets += 1

    def close(self) -> None:
        """End vLLM; the engine cannot be used afterwards."""
        self.engine.engine_core.shutdown()
        del self.engine

    def _admit(self, request: Request) -> None:
        """Give a request to vLLM. Its cached prefixes are its version's own: the salt enters their names."""
        from vllm import SamplingParams

        name = "/".join(map(str, request.id))
        sampling = request.sampling
        self.engine.add_request(
            name,
            {
                "type": "token",
                "prompt_token_ids": request.prompt.tolist(),
                "cache_salt": f"{self.version}.{self.resets}",
            },
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                seed=request.seed % 2**63,
                stop_token_ids=sorted(self.tokenizer.eos_ids),
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                skip_clone=True,
            ),
        )
        self.running[name] = _Running(request)

    def _leave(self, name: str, finish: Finish) -> tuple[RequestId, Completion]:
        running = self.running.pop(name)
        return running.request.id, running.completion(finish)


def _finish(running: _Running, output: Any) -> Finish:
    """Why vLLM ended a request, after its own account of versions was compared with ours."""
    theirs = [(int(span.version), span.start, span.end) for span in output.weight_versions]
    if theirs != running.spans():
        raise RuntimeError(
            f"request {tuple(running.request.id)}: vLLM drew its tokens with the versions {theirs}, not "
            f"{running.spans()} (version, start, end)"
        )
    reasons: dict[str, Finish] = {"stop": "stop", "length": "length"}
    if output.finish_reason not in reasons:
        raise RuntimeError(f"vLLM gave up request {tuple(running.request.id)}: {output.finish_reason}")
    return reasons[output.finish_reason]


def _start(config: VllmEngine, folder: str, device: str) -> Any:
    """vLLM's engine in this process and thread, without tokenizer, statistics and look-ups in the network."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over the setting
    import torch
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    if vllm.__version__.partition("+")[0] != VERSION:
        raise RuntimeError(f"vllm {vllm.__version__} is installed, the vllm engine is written for {VERSION}")
    if current_platform.device_type != device:
        raise ValueError(f"vLLM is installed for {current_platform.device_type}, and the generator is on {device}")
    if device == "cpu":
        if not config.eager:
            raise ValueError("--generator.engine.no-eager needs a GPU: on CPU compiled code keeps the first weights")
        _keep_weights_live()
        # Else the first draw compiles one small function of the sampler: seconds, and a C++ compiler is needed.
        torch._dynamo.config.disable = True
    settings = vllm.EngineArgs(
        model=folder,
        dtype=config.dtype,
        max_model_len=config.max_length,
        max_num_seqs=config.slots,
        max_num_batched_tokens=max(_PREFILL_TOKENS, config.max_length, config.slots),
        # On CPU a generator cannot be set back, as a draw in the middle of a prompt would ask.
        enable_chunked_prefill=device != "cpu",
        kv_cache_memory_bytes=round(config.kv_gib * 2**30),
        enforce_eager=config.eager,
        # A step's tokens are those of the forward that it runs, and so of the version that is set.
        async_scheduling=False,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        skip_tokenizer_init=True,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        trust_remote_code=False,
        seed=0,
    ).create_engine_config()
    if settings.model_config.is_moe:
        raise ValueError(f"{folder!r} is a mixture of experts, which the vllm engine does not serve: use native")
    with warnings.catch_warnings():
        # It looks through the modules of other libraries, deprecated names too.
        warnings.simplefilter("ignore", FutureWarning)
        engine = LLMEngine.from_vllm_config(settings, disable_log_stats=True)
    (packed,) = engine.apply_model(lambda model: [name for name, p in model.named_parameters() if not p.numel()])
    if packed:
        raise RuntimeError(f"vLLM {VERSION} has packed away the weight {packed[0]}: it could not be changed")
    return engine


def _keep_weights_live() -> None:
    """Let layers on CPU multiply with their weights as they are.

    vLLM would give each layer a repacked copy and use that for ever: later weights would not reach it. For the head of
    tied embeddings nothing would show it.
    """
    from torch.nn import functional
    from vllm.model_executor.layers import utils

    if "dispatch_cpu_unquantized_gemm" not in vars(utils):
        raise RuntimeError(f"vLLM {VERSION} has no dispatch_cpu_unquantized_gemm: its weights could not be kept live")

    def multiply(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = functional.linear

    utils.dispatch_cpu_unquantized_gemm = multiply


def _copy(model: Any, weights: list[tuple[str, Tensor]]) -> list[str]:
    """Copy tensors by Hugging Face names into vLLM's, fused ones too; its parameters that none of them filled."""
    taken = model.load_weights(weights)
    return [name for name, _ in model.named_parameters() if name not in taken]
