"""Tasks: where questions come from, what is dropped, that nothing is in both parts, and how prompts are written."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.arithmetic import Problem, build_tokenizer, correct_answer
from kit.errors import ArgumentError, KitError
from kit.evaluation import Evaluation
from kit.task_data import DataNotFound, last_boxed, source_of
from kit.task_gym import parse as parse_gym
from kit.task_lesson import evaluation_table, math_settings, reward_table
from kit.task_setup import prepare
from kit.tasks import is_held_out, load_task, normal, split, with_prompts, worked
from kit.templates import BUNDLED, PLAIN, Tags, chat_template, rendered, set_template

SUMS = [{"q": f"{a}+{b}=?", "a": str(a + b), "w": f"steps: {a}+{b}", "hard": a > 14} for a in range(10, 20)
        for b in range(10, 14)]  # fmt: skip


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ---- parts


questions = st.text(alphabet="abc 1+\n", min_size=1, max_size=6)
rows = st.lists(st.fixed_dictionaries({"question": questions, "answer": st.text(alphabet="12 ", max_size=2)}))


@given(rows, st.none() | rows, st.integers(0, 100))
def test_no_question_is_in_both_parts_or_twice_and_none_is_lost_without_a_note(given_rows, test_rows, percent):
    try:
        train, test, notes = split(given_rows, percent, test_rows)
    except ArgumentError as error:
        assert "expected at least 2" in str(error)
        return
    found = [normal(row["question"]) for row in train + test]
    assert len(found) == len(set(found))
    assert all(row["question"].strip() and row["answer"].strip() for row in train + test)
    assert train and test
    everything = len(given_rows) + len(test_rows or [])
    assert (len(found) < everything) == bool(notes)


def test_where_a_question_belongs_does_not_depend_on_the_others_or_on_the_seed():
    rows = [{"question": f"what is {n}?", "answer": "1"} for n in range(400)]
    _, test, _ = split(rows, 10)
    _, fewer, _ = split(rows[:200], 10)
    assert [row for row in test if row in rows[:200]] == fewer
    assert 20 <= len(test) <= 60  # 10 % of 400, by a hash
    assert [row for row in rows if is_held_out(row["question"], 10)] == test


def test_the_seed_draws_the_training_problems_and_leaves_the_held_out_ones(tmp_path):
    path = write(tmp_path / "sums.jsonl", SUMS)
    one, again, other = (
        load_task(path, question="q", answer="a", size=10, held_out=3, seed=seed) for seed in (0, 0, 1)
    )
    assert list(one.train["question"]) == list(again.train["question"]) != list(other.train["question"])
    assert list(one.held_out["question"]) == list(other.held_out["question"])
    assert len(one.train) == 10 and len(one.held_out) == 3


def test_a_test_split_of_its_own_is_kept_clean_of_training_questions():
    train = [{"question": q, "answer": "1"} for q in ("a", "b", "c")]
    test = [{"question": q, "answer": "1"} for q in ("B ", "d")]
    kept, held_out, notes = split(train, 50, test)
    assert [row["question"] for row in kept] == ["a", "c"] and held_out == test
    assert notes == ["1 training questions are in the test split and left out"]


# ---- files


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_files_of_each_kind_give_the_same_task(tmp_path, suffix):
    from datasets import Dataset

    path = tmp_path / f"sums ü.{suffix}"
    table = Dataset.from_list([*SUMS, {"q": "wie groß?", "a": "ß 1", "w": "", "hard": False}])
    {"jsonl": table.to_json, "parquet": table.to_parquet, "csv": table.to_csv}[suffix](str(path))
    task = load_task(str(path), question="q", answer="a", solution="w", level="hard", size=100, held_out=100)
    found = {row["question"]: row["answer"] for part in (task.train, task.held_out) for row in part}
    assert found == {row["q"]: row["a"] for row in SUMS} | {"wie groß?": "ß 1"}
    assert set(task.train["level"]) == {"True", "False"}
    assert len(task.notes) == 2 and "100 were asked for" in task.notes[0]


def test_a_folder_that_datasets_saved_is_read(tmp_path):
    from datasets import Dataset

    Dataset.from_list(SUMS).save_to_disk(str(tmp_path / "saved"))
    task = load_task(str(tmp_path / "saved"), question="q", answer="a", size=5, held_out=2)
    assert len(task.train) == 5 and task.correct_answer(["<answer>1</answer>"], answer=["1.0"]) == [1.0]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"question": "qu", "answer": "a"}, "There is no column 'qu' for the question; there are q, a, w, hard"),
        ({"question": "q", "answer": "b"}, "There is no column 'b' for the answer; there are q, a, w, hard"),
        ({"answer": "a"}, "Which column holds the question? Give --question COLUMN; there are q, a, w, hard"),
        ({"question": "q", "answer": "a", "solution": "s"}, "no column 's' for the solution"),
    ],
)
def test_a_missing_column_is_named_with_those_there_are(tmp_path, columns, said):
    with pytest.raises(ArgumentError, match=said.replace("?", r"\?")):
        load_task(write(tmp_path / "sums.jsonl", SUMS), **columns)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (SUMS[:1], "There are 1 different questions"),
        ([SUMS[0]] * 9, "There are 1 different questions with an answer; expected at least 2.* 8 of 9 rows repeat"),
        ([{"q": "a", "a": ""}, {"q": "b", "a": " "}, {"q": "c", "a": "1"}], "2 of 3 rows without"),
        ([{"q": "a", "a": None}, {"q": None, "a": "1"}], "There are 0 different questions"),
    ],
)
def test_too_little_to_divide_is_said_with_what_was_dropped(tmp_path, rows, said):
    with pytest.raises(ArgumentError, match=said):
        load_task(write(tmp_path / "few.jsonl", rows), question="q", answer="a")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.jsonl", None, "There is no file"),
        ("bad.jsonl", "{not json\n", "could not be read"),
        ("x.txt", "a", "no data"),
        ("empty.csv", "", "could not be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataNotFound, match=said) as error:
        load_task(str(tmp_path / name), question="q", answer="a")
    assert name in str(error.value) and isinstance(error.value, KitError)


def test_a_hub_set_that_cannot_be_had_says_what_to_do(monkeypatch):
    import datasets
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataNotFound, match=r"'openai/gsm8k'.*HF_HUB_OFFLINE is set.*--task FILE --question"):
        load_task("gsm8k")


def test_a_local_copy_of_a_known_set_is_read_by_its_columns(tmp_path):
    rows = [{"question": f"Tom has {n} eggs.", "answer": f"He has <<{n}={n}>>{n}.\n#### 1,{n:03}"} for n in range(30)]
    source = source_of("gsm8k")
    assert (source.name, source.held_out, source.final(rows[7]["answer"])) == ("openai/gsm8k", "test", "1007")
    task = load_task(write(tmp_path / "gsm8k.jsonl", rows), question="question", answer="answer", size=3, held_out=1)
    assert task.correct_answer(["<answer>5</answer>"], answer=["5"]) == [1.0]


def test_the_last_box_is_found_with_its_braces_balanced():
    assert last_boxed(r"\boxed{1} and \boxed{\frac{a}{b}}, so") == r"\frac{a}{b}"
    assert last_boxed(r"\boxed{never closed") == "never closed"
    assert last_boxed("none ") == "none"


# ---- reasoning-gym


def test_a_family_is_scored_by_its_own_rule():
    task = load_task("reasoning-gym:chain_sum:max_terms=3,max_digits=2", size=40, held_out=10, seed=5, tags=PLAIN)
    assert len(task.train) == 40 and len(task.held_out) == 10 and task.notes == ()
    row = task.held_out[0]
    assert row["level"] in {f"num_terms {terms}, num_digits {digits}" for terms in (2, 3) for digits in (1, 2)}
    given = [row["answer"], f"+0{row['answer']}.0".replace("+0-", "-0"), "no number", ""]
    columns = {name: [row[name]] * 4 for name in task.held_out.column_names}
    scores = task.correct_answer(given, **columns)
    assert scores[:2] == [1.0, 1.0] and max(scores[2:]) < 1


def test_both_parts_of_a_family_have_no_question_in_common_whatever_the_seed():
    parts = [load_task("reasoning-gym:chain_sum", size=60, held_out=20, seed=seed) for seed in (0, 1)]
    for train in parts:
        for test in parts:
            assert not set(map(normal, train.train["question"])) & set(map(normal, test.held_out["question"]))
    assert list(parts[0].train["question"]) != list(parts[1].train["question"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("chainsum", "no family 'chainsum'.*closest: chain_sum"),
        ("chain_sum:terms=3", "chain_sum has no option terms; it has min_terms, max_terms"),
        ("chain_sum:min_terms=9", "chain_sum cannot be made: AssertionError"),
        ("chain_sum:min_terms", "has no value"),
    ],
)
def test_a_family_that_cannot_be_made_is_said(name, said):
    with pytest.raises(ArgumentError, match=said):
        load_task(f"reasoning-gym:{name}")


def test_options_keep_their_type():
    assert parse_gym("reasoning-gym:x:a=1,b=0.5,c=True,d=word") == ("x", {"a": 1, "b": 0.5, "c": True, "d": "word"})


def test_an_answer_that_breaks_a_family_scores_nothing():
    task = load_task("reasoning-gym:countdown", size=8, held_out=2, tags=PLAIN)
    columns = {name: [task.train[0][name]] * 3 for name in task.train.column_names}
    assert max(task.correct_answer(["(" * 5000, "9**9**9**9", "\0"], **columns)) < 1


# ---- the bundled task


def test_the_bundled_task_rewards_as_the_bundled_reward():
    task = load_task("arithmetic", size=8, held_out=4)
    texts = ["<think>w</think> 91", "<think>w</think> 91 or 92", "91", "<think></think>", "</think> 91."]
    wanted = ["91"] * len(texts)
    assert task.correct_answer(texts, answer=wanted) == correct_answer(texts, wanted) == [1.0, 0.0, 0.0, 0.0, 1.0]
    for row in task.train:
        completion = worked(task, row["prompt"], row["solution"], row["answer"])
        assert completion.startswith("<think>steps: ")
        assert correct_answer([completion], [row["answer"]]) == [1.0]


# ---- prompts


def test_the_generation_prompt_opens_the_tag_and_the_ids_are_the_templates():
    tokenizer = build_tokenizer()
    assert set_template(tokenizer, BUNDLED) == "the kit's chat template (the model has none)"
    text = rendered(tokenizer, "24+67=?")
    assert text == "Q: 24+67=?\nA: <think>"
    messages = [{"role": "user", "content": "24+67=?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer(text).input_ids == ids
    assert tokenizer.decode(ids) == text
    assert rendered(tokenizer, "2+2=?", "be brief.") == "be brief.\n\nQ: 2+2=?\nA: <think>"


def test_a_template_of_the_models_own_stays_unless_it_is_to_be_replaced():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    assert set_template(tokenizer, Tags()) == "the model's own chat template"
    assert rendered(tokenizer, "2+2") == "2+2"
    assert set_template(tokenizer, Tags(), "kit") == "the kit's chat template"
    assert tokenizer.chat_template == chat_template(Tags())
    with pytest.raises(ArgumentError, match="template is 'mine'"):
        set_template(tokenizer, Tags(), "mine")


def test_a_template_that_is_tokenized_otherwise_than_its_text_is_refused_or_mended():
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<pad>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 0)])
    tokenizer.chat_template = "{{ '<pad>' + messages[0]['content'] }}"
    assert tokenizer(rendered(tokenizer, "2+2")).input_ids == [0, *build_tokenizer()("2+2").input_ids]
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(ArgumentError, match="not tokenized as the template does it"):
        rendered(tokenizer, "2+2")


def test_long_prompts_are_left_out_and_counted(tmp_path):
    rows = [{"q": "1" * (n + 1), "a": "1"} for n in range(50)]
    task = load_task(write(tmp_path / "long.jsonl", rows), question="q", answer="a", size=100, held_out=100)
    tokenizer = build_tokenizer()
    set_template(tokenizer, BUNDLED)
    cut = with_prompts(task, tokenizer, max_prompt_length=40)
    lengths = [len(ids) for part in (cut.train, cut.held_out) for ids in tokenizer(list(part["prompt"])).input_ids]
    assert max(lengths) == 40 and len(lengths) == 40 - len("Q: \nA: <think>")
    assert sum("longer than 40 tokens" in note for note in cut.notes) == 2
    with pytest.raises(ArgumentError, match=r"Every prompt .* max_prompt_length=3 .* Give --max-prompt-length 6\d"):
        with_prompts(task, tokenizer, max_prompt_length=3)


def test_a_worked_solution_does_not_open_a_tag_that_is_open(tmp_path):
    path = write(tmp_path / "sums.jsonl", SUMS)
    task = load_task(path, question="q", answer="a", solution="w", tags=Tags(), size=4, held_out=1)
    assert worked(task, "Q: 1\nA: <think>", "so", "2") == "so</think> <answer>2</answer>"
    assert worked(task, "Q: 1\nA: ", "so", "2") == "<think>so</think> <answer>2</answer>"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>a</think><answer> 4 </answer>", "4"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>4", None),
        ("4", None),
        ("<answer> </answer>", None),
    ],
)
def test_the_answer_is_what_the_last_tags_hold(text, answer):
    assert Tags().answer_of(text) == answer


# ---- what notebook 9 shows


def test_the_sums_file_is_a_task_of_worked_problems_outside_the_pre_training(tmp_path):
    settings = math_settings("tiny", "float16", 3, folder=tmp_path)
    prepared = prepare(settings)
    row = prepared.task.train[0]
    assert row["prompt"] == f"Q: {row['question']}\nA: <think>"
    completion = worked(prepared.task, row["prompt"], row["solution"], row["answer"])
    rewards = {f.__name__: f for f in prepared.rewards.functions}
    assert rewards["correct_answer"]([completion], answer=[row["answer"]]) == [1.0]
    assert rewards["exact_format"]([completion], prompts=[row["prompt"]]) == [1.0]
    a, b = map(int, row["question"].removesuffix("=?").split("+"))
    assert Problem(a, b).split == "rl" and len(prepared.task.held_out) == 64


def test_a_larger_model_gets_settings_that_fit_together():
    settings = math_settings("Qwen/Qwen3-4B-Base", "bfloat16", 100)
    assert (settings.task, settings.template) == ("gsm8k", "kit")
    assert settings.completions % settings.micro_batch == 0 and settings.tags == ""


def test_the_tables_say_what_was_given(tmp_path):
    prepared = prepare(math_settings("tiny", "float16", 3, folder=tmp_path))
    examples = {"right": "w</think> 91", "wrong": "w</think> 92", "bare": "91"}
    lines = reward_table(prepared.rewards, "Q: 24+67=?\nA: <think>", examples, "91").splitlines()
    assert lines[0].split() == ["correct_answer", "exact_format", "sum"]
    given = [line.split()[1:] for line in lines[1:]]
    assert given == [["1.00", "1.00", "1.10"], ["0.00", "1.00", "0.10"], ["0.00", "0.00", "0.00"]]
    one = Evaluation(2, 2, 0.5, 0.5, 0.5, 0.25, (1.0, 0.0), {1: 0.5, 2: 0.5}, 0.5, {"2": (1.0, 1), "3": (0.0, 1)})
    table = evaluation_table({"base": one, "GRPO": one})
    assert "0.500 ± 0.500" in table and "25.0%" in table
    assert table.splitlines()[-1].split() == ["level", "3", "(1)", "0.000", "0.000"]
