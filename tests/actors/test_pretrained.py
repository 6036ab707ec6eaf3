import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.pretrained import load_model, register_attention
from tests.actors.models import save_tiny


def test_weights_type_and_mode_are_as_asked(tmp_path: Path):
    folder = save_tiny(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    model = load_model(folder, "bfloat16")
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(torch.equal(p, stored[name].bfloat16()) for name, p in model.named_parameters())


def test_a_registered_attention_gets_the_keywords_of_the_call(tmp_path: Path):
    seen = []

    def attention(module, query, key, value, attention_mask, *, scaling, lengths, **_):
        seen.append((module.layer_idx, tuple(query.shape), tuple(key.shape), attention_mask, scaling, lengths))
        return query.transpose(1, 2), None

    register_attention("test_keywords", attention)
    model = load_model(save_tiny(tmp_path), "float32", attention="test_keywords")
    ids = torch.tensor([[1, 5, 6]])
    model(ids, position_ids=torch.arange(3)[None], lengths="passed", use_cache=False)
    assert seen == [(i, (1, 4, 3, 32), (1, 2, 3, 32), None, 32**-0.5, "passed") for i in range(2)]


def test_broken_folders_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}.*config.json"):
        load_model(str(tmp_path), "float32")
    folder = save_tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack 1 tensors .*model\.norm\.weight"):
        load_model(folder, "float32")
    file.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=f"cannot load the model in '{tmp_path}'"):
        load_model(folder, "float32")
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="safetensors"):
        load_model(folder, "float32")


def test_a_shape_that_differs_from_the_config_is_refused(tmp_path: Path):
    folder = save_tiny(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 100}))
    with pytest.raises(ValueError, match="cannot load the model"):
        load_model(folder, "float32")


def test_import_of_actors_leaves_transformers_out():
    code = "import sys, actors, actors.engines, actors.engines.base; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
