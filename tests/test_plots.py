"""Figures and their words: values by hand, every kind of run that can come, and readability as numbers."""

import math
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from kit.plots import DTYPE_STYLE, PAPER, settings_differences, style_of, summary_text, training_figure
from kit.records import Run
from kit.summary import number, smooth, smooth_log

K3 = {"float32": [0.0, 1e-9], "float16": [1e-10, 1e-4], "bfloat16": [1e-8, 5e-3]}


def a_run(dtype: str, records: list[dict], name: str = "", **info) -> Run:
    info = {
        "precision": {"name": dtype, "expected_k3": K3[dtype]},
        "settings": {"max_grad_norm": 1.0, "learning_rate": 1e-5},
        "model": "tiny",
        "hardware": {"name": "a CPU", "free_gib": len(records)},
        "versions": {"torch": "2.13.0"},
        "status": "finished",
    } | info
    return Run(Path("runs") / (name or dtype), info, records, [])


def steps(*columns: tuple[str, list]) -> list[dict]:
    """Records from columns: steps(("kl", [0.1, 0.2])) has two steps."""
    count = len(columns[0][1])
    return [{"step": 1 + i} | {key: values[i] for key, values in columns} for i in range(count)]


FP16 = steps(
    ("accuracy", [0.2, 0.4, 0.6, 0.8, 1.0]),
    ("reward", [0.1, 0.2, 0.3, 0.4, 0.5]),
    ("grad_norm", [None, 0.5, 0.0, 2.0, 1.0]),
    ("kl", [0.0, 0.001, 0.002, 0.003, 0.004]),
    ("mismatch/k3", [1e-8, 2e-8, 3e-8, 2e-4, 5e-8]),
    ("scaler/scale", [32768.0, 32768.0, 32768.0, 32768.0, 65536.0]),
    ("scaler/skipped", [1, 0, 0, 0, 0]),
    ("speed/tokens_per_s", [100.0, 200.0, 300.0, 400.0, 500.0]),
)
BF16 = steps(("accuracy", [0.2] * 5), ("mismatch/k3", [3e-6] * 5), ("completion_length", [50.0] * 5))


def drawn(figure, title: str):
    """The axes with this title."""
    return next(ax for ax in figure.axes if ax.get_title(loc="left") == title)


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def test_smoothing_is_the_weighted_mean_it_says():
    assert smooth([0.0, 0.0, 1.0], half_life=1.0) == [0.0, 0.0, pytest.approx(1 / 1.75)]
    assert smooth([2.0, None, 4.0], half_life=1.0) == [2.0, None, pytest.approx((0.25 * 2 + 4) / 1.25)]
    assert smooth([5.0] * 9, half_life=3.0) == pytest.approx([5.0] * 9)
    assert smooth([], half_life=3.0) == []
    assert smooth_log([1.0, 100.0, 0.0], half_life=1.0) == [1.0, pytest.approx(100 ** (2 / 3)), None]


def test_panels_show_the_recorded_values():
    figure = training_figure(a_run("float16", FP16), half_life=1.0)
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        "Accuracy", "Gradient norm", "KL to base", "Mismatch k3", "Loss scale", "Speed",
    ]  # fmt: skip
    points, line, _ = drawn(figure, "Accuracy").lines
    assert points.get_xydata().tolist() == [[1, 0.2], [2, 0.4], [3, 0.6], [4, 0.8], [5, 1.0]]
    assert line.get_ydata() == pytest.approx(smooth([0.2, 0.4, 0.6, 0.8, 1.0], 1.0))
    assert drawn(figure, "Loss scale").lines[0].get_drawstyle() == "steps-post"
    assert [ax.get_yscale() for ax in figure.axes] == ["linear", "log", "linear", "log", "log", "linear"]


def test_the_gradient_norm_shows_clipping_zeros_and_skipped_steps():
    ax = drawn(training_figure(a_run("float16", FP16), half_life=1.0), "Gradient norm")
    points, line, _, clip, skipped, zeros = ax.lines
    assert points.get_xydata().tolist() == [[2, 0.5], [4, 2.0], [5, 1.0]]  # neither the skipped step nor the zero
    assert line.get_ydata() == pytest.approx(smooth_log([0.5, 2.0, 1.0], 1.0))
    assert set(clip.get_ydata()) == {1.0}
    assert (list(skipped.get_xdata()), skipped.get_marker()) == ([1], "x")
    assert (list(zeros.get_xdata()), zeros.get_marker()) == ([3], "v")
    assert "unclipped; x: skipped update; \u25bc: zero" in [text.get_text() for text in ax.texts]


def test_the_expected_range_is_inside_the_axes():
    for run in (
        a_run("float16", FP16),
        a_run("bfloat16", BF16),
        a_run("float32", steps(("mismatch/k3", [0.0, 1e-14]))),
    ):
        ax = drawn(training_figure(run), "Mismatch k3")
        low, high = ax.get_ylim()
        bar = next(line for line in ax.lines if line.get_linewidth() == 4)
        assert low <= min(bar.get_ydata()) < max(bar.get_ydata()) <= high
        assert max(bar.get_ydata()) == K3[run.info["precision"]["name"]][1] or max(bar.get_ydata()) == high


def test_the_panels_follow_what_was_recorded():
    figure = training_figure(a_run("bfloat16", steps(("reward", [1.0]), ("completion_length", [50.0]))))
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles == ["Reward", "Gradient norm", "KL to base", "Mismatch k3", "Completion length", "Speed"]
    assert texts(figure).count("not recorded") == 4
    mixed = training_figure([a_run("bfloat16", BF16), a_run("float16", FP16)])
    assert drawn(mixed, "Loss scale").lines[0].get_color() == style_of([a_run("float16", [])], 0)["color"]


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [a_run("float16", [])],
        [a_run("float16", FP16[:1])],
        [a_run("float16", [{"step": 7}])],
        [a_run("float16", FP16), a_run("float16", [], name="empty"), a_run("bfloat16", BF16)],
        [a_run("float16", steps(("grad_norm", [0.0]), ("mismatch/k3", [0.0]), ("kl", [-1e-9])))],
        [Run(Path("runs/bare"), {}, FP16, [])],
        [a_run("float16", FP16, name=f"a-rather-long-name-for-a-run-{i}", seed=i, note=i) for i in range(5)],
        [a_run("bfloat16", steps(("grad_norm", [1e-7, 3e5]), ("mismatch/k3", [1e-3, 4e7]), ("kl", [0.1, 6.8e9])))],
    ],
    ids=["none", "empty", "one step", "a step without values", "mixed", "zeros", "no info", "many", "collapse"],
)
def test_every_kind_of_run_is_drawn_inside_the_figure(runs):
    figure = training_figure(runs)
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    boxes = [ax.get_tightbbox() for ax in figure.axes]  # with everything drawn in and around the axes
    boxes += [part.get_window_extent() for part in [*figure.texts, *figure.legends]]
    assert min(min(box.x0, box.y0) for box in boxes) >= 0
    assert max(box.x1 for box in boxes) <= width
    assert max(box.y1 for box in boxes) <= height
    assert summary_text(runs)


def test_titles_and_values_do_not_run_into_each_other():
    runs = [a_run(dtype, steps(*[(key, [1.234e-7]) for key in ("kl", "mismatch/k3", "grad_norm")]))
            for dtype in ("float16", "bfloat16")]  # fmt: skip
    figure = training_figure(runs)
    figure.canvas.draw()
    for ax in figure.axes:
        boxes = [text.get_window_extent() for text in ax.texts if text.get_position()[0] <= 0 and text.get_text() != ""]
        boxes += [ax.title.get_window_extent(), ax._left_title.get_window_extent()]
        boxes = [box for box in boxes if box.width > 1]
        assert not [1 for a, b in combinations(boxes, 2) if a.overlaps(b)], ax.get_title(loc="left")


def test_a_dtype_looks_the_same_everywhere_and_like_no_other():
    for part in ("color", "linestyle", "marker"):
        assert len({str(style[part]) for style in DTYPE_STYLE.values()}) == 3
    alone = style_of([a_run("bfloat16", [])], 0)
    assert style_of([a_run("float16", []), a_run("bfloat16", [])], 1) == alone
    again = style_of([a_run("bfloat16", []), a_run("bfloat16", [])], 1)
    assert again["color"] != alone["color"]
    assert (again["linestyle"], again["marker"]) == (alone["linestyle"], alone["marker"])


def linear(color: str) -> np.ndarray:
    rgb = np.array(to_rgb(color))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def test_colours_read_on_the_paper_and_in_colour_blindness():
    luminance = {name: linear(style["color"]) @ [0.2126, 0.7152, 0.0722] for name, style in DTYPE_STYLE.items()}
    paper = linear(PAPER) @ [0.2126, 0.7152, 0.0722]
    assert all((paper + 0.05) / (value + 0.05) >= 4.5 for value in luminance.values())  # WCAG AA, for text
    deuteranopia = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])
    protanopia = np.array(
        [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]
    )  # Machado et al. 2009
    for matrix in (np.eye(3), deuteranopia, protanopia):
        seen = {name: (matrix @ linear(style["color"])).clip(0, 1) ** (1 / 2.2) for name, style in DTYPE_STYLE.items()}
        assert all(np.linalg.norm(seen[a] - seen[b]) > 0.25 for a, b in combinations(seen, 2))


def test_the_figure_ignores_the_users_style():
    plain = training_figure(a_run("float16", FP16))
    with matplotlib.rc_context({"figure.facecolor": "black", "axes.facecolor": "black", "text.color": "white",
                                "axes.labelcolor": "white", "xtick.color": "white", "axes.edgecolor": "white",
                                "grid.color": "black", "lines.linewidth": 9}):  # fmt: skip
        styled = training_figure(a_run("float16", FP16))
    plain.canvas.draw()
    styled.canvas.draw()
    assert np.array_equal(np.asarray(plain.canvas.buffer_rgba()), np.asarray(styled.canvas.buffer_rgba()))


def test_pyplot_is_not_touched():
    code = "import sys, kit.plots; kit.plots.training_figure([]); print('matplotlib.pyplot' in sys.modules)"
    root = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True).stdout == "False\n"


def test_the_summary_says_the_numbers():
    assert summary_text(a_run("float16", FP16)).splitlines() == [
        "float16: float16, 5 steps, finished. tiny, a CPU, torch 2.13.0.",
        "  Accuracy: 0.2 at first, 1 at last (means of 1 step), share of completions right.",
        "  Gradient norm: median 0.75, highest 2 at step 4, above the clip norm 1 in 1 step; "
        "1 update skipped (step 1).",
        "  KL to base: 0 at first, 0.004 at last (means of 1 step), nats a token.",
        "  Mismatch k3: median 3e-8 nats a token, highest 2e-4 at step 4; expected of float16: 1e-10 to 1e-4, "
        "above it in 1 of 5 steps.",
        "  Loss scale: 32768 at first, 65536 at last, lowest 32768.",
        "  Speed: median 300 tokens a second.",
    ]
    assert summary_text(a_run("float16", [])).splitlines()[1] == "  No steps yet."
    assert summary_text([]) == "No runs."


def test_the_summary_compares_the_runs():
    lines = summary_text([a_run("bfloat16", BF16), a_run("float16", FP16)]).splitlines()
    assert lines[-2:] == [
        "Median mismatch k3: bfloat16 3e-6, float16 3e-8; bfloat16 is 100 x float16.",
        "The runs differ in dtype only.",
    ]


def test_first_and_last_are_means_over_a_fifth_of_the_run():
    run = a_run("float16", steps(("kl", [float(i) for i in range(20)])))
    assert "  KL to base: 1.5 at first, 17.5 at last (means of 4 steps), nats a token." in summary_text(run)


def test_what_differs_beyond_dtype_is_listed_and_warned_of():
    fp16 = a_run("float16", FP16, "a", settings={"learning_rate": 1e-5, "fp16": True, "beta": 0.0}, seed=1)
    bf16 = a_run("bfloat16", BF16, "b", settings={"learning_rate": 1e-5, "bf16": True, "beta": 0.0}, seed=1)
    assert settings_differences([fp16, bf16]) == {}
    other = a_run("bfloat16", BF16[:3], "c", settings={"learning_rate": 2e-5, "bf16": True}, seed=1)
    assert settings_differences([fp16, other]) == {
        "settings.learning_rate": {"a": 1e-5, "c": 2e-5},
        "settings.beta": {"a": 0.0, "c": None},
    }
    assert summary_text([fp16, other]).splitlines()[-1] == (
        "Warning: the runs differ in more than dtype: learning_rate (a 1e-05, c 2e-05); beta (a 0.0, c None); "
        "steps recorded (a 5, c 3)."
    )
    warning = "Warning: more than dtype differs: learning_rate, beta, steps recorded"
    assert warning in texts(training_figure([fp16, other]))
    assert not [text for text in texts(training_figure([fp16, bf16])) if "Warning" in text]


def test_a_setting_recorded_twice_is_listed_once():
    one, two = (a_run("float16", FP16, name, settings={"beta": beta}, train_settings={"beta": beta, "seed": beta})
                for name, beta in (("a", 0.0), ("b", 0.1)))  # fmt: skip
    assert list(settings_differences([one, two])) == ["settings.beta", "train_settings.seed"]


def test_runs_of_one_name_are_told_apart():
    one, two = a_run("float16", FP16, seed=1), a_run("float16", FP16, seed=2)
    two.path = Path("elsewhere/float16")
    assert settings_differences([one, two]) == {"seed": {"runs/float16": 1, "elsewhere/float16": 2}}


def test_numbers_are_short():
    values = [0.0, 1.0, -0.5, 0.00099, 0.001, 999.4, 1000.4, 65536.0, 1e6, 6.8e9, 1.999e-5, math.pi]
    told = ["0", "1", "-0.5", "9.9e-4", "0.001", "999", "1000", "65536", "1e6", "6.8e9", "2e-5", "3.14"]
    assert [number(value) for value in values] == told
    assert number(123.4, 2) == "123"
