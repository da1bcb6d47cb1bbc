"""float16 loss scaling on GPU and CPU, and a name for what overflowed.

The scale multiplies the loss so that gradients do not underflow below float16's smallest numbers; a step whose
gradients overflow is skipped and the scale halved (Micikevicius et al., "Mixed Precision Training", 2018).
"""

import torch

from kit.precision import Precision


def attach_scaler(accelerator, precision: Precision) -> None:
    """Give the accelerator autocast and a gradient scaler where the contract asks for them.

    accelerate 1.15 leaves both out for fp16 on a CPU, without a word: products then run in whatever dtype the operands
    have, and small gradients vanish. Call before `accelerator.prepare`.
    """
    if precision.loss_scaling and accelerator.scaler is None:
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler(accelerator.device.type)


def first_nonfinite_gradient(model) -> str | None:
    """The parameter, nearest to the loss, whose gradient is not finite; None when all are finite.

    The backward pass runs from the last layer to the first, so the last such parameter in forward order is where the
    overflow entered.
    """
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            return _short(name)
    return None


def first_nonfinite_activation(model, forward) -> str | None:
    """The first module in execution order whose output is not finite, found by running `forward()` again with hooks.

    Costs one forward pass without gradients; meant for the step that went wrong.
    """
    found = []

    def check(name):
        def hook(module, inputs, output):
            tensor = output[0] if isinstance(output, tuple) else output
            if not found and torch.is_tensor(tensor) and tensor.is_floating_point() and not tensor.isfinite().all():
                found.append(name)

        return hook

    leaves = [(name, module) for name, module in model.named_modules() if not any(module.children())]
    handles = [module.register_forward_hook(check(_short(name))) for name, module in leaves]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _short(name):
    return name.removeprefix("base_model.model.").replace(".default", "").removesuffix(".weight")
