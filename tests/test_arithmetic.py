"""The addition task: problems, splits, text, parser, reward, tokenizer, dataset."""

import random
from itertools import islice

import pytest

from kit import arithmetic
from kit.arithmetic import (
    CAREFUL,
    DIGITS,
    GUESS_SHARE,
    QUICK,
    SPLIT_PERCENT,
    Problem,
    answer_of,
    build_tokenizer,
    completion_text,
    correct_answer,
    make_dataset,
    prompt_text,
    stream,
)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def test_splits_are_disjoint_and_have_the_stated_sizes():
    drawn = {split: set(islice(stream(split, random.Random(1)), 4000)) for split in SPLIT_PERCENT}
    for split, problems in drawn.items():
        assert {problem.split for problem in problems} == {split}
    assert not drawn["rl"] & drawn["pretrain"] and not drawn["rl"] & drawn["test"]
    assert not drawn["test"] & drawn["pretrain"]
    everything = [Problem(a, b).split for a in range(10, 100) for b in range(10, 100)]
    for split, percent in SPLIT_PERCENT.items():
        assert everything.count(split) / len(everything) == pytest.approx(percent / 100, abs=0.02)


def test_a_problem_and_its_mirror_share_a_split():
    rng = random.Random(2)
    pairs = [(rng.randrange(100, 1000), rng.randrange(100, 1000)) for _ in range(2000)]
    assert all(Problem(a, b).split == Problem(b, a).split for a, b in pairs)


def test_stream_repeats_for_a_seed_and_differs_between_seeds():
    first, again, other = (list(islice(stream("rl", random.Random(seed)), 50)) for seed in (3, 3, 4))
    assert first == again != other


def test_known_texts():
    problem = Problem(957, 68 + 100)
    assert prompt_text(problem) == "Q: 957+168=?\nA: "
    assert completion_text(problem, random.Random(0), CAREFUL) == (
        "<think>steps: 7+8+0=5c 5+6+1=2c 9+1+1=1c 1</think> 1125"
    )
    assert (problem.answer, problem.digits) == (1125, 3)


def test_careful_work_is_always_right():
    rng = random.Random(5)
    for problem in islice(stream("pretrain", rng), 5000):
        assert answer_of(completion_text(problem, rng, CAREFUL)) == problem.answer


def test_a_dropped_carry_gives_the_carryless_sum():
    always_drops = arithmetic.Style(label="quick: ", separator=",", share=0.0, slip=0.0, drop_carry=1.0)
    text = completion_text(Problem(957, 168), random.Random(0), always_drops)
    assert text == "<think>quick: 7+8+0=5c,5+6+0=1c,9+1+0=0c</think> 15"


def test_corpus_holds_the_stated_mixture():
    rng = random.Random(6)
    texts = [completion_text(problem, rng) for problem in islice(stream("pretrain", rng), 6000)]
    for opening, share in (("steps: ", CAREFUL.share), ("quick: ", QUICK.share), ("i guess", GUESS_SHARE)):
        found = sum(text.startswith(f"<think>{opening}") for text in texts) / len(texts)
        assert found == pytest.approx(share, abs=0.03)
    assert CAREFUL.share + QUICK.share + GUESS_SHARE == pytest.approx(1.0)


def test_quick_work_and_guesses_err_as_often_as_their_rates_say():
    rng = random.Random(7)
    problems = list(islice(stream("pretrain", rng), 6000))
    quick = [answer_of(completion_text(problem, rng, QUICK)) == problem.answer for problem in problems]
    # Two or three unslipped digits (0.85 each) and a carry kept (0.65) at about half of the places: 0.43.
    assert sum(quick) / len(quick) == pytest.approx(0.43, abs=0.04)
    guesses = [(text, problem) for problem in problems if "guess" in (text := completion_text(problem, rng))]
    right = sum(answer_of(text) == problem.answer for text, problem in guesses) / len(guesses)
    assert right == pytest.approx(arithmetic.GUESS_RIGHT, abs=0.03)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>steps: 4+7+0=1c 2+6+1=9</think> 91", 91),
        ("</think>91", 91),
        ("<think>a</think> 5 <think>b</think> 91\n", 91),
        ("</think> 91.", 91),
        ("</think> -91", -91),
        ("</think> 091", 91),
        ("", None),
        ("91", None),
        ("<think>91", None),
        ("<think>91</think>", None),
        ("</think> 91</think>", None),
        ("</think> 91 92", None),
        ("</think> 9 1", None),
        ("</think> 91 or 92", None),
        ("</think> 91.5", None),
        ("</think> --91", None),
        ("</think> \u0669\u0661", None),
        ("</think> " + "9" * 5000, None),
    ],
)
def test_answer_of(text, expected):
    assert answer_of(text) == expected


def test_answer_of_refuses_chat_messages():
    with pytest.raises(TypeError, match="type list cannot be read: expected plain text"):
        answer_of([{"role": "assistant", "content": "</think> 91"}])


def test_reward_is_one_only_for_the_exact_answer():
    completions = ["</think> 91", "</think> 92", "91", "</think> 1125"]
    assert correct_answer(completions, ["91", "91", "91", "1125"], digits=[2, 2, 2, 3]) == [1.0, 0.0, 0.0, 1.0]


def test_reward_refuses_unequal_columns():
    with pytest.raises(ValueError):
        correct_answer(["</think> 91"], ["91", "92"])


def test_dataset_rows_are_right_distinct_and_from_their_split():
    data = make_dataset("rl", 3000, seed=0)
    assert data.column_names == ["prompt", "answer", "digits"]
    assert len(set(data["prompt"])) == 3000
    for prompt, answer, digits in zip(data["prompt"], data["answer"], data["digits"], strict=True):
        a, b = map(int, prompt.removeprefix("Q: ").removesuffix("=?\nA: ").split("+"))
        assert (Problem(a, b).split, str(a + b), len(str(a)), len(str(b))) == ("rl", answer, digits, digits)
    assert data["digits"].count(2) / 3000 == pytest.approx(1 / len(DIGITS), abs=0.05)


def test_dataset_repeats_for_a_seed_and_differs_between_seeds():
    first, again, other = (make_dataset("test", 64, seed=seed)["prompt"] for seed in (0, 0, 1))
    assert list(first) == list(again) != list(other)


def test_dataset_goes_on_when_the_short_problems_are_used_up():
    data = make_dataset("test", 2000, seed=0)
    short = sum(Problem(a, b).split == "test" for a in range(10, 100) for b in range(10, 100))
    assert data["digits"].count(2) == short < 1000
    assert len(set(data["prompt"])) == 2000


@pytest.mark.parametrize("size", [0, -3, 10**6])
def test_dataset_refuses_impossible_sizes(size):
    available = sum(len(arithmetic._pool("test", digits)) for digits in DIGITS)
    with pytest.raises(ValueError, match=f"dataset of {size} problems.* between 1 and {available}"):
        make_dataset("test", size, seed=0)


def test_unknown_split_is_refused_with_the_valid_ones():
    message = "unknown split 'train': expected one of 'pretrain', 'rl', 'test'"
    with pytest.raises(ValueError, match=message):
        make_dataset("train", 8, seed=0)
    with pytest.raises(ValueError, match=message):
        next(stream("train", random.Random(0)))


def test_tokenizer_round_trip_one_id_a_character(tokenizer):
    rng = random.Random(8)
    for problem in islice(stream("pretrain", rng), 200):
        text = prompt_text(problem) + completion_text(problem, rng)
        ids = tokenizer(text).input_ids
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
    every_character = "".join(arithmetic.CHARACTERS)
    assert tokenizer(every_character).input_ids == list(range(3, 64))
    assert tokenizer.decode(list(range(3, 64))) == every_character


def test_tokenizer_pads_left_and_knows_its_special_tokens(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 64
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    batch = tokenizer(["12", "1234<eos>"], padding=True)
    assert batch.input_ids == [[0, 0, 0, 4, 5], [4, 5, 6, 7, 1]]
    assert batch.attention_mask == [[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]]
    assert tokenizer("1\u00d72").input_ids == [4, 2, 5]
