"""Emulated formats: what is rounded and what comes back, on a hand-made model, the bundled one and a real engine."""

import pytest
import torch
from engines import MODEL

from kit.drawn_policy import load_trainer
from kit.emulation import add_rounding, emulated, emulated_sampler, rounded, save_rounded
from kit.errors import ArgumentError
from kit.formats import BFLOAT16, FLOAT16, FLOAT32, FloatFormat, round_tensor
from kit.loading import resolve
from kit.mantissa import fit
from kit.precision import Precision
from kit.teacher_forcing import Texts, sampler_scores, trainer_scores

FLOAT32_CONTRACT = Precision("float32")


def two_layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.SiLU(), torch.nn.Linear(5, 3))


def logprobs(model, ids):
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=ids, use_cache=False).logits, -1)


@pytest.fixture(scope="module")
def tiny():
    return load_trainer(resolve(MODEL), FLOAT32_CONTRACT)


@pytest.fixture(scope="module")
def texts(tiny):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 64, (6, 40), generator=generator).tolist()
    return Texts([row[:5] for row in ids], [row[5 : 20 + 4 * i] for i, row in enumerate(ids)])


def test_two_layers_are_computed_as_by_hand():
    model, form = two_layers(), FloatFormat(8, 4)
    x = torch.randn(7, 6)
    first, second = model[0], model[2]
    w, b, v, c = (round_tensor(p.detach(), form) for p in (first.weight, first.bias, second.weight, second.bias))
    hidden = round_tensor(round_tensor(x, form) @ w.T + b, form)
    hidden = round_tensor(torch.nn.functional.silu(hidden), form)
    with emulated(model, form), torch.no_grad():
        found = model(x)
    torch.testing.assert_close(found, round_tensor(hidden @ v.T + c, form), rtol=0, atol=2.0**-8)
    assert (found == round_tensor(found, form)).all()


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("activations", [True, False])
def test_everything_comes_back_also_after_an_error(weights, activations):
    model = two_layers()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    x, expected = torch.randn(7, 6), None
    expected = model(x)
    with pytest.raises(RuntimeError), emulated(model, BFLOAT16, weights=weights, activations=activations):
        changed = any((p != before[name]).any() for name, p in model.named_parameters())
        assert changed == weights
        raise RuntimeError
    assert all((p == before[name]).all() and p.data_ptr() == places[name] for name, p in model.named_parameters())
    assert (model(x) == expected).all()


def test_float32_is_no_change_and_half_a_format_is_one_side_of_it():
    model, x = two_layers(), torch.randn(7, 6)
    with emulated(model, FLOAT32):
        assert (model(x) == two_layers()(x)).all()
    with emulated(model, BFLOAT16, activations=False):
        only_weights = model(x)
    with emulated(model, BFLOAT16, weights=False):
        only_activations = model(x)
    with emulated(model, BFLOAT16):
        both = model(x)
    assert not (only_weights == only_activations).all() and not (both == only_weights).all()


def test_gradients_pass_through_the_rounding():
    model, x = two_layers(), torch.randn(7, 6)
    with emulated(model, BFLOAT16):
        model(x).square().sum().backward()
    rounded_gradient = model[0].weight.grad.clone()
    model.zero_grad()
    model(x).square().sum().backward()
    assert torch.nn.functional.cosine_similarity(rounded_gradient.flatten(), model[0].weight.grad.flatten(), 0) > 0.999


def test_containers_are_rounded_and_the_rest_is_left():
    x, n = torch.tensor([1.001]), torch.tensor([5])
    found = rounded({"a": (x, n), "b": [None, "text"], "c": x.double()}, BFLOAT16)
    assert found["a"][0].item() == 1.0 and found["a"][1] is n and found["b"] == [None, "text"]
    assert found["c"].item() == x.double().item()
    assert rounded((), BFLOAT16) == () and rounded(None, BFLOAT16) is None


def test_a_model_of_another_dtype_and_a_weight_out_of_range_are_refused():
    with pytest.raises(ArgumentError, match="bfloat16"), emulated(two_layers().bfloat16(), FLOAT16):
        pass
    model = two_layers()
    with torch.no_grad():
        model[0].weight[0, 0] = 1e6
    before = model[2].weight.detach().clone()
    with pytest.raises(ArgumentError, match=r"0.weight holds 1e\+06"), emulated(model, FLOAT16):
        pass
    assert (model[2].weight == before).all() and model[0].weight[0, 0] == 1e6


def test_emulated_bfloat16_is_near_the_real_one(tiny, texts):
    """Not equal: real arithmetic rounds in other places too; within a factor of 3 of the same distance from float32."""
    bfloat16 = Precision("bfloat16")
    exact = trainer_scores(tiny, texts, FLOAT32_CONTRACT)
    real = trainer_scores(load_trainer(resolve(MODEL), bfloat16), texts, bfloat16)
    with emulated(tiny, BFLOAT16):
        found = trainer_scores(tiny, texts, FLOAT32_CONTRACT)
    distances = [(scores - exact)[texts.mask].abs().mean().item() for scores in (real, found)]
    assert 1 / 3 < distances[1] / distances[0] < 3


def test_each_bit_halves_the_distance_from_float32(tiny, texts):
    exact = trainer_scores(tiny, texts, FLOAT32_CONTRACT)
    bits, distances = range(5, 18, 2), []
    for m in bits:
        with emulated(tiny, FloatFormat(8, m), weights=False):
            found = trainer_scores(tiny, texts, FLOAT32_CONTRACT)
        distances.append((found - exact)[texts.mask].abs().mean().item())
    assert abs(fit(bits, distances)["slope"] + 1) < 0.15


def test_a_rounded_checkpoint_holds_rounded_weights(tiny, tmp_path):
    from transformers import AutoTokenizer

    form = FloatFormat(8, 4)
    before = {name: p.detach().clone() for name, p in tiny.named_parameters()}
    save_rounded(tiny, AutoTokenizer.from_pretrained(resolve(MODEL)), form, tmp_path)
    found = dict(load_trainer(str(tmp_path), FLOAT32_CONTRACT).named_parameters())
    assert all((found[name] == round_tensor(p, form)).all() for name, p in before.items())
    assert all((p == before[name]).all() for name, p in tiny.named_parameters())


@pytest.mark.engine("float32")
def test_a_real_sampler_computes_in_an_emulated_format_and_then_again_in_float32(engines, dtype, tiny, texts):
    sampler = engines.get(dtype).sampler
    sampler.drop_adapter()
    exact = sampler_scores(sampler, texts)
    distances = []
    for m in (6, 9):
        with emulated_sampler(sampler, FloatFormat(8, m)):
            distances.append((sampler_scores(sampler, texts) - exact)[texts.mask].abs().mean().item())
    assert 4 < distances[0] / distances[1] < 16  # three bits
    with emulated(tiny, FloatFormat(8, 6), weights=False):
        trainer = trainer_scores(tiny, texts, FLOAT32_CONTRACT)
    alone = (trainer - exact)[texts.mask].abs().mean().item()
    assert 1 / 3 < distances[0] / alone < 3  # both sides are about as far away
    assert torch.equal(sampler_scores(sampler, texts)[texts.mask], exact[texts.mask])


@pytest.mark.engine("bfloat16")
def test_a_sampler_of_another_dtype_is_refused(engines, dtype):
    with pytest.raises(ArgumentError, match="computes in bfloat16"), emulated_sampler(
        engines.get(dtype).sampler, FLOAT16
    ):  # fmt: skip
        pass


def test_hooks_are_all_removed():
    model = two_layers()
    handles = add_rounding(model, BFLOAT16)
    assert len(handles) == 3 + 4  # inputs of the three layers, outputs of those and of the whole
    for handle in handles:
        handle.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
