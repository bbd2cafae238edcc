"""Sampling: greedy ties, truncation, seeds, distribution, and independence of the batch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from orthros_service.engine import sampling
from orthros_service.engine.sampling import make_generator, sample
from orthros_service.errors import EngineError
from orthros_service.types import SamplingParameters

# Half steps make ties as common as in half-precision logits.
LOGITS = st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=1, max_size=30)
TEMPERATURES = st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.0])
TOP_PS = st.sampled_from([0.05, 0.3, 0.5, 0.9, 1.0])
TOP_KS = st.one_of(st.none(), st.integers(1, 35))


@st.composite
def sampling_parameters(draw: st.DrawFn) -> SamplingParameters:
    return SamplingParameters(
        temperature=draw(TEMPERATURES),
        top_p=draw(TOP_PS),
        top_k=draw(TOP_KS),
        seed=draw(st.integers(0, 2**64)),
    )


def allowed_tokens(logits: list[float], parameters: SamplingParameters) -> set[int]:
    """The plain reference: sort all, keep k, then the smallest set whose mass is at least p."""
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: parameters.top_k]
    weights = [math.exp((logits[i] - logits[ranked[0]]) / parameters.temperature) for i in ranked]
    kept, mass = set(), 0.0
    for token, weight in zip(ranked, weights, strict=True):
        kept.add(token)
        mass += weight / sum(weights)
        # Where the mass meets p to rounding, one token more is right as well.
        if mass >= parameters.top_p + 1e-6:
            break
    return kept


def draw_one(logits: Tensor, parameters: SamplingParameters) -> int:
    return int(sample(logits[None], [parameters], [make_generator(parameters)]))


def frequencies(logits: Tensor, parameters: SamplingParameters, draws: int) -> Tensor:
    generator = make_generator(parameters)
    rows = logits.expand(200, -1)
    tokens = [sample(rows, [parameters] * 200, [generator] * 200) for _ in range(draws // 200)]
    return torch.bincount(torch.cat(tokens), minlength=logits.numel())


@given(LOGITS)
def test_greedy_takes_the_best_token_and_ties_go_to_the_lowest_id(logits: list[float]) -> None:
    token = draw_one(torch.tensor(logits, dtype=torch.bfloat16), SamplingParameters())
    assert token == logits.index(max(logits))


@given(LOGITS, sampling_parameters())
def test_a_sampled_token_lies_in_the_truncated_set(
    logits: list[float], parameters: SamplingParameters
) -> None:
    token = draw_one(torch.tensor(logits), parameters)
    if parameters.temperature == 0:
        assert token == logits.index(max(logits))
    else:
        assert token in allowed_tokens(logits, parameters)


@given(LOGITS, st.sampled_from([0.05, 0.3, 0.5, 0.9, 1.0]))
def test_the_nucleus_is_the_smallest_set_with_mass_p(logits: list[float], top_p: float) -> None:
    probabilities = torch.tensor(logits).softmax(dim=-1)
    ids = sampling._nucleus_ids(probabilities, top_p).tolist()
    assert ids == sorted(range(len(logits)), key=lambda i: (-probabilities[i], i))[: len(ids)]
    mass = probabilities[ids].double()
    assert mass.sum() >= top_p - 1e-6
    assert mass[:-1].sum() < top_p


@pytest.mark.parametrize("top_p", [0.5, 0.999, 1 - 1e-9])
def test_a_nucleus_wider_than_the_first_guess_is_still_exact(top_p: float) -> None:
    torch.manual_seed(0)
    probabilities = (torch.randn(5000).bfloat16() / 4).float().softmax(dim=-1)
    values, order = probabilities.sort(descending=True, stable=True)
    size = 1 + int((values.double().cumsum(0)[:-1] < top_p).sum())
    assert size > sampling._FIRST_NUCLEUS_TOKENS
    assert torch.equal(sampling._nucleus_ids(probabilities, top_p), order[:size])


@given(st.data())
def test_a_row_does_not_depend_on_its_neighbours(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 20))
    rows = data.draw(
        st.lists(
            st.lists(st.integers(-8, 8).map(float), min_size=width, max_size=width),
            min_size=1,
            max_size=5,
        )
    )
    parameters = [data.draw(sampling_parameters()) for _ in rows]
    together = sample(torch.tensor(rows), parameters, [make_generator(p) for p in parameters])
    alone = [draw_one(torch.tensor(row), p) for row, p in zip(rows, parameters, strict=True)]
    assert together.tolist() == alone


def test_a_sequence_repeats_with_its_seed_while_its_batch_comes_and_goes() -> None:
    parameters = SamplingParameters(temperature=1.0, top_p=0.95, seed=7)
    torch.manual_seed(0)
    steps = torch.randn(30, 500)
    alone = make_generator(parameters)
    expected = [int(sample(logits[None], [parameters], [alone])) for logits in steps]
    generator = make_generator(parameters)
    actual = []
    for step, logits in enumerate(steps):
        others = [
            SamplingParameters(temperature=0.5 + n, top_k=3 + n, seed=n) for n in range(step % 4)
        ]
        batch = torch.cat((torch.randn(len(others), 500), logits[None]))
        generators = [*(make_generator(p) for p in others), generator]
        actual.append(int(sample(batch, [*others, parameters], generators)[-1]))
    assert actual == expected


def test_sequences_without_a_seed_differ() -> None:
    parameters = SamplingParameters(temperature=1.0)
    draws = {draw_one(torch.zeros(1_000_000), parameters) for _ in range(4)}
    assert len(draws) > 1


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (SamplingParameters(temperature=1.0, seed=1), [0.4, 0.3, 0.2, 0.1]),
        (SamplingParameters(temperature=0.5, seed=2), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        (SamplingParameters(temperature=1.0, top_k=2, seed=3), [4 / 7, 3 / 7, 0, 0]),
        (SamplingParameters(temperature=1.0, top_p=0.8, seed=4), [4 / 9, 3 / 9, 2 / 9, 0]),
        # After top-k the first token holds 4/7 and is enough; of the whole it would hold 0.4.
        (SamplingParameters(temperature=1.0, top_k=2, top_p=0.55, seed=5), [1, 0, 0, 0]),
    ],
)
def test_frequencies_follow_the_distribution(
    parameters: SamplingParameters, expected: list[float]
) -> None:
    draws = 20_000
    counts = frequencies(torch.tensor([0.4, 0.3, 0.2, 0.1]).log(), parameters, draws)
    allowed = torch.tensor(expected) > 0
    assert counts[~allowed].sum() == 0
    wanted = torch.tensor(expected)[allowed] * draws
    chi_square = ((counts[allowed] - wanted) ** 2 / wanted).sum()
    # 99.9th percentile for three degrees of freedom; the seeds are fixed.
    assert chi_square < 16.27


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([-200.0, 0.0, -200.0, 0.0, -200.0])
    counts = frequencies(logits, SamplingParameters(temperature=1.0, seed=0), 2000)
    assert counts[[0, 2, 4]].sum() == 0
    assert counts[[1, 3]].min() > 0


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6, 1e30, math.inf])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.tensor([60.0, 3.0e4, -3.0e4, 3.0e4])
    token = draw_one(logits, SamplingParameters(temperature=temperature, seed=0))
    assert token in ({1, 3} if temperature < 1 else {0, 1, 2, 3})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_not_finite_is_an_engine_error(value: float, temperature: float) -> None:
    logits = torch.zeros(3, 10, dtype=torch.bfloat16)
    logits[1, 4] = value
    parameters = [SamplingParameters(temperature=temperature)] * 3
    with pytest.raises(EngineError, match=r"rows \[1\]"):
        sample(logits, parameters, [make_generator(p) for p in parameters])


def test_the_logits_are_not_modified_and_their_dtype_does_not_matter() -> None:
    logits = torch.arange(10.0).bfloat16()[None]
    parameters = SamplingParameters(temperature=2.0, top_k=4, seed=3)
    before = logits.clone()
    token = sample(logits, [parameters], [make_generator(parameters)])
    assert torch.equal(logits, before)
    assert token.dtype == torch.int64
    assert int(token) == draw_one(logits[0].float(), parameters)


def test_missing_generators_and_wrong_counts_are_engine_errors() -> None:
    parameters = SamplingParameters(temperature=1.0)
    with pytest.raises(EngineError, match="no random generator"):
        sample(torch.zeros(1, 4), [parameters], [None])
    with pytest.raises(EngineError, match="2 rows"):
        sample(torch.zeros(2, 4), [parameters], [None])


def test_an_empty_batch_gives_no_tokens() -> None:
    assert sample(torch.zeros(0, 4), [], []).shape == (0,)
