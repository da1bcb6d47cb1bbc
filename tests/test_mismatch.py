"""Mismatch metrics: closed forms, invariances, and what they do with numbers that are not finite."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kit.mismatch import KEYS, MAX_LOG_RATIO, kl_k3, mismatch_metrics

LOGPROBS = st.floats(-30.0, 0.0, width=32)


@st.composite
def batches(draw, elements=LOGPROBS):
    """(trainer logprobs, sampler logprobs, mask), up to 6 sequences of up to 8 tokens, at least one token kept."""
    shape = (draw(st.integers(1, 6)), draw(st.integers(1, 8)))
    trainer, sampler = (torch.from_numpy(draw(arrays("float32", shape, elements=elements))) for _ in range(2))
    mask = torch.from_numpy(draw(arrays("bool", shape)))
    mask[0, 0] = True
    return trainer, sampler, mask


def of_differences(differences) -> dict:
    """The metrics of these log-ratios, one side's logprob being 0: exact whatever their size."""
    d = torch.tensor(differences)
    return mismatch_metrics(d.clamp(max=0), (-d).clamp(max=0), torch.ones_like(d))


def close(left: dict, right: dict, tolerance: float = 1e-6) -> bool:
    return all(left[k] == pytest.approx(right[k], rel=tolerance, abs=tolerance) for k in left)


def test_every_metric_in_closed_form():
    found = mismatch_metrics(
        torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]),
        torch.tensor([[-1.5, -2.25], [-3.0, 0.0]]),
        torch.tensor([[1, 1], [1, 0]]),
    )
    d1, d2 = 0.5, 0.25
    w = math.exp(d1 + d2)  # of the first sequence; the second one's is 1
    assert found == pytest.approx(
        {
            "mismatch/abs_mean": (d1 + d2) / 3,
            "mismatch/abs_p99": d1,
            "mismatch/abs_max": d1,
            "mismatch/k1": -(d1 + d2) / 3,
            "mismatch/k3": (math.exp(d1) - d1 - 1 + math.exp(d2) - d2 - 1) / 3,
            "mismatch/prob_abs_max": math.exp(-1) - math.exp(-1.5),
            "mismatch/seq_kl": -(d1 + d2) / 2,
            "mismatch/seq_abs": (d1 + d2) / 2,
            "mismatch/ess": (w + 1) ** 2 / (2 * (w**2 + 1)),
            "mismatch/ratio_max": w,
            "mismatch/nonfinite": 0,
            "mismatch/saturated": 0,
        }
    )


def test_abs_p99_is_the_smallest_value_that_99_percent_do_not_exceed():
    assert of_differences([[i / 100 for i in range(1, 101)]])["mismatch/abs_p99"] == pytest.approx(0.99)
    assert of_differences([[i / 1000 for i in range(1, 1001)]])["mismatch/abs_p99"] == pytest.approx(0.99)


def test_k1_and_k3_are_the_exact_kl_in_expectation():
    """Tokens drawn exactly in proportion to p make the sample mean the expectation; then both are KL(p || q)."""
    p, q = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 8]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    tokens = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    found = mismatch_metrics(q.log()[tokens][None], p.log()[tokens][None], torch.ones(1, 8))
    exact = (p * (p / q).log()).sum().item()
    assert found["mismatch/k1"] == pytest.approx(exact, rel=1e-6)
    assert found["mismatch/k3"] == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("size", [1e-3, 1e-4, 1e-5, 1e-6])
def test_k3_keeps_its_digits_for_small_ratios(size):
    """k3 = d^2/2 + d^3/6 + ...: at 1e-6 the formula as written gives 0 in float32."""
    assert of_differences([[size, -size]])["mismatch/k3"] == pytest.approx(size**2 / 2, rel=1e-3)
    naive = torch.tensor(1e-6).exp() - torch.tensor(1e-6) - 1
    assert abs(naive.item() - 0.5e-12) > 1e-9


@given(batches())
def test_ranges(batch):
    found = mismatch_metrics(*batch)
    assert found["mismatch/k3"] >= 0
    assert 0 < found["mismatch/ess"] <= 1 + 1e-9
    assert 0 <= found["mismatch/abs_mean"] <= found["mismatch/abs_max"] * (1 + 1e-6)
    assert found["mismatch/abs_p99"] <= found["mismatch/abs_max"]
    assert 0 <= found["mismatch/prob_abs_max"] <= 1
    assert abs(found["mismatch/k1"]) <= found["mismatch/abs_mean"] * (1 + 1e-5)
    assert all(math.isfinite(value) for value in found.values())


@given(batches())
def test_equal_logprobs_have_no_mismatch(batch):
    trainer, _, mask = batch
    found = mismatch_metrics(trainer, trainer, mask)
    ones = {"mismatch/ess", "mismatch/ratio_max"}
    assert found == {key: 1.0 if key in ones else 0.0 for key in found}


@given(batches(), st.randoms(use_true_random=False))
def test_order_of_sequences_does_not_matter(batch, random):
    rows = list(range(len(batch[0])))
    random.shuffle(rows)
    assert close(mismatch_metrics(*batch), mismatch_metrics(*(part[rows] for part in batch)))


@given(batches(), st.integers(1, 5), st.sampled_from([0.0, 1e30, math.inf, -math.inf, math.nan]))
def test_padding_may_hold_anything(batch, width, rubbish):
    trainer, sampler, mask = batch
    widened = [torch.nn.functional.pad(part, (0, width), value=rubbish) for part in (trainer, sampler)]
    widened = [torch.where(torch.nn.functional.pad(mask, (0, width)), part, rubbish) for part in widened]
    assert close(mismatch_metrics(*widened, torch.nn.functional.pad(mask, (0, width))), mismatch_metrics(*batch))


@given(batches())
def test_exchanging_the_sides_turns_the_signed_metrics_round(batch):
    trainer, sampler, mask = batch
    one, other = mismatch_metrics(trainer, sampler, mask), mismatch_metrics(sampler, trainer, mask)
    for key in ("mismatch/k1", "mismatch/seq_kl"):
        assert other[key] == pytest.approx(-one[key], abs=1e-6)
    for key in ("abs_mean", "abs_p99", "abs_max", "seq_abs", "prob_abs_max"):
        assert other[f"mismatch/{key}"] == pytest.approx(one[f"mismatch/{key}"], abs=1e-6)


@given(batches(), st.floats(-20, 20, width=32))
def test_ess_does_not_depend_on_a_factor_common_to_all_weights(batch, shift):
    """The weights are normalised: exp(shift) on each changes nothing."""
    trainer, sampler, mask = batch
    mask[:, 0] = True
    moved = trainer.clone()
    moved[:, 0] += shift
    assert mismatch_metrics(moved, sampler, mask)["mismatch/ess"] == pytest.approx(
        mismatch_metrics(trainer, sampler, mask)["mismatch/ess"], rel=1e-4
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_log_ratios_of_100_are_finite_and_flagged(sign):
    found = of_differences([[100.0 * sign, 0.0], [0.1, 0.1]])
    assert all(math.isfinite(value) for value in found.values())
    assert found["mismatch/saturated"] == 2  # one token, one sequence
    assert found["mismatch/abs_max"] == 100.0
    expected = math.exp(MAX_LOG_RATIO) if sign > 0 else math.exp(0.2)
    assert found["mismatch/ratio_max"] == pytest.approx(expected, rel=1e-6)
    assert math.isinf(torch.tensor(100.0).exp().item())  # what the formula as written gives


def test_a_long_sequence_of_large_ratios_is_finite():
    found = of_differences([[50.0] * 2048, [0.0] * 2048])
    assert all(math.isfinite(value) for value in found.values())
    assert found["mismatch/seq_abs"] == pytest.approx(50 * 2048 / 2)
    assert found["mismatch/ess"] == pytest.approx(1 / 2)  # one of two sequences has all the weight


def test_sums_grow_with_length_and_means_do_not():
    short, long = of_differences([[0.01] * 10]), of_differences([[0.01] * 1000])
    assert long["mismatch/abs_mean"] == pytest.approx(short["mismatch/abs_mean"])
    assert long["mismatch/seq_abs"] == pytest.approx(100 * short["mismatch/seq_abs"])


@given(batches(), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), min_size=1), st.sampled_from("ts"),
       st.sampled_from([math.nan, math.inf, -math.inf]))  # fmt: skip
def test_logprobs_that_are_not_finite_are_counted_and_left_out(batch, places, side, value):
    trainer, sampler, mask = batch
    clean_mask, spoilt = mask.clone(), (trainer if side == "t" else sampler).clone()
    for row, column in places:
        if row < mask.shape[0] and column < mask.shape[1]:
            spoilt[row, column], clean_mask[row, column] = value, False
    parts = (spoilt, sampler) if side == "t" else (trainer, spoilt)
    found = mismatch_metrics(*parts, mask)
    assert found.pop("mismatch/nonfinite") == int((mask & ~clean_mask).sum())
    expected = mismatch_metrics(trainer, sampler, clean_mask)
    assert expected.pop("mismatch/nonfinite") == 0
    assert found == expected


@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3), (0, 0)])
def test_without_tokens_there_is_no_number(shape):
    found = mismatch_metrics(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape))
    assert [found[key] for key in KEYS[:-1]] == [None] * (len(KEYS) - 1)
    assert found["mismatch/nonfinite"] == 0


def test_with_nothing_finite_there_is_no_number_but_a_count():
    found = mismatch_metrics(torch.full((2, 3), math.nan), torch.zeros(2, 3), torch.ones(2, 3))
    assert (found["mismatch/abs_mean"], found["mismatch/ess"], found["mismatch/nonfinite"]) == (None, None, 6)


@given(batches())
def test_a_sequence_without_tokens_counts_for_nothing(batch):
    """A completion of length 0 has no ratio: it must not pull the mean over sequences towards 0."""
    longer = [torch.cat([part, torch.zeros_like(part[:1])]) for part in batch]
    assert mismatch_metrics(*longer) == mismatch_metrics(*batch)


@given(batches())
@settings(max_examples=20)
def test_16_bit_input_is_compared_in_float32(batch):
    trainer, sampler, mask = batch
    short = [part.to(torch.bfloat16) for part in (trainer, sampler)]
    assert mismatch_metrics(*short, mask) == mismatch_metrics(*(part.float() for part in short), mask)


@pytest.mark.parametrize("shapes", [((2, 3), (2, 2), (2, 3)), ((2, 3), (2, 3), (3,)), ((6,), (2, 3), (2, 3))])
def test_different_shapes_are_an_error_that_names_them(shapes):
    with pytest.raises(ValueError, match="must have one shape") as error:
        mismatch_metrics(*(torch.zeros(shape) for shape in shapes))
    assert all(str(tuple(shape)) in str(error.value) for shape in shapes)


@given(batches())
def test_kl_k3_is_trls_kl(batch):
    """The formula of TRL's loss at beta > 0, in float64."""
    policy, base, mask = batch
    r = (base - policy)[mask].double()
    assert kl_k3(*batch) == pytest.approx((r.exp() - r - 1).mean().item(), rel=1e-5, abs=1e-9)


def test_kl_k3_leaves_out_what_is_not_finite_and_survives_large_ratios():
    policy, base = torch.tensor([[-1.0, math.nan, -200.0]]), torch.tensor([[-1.5, -1.0, 0.0]])
    assert kl_k3(policy, base, torch.tensor([[1, 1, 0]])) == pytest.approx(math.exp(-0.5) + 0.5 - 1)
    assert math.isfinite(kl_k3(policy, base, torch.tensor([[0, 0, 1]])))
    assert kl_k3(policy, base, torch.zeros(1, 3)) is None
