"""How the mismatch adds up with length: pure parts against closed forms and simulation, then real engines."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit import growth, length
from kit.cli import main
from kit.errors import ArgumentError
from kit.measure import Measurement

ROOT = Path(__file__).parents[1]


def drawn(kl: float, sequences: int, tokens: int, seed: int = 0) -> Measurement:
    """What theory has: independent d of mean -kl and variance 2 kl."""
    generator = torch.Generator().manual_seed(seed)
    d = -kl + math.sqrt(2 * kl) * torch.randn((sequences, tokens), generator=generator)
    sampler = -torch.rand((sequences, tokens), generator=generator)
    return Measurement(sampler + d, sampler, torch.ones(sequences, tokens, dtype=torch.bool))


# ---- theory


@given(kl=st.floats(1e-8, 1.0), length=st.integers(1, 100_000))
def test_walk_and_drift_cross_where_the_crossover_says(kl, length):
    crossing = growth.crossover(kl)
    assert (growth.drift(kl, length) > growth.walk(kl, length)) == (length > crossing) or math.isclose(length, crossing)


@given(kl=st.floats(1e-8, 0.1), length=st.integers(1, 100_000))
def test_expected_size_lies_between_its_parts_and_their_sum(kl, length):
    expected = growth.expected_abs(kl, length)
    walk, drift = growth.walk(kl, length), growth.drift(kl, length)
    assert max(walk * math.sqrt(2 / math.pi), drift) * 0.999999 <= expected <= math.hypot(walk, drift) * 1.000001


@given(kl=st.floats(1e-9, 1e-2), length=st.integers(1, 1000))
def test_eightfold_rounding_is_eightfold_walk_and_64_fold_drift(kl, length):
    assert math.isclose(growth.walk(64 * kl, length), 8 * growth.walk(kl, length))
    assert math.isclose(growth.drift(64 * kl, length), 64 * growth.drift(kl, length))


def test_without_mismatch_nothing_is_expected():
    assert growth.expected_abs(0.0, 1000) == 0.0 and growth.crossover(0.0) is None


@given(power=st.floats(-2, 2), factor=st.floats(1e-6, 1e6))
def test_slope_is_the_exponent_of_a_power_law(power, factor):
    lengths = [16, 32, 64, 100]
    assert math.isclose(growth.slope(lengths, [factor * n**power for n in lengths]), power, abs_tol=1e-9)


@pytest.mark.parametrize(("lengths", "values"), [([], []), ([16], [1.0]), ([16, 32], [0.0, 1.0]), ([16, 16], [1, 2])])
def test_slope_of_too_little_is_none(lengths, values):
    assert growth.slope(lengths, values) is None


@given(longest=st.integers(1, 5000))
def test_lengths_rise_to_the_longest(longest):
    lengths = growth.lengths_up_to(longest)
    assert lengths == sorted(set(lengths)) and lengths[-1] == longest


def test_no_length_is_refused():
    with pytest.raises(ArgumentError, match="longest length is 0"):
        growth.lengths_up_to(0)


# ---- measured


def test_rows_are_sums_over_prefixes_of_the_sequences_that_reach_them():
    d = torch.tensor([[0.1, -0.2, 0.4], [0.3, 0.1, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    sampler = torch.full((2, 3), -1.0)
    one, two, three = growth.by_length(Measurement(sampler + d, sampler, mask), [1, 2, 3])
    assert (one["sequences"], two["sequences"], three["sequences"]) == (2, 2, 1)
    assert two["abs"] == pytest.approx((0.1 + 0.4) / 2) and two["mean"] == pytest.approx((-0.1 + 0.4) / 2)
    assert two["rms"] == pytest.approx(math.sqrt((0.01 + 0.16) / 2))
    assert three["abs"] == pytest.approx(0.3) and three["abs_standard_error"] is None
    assert one["kl"] == pytest.approx((math.expm1(0.1) - 0.1 + math.expm1(0.3) - 0.3) / 2, rel=1e-5)


def test_a_token_that_is_not_finite_adds_nothing():
    sampler = torch.tensor([[-1.0, math.nan, -1.0], [-1.0, -1.0, -math.inf]])
    trainer = torch.tensor([[-1.5, -2.0, -1.5], [-1.5, -1.0, -1.0]])
    (row,) = growth.by_length(Measurement(trainer, sampler, torch.ones(2, 3).bool()), [3])
    assert row["abs"] == pytest.approx((1.0 + 0.5) / 2)


def test_a_drawn_mismatch_has_the_predicted_size_at_every_length():
    kl = 2e-3
    found = growth.summary(drawn(kl, 400, 2048))
    assert found["rms"] == pytest.approx(math.sqrt(2 * kl), rel=0.02)
    for row in found["by_length"]:
        assert abs(row["abs"] - growth.expected_abs(kl, row["length"])) < 5 * row["abs_standard_error"]
        assert row["kl"] == pytest.approx(growth.drift(kl, row["length"]), rel=0.1)
    assert found["crossover"] == pytest.approx(2 / kl, rel=0.05)


@pytest.mark.parametrize(("kl", "lowest", "highest"), [(1e-6, 0.4, 0.6), (1.0, 0.9, 1.1)])
def test_a_small_mismatch_walks_and_a_large_one_drifts(kl, lowest, highest):
    found = growth.growth(drawn(kl, 200, 512), growth.lengths_up_to(512))
    assert lowest < found["low"] < found["slope"] < found["high"] < highest


def test_an_interval_needs_enough_sequences():
    found = growth.growth(drawn(1e-3, growth.FEWEST_SEQUENCES - 1, 64), [16, 32, 64])
    assert found["slope"] is not None and found["low"] is None and found["high"] is None


def test_nothing_to_grow_is_said():
    measured = Measurement(torch.zeros(3, 64), torch.zeros(3, 64), torch.ones(3, 64).bool())
    found = growth.summary(measured)
    assert found["growth"] == {"slope": None, "low": None, "high": None} and found["crossover"] is None
    with pytest.raises(ArgumentError, match="No token"):
        growth.summary(Measurement(torch.full((2, 4), math.nan), torch.zeros(2, 4), torch.ones(2, 4).bool()))


def test_density_counts_every_token_once_and_in_its_place():
    measured = drawn(1e-3, 20, 50)
    found = growth.density(measured, scale=0.05)
    for grid in (found["d"], found["probability"]):
        assert len(grid) == growth.BINS and sum(map(sum, grid)) == 1000
    one = Measurement(torch.tensor([[math.log(0.5)]]), torch.tensor([[math.log(0.5)]]), torch.ones(1, 1).bool())
    cells = growth.density(one, scale=1.0)["probability"]
    assert cells[growth.BINS // 2 - 1][growth.BINS // 2 - 1] + cells[growth.BINS // 2][growth.BINS // 2] == 1


def test_density_keeps_what_lies_beyond_its_edges():
    trainer, sampler = torch.tensor([[5.0, -30.0]]), torch.tensor([[-20.0, 0.0]])
    found = growth.density(Measurement(trainer, sampler, torch.ones(1, 2).bool()), scale=1.0)
    assert found["d"][0][-1] == 1 and found["d"][-1][0] == 1


# ---- refused before anything loads


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--sequences", "1"], "sequences is 1"),
        (["--tokens", "4000"], "tokens is 4000; this model's context leaves room for 2 to 1904 after"),
        (["--tokens", "1"], "tokens is 1;"),
        (["--dtypes", ","], "No dtype was given"),
        (["--dtypes", "float8"], "Unknown dtype 'float8'"),
        (["--model", "./nowhere"], "no folder ./nowhere"),
    ],
)
def test_a_bad_request_is_one_line_and_status_2(words, named, tmp_path, capsys):
    assert main(["experiment", "length", *words, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert named in printed.err.splitlines()[-1] and printed.out == "" and not (tmp_path / "out").exists()


# ---- real engines


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """The experiment's JSON in two dtypes, and its folder, from a process of its own."""
    out = tmp_path_factory.mktemp("length")
    command = [sys.executable, "-m", "kit", "experiment", "length", "--dtypes", "float16,bfloat16"]
    done = subprocess.run(
        [*command, "--sequences", "16", "--tokens", "256", "--json", "--out", str(out)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.engine
def test_every_completion_has_the_whole_length_and_every_dtype_its_rows(result):
    assert list(result["dtypes"]) == ["float16", "bfloat16"] and result["experiment"] == "length"
    for found in result["dtypes"].values():
        assert found["tokens"] == 16 * 256 and found["mismatch/nonfinite"] == 0
        assert [row["length"] for row in found["by_length"]] == [16, 32, 64, 128, 256]
        assert all(row["sequences"] == 16 for row in found["by_length"])
        assert found["kernels"]["sampler_attention"] and found["kernels"]["trainer_attention"]
        assert sum(map(sum, found["density"]["d"])) == 16 * 256


@pytest.mark.engine
def test_the_16_bit_dtypes_lie_where_their_roundoff_has_them(result):
    small, large = result["dtypes"].values()
    assert 3 < large["rms"] / small["rms"] < 25
    for near, far in zip(small["by_length"], large["by_length"], strict=True):
        assert near["kl"] < far["kl"]
    assert small["crossover"] > large["crossover"]


@pytest.mark.engine
def test_result_and_figure_are_written_and_said_in_words(result):
    assert json.loads(Path(result["result"]).read_text())["dtypes"] == result["dtypes"]
    assert Path(result["figure"]).stat().st_size > 20_000
    words = length.text(result)
    assert words.count("mean |sequence log-ratio|") == 2 and "not measured here" in words
    assert "bfloat16 / float16" in words
    drawn_axes = length.figure(result).findobj(lambda artist: hasattr(artist, "get_xscale"))
    assert len(drawn_axes) >= 6
