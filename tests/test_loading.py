"""Loading: every argument of the documented call is honoured, and every bad one refused before anything is closed."""

import shutil
from pathlib import Path

import pytest
import torch
from engines import MODEL, each_dtype, share_of_digits, with_adapter

from kit.errors import ArgumentError, KitError
from kit.loading import TARGET_MODULES, TINY, FastLanguageModel, ModelNotFound, close_current, resolve
from kit.precision import PrecisionError
from kit.sampler import SamplerClosed, VLLMSampler

# ---- get_peft_model: an argument a test ----


def adapters(policy) -> dict:
    """Name of each adapted module -> its PEFT layer."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in policy.named_modules() if isinstance(module, LoraLayer)}


@each_dtype
def test_adapters_are_float32_and_the_base_is_the_contracts(model, dtype):
    policy = with_adapter(model)
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in policy.parameters() if not p.requires_grad} == {getattr(torch, dtype)}
    assert all("lora_" in name for name, p in policy.named_parameters() if p.requires_grad)


@pytest.mark.engine("float32")
@pytest.mark.parametrize("r", [1, 5, 16])
def test_r_is_the_rank(model, r):
    for layer in adapters(with_adapter(model, r=r)).values():
        assert layer.lora_A["default"].weight.shape[0] == layer.lora_B["default"].weight.shape[1] == r


@pytest.mark.engine("float32")
@pytest.mark.parametrize(("rslora", "scaling"), [(False, 24 / 4), (True, 24 / 2)])
def test_lora_alpha_and_use_rslora_decide_the_scaling_on_both_sides(model, tokenizer, rslora, scaling):
    from kit.probe import disagreement

    policy = with_adapter(model, spread=0.1, r=4, lora_alpha=24, use_rslora=rslora)
    assert {layer.scaling["default"] for layer in adapters(policy).values()} == {scaling}
    model.kit.sampler.load_adapter(policy)
    ids = tokenizer("Q: 12+45=?\nA: <think>").input_ids
    assert disagreement(policy, model.kit.sampler, ids, model.kit.precision) < 1e-5


@pytest.mark.engine("float32")
@pytest.mark.parametrize("targets", [["q_proj"], ["gate_proj", "down_proj"], list(TARGET_MODULES)])
def test_target_modules_and_only_those_get_an_adapter(model, targets):
    names = {name.rpartition(".")[2] for name in adapters(with_adapter(model, target_modules=targets))}
    assert names == set(targets)


@pytest.mark.engine("float32")
def test_random_state_decides_the_start_and_the_start_is_the_base_model(engines, dtype, tokenizer):
    def first_a(seed):
        policy = with_adapter(engines.model(dtype), random_state=seed)
        return policy, next(p.detach() for n, p in policy.named_parameters() if "lora_A" in n)

    (policy, one), (_, same), (_, other) = first_a(1), first_a(1), first_a(2)
    assert torch.equal(one, same) and not torch.equal(one, other)
    ids = torch.tensor([tokenizer("Q: 12+45=?").input_ids])
    with torch.no_grad(), policy.disable_adapter():
        base = policy(ids).logits
    with torch.no_grad():
        assert torch.equal(policy(ids).logits, base)


@pytest.mark.engine("float32")
@pytest.mark.parametrize("given", [True, "unsloth", False])
def test_use_gradient_checkpointing_reaches_the_trainer(make_trainer, model, given):
    trainer = make_trainer(policy=with_adapter(model, use_gradient_checkpointing=given), max_steps=1)
    trainer.train()
    assert trainer.args.gradient_checkpointing is bool(given)
    assert trainer.model.get_base_model().is_gradient_checkpointing is bool(given)


@pytest.mark.engine("float32")
@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"lora_dropout": 0.1}, "lora_dropout is 0.1; expected 0"),
        ({"bias": "all"}, "bias is 'all'; expected 'none'"),
        ({"r": 0}, "rank r is 0"),
        ({"r": 17}, "ranks 1 to 16.* max_lora_rank=17"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head.* none on the output layer"),
        ({"target_modules": ["q_proj", "W_pack"]}, "W_pack.* that can are down_proj, gate_proj"),
    ],
)
def test_adapters_that_the_sampler_cannot_follow_are_refused(model, bad, named):
    before = [type(module) for module in model.modules()]
    with pytest.raises(ArgumentError, match=named):
        with_adapter(model, **bad)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.engine("float32")
def test_a_model_from_elsewhere_is_refused(model):
    del model.kit
    with pytest.raises(ArgumentError, match="carries no precision contract"):
        with_adapter(model)


# ---- from_pretrained: what is refused, and what a refusal leaves alone ----


@pytest.fixture
def folder(tmp_path):
    """A copy of the bundled model."""
    return shutil.copytree(TINY, tmp_path / "copy")


def test_names_resolve_to_folders(folder):
    assert resolve("tiny") == str(TINY)
    assert resolve(str(folder)) == str(folder)


@pytest.mark.parametrize(
    ("missing", "named"),
    [("config.json", "config.json"), ("tokenizer.json", "tokenizer"), ("model.safetensors", "weights")],
)
def test_a_folder_that_lacks_a_part_is_named_with_the_part(folder, missing, named):
    (folder / missing).unlink()
    with pytest.raises(ModelNotFound, match=f"{folder} has no .*Expected .*{named}"):
        FastLanguageModel.from_pretrained(str(folder), dtype="float32")


def test_a_folder_that_is_not_there_is_named():
    with pytest.raises(ModelNotFound, match=r"no folder \./nowhere"):
        FastLanguageModel.from_pretrained("./nowhere", dtype="float32")


@pytest.mark.engine("float32")
@pytest.mark.parametrize(
    ("bad", "error", "named"),
    [
        ({"dtype": "float8"}, PrecisionError, "Unknown dtype 'float8'"),
        ({"dtype": torch.int8}, PrecisionError, "Unknown dtype 'int8'"),
        ({"max_seq_length": 1}, ArgumentError, "max_seq_length is 1"),
        ({"max_seq_length": 4096}, ArgumentError, "max_seq_length is 4096, but this model's positions end at 2048"),
        ({"max_lora_rank": -1}, ArgumentError, "max_lora_rank is -1"),
        ({"max_lora_rank": 1024}, ArgumentError, "max_lora_rank is 1024"),
        ({"gpu_memory_utilization": 0}, ArgumentError, "gpu_memory_utilization is 0"),
        ({"gpu_memory_utilization": 1.1}, ArgumentError, "gpu_memory_utilization is 1.1"),
        ({"max_num_seqs": 0}, ArgumentError, "max_num_seqs is 0"),
        ({"load_in_4bit": True}, PrecisionError, "load_in_4bit=True"),
        ({"start": "slow"}, ArgumentError, "start is 'slow'; expected one of fast, compiled, eager"),
        ({"model_name": "./nowhere"}, ModelNotFound, "./nowhere"),
    ],
)
def test_a_call_that_cannot_work_says_why_and_leaves_the_loaded_model_alone(model, bad, error, named):
    with pytest.raises(error, match=named) as raised:
        FastLanguageModel.from_pretrained(**({"model_name": MODEL, "dtype": "float32", "max_seq_length": 64} | bad))
    assert isinstance(raised.value, KitError)
    assert not model.kit.sampler.is_closed


@pytest.mark.engine("float32")
def test_fast_generate_takes_and_gives_text(engines, dtype):
    """Through the public function: the shared fixtures build their models without it."""
    from kit.loading import _add_fast_generate
    from kit.sampler import SamplingSettings

    model = engines.model(dtype)
    _add_fast_generate(model, engines.tokenizer)
    model.kit.sampler.drop_adapter()
    one = model.fast_generate("Q: 12+45=?\nA: ", SamplingSettings(90), seeds=[1])
    many = model.fast_generate(["Q: 12+45=?\nA: ", "Q: 1+1=?\nA: "], SamplingSettings(90), seeds=[1, 2])
    assert len(one) == 1 and one[0] == many[0] and len(many) == 2
    assert "</think>" in one[0] and "<eos>" not in one[0]


# ---- from_pretrained: an argument a test, read back from two engines that differ in all of them ----


@pytest.fixture(scope="module")
def documented():
    """The call of the documentation."""
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=MODEL,
        max_seq_length=2048,
        load_in_4bit=False,
        fast_inference=True,
        max_lora_rank=32,
        gpu_memory_utilization=0.9,
        dtype=torch.float16,
    )
    yield model, tokenizer
    close_current()


@pytest.fixture(scope="module")
def other():
    """All arguments with other values, those the documentation leaves out too."""
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=str(TINY),
        max_seq_length=96,
        load_in_4bit=False,
        fast_inference=True,
        max_lora_rank=8,
        gpu_memory_utilization=1e-4,
        dtype="bfloat16",
        max_num_seqs=3,
        random_state=11,
        start="eager",
        vllm_arguments={"max_num_batched_tokens": 640},
    )
    yield model, tokenizer
    close_current()


def engine_config(model):
    return model.kit.sampler.llm.llm_engine.vllm_config


@pytest.mark.engine
def test_documented_call_fast_inference_samples_with_vllm(documented):
    assert isinstance(documented[0].kit.sampler, VLLMSampler)


@pytest.mark.engine
def test_documented_call_dtype_is_that_of_trainer_and_sampler(documented):
    model, _ = documented
    assert {p.dtype for p in model.parameters()} == {torch.float16}  # the checkpoint is bfloat16
    assert set().union(*model.kit.sampler.realised().values()) == {torch.float16}


@pytest.mark.engine
def test_documented_call_max_seq_length_is_the_engines(documented):
    assert engine_config(documented[0]).model_config.max_model_len == documented[0].kit.max_seq_length == 2048


@pytest.mark.engine
def test_documented_call_max_lora_rank_is_accepted_and_no_more(documented):
    model, _ = documented
    assert engine_config(model).lora_config.max_lora_rank == 32
    with pytest.raises(ArgumentError, match="ranks 1 to 32"):
        FastLanguageModel.get_peft_model(model, r=33)


@pytest.mark.engine
def test_documented_call_without_4_bit_keeps_every_weight(documented):
    from safetensors.torch import load_file

    model, _ = documented
    stored = load_file(TINY / "model.safetensors")
    assert all(torch.equal(model.get_parameter(name), value.half()) for name, value in stored.items())


@pytest.mark.engine
def test_documented_call_trains(documented, problems, tmp_path):
    from kit import GRPOConfig, GRPOTrainer

    model, tokenizer = documented
    model = FastLanguageModel.get_peft_model(model, r=32, lora_alpha=64, target_modules=list(TARGET_MODULES))
    arguments = GRPOConfig(
        output_dir=str(tmp_path / "run"), max_steps=2, learning_rate=1e-3, per_device_train_batch_size=8,
        num_generations=8, max_completion_length=24,
    )  # fmt: skip
    records = []
    GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=share_of_digits, args=arguments, train_dataset=problems,
        on_record=records.append,
    ).train()  # fmt: skip
    assert [record["step"] for record in records] == [1, 2]
    assert all(1e-6 < record["mismatch/abs_mean"] < 1e-2 for record in records)


@pytest.mark.engine
def test_loading_again_closes_the_engine_before(documented, other):
    assert documented[0].kit.sampler.is_closed
    with pytest.raises(SamplerClosed, match="Load the model again"):
        documented[0].kit.sampler.score([1, 2])
    assert not other[0].kit.sampler.is_closed


@pytest.mark.engine
def test_another_dtype_and_length(other):
    assert {p.dtype for p in other[0].parameters()} == {torch.bfloat16}
    assert set().union(*other[0].kit.sampler.realised().values()) == {torch.bfloat16}
    assert engine_config(other[0]).model_config.max_model_len == 96


@pytest.mark.engine
def test_another_max_lora_rank(other):
    assert engine_config(other[0]).lora_config.max_lora_rank == 8
    with pytest.raises(ArgumentError, match="ranks 1 to 8"):
        FastLanguageModel.get_peft_model(other[0], r=9)


@pytest.mark.engine
def test_gpu_memory_utilization_bounds_the_kv_cache(other):
    """On a CPU: that share of the free memory (here 1e-4 of some GiB; unbounded, this cache would take 1.4 MiB)."""
    import psutil

    size = engine_config(other[0]).cache_config.kv_cache_memory_bytes
    assert size <= 1.5e-4 * psutil.virtual_memory().total


@pytest.mark.engine
def test_max_num_seqs_and_the_engines_own_arguments(other):
    scheduler = engine_config(other[0]).scheduler_config
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (3, 640)


@pytest.mark.engine
def test_random_state_and_start(other):
    config = engine_config(other[0])
    assert config.model_config.seed == 11
    assert config.model_config.enforce_eager


@pytest.mark.engine
def test_closing_removes_what_the_sampler_wrote():
    model, _ = FastLanguageModel.from_pretrained(MODEL, max_seq_length=64, dtype="float32", max_lora_rank=16)
    sampler = model.kit.sampler
    sampler.load_adapter(with_adapter(model))
    written = Path(sampler._adapter_dir)
    assert written.exists()
    sampler.close()
    assert not written.exists()
    assert sampler.close() == 0.0


@pytest.mark.engine
def test_without_fast_inference_there_is_no_engine(capsys):
    from kit.transformers_sampler import TransformersSampler

    model, _ = FastLanguageModel.from_pretrained(MODEL, max_seq_length=64, dtype="float32", fast_inference=False)
    assert isinstance(model.kit.sampler, TransformersSampler)
    assert model.kit.sampler.model is model
    assert "Sampling with transformers, not vLLM" in capsys.readouterr().out
