"""What only a GPU shows: base weights once, the adapter's kernel, memory that comes back. `pytest tests/gpu`."""

import pytest
import torch
from engines import with_adapter

from kit.fused_adapter import FusedLayer, add_low_rank
from kit.loading import FastLanguageModel, close_current
from kit.probe import SyncProbe, disagreement
from kit.process_memory import used_memory_gib
from kit.sampler import SamplingSettings
from kit.shared_weights import addresses, named_views

pytestmark = pytest.mark.gpu
SETTINGS = SamplingSettings(24)
PROMPT = "Q: 12+45=?\nA: "


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 16, 33, 300])
@pytest.mark.parametrize("slices", [(64,), (128, 64, 64), (96, 96), (4096, 1024, 1024)])
def test_the_kernel_adds_each_parts_product_and_leaves_other_rows_alone(slices, tokens, dtype):
    torch.manual_seed(0)
    outputs, rank = sum(slices), 16
    both = torch.randn(tokens, outputs + rank * len(slices), device="cuda").to(dtype)
    b = torch.randn(outputs, rank, device="cuda").to(dtype)
    indices = torch.arange(512, device="cuda") % 3 - 1  # every third row has no adapter
    y, low = both[:, :outputs].double(), both[:, outputs:].double().split(rank, dim=1)
    added = torch.cat([z @ part.double().T for z, part in zip(low, b.split(list(slices)), strict=True)], dim=1)
    expected = y + added * (indices[:tokens, None] >= 0)
    found, eps = add_low_rank(both, b, indices, slices), torch.finfo(dtype).eps
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=4 * eps, atol=64 * eps)


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def loaded(request):
    """(base model, tokenizer) of `tiny`, its engine shared."""
    yield FastLanguageModel.from_pretrained(
        "tiny", dtype=request.param, max_seq_length=128, max_lora_rank=16, gpu_memory_utilization=0.2
    )
    close_current()


def test_the_trainers_weights_are_the_samplers(loaded):
    model, _ = loaded
    assert model.kit.shared_weights.startswith("shared")
    views = model.kit.sampler.llm.apply_model(named_views)[0]
    assert addresses(model) <= {view.untyped_storage().data_ptr() for view in views.values()}
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_every_projection_of_the_engine_is_fused(loaded):
    model, _ = loaded
    (layers,) = model.kit.sampler.llm.apply_model(
        lambda engine: [getattr(m, "kit_fused", None) for m in engine.modules() if hasattr(m, "lora_a_stacked")]
    )
    projections = [layer for layer in layers if isinstance(layer, FusedLayer)]
    assert len(projections) == 4 * model.config.num_hidden_layers


def test_completions_follow_the_adapter_and_are_the_trainers(loaded):
    model, tokenizer = loaded
    sampler, ids = model.kit.sampler, tokenizer([PROMPT] * 8).input_ids
    before = sampler.generate(ids, SETTINGS, list(range(8)))
    baseline = disagreement(model, sampler, [*ids[0], *before[0].token_ids], model.kit.precision)
    policy = with_adapter(model, spread=0.1)
    sampler.load_adapter(policy)
    changed = sampler.generate(ids, SETTINGS, list(range(8)))
    found = disagreement(policy, sampler, [*ids[0], *changed[0].token_ids], model.kit.precision)
    sampler.drop_adapter()
    after = sampler.generate(ids, SETTINGS, list(range(8)))
    assert [c.token_ids for c in after] == [c.token_ids for c in before]
    assert [c.logprobs for c in changed] != [c.logprobs for c in before]
    assert 0 < found <= SyncProbe(model.kit.precision, baseline).limit


def test_memory_comes_back():
    close_current()
    torch.zeros(1, device="cuda")
    used = []
    for dtype in ("float16", "bfloat16", "float16"):
        FastLanguageModel.from_pretrained("tiny", dtype=dtype, max_seq_length=128, gpu_memory_utilization=0.2)
        close_current()
        used.append(used_memory_gib())
    assert max(used) - min(used) < 0.3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_four_bit_weights_agree_in_the_contracts_dtype(dtype):
    """In vLLM's own bfloat16 arithmetic the float16 contract would be off by its factor of eight."""
    pytest.importorskip("bitsandbytes")
    model, tokenizer = FastLanguageModel.from_pretrained(
        "tiny", dtype=dtype, max_seq_length=128, max_lora_rank=16, gpu_memory_utilization=0.2, load_in_4bit=True
    )
    stored = {p.dtype for p in model.parameters()}
    assert stored == {torch.uint8, getattr(torch, dtype)}
    sampler, ids = model.kit.sampler, tokenizer([PROMPT] * 8).input_ids
    policy = with_adapter(model, spread=0.1)
    sampler.load_adapter(policy)
    completion = sampler.generate(ids, SETTINGS, list(range(8)))[0]
    found = disagreement(policy, sampler, [*ids[0], *completion.token_ids], model.kit.precision)
    assert 0 < found < 4 * model.kit.precision.unit_roundoff
    close_current()
