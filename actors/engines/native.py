"""A Hugging Face model in plain torch with continuous batching over the slots of one KV cache.

Each step runs one decode forward for all running requests and a prefill for those that join, then draws one token for
each. Running requests fill the first slots without a gap, ordered by length class, so that no class attends further
than its longest. A deterministic engine instead gives each request a fixed slot and always runs all slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from actors import pretrained
from actors.config import NativeEngine
from actors.engines.base import EMPTY, check, check_ends, check_room, check_weights, hits_stop
from actors.engines.sampling import Drawn, draw, uniforms
from actors.engines.slots import Decode, Prefill, Probe, Slots, attention
from actors.tokenizer import Tokenizer
from actors.types import Completion, Finish, Kept, Request, RequestId
from actors.weights import Box

_ATTENTION = "slots"
_PREFILL_TOKENS = 8192
"""Most prompt tokens of one prefill forward, unless a single prompt is longer."""
_SHORTEST_CLASS = 32
"""Length classes end at this many tokens and its doublings: below, one class costs less than two."""


class Native:
    """`actors.engines.base.Engine` on one device; a token's draw depends on its request's seed and logits alone."""

    def __init__(
        self, config: NativeEngine, folder: str, *, device: str = "cpu", replicas: int = 1, group_size: int = 1
    ) -> None:
        """Load the model and allocate the cache.

        Args:
            folder: Hugging Face folder with model and tokenizer; its weights count as version 0.
            replicas: with `config.deterministic`, how many replicas share the tickets.
            group_size: with `config.deterministic`, members of a ticket; as many slots are added for negative tickets.

        Raises:
            FileNotFoundError, ValueError: the folder cannot be used.
            NotImplementedError: the model's attention needs more than this engine has.
        """
        self.version = 0
        self.config = config
        self.device = torch.device(device)
        self.tokenizer = Tokenizer.load(folder)
        pretrained.register_attention(_ATTENTION, attention)
        self.model = pretrained.load_model(folder, config.dtype, attention=_ATTENTION).to(device)
        self.replicas, self.group_size = replicas, group_size
        self.width = config.slots + (group_size if config.deterministic else 0)
        self.queue: deque[Request] = deque()
        self.requests = np.full(self.width, None, dtype=object)
        self.kept: dict[RequestId, list[np.ndarray]] = {}
        """Of running requests whose sampling cuts: the set of each token so far, int32; empty if nothing was cut."""
        self.rows = np.zeros(self.width, _row_type(config.max_length))
        self.span = self.width if config.deterministic else 0
        """Rows that a decode forward computes: all, or those that run."""
        self.segments = [(0, self.width, config.max_length)] if config.deterministic else []
        """Spans of rows of one length class with the length that they attend over."""
        probe = Probe()
        logits = self._forward(np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64), probe)
        self.kv = torch.zeros(
            (probe.layers, 2, self.width, probe.kv_heads, config.max_length, probe.head_dim),
            dtype=logits.dtype,
            device=self.device,
        )
        check_ends(self.tokenizer.eos_ids, logits.shape[-1], folder)
        self.ends = np.zeros(logits.shape[-1], bool)
        self.ends[list(self.tokenizer.eos_ids)] = True
        self.classes = np.ceil(np.log2(np.maximum(np.arange(config.max_length + 2), _SHORTEST_CLASS))).astype(np.int8)

    @property
    def unfinished(self) -> int:
        """Requests added and not yet returned."""
        return len(self.queue) + int(self.rows["running"].sum())

    @property
    def free(self) -> int:
        """Slots that no request runs in or waits for."""
        return max(0, self.width - self.unfinished)

    def add(self, request: Request) -> None:
        """Queue a request, first come first served; a deterministic engine lets it wait for its own slot.

        Raises:
            ValueError: empty prompt, a token that the model lacks, prompt + max_tokens beyond
                `max_length`, or weights older than `min_version`.
        """
        check(request, self.version)
        check_room(request, len(self.ends), self.config.max_length)
        self.queue.append(request)

    @torch.inference_mode()
    def step(self) -> list[tuple[RequestId, Completion]]:
        """Decode, admit and prefill, draw one token per running request; return the requests that it finished.

        Raises:
            FloatingPointError: the model gave logits that are not finite.
        """
        old = self._decode() if self.rows["running"].any() else self.kv.new_zeros(0, len(self.ends))
        joined = self._admit()
        if not (len(old) or joined):
            return []
        logits = self._prefill(joined, old) if joined else old
        return self._leave(self._draw(logits))

    def abort(self, ids: Iterable[RequestId]) -> list[tuple[RequestId, Completion]]:
        """Stop these requests and return what they have so far, finish `abort`. Unknown ids are ignored."""
        unwanted = set(ids)
        waiting = [r for r in self.queue if r.id in unwanted]
        self.queue = deque(r for r in self.queue if r.id not in unwanted)
        finishes: dict[int, Finish] = {
            row: "abort" for row in np.flatnonzero(self.rows["running"]) if self.requests[row].id in unwanted
        }
        return [(r.id, EMPTY) for r in waiting] + self._leave(finishes)

    def wanted(self) -> dict[str, Box]:
        """All of every parameter; one that is tied to another goes under the first name only."""
        return {name: Box((0,) * p.ndim, tuple(p.shape)) for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copy new weights in place and stamp later tokens with `version`; running requests keep their KV.

        Raises:
            ValueError: a tensor is missing or has another shape; nothing was copied then.
        """
        parameters = dict(self.model.named_parameters())
        check_weights(tensors, {name: tuple(p.shape) for name, p in parameters.items()}, version)
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
        self.version = version

    def reset_cache(self) -> None:
        """Nothing to forget: a prompt's KV is shared only by requests that join in the same step."""

    def close(self) -> None:
        """Free model and cache; the engine cannot be used afterwards."""
        del self.model, self.kv

    @torch.inference_mode()
    def _forward(self, ids: np.ndarray, positions: np.ndarray, slots: Slots) -> Tensor:
        """Logits [batch, vocabulary] after the last of `ids`, int64 [batch, length]."""
        return self.model(
            input_ids=torch.from_numpy(ids).to(self.device),
            position_ids=torch.from_numpy(positions).to(self.device),
            slots=slots,
            use_cache=False,
            logits_to_keep=1,
        ).logits[:, -1]

    def _decode(self) -> Tensor:
        """Feed every running request its last token. Idle slots of a deterministic engine write at 0, to no effect."""
        rows = self.rows[: self.span]
        positions = rows["length"][:, None].copy()
        logits = self._forward(rows["token"][:, None].copy(), positions, Decode.at(self.kv, self.segments, positions))
        rows["length"] += rows["running"]
        return logits

    def _admit(self) -> list[int]:
        """Give queued requests their rows: the next free one, or with fixed slots those whose own is free."""
        joined = []
        waiting: deque[Request] = deque()
        while self.queue and (self.config.deterministic or self.span < self.width):
            request = self.queue.popleft()
            row = self._fixed_slot(request.id) if self.config.deterministic else self.span
            if self.rows["running"][row]:
                waiting.append(request)
                continue
            sampling = request.sampling
            self.requests[row] = request
            if sampling.cuts:
                self.kept[request.id] = []
            for field, value in (
                ("running", True),
                ("length", len(request.prompt)),
                ("made", 0),
                ("budget", sampling.max_tokens),
                ("seed", request.seed % 2**64),
                ("temperature", sampling.temperature),
                ("top_p", sampling.top_p),
                ("top_k", sampling.top_k),
                ("stops", bool(sampling.stop)),
                ("cuts", sampling.cuts),
            ):
                self.rows[field][row] = value
            joined.append(row)
            self.span = max(self.span, row + 1)
        self.queue.extend(waiting)
        return joined

    def _fixed_slot(self, request: RequestId) -> int:
        if request.ticket < 0:
            return self.config.slots + request.member % self.group_size
        return (request.ticket // self.replicas * self.group_size + request.member) % self.config.slots

    def _prefill(self, joined: list[int], old: Tensor) -> Tensor:
        """Logits [span, vocabulary]: `old` of rows that decoded, those after the prompt of rows that joined."""
        logits = torch.zeros((self.span, len(self.ends)), dtype=self.kv.dtype, device=self.device)
        logits[: len(old)] = old
        for prompts, rows, sources in self._prompts(joined):
            positions = np.broadcast_to(np.arange(prompts.shape[1]), prompts.shape).copy()
            where, which = torch.from_numpy(rows).to(self.device), torch.from_numpy(sources).to(self.device)
            logits[where] = self._forward(prompts, positions, Prefill(self.kv, where, which))[which]
        return logits

    def _prompts(self, joined: list[int]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Batches of distinct prompts of one length, int64 [batch, length], with the rows that want them and, for each
        row, which prompt it wants. With fixed slots a batch is one prompt: its bits depend on nothing else."""
        sharing: dict[bytes, list[int]] = {}
        for row in joined:
            sharing.setdefault(self.requests[row].prompt.tobytes(), []).append(row)
        by_length: dict[int, list[list[int]]] = {}
        for rows in sharing.values():
            by_length.setdefault(int(self.rows["length"][rows[0]]), []).append(rows)
        for length, members in by_length.items():
            batch = 1 if self.config.deterministic else max(1, _PREFILL_TOKENS // length)
            for start in range(0, len(members), batch):
                part = members[start : start + batch]
                prompts = np.stack([self.requests[rows[0]].prompt for rows in part]).astype(np.int64)
                yield prompts, np.concatenate(part), np.repeat(np.arange(len(part)), [len(rows) for rows in part])

    def _draw(self, logits: Tensor) -> dict[int, Finish]:
        """Append a token to every running request; the rows that end with it."""
        rows = self.rows[: self.span]
        running, made = rows["running"], rows["made"]
        uniform = uniforms(rows["seed"], made)
        drawn = draw(logits, uniform, rows["temperature"], rows["top_p"], rows["top_k"])
        tokens, logprobs = (column.cpu().numpy() for column in (drawn.tokens, drawn.logprobs))
        if not np.isfinite(logprobs[running]).all():
            bad = self.requests[np.flatnonzero(running & ~np.isfinite(logprobs))[0]].id
            raise FloatingPointError(f"logits of request {tuple(bad)} at version {self.version} are not finite")
        where = np.flatnonzero(running)
        at = made[where]
        rows["tokens"][where, at] = rows["token"][where] = tokens[where]
        rows["logprobs"][where, at] = logprobs[where]
        rows["versions"][where, at] = self.version
        if self.kept:
            self._keep(drawn, np.flatnonzero(running & rows["cuts"]))
        made += running
        stopped = running & self.ends[tokens]
        for row in np.flatnonzero(running & rows["stops"] & ~stopped):
            text, stop = rows["tokens"][row, : made[row]], self.requests[row].sampling.stop
            stopped[row] = hits_stop(self.tokenizer, text, stop)
        full = running & ~stopped & (made >= rows["budget"])
        ended: dict[int, Finish] = dict.fromkeys(np.flatnonzero(stopped).tolist(), "stop")
        return ended | dict.fromkeys(np.flatnonzero(full).tolist(), "length")

    def _keep(self, drawn: Drawn, cut: np.ndarray) -> None:
        """Note what the tokens of the rows `cut` were drawn from."""
        assert drawn.kept is not None
        where = torch.from_numpy(cut).to(self.device)
        kept = drawn.kept[where]
        assert kept.gather(1, drawn.tokens[where, None]).all(), "a token was drawn that truncation had left out"
        ids = kept.nonzero()[:, 1].to(torch.int32).cpu().numpy()
        ends = kept.sum(-1).cumsum(0).tolist()
        for row, start, end in zip(cut.tolist(), [0, *ends[:-1]], ends, strict=True):
            whole = end - start == len(self.ends)
            self.kept[self.requests[row].id].append(ids[start : start if whole else end].copy())

    def _leave(self, finishes: Mapping[int, Finish]) -> list[tuple[RequestId, Completion]]:
        """Take these rows out and close the gaps."""
        columns = {name: self.rows[name] for name in ("tokens", "logprobs", "versions")}
        made = self.rows["made"]
        returned = []
        for row, finish in finishes.items():
            own = {name: column[row, : made[row]].copy() for name, column in columns.items()}
            id = self.requests[row].id
            kept = Kept.of(self.kept.pop(id)) if id in self.kept else None
            returned.append((id, Completion(**own, finish=finish, kept=kept)))
        gone = list(finishes)
        self.requests[gone] = None
        for field in ("running", "length", "token", "stops"):
            self.rows[field][gone] = 0
        if not self.config.deterministic:
            self._pack()
        return returned

    @torch.inference_mode()
    def _pack(self) -> None:
        """Bring the running rows to the front, longest class first, with as few moves as that takes."""
        rows = self.rows[: self.span]
        classes = np.where(rows["running"], self.classes[rows["length"] + 1], 0)
        count = int(rows["running"].sum())
        order = np.sort(classes)[::-1]
        target = np.flatnonzero(classes[:count] != order[:count])
        if target.size:
            settled = classes == order
            source = np.flatnonzero(rows["running"] & ~settled)
            source = source[np.argsort(-classes[source], kind="stable")]
            used = int(rows["length"][source].max())
            to, of = (torch.from_numpy(i).to(self.device) for i in (target, source))
            self.kv[:, :, to, :, :used] = self.kv[:, :, of, :, :used]
            rows[target] = rows[source]
            self.requests[target] = self.requests[source]
        rows["running"][count:] = False
        self.requests[count : self.span] = None
        self.span = count
        starts = np.flatnonzero(np.diff(order[:count], prepend=-1)).tolist()
        self.segments = [(s, e, int(rows["length"][s:e].max()) + 1) for s, e in pairwise([*starts, count])]


def _row_type(max_length: int) -> np.dtype:
    """State of one running request. `length` tokens are in the cache; `token` is the last one drawn, not yet in it."""
    column = (max_length,)
    return np.dtype(
        [
            ("length", np.int64),
            ("token", np.int64),
            ("seed", np.uint64),
            ("made", np.int64),
            ("budget", np.int64),
            ("top_k", np.int64),
            ("temperature", np.float64),
            ("top_p", np.float64),
            ("running", np.bool_),
            ("stops", np.bool_),
            ("cuts", np.bool_),
            ("tokens", np.int32, column),
            ("logprobs", np.float32, column),
            ("versions", np.int32, column),
        ],
        align=True,
    )
