"""Full-vocabulary comparison: closed forms, inequalities that must hold, and agreement with the sampled estimators."""

import math

import pytest
import torch
from engines import with_adapter
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kit.distributions import compare_distributions, compare_logprobs
from kit.errors import ArgumentError
from kit.mismatch import mismatch_metrics
from kit.precision import Precision
from kit.probe import next_token_logprobs
from kit.sampler import SamplingSettings

TEXT = "Q: 123+457=?\nA: <think>"  # 23 tokens


@st.composite
def distributions(draw):
    """Two log-distributions over the same 2 to 20 tokens."""
    size = draw(st.integers(2, 20))
    logits = [draw(arrays("float64", size, elements=st.floats(-20, 20))) for _ in range(2)]
    return [torch.log_softmax(torch.from_numpy(x), -1) for x in logits]


def test_closed_form():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.25, 0.25, 0.5])
    kl, total_variation, overlap = compare_logprobs(p.log(), q.log(), top_k=2)
    assert kl == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-6)
    assert total_variation == pytest.approx(0.3)
    assert overlap == 0.5  # {0, 1} and {2, one of 0 and 1}


def test_equal_distributions_do_not_differ():
    logprobs = torch.log_softmax(torch.randn(50), -1)
    assert compare_logprobs(logprobs, logprobs) == (0.0, 0.0, 1.0)


@given(distributions())
def test_kl_is_torchs_kl_and_pinskers_inequality_holds(pair):
    p, q = pair
    kl, total_variation, overlap = compare_logprobs(p, q)
    exact = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum").item()
    assert kl == pytest.approx(exact, rel=1e-9, abs=1e-9)
    assert kl >= 0
    assert 0 <= total_variation <= 1 + 1e-12
    assert total_variation <= math.sqrt(kl / 2) + 1e-7
    assert 0 <= overlap <= 1


def test_a_kl_below_float32_rounding_is_still_right():
    """float16's KL on a small model is 1e-9; the rounding of float32 logprobs alone would make 1e-7 of it."""
    torch.manual_seed(0)
    exact_p = torch.log_softmax(torch.randn(64, dtype=torch.float64), -1)
    exact_q = torch.log_softmax(exact_p + 1e-4 * torch.randn(64, dtype=torch.float64), -1)
    true = (exact_p.exp() * (exact_p - exact_q)).sum().item()
    assert 1e-9 < true < 1e-8
    p, q = exact_p.float(), exact_q.float()
    assert compare_logprobs(p, q)[0] == pytest.approx(true, rel=0.02)
    naive = (p.double().exp() * (p.double() - q.double())).sum().item()
    assert abs(naive - true) > true


def test_tokens_that_one_side_excludes():
    half, one = torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]).log()
    assert compare_logprobs(one, half)[0] == pytest.approx(math.log(2))
    assert compare_logprobs(half, one)[0] == math.inf
    assert compare_logprobs(one, half)[1] == pytest.approx(0.5)


@pytest.mark.engine("float32")
@pytest.mark.parametrize("positions", [[0], [5, 1000], [-1]])
def test_positions_outside_the_text_are_refused(model, tokenizer, positions):
    with pytest.raises(ArgumentError, match="outside the text; expected 1 to 23"):
        compare_distributions(model, tokenizer(TEXT).input_ids, positions)


@pytest.mark.engine("float32")
def test_in_float32_both_sides_have_one_distribution_with_the_adapter_too(model, tokenizer):
    ids = tokenizer(TEXT).input_ids
    found = compare_distributions(model, ids, [1, 10, len(ids)])
    found += compare_distributions(with_adapter(model, spread=0.1), ids, [1, 10, len(ids)])
    assert [comparison.position for comparison in found] == [1, 10, 23] * 2
    for comparison in found:
        assert comparison.kl < 1e-9
        assert comparison.total_variation < 1e-5
        assert comparison.top_k_overlap == 1.0


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.5])
def test_the_exact_kl_is_what_the_sampled_estimators_estimate(noise):
    """Tokens drawn from one side: the means of k1 and k3 lie within four standard errors of the exact KL."""
    torch.manual_seed(0)
    sampler = torch.log_softmax(2 * torch.randn(64), -1)
    trainer = torch.log_softmax(sampler + noise * torch.randn(64), -1)
    exact, *_ = compare_logprobs(sampler, trainer)
    tokens = torch.multinomial(sampler.exp(), 100_000, replacement=True)
    found = mismatch_metrics(trainer[tokens][None], sampler[tokens][None], torch.ones(1, len(tokens)))
    d = (trainer - sampler)[tokens].double()
    for key, samples in (("mismatch/k1", -d), ("mismatch/k3", d.expm1() - d)):
        assert abs(found[key] - exact) < 4 * samples.std() / len(tokens) ** 0.5
    assert 0.1 < exact / (noise**2 / 2) < 10


@pytest.mark.engine("bfloat16")
def test_the_exact_kl_has_the_size_that_sampling_finds(model, tokenizer):
    """Four positions, 200 tokens at each; rounding differs between batch shapes, so a factor of 3 is allowed."""
    policy, draws, positions = with_adapter(model, spread=0.4), 200, [3, 6, 16, 23]
    ids = tokenizer(TEXT).input_ids
    exact = compare_distributions(policy, ids, positions)
    trainer_TV, estimates = next_token_logprobs(policy, ids, Precision("bfloat16")), []
    for position in positions:
        prompts = [ids[:position]] * draws
        sampled = model.kit.sampler.generate(prompts, SamplingSettings(max_tokens=1), list(range(draws)))
        tokens = torch.tensor([completion.token_ids[0] for completion in sampled])
        sampler = torch.tensor([completion.logprobs for completion in sampled])
        metrics = mismatch_metrics(trainer_TV[position - 1][tokens][:, None], sampler, torch.ones(draws, 1))
        estimates.append(metrics["mismatch/k3"])
    assert 1 / 3 < sum(estimates) / sum(comparison.kl for comparison in exact) < 3
