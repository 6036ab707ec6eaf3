import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.engines.sampling import _kept, draw, mix, uniforms

MASK = 2**64 - 1


def test_mix_gives_the_published_sequence_of_splitmix64():
    steps = np.arange(1, 6, dtype=np.uint64)
    states = np.uint64(1234567) + steps * np.uint64(0x9E3779B97F4A7C15)
    assert mix(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(st.lists(st.tuples(st.integers(0, MASK), st.integers(0, 10**6)), min_size=1, max_size=5))
def test_uniforms_depend_on_their_own_row_only(rows):
    seeds, counters = np.array([r[0] for r in rows], np.uint64), np.array([r[1] for r in rows])
    together = uniforms(seeds, counters)
    assert ((together >= 0) & (together < 1)).all()
    assert together.tolist() == [uniforms(seeds[i : i + 1], counters[i : i + 1])[0] for i in range(len(rows))]


def test_uniforms_are_uniform_over_seeds_and_over_counters():
    for seeds, counters in ((np.arange(20000), np.zeros(20000)), (np.full(20000, 5), np.arange(20000))):
        values = uniforms(seeds.astype(np.uint64), counters)
        counts = np.histogram(values, 20, (0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees: p = 0.001
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.03


def one(probabilities, uniform, temperature=1.0, top_p=1.0, top_k=0):
    """Tokens and logprobs for each of the uniform numbers."""
    n = len(uniform)
    logits = torch.tensor(probabilities, dtype=torch.float64).log().expand(n, -1)
    full = [np.full(n, value) for value in (temperature, top_p, top_k)]
    tokens, logprobs, _ = draw(logits, np.asarray(uniform, np.float64), *full)
    return tokens.tolist(), logprobs.tolist()


P = [0.05, 0.5, 0.15, 0.3]


def test_inverse_of_the_cumulated_distribution():
    tokens, logprobs = one(P, [0.0, 0.049, 0.051, 0.549, 0.551, 0.699, 0.701, 1 - 2**-52])
    assert tokens == [0, 0, 1, 1, 2, 2, 3, 3]
    assert logprobs == pytest.approx(np.log([P[t] for t in tokens]).tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"top_k": 2}, {1: 0.625, 3: 0.375}),
        ({"top_k": 3}, {1: 0.5 / 0.95, 2: 0.15 / 0.95, 3: 0.3 / 0.95}),
        ({"top_p": 0.5}, {1: 1.0}),
        ({"top_p": 0.51}, {1: 0.625, 3: 0.375}),
        ({"top_p": 0.0}, {1: 1.0}),
        ({"top_k": 2, "top_p": 0.6}, {1: 1.0}),  # of the renormalised two, the first alone reaches 0.6
        ({"top_k": 9}, dict(enumerate(P))),
        ({"temperature": 0.5}, dict(enumerate(np.square(P) / np.square(P).sum()))),
        ({"temperature": 2.0, "top_k": 2}, {1: 0.5**0.5 / (0.5**0.5 + 0.3**0.5), 3: 0.3**0.5 / (0.5**0.5 + 0.3**0.5)}),
        ({"temperature": 0.0}, {1: 1.0}),
        ({"temperature": 0.0, "top_k": 1}, {1: 1.0}),
    ],
)
def test_distribution_is_the_one_worked_out_by_hand(settings, expected):
    n = 20000
    tokens, logprobs = one(P, uniforms(np.arange(n).astype(np.uint64), np.zeros(n)), **settings)
    assert set(tokens) == set(expected)
    for token, probability in expected.items():
        sigma = (probability * (1 - probability) / n) ** 0.5
        assert abs(tokens.count(token) / n - probability) <= 4 * sigma
        reported = 0.5 if settings.get("temperature") == 0 else probability
        assert logprobs[tokens.index(token)] == pytest.approx(np.log(reported), abs=1e-6)


def test_rows_do_not_see_each_other():
    generator = np.random.default_rng(0)
    logits = torch.from_numpy(generator.normal(size=(6, 16)))
    rows = (
        generator.random(6),
        np.array([1.0, 0, 0.7, 1, 1.3, 1]),
        np.array([1, 1, 0.8, 0.5, 1, 1]),
        np.array([0, 3, 0, 4, 5, 0]),
    )
    tokens, logprobs, _ = draw(logits, *rows)
    for i in range(6):
        alone = draw(logits[i : i + 1], *(r[i : i + 1] for r in rows))
        assert (alone[0].item(), alone[1].item()) == (tokens[i].item(), pytest.approx(logprobs[i].item(), abs=1e-6))


def test_equal_logits_keep_exactly_k():
    tokens, logprobs = one([0.25] * 4, [0.0, 0.4, 0.6, 0.99], top_k=2)
    assert tokens == [0, 0, 1, 1]
    assert logprobs == pytest.approx([np.log(0.5)] * 4, abs=1e-6)


def test_top_p_of_one_cuts_nothing_whatever_the_rounding():
    logits = torch.tensor([[0.0, -45.0]])  # the second probability is below the spacing of float64 at 1
    assert _kept(logits, torch.tensor([[1.0]]), torch.tensor([[0]])).tolist() == [[True, True]]
    below = torch.tensor([[1 - 1e-9]], dtype=torch.float64)
    assert _kept(logits, below, torch.tensor([[0]])).tolist() == [[True, False]]
