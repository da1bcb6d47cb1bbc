"""Training arguments: TRL's, with the defaults this kit's question needs."""

from dataclasses import dataclass, field
from datetime import datetime

import torch
import trl

from kit.errors import ArgumentError


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """`trl.GRPOConfig` that leaves the number format to the contract and hides nothing of the mismatch.

    What differs from TRL 1.16: `bf16` and `fp16` stay unset until the model's contract sets them (TRL turns bf16 on
    when neither is given); the mismatch is measured, not corrected, unless you ask for
    `vllm_importance_sampling_correction=True`; every step is logged; `output_dir` is the run's folder.

    Args:
        kl_share: share of each step's completions on which the KL to the base model is measured when `beta` is 0 (at
            least one, at most a micro-batch). Costs one forward pass of that share, without gradients.
        sync: "native" loads the adapter as an adapter; "merged" adds it to 16-bit base weights as TRL does.
    """

    output_dir: str | None = None
    logging_steps: float = 1
    report_to: str | list[str] | None = "none"
    use_vllm: bool = True
    vllm_mode: str = "colocate"
    vllm_importance_sampling_correction: bool = False
    gradient_checkpointing: bool | None = None
    disable_tqdm: bool | None = True
    use_cpu: bool = field(default_factory=lambda: not torch.cuda.is_available())
    save_strategy: str = "steps"
    save_steps: float = 10
    save_total_limit: int | None = 2
    logging_nan_inf_filter: bool = False
    kl_share: float = 1 / 16
    sync: str = "native"

    def __post_init__(self):
        if self.output_dir is None:
            self.output_dir = f"runs/{datetime.now():%Y%m%d-%H%M%S}"
        self.bf16 = bool(self.bf16)  # TRL reads None as True
        if not 0 < self.kl_share <= 1:
            raise ArgumentError(f"kl_share is {self.kl_share}; expected a share above 0, at most 1.")
        if self.sync not in ("native", "merged"):
            raise ArgumentError(f"sync is {self.sync!r}; expected 'native' or 'merged'.")
        super().__post_init__()
