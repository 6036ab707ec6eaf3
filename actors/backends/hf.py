"""Any causal language model of transformers as a training backend, sharded by FSDP2 when there are several ranks."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from actors.backends.packed import Documents, Repeats, packed_attention, repeat
from actors.batching import Microbatch
from actors.config import Dtype
from actors.pretrained import load_model, register_attention
from actors.weights import Shard, box_of, first_replica, torch_dtype
from losses.ops import KeptSets, logprobs_and_entropy

LOGITS = 2**26
"""Most logits held at a time (256 MiB in float32); a microbatch with more is scored in chunks."""

TEXT = {".json", ".jinja", ".model", ".txt"}
"""Suffixes of tokenizer and template files, which a saved folder takes over from its source."""


class _Scored(nn.Module):
    """Base model and head in one module, so that FSDP holds the head's weight while logits are computed in chunks."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base: nn.Module = model.base_model
        self.head: nn.Linear = model.get_output_embeddings()

    def forward(
        self,
        inputs_S: Tensor,
        positions_S: Tensor,
        layout: Documents,
        sources: Repeats,
        targets_T: Tensor,
        temperature_T: Tensor,
        kept: KeptSets | None,
    ) -> tuple[Tensor, Tensor]:
        hidden_TD = repeat(_hidden(self.base, inputs_S, positions_S, layout), sources)
        weight_VD = self.head.weight
        chunk = max(1, LOGITS // len(weight_VD))
        return logprobs_and_entropy(hidden_TD, weight_VD, targets_T, temperature_T, chunk, kept)


def _hidden(base: nn.Module, inputs_S: Tensor, positions_S: Tensor, layout: Documents) -> Tensor:
    """Final hidden states [S, D] of packed documents."""
    out = base(input_ids=inputs_S[None], position_ids=positions_S[None], use_cache=False, documents=layout)
    hidden_SD: Tensor = out.last_hidden_state[0]
    return hidden_SD


class HfModel:
    """A `Backend` over a transformers model.

    Parameters and gradients are float32; with dtype bfloat16 forward and backward compute in it. Gradients are summed
    over ranks, never averaged: the loss is a plain sum and the trainer divides.

    Args:
        folder: local Hugging Face folder.
        dtype: of forward and backward.
        device: where this rank computes.
        mesh: the data-parallel ranks (one dimension); None for a single rank, which needs no process group.
        frozen: never trained: no gradient, and kept in `dtype`.

    Raises:
        ValueError: the model's logits are not hidden @ head.T, or it has no list of decoder layers.
    """

    def __init__(
        self,
        folder: str,
        dtype: Dtype,
        device: torch.device,
        mesh: DeviceMesh | None = None,
        *,
        frozen: bool = False,
    ) -> None:
        register_attention("packed", packed_attention)
        self.folder, self.device = Path(folder), device
        self.model: Any = load_model(folder, dtype if frozen else "float32", "packed").to(device)
        self.model.requires_grad_(not frozen)
        self.compute = torch_dtype(dtype)
        self.scored = _Scored(self.model)
        _check_head(self.model, self.scored, folder, device)
        every = dict(self.model.named_parameters(remove_duplicate=False))
        first = dict(self.model.named_parameters())
        self.tied = every.keys() - first.keys()
        """Names that share the storage of another parameter: they are not sent or saved."""
        if mesh is not None:
            _shard(self.scored, mesh, self.compute)
        self._parameters = dict(self.model.named_parameters())

    def parameters(self) -> dict[str, Parameter]:
        return self._parameters

    def forward(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        layout = Documents(microbatch.prompts, microbatch.continuations, self.device)
        sources = Repeats.of(microbatch.source_T, len(microbatch.inputs_S))
        autocast = self.compute != torch.float32 and not isinstance(self.scored, FSDPModule)
        with torch.autocast(self.device.type, self.compute, enabled=autocast):
            scores: tuple[Tensor, Tensor] = self.scored(
                microbatch.inputs_S,
                microbatch.positions_S,
                layout,
                sources,
                microbatch.targets_T,
                microbatch.temperature_T,
                microbatch.kept,
            )
        if isinstance(self.scored, FSDPModule) and not torch.is_grad_enabled():
            # No backward will reshard the root: left whole, the next forward would use these weights even if the
            # shards have changed since.
            self.scored.reshard()
        return scores

    def shards(self) -> Iterator[Shard]:
        for name, tensor in self.weights().items():
            if first_replica(tensor):
                box, local = box_of(tensor)
                yield Shard(name, tuple(tensor.shape), box, local)

    def save(self, path: str) -> None:
        """Tensors are gathered one at a time; rank 0 then holds the whole model in host memory."""
        gathered = {}
        writes = not isinstance(self.scored, FSDPModule) or torch.distributed.get_rank() == 0
        for name, tensor in self.weights().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if writes:
                gathered[name] = whole.contiguous().cpu()
        if writes:
            self.export(path, gathered)

    def export(self, path: str, weights: dict[str, Tensor]) -> None:
        """One file of float32 weights, the config, and the source folder's tokenizer files."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        for file in self.folder.iterdir():
            if file.suffix in TEXT and not file.name.startswith("model"):
                shutil.copyfile(file, folder / file.name)
        self.model.config.save_pretrained(folder)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    def weights(self) -> dict[str, Tensor]:
        """From the state dict: parameters may be whole, not shards, after a forward."""
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items() if name not in self.tied}


def _check_head(model: Any, scored: _Scored, folder: str, device: torch.device) -> None:
    """Refuse a model that does more to its logits than the head's product, such as capping, scaling or a bias."""
    ids = torch.arange(8, device=device) % model.config.vocab_size
    positions, layout = torch.arange(8, device=device), Documents([8], [], device)
    with torch.no_grad():
        logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, documents=layout).logits[0]
        expected = nn.functional.linear(_hidden(scored.base, ids, positions, layout), scored.head.weight)
        error = (logits - expected).abs().max().item() / max(expected.abs().max().item(), 1e-30)
    if not error < 1e-5:
        raise ValueError(
            f"{type(model).__name__} in {folder!r}: its logits differ from hidden @ head.T by {error:.1e} of the "
            "largest logit (soft-capping, scaling or a bias), so the hf backend would train other logprobs: "
            "use a model without it"
        )


def _shard(scored: _Scored, mesh: DeviceMesh, compute: torch.dtype) -> None:
    """FSDP2 on every decoder layer and on the rest. Inputs keep their types: a cast would round temperatures."""
    layers = [child for child in scored.base.modules() if isinstance(child, nn.ModuleList)]
    if not layers:
        raise ValueError(f"{type(scored.base).__name__} has no list of decoder layers to shard: use one trainer rank")
    decoder = max(layers, key=lambda found: math.fsum(p.numel() for p in found.parameters()))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in decoder:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(scored, mesh=mesh, mp_policy=policy)
    for module in scored.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
            module.set_gradient_divide_factor(1.0)
