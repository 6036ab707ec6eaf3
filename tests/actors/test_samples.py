"""Sample rollouts: which groups, which members, and text that splits exactly into tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from actors import payload
from actors.samples import choose, pieces, samples
from actors.tokenizer import Tokenizer
from actors.types import Group, GroupMeta, PayloadHandle, Rollout, Sampling, Taken, Turn

EMOJI = "\U0001f469\u200d\U0001f680"  # an astronaut: 4 + 3 + 4 bytes of UTF-8


def wrap(inner: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(inner=inner, eos_ids=frozenset(), template=None, names={})


def byte_level() -> Tokenizer:
    """A token per byte, one for "ab", one of two of an emoji's bytes, and a special one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pair = "".join(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("\U0001f469")[0][0])[1:3]
    vocab = {token: i for i, token in enumerate([*letters, "ab", pair])}
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges=[("a", "b"), (pair[0], pair[1])]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    return wrap(inner)


def sentence_piece() -> Tokenizer:
    """Blanks are part of words and the text's first one is not written; unknown characters are bytes."""
    words = ["\u2581the", "\u2581cat", "s", "\u2581", "x"]
    vocab = {token: i for i, token in enumerate(["<unk>", *[f"<0x{i:02X}>" for i in range(256)], *words])}
    inner = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrap(inner)


BYTES, SENTENCES = byte_level(), sentence_piece()


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.inner.decode(ids, skip_special_tokens=False)


def test_pieces_of_emoji_come_with_the_token_that_completes_them():
    ids = BYTES.encode(f"ab {EMOJI}c<end>").tolist()
    # 1F469 is F0 9F 91 A9: first byte, the pair, last byte. 200D is E2 80 8D. 1F680 is F0 9F 9A 80.
    whole = ["ab", " ", "", "", "\U0001f469", "", "", "\u200d", "", "", "", "\U0001f680", "c", "<end>"]
    assert pieces(ids, BYTES) == whole


def test_a_text_cut_inside_a_character_ends_with_what_the_decoder_makes_of_it():
    ids = BYTES.encode(f"a{EMOJI}").tolist()[:3]
    assert pieces(ids, BYTES) == ["a", "", "\ufffd"]


def test_words_keep_their_blanks_but_the_first():
    ids = [SENTENCES.inner.token_to_id(t) for t in ("\u2581the", "\u2581cat", "s", "<0xC3>", "<0xA9>", "\u2581cat")]
    assert pieces(ids, SENTENCES) == ["the", " cat", "s", "", "\u00e9", " cat"]


@pytest.mark.parametrize("tokenizer", [BYTES, SENTENCES], ids=["bytes", "sentences"])
@given(data=st.data())
def test_pieces_joined_are_the_text(tokenizer, data):
    size = tokenizer.inner.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=40))
    out = pieces(ids, tokenizer)
    assert len(out) == len(ids)
    assert "".join(out) == decoded(tokenizer, ids)


@given(st.text(max_size=20))
def test_pieces_of_proper_text_are_never_broken(text):
    out = pieces(BYTES.encode(text).tolist(), BYTES)
    assert "".join(out) == text
    assert ("\ufffd" in "".join(out)) == ("\ufffd" in text)


def group(ticket: int, rewards: list[float], folder: Path) -> GroupMeta:
    rollouts = tuple(
        Rollout(
            tokens=np.array([65, 66, 67 + member], np.int32),
            mask=np.array([False, True, True]),
            logprobs=np.array([0.0, -0.123456, -1.0], np.float32),
            versions=np.array([-1, 3, 4], np.int32),
            turns=(
                Turn(start=0, end=1, kind="prompt"),
                Turn(start=1, end=3, kind="action", finish="stop", reward=reward),
            ),
            reward=reward,
            sampling=Sampling(max_tokens=4),
            parts={"format": 0.5},
        )
        for member, reward in enumerate(rewards)
    )
    handle = payload.write(Group(ticket=ticket, attempt=1, row=ticket + 100, rollouts=rollouts), str(folder))
    return meta(ticket, rewards, handle)


def meta(ticket: int, rewards: list[float], handle: PayloadHandle) -> GroupMeta:
    numbers = np.ones(len(rewards), np.int32)
    return GroupMeta(
        ticket=ticket,
        attempt=1,
        row=ticket + 100,
        rewards=np.array(rewards, np.float32),
        lengths=numbers,
        actions=numbers,
        oldest=numbers,
        newest=numbers,
        truncated=numbers > 1,
        handle=handle,
    )


def taken(*groups: GroupMeta, step: int = 6) -> Taken:
    return Taken(step=step, groups=groups, max_staleness=None, metrics={}, last=False)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.5, 1.0, 0.0, 1.0], {"best": 1, "worst": 2}),
        ([0.5, 0.0, 0.0], {"best": 0, "worst": 2}),
        ([1.0, 1.0], {"best": 0, "worst": 1}),
        ([0.25], {"best": 0}),
    ],
)
def test_best_and_worst(tmp_path, rewards, expected):
    out = samples(taken(group(3, [0.0], tmp_path), group(8, rewards, tmp_path)), 1, BYTES)
    assert {r["rank"]: r["tokens"][2] - 67 for r in out} == expected
    assert [r["reward"] for r in out] == [rewards[i] for i in expected.values()]


def test_a_record_is_whole_and_is_json(tmp_path):
    (record, _) = json.loads(json.dumps(samples(taken(group(8, [1.0, 0.0], tmp_path)), 0, BYTES), allow_nan=False))
    letters = [BYTES.inner.id_to_token(i) for i in (65, 66, 67)]
    assert record == {
        "step": 6,
        "ticket": 8,
        "row": 108,
        "rank": "best",
        "reward": 1.0,
        "parts": {"format": 0.5},
        "turns": [
            {"kind": "prompt", "start": 0, "end": 1, "finish": None, "reward": 0.0},
            {"kind": "action", "start": 1, "end": 3, "finish": "stop", "reward": 1.0},
        ],
        "pieces": letters,
        "tokens": [65, 66, 67],
        "mask": [False, True, True],
        "logprobs": [0.0, -0.1235, -1.0],
        "versions": [-1, 3, 4],
    }


def test_a_freed_payload_is_an_error(tmp_path):
    gone = group(8, [1.0], tmp_path)
    payload.free(gone.handle)
    with pytest.raises(FileNotFoundError):
        samples(taken(gone), 0, BYTES)


HANDLE = PayloadHandle(host="", path="", nbytes=0)


def metas(*rewards: list[float]) -> list[GroupMeta]:
    return [meta(i, values, HANDLE) for i, values in enumerate(rewards)]


def test_groups_with_different_rewards_come_first():
    groups = metas([1, 1], [0, 1], [0, 0], [0, 1], [1, 1])
    assert choose(taken(*groups), 1)[0] in (1, 3)
    assert choose(taken(*groups), 2) == [1, 3]
    assert {1, 3} < set(choose(taken(*groups), 3))
    assert choose(taken(*groups), 9) == [0, 1, 2, 3, 4]
    assert choose(taken(*groups), 0) == []
    assert choose(taken(), 3) == []


def test_several_are_spread_from_hard_to_easy():
    """Twelve groups in any order, three wanted: one of each third by mean reward."""
    order = [5, 0, 11, 3, 8, 2, 7, 10, 1, 9, 4, 6]
    groups = metas(*[[0.0, (hardness + 1) / 12] for hardness in order])
    for step in range(20):
        chosen = choose(taken(*groups, step=step), 3)
        assert sorted(order[i] // 4 for i in chosen) == [0, 1, 2]


def test_one_a_step_visits_hard_and_easy_ones_alike():
    groups = metas(*[[0.0, (i + 1) / 10] for i in range(10)])
    seen = [choose(taken(*groups, step=step), 1)[0] for step in range(100)]
    assert all(8 <= seen.count(i) <= 12 for i in range(10))


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=3), max_size=12), st.integers(0, 15))
def test_the_wanted_number_is_chosen(rewards, count):
    for step in (0, 1, 987, 46367):
        chosen = choose(taken(*metas(*rewards), step=step), count)
        assert len(set(chosen)) == len(chosen) == min(count, len(rewards))
