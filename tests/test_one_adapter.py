"""One adapter's arithmetic in the engine equals vLLM's own, and leaves rows without an adapter alone."""

from types import SimpleNamespace

import pytest
import torch
from engines import with_adapter

from kit.sampler import SamplingSettings

SLICES = (64, 32, 32)  # outputs of a packed projection's parts


@pytest.fixture(scope="module")
def wrapper():
    from kit.engine import import_vllm

    import_vllm()
    from vllm.lora.punica_wrapper.punica_selector import get_punica_wrapper

    return get_punica_wrapper(256, 32, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_prefill", [True, False])
@pytest.mark.parametrize("ids", [(1,) * 12, (1,), (0,) * 12, (0, 1) * 6, (1, 2, 2) * 4, (2,) * 3])
def test_each_row_gets_its_adapters_product(wrapper, ids, is_prefill, dtype):
    """`ids`: the adapter of each row, 0 for none; adapter 1 is in slot 0 and adapter 2 in slot 1."""
    generator = torch.Generator().manual_seed(0)
    slots = max(1, *ids, 0)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    x, y = random(len(ids), 48), random(len(ids), sum(SLICES))
    a = [random(slots, 1, 8, 48) for _ in SLICES]
    b = [random(slots, 1, size, 8) for size in SLICES]
    expected = y.double()
    for row, adapter in enumerate(ids):
        if adapter:
            parts = [
                bi[adapter - 1, 0].double() @ (ai[adapter - 1, 0].double() @ x[row].double())
                for ai, bi in zip(a, b, strict=True)
            ]
            expected[row] += torch.cat(parts)
    mapping = SimpleNamespace(index_mapping=ids, prompt_mapping=ids, is_prefill=is_prefill)
    wrapper.update_metadata(mapping, [1, 2][:slots], slots, 32)
    wrapper.add_lora_linear(y, x, a, b, 1.0, SLICES)
    # the product reaches 60; float32 sums are of 384 terms
    torch.testing.assert_close(
        y.double(), expected, rtol=0, atol=(512 if dtype == torch.float32 else 64) * torch.finfo(dtype).eps
    )


@pytest.mark.engine("float32")
def test_completions_without_the_adapter_are_the_base_models(model, engines):
    """vLLM 0.31's own way would add the adapter of the last slot to them while it decodes."""
    sampler, ids = model.kit.sampler, engines.tokenizer(["Q: 12+45=?\nA: "] * 4).input_ids
    settings, seeds = SamplingSettings(24), [1, 2, 3, 4]

    def logprobs(completions):
        return [value for completion in completions for value in completion.logprobs]

    sampler.drop_adapter()  # of an earlier test
    before = sampler.generate(ids, settings, seeds)
    sampler.load_adapter(with_adapter(model, spread=0.3))
    changed = sampler.generate(ids, settings, seeds)
    sampler.drop_adapter()
    after = sampler.generate(ids, settings, seeds)
    assert [c.token_ids for c in after] == [c.token_ids for c in before]
    assert logprobs(after) == pytest.approx(logprobs(before), abs=1e-4)
    assert logprobs(changed) != pytest.approx(logprobs(before), abs=1e-2)
