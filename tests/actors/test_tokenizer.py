import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from actors.tokenizer import Tokenizer
from tests.actors.models import CHARS, char_tokenizer

CHAT = [
    {"role": "user", "content": "1+2="},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "so\n 4*5="},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    char_tokenizer().save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"eos_token_id": 2, "model_type": "qwen3"}))
    return path


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    return Tokenizer.load(str(folder)), AutoTokenizer.from_pretrained(folder)


@given(text=st.text(st.sampled_from(CHARS), max_size=30))
def test_encode_and_decode_equal_transformers(pair, text):
    ours, reference = pair
    ids = ours.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == reference(text)["input_ids"]
    assert ours.decode(ids) == text == reference.decode(ids.tolist())


def test_decode_leaves_special_tokens_out(pair):
    ours, _ = pair
    assert ours.decode(np.array([1, 4, 5, 2, 0], np.int32)) == "12"


def test_chat_equals_transformers(pair):
    ours, reference = pair
    expected = reference.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert ours.chat(CHAT).tolist() == list(expected)
    assert ours.decode(ours.chat(CHAT)) == "1+2=3so\n 4*5=>"
    assert ours.chat(CHAT)[0] == 1


def test_specials_only_when_asked(folder, tmp_path):
    tokenizer = char_tokenizer()
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    tokenizer.save_pretrained(tmp_path)
    ours = Tokenizer.load(str(tmp_path))
    assert ours.encode("12").tolist() == [4, 5]
    assert ours.encode("12", specials=True).tolist() == [1, 4, 5]
    assert ours.chat(CHAT)[:2].tolist() == [1, 4]  # the template's own bos, and no second one


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [2, 7]}, {"eos_token_id": 5}, {2, 7}),
        ({}, {"eos_token_id": 5}, {5}),
        (None, {}, {2}),
    ],
)
def test_eos_ids_by_precedence(tmp_path, generation, config, expected):
    char_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert Tokenizer.load(str(tmp_path)).eos_ids == expected


def test_template_of_the_config_with_object_tokens_and_extensions(tmp_path):
    char_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    file = tmp_path / "tokenizer_config.json"
    text = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    config = json.loads(file.read_text())
    config["bos_token"] = {"content": "<bos>", "special": True}
    config["chat_template"] = [{"name": "tools", "template": "x"}, {"name": "default", "template": text}]
    file.write_text(json.dumps(config))
    ours = Tokenizer.load(str(tmp_path))
    assert ours.chat(CHAT).tolist() == [1, *ours.encode("1+2=3").tolist()]


def test_template_is_sandboxed_and_refuses_with_one_line(tmp_path):
    char_tokenizer().save_pretrained(tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ raise_exception('only user messages') }}")
    with pytest.raises(ValueError, match="only user messages"):
        Tokenizer.load(str(tmp_path)).chat(CHAT)
    template.write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="unsafe"):
        Tokenizer.load(str(tmp_path)).chat(CHAT)
    template.unlink()
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.load(str(tmp_path)).chat(CHAT)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match="cannot read the tokenizer"):
        Tokenizer.load(str(tmp_path))
    char_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json' must hold a JSON object, not a list"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"config\.json' is not valid JSON"):
        Tokenizer.load(str(tmp_path))


def test_imports_neither_torch_nor_transformers():
    code = "import sys, actors.tokenizer; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
