"""Loss scaling on a CPU: what accelerate leaves out, and naming what overflowed."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from kit.precision import Precision
from kit.scaling import attach_scaler, first_nonfinite_activation, first_nonfinite_gradient


def accelerator(precision: Precision) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(mixed_precision=precision.mixed_precision, cpu=True)


class Net(nn.Module):
    """Three layers in a row, with biases, whose names a report must find."""

    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return self.third(self.second(self.first(x)))


def test_accelerate_alone_scales_nothing_in_float16_on_a_cpu_and_the_kit_does():
    naive = accelerator(Precision("float16"))
    assert naive.scaler is None
    attach_scaler(naive, Precision("float16"))
    assert naive.scaler.is_enabled()
    assert naive.scaler.get_scale() == 2.0**16


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_the_other_dtypes_are_not_scaled(name):
    plain = accelerator(Precision(name))
    attach_scaler(plain, Precision(name))
    assert plain.scaler is None


def test_a_scaler_that_is_there_is_kept():
    own = accelerator(Precision("float16"))
    own.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    attach_scaler(own, Precision("float16"))
    assert own.scaler.get_scale() == 8.0


def small_gradient(scaled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient in float16 arithmetic, the true one) of a loss so small that its gradient underflows in float16."""
    own = accelerator(Precision("float16"))
    if scaled:
        attach_scaler(own, Precision("float16"))
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16, bias=False), torch.rand(32, 16) + 0.5
    optimizer = own.prepare_optimizer(torch.optim.SGD(layer.parameters(), lr=1.0))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = 1e-9 * layer(x).float().sum()
    own.backward(loss)
    if scaled:
        own.unscale_gradients(optimizer)
    return layer.weight.grad, 1e-9 * x.sum(0).expand(16, 16)


def test_small_gradients_underflow_without_scaling_and_arrive_with_it():
    naive, true = small_gradient(scaled=False)
    assert torch.equal(naive, torch.zeros_like(true))
    ours, true = small_gradient(scaled=True)
    torch.testing.assert_close(ours, true, rtol=2e-2, atol=0.0)


def test_an_overflow_skips_the_step_and_halves_the_scale():
    own = accelerator(Precision("float16"))
    attach_scaler(own, Precision("float16"))
    model = Net()
    optimizer = own.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    before = {n: p.clone() for n, p in model.named_parameters()}
    own.backward(model(torch.full((4, 8), 1e38)).sum())
    optimizer.step()
    assert own.optimizer_step_was_skipped
    assert own.scaler.get_scale() == 2.0**15
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_the_bad_gradient_nearest_to_the_loss_is_named():
    model = Net()
    model(torch.ones(2, 8)).sum().backward()
    assert first_nonfinite_gradient(model) is None
    model.first.weight.grad[0, 0] = torch.nan
    model.second.weight.grad[3, 3] = torch.inf
    assert first_nonfinite_gradient(model) == "second"
    model.third.bias.grad[0] = -torch.inf
    assert first_nonfinite_gradient(model) == "third.bias"


def test_parameters_without_gradient_are_passed_over():
    model = Net()
    assert first_nonfinite_gradient(model) is None


def test_the_first_bad_activation_is_named_and_no_hook_stays():
    model, x = Net(), torch.ones(2, 8)
    assert first_nonfinite_activation(model, lambda: model(x)) is None
    with torch.no_grad():
        model.second.weight[0] = torch.inf
    assert first_nonfinite_activation(model, lambda: model(x)) == "second"  # third is bad too, but later
    assert not any(module._forward_hooks for module in model.modules())


def test_no_hook_stays_when_the_forward_pass_raises():
    model = Net()
    with pytest.raises(RuntimeError):
        first_nonfinite_activation(model, lambda: model(torch.ones(2, 3)))
    assert not any(module._forward_hooks for module in model.modules())


def test_names_are_those_of_the_model_without_the_adapters_wrapping():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(Net(), LoraConfig(r=2, target_modules=["second"]))
    model(torch.ones(2, 8)).sum().backward()
    model.base_model.model.second.lora_A["default"].weight.grad[0, 0] = torch.nan
    assert first_nonfinite_gradient(model) == "second.lora_A"
