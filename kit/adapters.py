"""An adapter's tensors, from the trainer's PEFT model into the engine's slots: no file, no merge, no reload.

Works on what vLLM allocates for an adapter (`lora_a_stacked`, `lora_b_stacked`: slot x 1 x rows x columns, one tensor a
part of a packed projection). Only what is already registered as the adapter of slot 0 may be written; `kit.probe`
proves after each write that both sides agree.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LowRank:
    """One projection's adapter: A (rank x inputs), B (outputs x rank), and the scaling of their product."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


def adapter_weights(model, adapter: str = "default") -> dict[str, LowRank]:
    """Name of each projection (as in the base checkpoint) -> its adapter, from a PEFT model. Copies nothing."""
    found = {}
    for name, module in model.get_base_model().named_modules():
        if adapter in getattr(module, "lora_A", {}):
            a, b = module.lora_A[adapter].weight.detach(), module.lora_B[adapter].weight.detach()
            found[name] = LowRank(a, b, module.scaling[adapter])
    return found


def write_adapter(engine_model, weights: dict[str, LowRank]) -> None:
    """Write an adapter into slot 0 of the engine's layers, rounded to their dtype; B carries the scaling as in vLLM."""
    packed = engine_model.packed_modules_mapping
    for module_name, module in engine_model.named_modules():
        if not hasattr(module, "lora_a_stacked"):
            continue
        parent, _, leaf = module_name.rpartition(".")
        for index, part in enumerate(packed.get(leaf, [leaf])):
            if (low_rank := weights.get(f"{parent}.{part}")) is None:
                continue
            rank = len(low_rank.a)
            module.lora_a_stacked[index][0, 0, :rank].copy_(low_rank.a)
            module.lora_b_stacked[index][0, 0, :, :rank].copy_(low_rank.b * low_rank.scaling)
