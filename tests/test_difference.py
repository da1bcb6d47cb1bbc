"""The first look at d: its table, its words and its figure, on logprobs made by hand."""

import math

import pytest
import torch

from kit.difference import difference_figure, difference_text, token_table
from kit.measure import Measurement


def measurement(sampler, d, mask=None):
    sampler = torch.tensor([sampler])
    mask = torch.ones_like(sampler, dtype=torch.bool) if mask is None else torch.tensor([mask])
    return Measurement(sampler + torch.tensor([d]), sampler, mask)


def test_table_keeps_the_least_certain_tokens_in_their_order():
    lines = token_table(list("abcd"), [-0.1, -3.0, -0.2, -2.0], [-0.1, -2.5, -0.2, -2.0], most=2).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["2", "'b'"], ["4", "'d'"]]
    assert lines[1].split()[-1] == "0.5" and lines[2].split()[-1] == "0"


def test_table_refuses_columns_of_unequal_length():
    with pytest.raises(ValueError, match="zip"):
        token_table(["a", "b"], [-1.0], [-1.0, -2.0])


def test_text_counts_what_both_sides_scored():
    measured = measurement([-1.0, -2.0, math.nan, -4.0], [0.5, 0.0, 0.0, 9.0], mask=[True, True, True, False])
    assert difference_text({"float16": measured}) == (
        " float16: mean |d| 0.25 nats, largest 0.5, exactly equal in 50% of 2 tokens"
    )


def test_figure_draws_each_dtype_and_its_mean():
    made = {
        "float16": measurement([-1.0, -2.0, -0.5], [1e-4, 0.0, 2e-4]),
        "bfloat16": measurement([-1.0, -2.0, -0.5], [8e-4, -8e-4, 8e-4]),
    }
    both, size = difference_figure(made).axes
    assert [line.get_ydata().tolist() for line in both.lines[:1]] == [pytest.approx([-0.9999, -2.0, -0.4998])]
    assert {text.get_text() for text in size.texts} == {
        "float16: mean 1e-4", "bfloat16: mean 8e-4", "exactly equal",
    }  # fmt: skip


def test_figure_of_exact_agreement_can_be_drawn():
    figure = difference_figure({"float32": measurement([-1.0, -2.0], [0.0, 0.0])})
    figure.canvas.draw()
    assert figure.axes[1].get_ylim()[0] > 0
