"""A real engine built with cascade attention off, and its memory against the plan."""

import json

import pytest

from kit.attention import engine_arguments
from kit.cards import lookup
from kit.memory import Settings, adapter_slot_bytes, base_bytes, plan_memory
from kit.shapes import shape_of

RANK, LENGTH = 8, 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random Qwen3 with a tokenizer, as a model folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from kit.arithmetic import build_tokenizer

    path = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, max_position_embeddings=128,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.engine("float32")
def test_the_switch_reaches_a_real_engine_and_its_adapter_slots_are_the_planned_ones(folder):
    from kit import FastLanguageModel
    from kit.sampler import VLLMSampler

    arguments = engine_arguments("0.10.2", (8, 0))
    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=LENGTH, dtype="float32", max_lora_rank=RANK, max_num_seqs=2,
        vllm_arguments=arguments,
    )  # fmt: skip
    sampler = model.kit.sampler
    try:
        assert isinstance(sampler, VLLMSampler)
        config = sampler.llm.llm_engine.vllm_config
        assert config.model_config.disable_cascade_attn is arguments["disable_cascade_attn"] is True
        settings = Settings(shape_of(folder), lookup("CPU"), "float32", RANK, LENGTH, shared=False)
        held = sampler.llm.apply_model(_held)[0]
        assert held["adapter slots"] == adapter_slot_bytes(settings)
        assert base_bytes(settings.model, "float32") == sum(p.nbytes for p in model.parameters())
        assert plan_memory(settings).part("sampler adapter").bytes == held["adapter slots"]
    finally:
        sampler.close()


def _held(engine_model) -> dict[str, int]:
    """Runs inside the engine: bytes of the buffers that one adapter is stacked into."""
    modules = [module for module in engine_model.modules() if hasattr(module, "lora_a_stacked")]
    stacks = [t for module in modules for t in (*_each(module.lora_a_stacked), *_each(module.lora_b_stacked))]
    return {"adapter slots": sum(tensor.nbytes for tensor in stacks)}


def _each(stacked) -> tuple:
    return stacked if isinstance(stacked, tuple) else (stacked,)


@pytest.mark.engine("float32")
@pytest.mark.parametrize("off", [True, False])
def test_vllm_takes_the_switch_either_way(folder, off):
    """The CPU platform forces it on later, so the configuration is read before a platform touches it."""
    from kit.engine import import_vllm

    import_vllm()
    from vllm.engine.arg_utils import EngineArgs

    arguments = engine_arguments("0.31.0", (8, 0), override=off)
    config = EngineArgs(model=str(folder), max_model_len=LENGTH, dtype="float32", **arguments).create_model_config()
    assert config.disable_cascade_attn is off


def test_the_folder_is_what_the_test_says(folder):
    config = json.loads((folder / "config.json").read_text())
    assert shape_of(folder).hidden == config["hidden_size"] == 64
