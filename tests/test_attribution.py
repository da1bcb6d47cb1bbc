"""Attribution: the split is exact on hand-made numbers, intervals cover, and a real measurement adds up."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engines import MODEL, with_adapter
from hypothesis import given
from hypothesis import strategies as st

from kit.attribution import AttributionSettings, figure, share_of, share_text, text
from kit.attribution_scores import Scores, attribute, split
from kit.decomposition import by_bins, decompose
from kit.drawn_policy import draw_adapter, load_trainer
from kit.errors import ArgumentError
from kit.intervals import MIN_SEQUENCES, Estimate, bootstrap, interval_note, token_mean
from kit.loading import close_current, resolve
from kit.precision import Precision
from kit.probe import trainer_score
from kit.teacher_forcing import (
    Texts,
    float32_head,
    open_sampler,
    sample_texts,
    sampler_kernels,
    sampler_scores,
    sampler_scores_cached,
    trainer_scores,
)

ROOT = Path(__file__).parents[1]


# ---- the split


def drawn(seed, sequences=12, tokens=9, names="abc"):
    """(coarse, exact, added, mask): random differences that add up."""
    generator = torch.Generator().manual_seed(seed)
    exact, *parts = (torch.randn(sequences, tokens, generator=generator).double() for _ in range(1 + len(names)))
    mask = torch.rand(sequences, tokens, generator=generator) < 0.8
    mask[:, 0] = True
    return exact + sum(parts), exact, dict(zip(names, parts, strict=True)), mask


@given(st.integers(0, 10_000))
def test_parts_add_up_to_the_difference_and_pairs_explain_them(seed):
    coarse, exact, added, mask = drawn(seed)
    found = decompose(coarse, exact, added, mask)
    assert abs(found.remainder) < 1e-9 * max(1, found.coarse.value)
    total = sum(part.alone.value for part in found.parts) + sum(pair.value for pair in found.pairs.values())
    assert total == pytest.approx(found.difference.value, rel=1e-6, abs=1e-6)
    for part in found.parts:
        halves = sum(value.value for names, value in found.pairs.items() if part.name in names) / 2
        assert part.part.value == pytest.approx(part.alone.value + halves, rel=1e-6, abs=1e-6)
        assert part.part.value == pytest.approx((part.alone.value + part.first.value) / 2, rel=1e-6, abs=1e-6)


def test_alone_and_first_are_what_changing_one_thing_does():
    coarse, exact, added, mask = drawn(3)
    square = lambda d: (d[mask].double() ** 2).mean().item()  # noqa: E731
    for part in decompose(coarse, exact, added, mask).parts:
        e = added[part.name]
        assert part.alone.value == pytest.approx(square(exact + e) - square(exact), rel=1e-5)
        assert part.first.value == pytest.approx(square(coarse) - square(coarse - e), rel=1e-5)


def test_errors_that_cancel_are_a_pair_below_zero():
    zero, one = torch.zeros(2, 3), torch.ones(2, 3)
    found = decompose(zero, zero, {"a": one, "b": -one}, one.bool())
    assert found.pairs["a", "b"].value == -2 and [p.part.value for p in found.parts] == [0, 0]
    assert [p.alone.value for p in found.parts] == [1, 1]


def test_what_does_not_add_up_is_refused():
    coarse, exact, added, mask = drawn(0)
    with pytest.raises(ArgumentError, match="do not add up"):
        decompose(coarse, exact, {**added, "a": added["a"] + 0.1}, mask)
    with pytest.raises(ArgumentError, match="do not add up"):
        decompose(coarse, exact, {}, mask)


def test_tokens_that_a_side_could_not_score_are_left_out_and_counted():
    coarse, exact, added, mask = drawn(1)
    whole = decompose(coarse, exact, added, mask)
    coarse[0, 0], exact[1, 0] = math.nan, math.inf
    found = decompose(coarse, exact, added, mask)
    assert found.dropped == 2 and found.tokens == whole.tokens - 2
    mask[:2, 0] = False
    assert decompose(coarse, exact, added, mask).coarse.value == pytest.approx(found.coarse.value)


def test_bins_share_out_every_token_once():
    coarse, _, _, mask = drawn(2)
    values = torch.arange(9.0).expand(mask.shape)
    bins = by_bins(coarse, mask, values, [0, 3, 6, 9, 12], ["a", "b", "c", "none"])
    assert sum(found.tokens for found in bins) == int(mask.sum())
    assert sum(found.share for found in bins) == pytest.approx(1)
    assert bins[0].abs_mean.value == pytest.approx(coarse[:, :3].abs()[mask[:, :3]].mean().item(), rel=1e-5)
    assert bins[3].tokens == 0 and bins[3].abs_mean is None
    assert by_bins(0 * coarse, mask, values, [0, 9], ["a"])[0].share == 0


# ---- intervals


def test_the_interval_is_that_of_a_mean():
    """95 % of a normal mean lies within 1.96 standard errors; the bootstrap of 400 sequences must be close to it."""
    values = torch.randn(400, generator=torch.Generator().manual_seed(0))
    (found,) = bootstrap(values[:, None], torch.ones(400))
    error = values.std().item() / 20
    assert found.value == pytest.approx(values.mean().item(), abs=1e-6)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    """Sequences whose tokens move together, of unequal length: intervals over tokens would be far too narrow."""
    generator, covered = torch.Generator().manual_seed(0), 0
    for seed in range(100):
        level = torch.randn(40, generator=generator)
        lengths = torch.randint(5, 30, (40,), generator=generator)
        covered += bootstrap((level * lengths)[:, None], lengths, seed=seed)[0].covers(0.0)
    assert 85 <= covered <= 100


def test_too_few_sequences_have_no_interval_and_that_is_said():
    for count in (1, MIN_SEQUENCES - 1):
        assert bootstrap(torch.ones(count, 1), torch.ones(count)) == [Estimate(1.0)]
        assert f"{count} sequence" in interval_note(count) and "too few" in interval_note(count)
    assert bootstrap(torch.ones(MIN_SEQUENCES, 1), torch.ones(MIN_SEQUENCES)) == [Estimate(1.0, 1.0, 1.0)]
    assert "95 %" in interval_note(MIN_SEQUENCES)
    empty = torch.tensor([0] * 20 + [2] * 7)  # sequences without a token do not count
    assert bootstrap(torch.ones(27, 1), empty)[0].low is None
    assert not Estimate(1.0).covers(1.0) and Estimate(1.0, 0.5, 2.0).covers(1.5)
    with pytest.raises(ArgumentError, match="No token"):
        bootstrap(torch.ones(3, 1), torch.zeros(3))


def test_a_token_mean_ignores_what_is_masked():
    values = torch.tensor([[1.0, math.nan], [2.0, 3.0]])
    assert token_mean(values, torch.tensor([[True, False], [True, True]])).value == 2.0


# ---- scoring the same tokens


def test_texts_align_completions_and_refuse_what_is_empty():
    texts = Texts([[1, 2], [3]], [[4, 5], [6]])
    assert texts.whole == [[1, 2, 4, 5], [3, 6]] and texts.longest == 4
    assert texts.mask.tolist() == [[True, True], [True, False]]
    aligned = texts.align([[-1.0, -2.0, -3.0], [-4.0]])
    assert aligned[0].tolist() == [-2.0, -3.0] and aligned[1, 0] == -4.0 and aligned[1, 1].isnan()
    for prompts, completions in (([], []), ([[1]], [[]]), ([[]], [[1]]), ([[1]], [[1], [2]])):
        with pytest.raises(ArgumentError, match="at least one token"):
            Texts(prompts, completions)


@pytest.fixture(scope="module")
def texts():
    ids = torch.randint(3, 64, (5, 30), generator=torch.Generator().manual_seed(1)).tolist()
    return Texts([row[: 3 + i] for i, row in enumerate(ids)], [row[3 + i : 12 + 4 * i] for i, row in enumerate(ids)])


def test_a_compiled_forward_pass_is_used_in_place_of_the_model(texts):
    precision = Precision("float32")
    model = load_trainer(resolve(MODEL), precision)
    calls = []
    forward = torch.compile(lambda **inputs: calls.append(1) or model(**inputs), backend="eager", dynamic=True)
    found = trainer_scores(model, texts, precision, forward=forward)
    assert calls and (found - trainer_scores(model, texts, precision))[texts.mask].abs().max() < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_padded_batch_is_scored_as_one_text_at_a_time(texts, dtype):
    precision = Precision(dtype)
    model = load_trainer(resolve(MODEL), precision)
    found = trainer_scores(model, texts, precision, batch=3)
    limit = 1e-5 if dtype == "float32" else 0.5  # logits of 27 are 0.125 apart in bfloat16
    for row, text_ids, completion in zip(found, texts.whole, texts.completions, strict=True):
        one = trainer_score(model, text_ids, precision)[-len(completion) :]
        assert (row[: len(completion)] - one).abs().max() < limit


def test_a_float32_head_changes_nothing_in_float32_and_something_in_bfloat16(texts):
    for dtype in ("float32", "bfloat16"):
        precision = Precision(dtype)
        model = load_trainer(resolve(MODEL), precision)
        plain = trainer_scores(model, texts, precision)
        head = trainer_scores(model, texts, precision, head_float32=True)
        moved = (plain - head)[texts.mask].abs().max().item()
        assert moved < 1e-5 if dtype == "float32" else 1e-4 < moved < 0.1
    policy = draw_adapter(model, 0.05, 0)
    assert (trainer_scores(policy, texts, precision, head_float32=True) - head)[texts.mask].abs().mean() > 1e-3


def test_a_drawn_adapter_is_the_same_for_the_same_seed():
    one, two, other = (
        draw_adapter(load_trainer(resolve(MODEL), Precision("bfloat16")), 0.01, seed) for seed in (0, 0, 1)
    )
    values = [dict(policy.named_parameters()) for policy in (one, two, other)]
    names = [name for name in values[0] if "lora_" in name]
    assert names and all(values[0][name].dtype == torch.float32 for name in names)
    assert all(torch.equal(values[0][name], values[1][name]) for name in names)
    assert not any(torch.equal(values[0][name], values[2][name]) for name in names)


@pytest.mark.engine("float32")
def test_a_sampler_scores_its_own_text_as_it_sampled_it_and_as_the_trainer_does(engines, dtype, problems):
    from kit.sampler import SamplingSettings

    sampler, model = engines.get(dtype).sampler, engines.model(dtype)
    sampler.drop_adapter()
    prompts = engines.tokenizer(problems["prompt"][:9]).input_ids
    sampled, while_sampling = sample_texts(sampler, prompts, SamplingSettings(max_tokens=24), seed=3)
    together, single = (sampler_scores(sampler, sampled, together=flag) for flag in (True, False))
    trainer = trainer_scores(model, sampled, Precision(dtype), batch=4)
    for scores in (while_sampling, single, trainer):
        assert (scores - together)[sampled.mask].abs().max() < 1e-5
    with float32_head(sampler) as possible:
        assert possible
    policy = with_adapter(model, spread=0.1)
    sampler.load_adapter(policy)
    moved = sampler_scores(sampler, sampled)
    assert (moved - together)[sampled.mask].abs().mean() > 1e-3
    assert (moved - trainer_scores(policy, sampled, Precision(dtype)))[sampled.mask].abs().max() < 1e-5


def hand_made_scores(sequences, tokens=6):
    """Scores of both sides that differ by a little noise a setting."""
    generator = torch.Generator().manual_seed(0)
    made = lambda: -1 + 0.01 * torch.randn(sequences, tokens, generator=generator)  # noqa: E731
    found = Scores(Texts([[1]] * sequences, [[2] * tokens] * sequences), made())
    found.trainer, found.sampler = [made() for _ in range(4)], [made() for _ in range(4)]
    found.native = made(), made()
    found.forgotten = {"temperature 0.7": (made(), found.texts)}
    return found


@pytest.mark.parametrize("sequences", [1, 3, 8])
def test_a_handful_of_sequences_is_told_and_drawn_without_intervals(sequences):
    result = split(hand_made_scores(sequences), "float16") | {"model": "made"}
    json.dumps(result, allow_nan=False)
    has_intervals = sequences >= MIN_SEQUENCES
    assert (result["total"]["coarse"]["low"] is not None) == has_intervals
    assert ("No intervals" in text(result)) != has_intervals
    figure(result).canvas.draw()


@pytest.mark.engine
def test_a_warm_prefix_cache_is_asked_and_the_rest_is_scored_as_without_it():
    ids = torch.randint(3, 64, (3, 400), generator=torch.Generator().manual_seed(2)).tolist()
    long = Texts([row[:5] for row in ids], [row[5:] for row in ids])
    sampler = open_sampler(resolve(MODEL), "float32", long.longest, 3)
    try:
        plain, (warm, cached) = sampler_scores(sampler, long), sampler_scores_cached(sampler, long)
        block = sampler.llm.llm_engine.vllm_config.cache_config.block_size
        kernels = sampler_kernels(sampler)
    finally:
        close_current()
    assert cached == 3 * (200 // block) * block > 0
    scored = warm.isfinite()
    assert scored.sum() == 3 * 399 - cached
    assert (warm - plain)[scored].abs().max() < 1e-4
    assert kernels["attention"] and (kernels["eager"] or torch.cuda.is_available())


# ---- the whole measurement


@pytest.fixture(scope="module")
def result():
    from kit import loading

    found = attribute(AttributionSettings(sequences=32, tokens=48))
    assert not loading._current, "an engine was left open"
    return found


@pytest.mark.engine
def test_the_parts_add_up_to_a_total_that_was_measured_apart_from_them(result):
    total = result["total"]
    parts = sum(part["part"]["value"] for part in result["parts"])
    assert parts == pytest.approx(total["difference"]["value"], rel=1e-6)
    assert total["difference"]["low"] <= parts <= total["difference"]["high"]
    # the grid's corners are the two ends, each measured without the parts
    assert result["grid"][0][0] == pytest.approx(total["coarse"]["value"], rel=1e-6)
    assert result["grid"][3][3] == pytest.approx(total["exact"]["value"], rel=1e-6)
    assert total["exact"]["value"] < 1e-9 < total["coarse"]["low"]


@pytest.mark.engine
def test_the_first_steps_of_the_chain_are_states_that_were_measured(result):
    """Changed first, a head's part must be the difference of two cells of the grid."""
    first = {part["name"]: part["first"]["value"] for part in result["parts"]}
    grid = result["grid"]
    assert first["trainer: head"] == pytest.approx(grid[0][0] - grid[1][0], rel=1e-4, abs=1e-12)
    assert first["sampler: head"] == pytest.approx(grid[0][0] - grid[0][1], rel=1e-4, abs=1e-12)


@pytest.mark.engine
def test_weights_matter_only_where_the_sides_have_different_ones(result):
    parts = {part["name"]: share_of(part, result) for part in result["parts"]}
    assert sum(parts.values()) == pytest.approx(1, rel=1e-6)
    assert abs(parts["weights, both sides"]) < 0.01 and parts["trainer: head"] > 0.1 and parts["sampler: head"] > 0.1
    one_sided = result["grid"][2][3]
    assert one_sided > 100 * result["grid"][2][2] and result["weights_move"]["value"] > 1e-5


@pytest.mark.engine
def test_the_steps_go_from_one_end_to_the_other_and_one_sides_head_alone_does_little(result):
    steps = [step["value"] for step in result["steps"]]
    assert steps[0] == pytest.approx(result["total"]["coarse"]["value"], rel=1e-9)
    assert steps[-1] == pytest.approx(result["total"]["exact"]["value"], rel=1e-9)
    assert steps[2] < steps[0] / 2 and steps[4] < steps[2] / 100


@pytest.mark.engine
def test_every_change_has_its_figures_and_one_side_alone_in_float32_does_not_help_much(result):
    changes = {row["name"]: row for row in result["changes"]}
    assert {"sampler: one text at a time", "trainer: one text at a time"} <= set(changes)
    assert any(name.startswith("trainer: attention eager") for name in changes)
    for row in result["changes"]:
        assert row["square"]["low"] <= row["square"]["value"] <= row["square"]["high"]
        assert row["change"]["value"] == pytest.approx(row["square"]["value"] - result["total"]["coarse"]["value"],
                                                       rel=1e-3, abs=1e-9)  # fmt: skip
    for side in ("trainer", "sampler"):
        alone = changes[f"only the {side} in float32, with float32 weights"]["square"]["value"]
        assert alone > 10 * result["total"]["exact"]["value"]
    forgotten = {row["name"]: row["abs_mean"]["value"] for row in result["forgotten"]}
    assert min(forgotten.values()) > result["rollout"]["mismatch/abs_mean"]


@pytest.mark.engine
def test_text_and_figure_say_the_same_numbers(result):
    told, drawn_figure = text(result), figure(result)
    drawn_figure.canvas.draw()
    shown = [t.get_text() for axes in drawn_figure.axes for t in [*axes.texts, *axes.get_yticklabels()]]
    for part in result["parts"]:
        share = share_text(part, result)
        assert part["name"] in told and share in told and share in shown and part["name"] in shown
    assert "Not separated: float32 weights" in told and "95 %" in told
    assert [label for label in shown if label == "bfloat16 everything"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (AttributionSettings(dtype="float32"), "expected bfloat16 or float16"),
        (AttributionSettings(tokens=5000), "leaves room for"),
        (AttributionSettings(sequences=0), "at least 1"),
        (AttributionSettings(tokens=0), "at least 1"),
        (AttributionSettings(model="./nowhere"), "no folder"),
    ],
    ids=["no coarse dtype", "too long", "no sequences", "no tokens", "no model"],
)
def test_what_cannot_be_measured_is_refused_before_an_engine_starts(settings, said, capsys):
    with pytest.raises((ArgumentError, OSError), match=said):
        attribute(settings)
    assert "Starting vLLM" not in capsys.readouterr().err


def test_the_gpu_script_says_what_it_takes():
    script = ROOT / "tests" / "benchmarks" / "gpu" / "attribution.py"
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
    assert "--backends" in done.stdout and "--out" in done.stdout
