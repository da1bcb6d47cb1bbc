"""What a trainer needs before TRL's constructor runs: the model, the dataset and the arguments checked and adapted."""

from pathlib import Path

from datasets import IterableDataset

from kit.errors import ArgumentError
from kit.loading import Loaded

# Prompts of the dataset whose length is checked before training; later ones are checked when they are sampled from.
CHECKED_PROMPTS = 2000


def check_model(model) -> Loaded:
    """What the kit knows of a model with an adapter.

    Raises:
        ArgumentError: no adapter, or not loaded by the kit.
    """
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        raise ArgumentError(
            f"GRPOTrainer got a {type(model).__name__} without an adapter. Add one with "
            f"FastLanguageModel.get_peft_model(model, r=..., lora_alpha=...): only adapters are trained, in float32."
        )
    if not isinstance(getattr(model, "kit", None), Loaded):
        raise ArgumentError(
            "This model carries no precision contract. Load it with kit.FastLanguageModel.from_pretrained."
        )
    return model.kit


def check_dataset(dataset, tokenizer, args, loaded: Loaded) -> None:
    """Refuse a dataset that is empty, has no prompts, or whose prompts leave no room for the completions."""
    if tokenizer is None:
        raise ArgumentError("processing_class is missing: give the tokenizer that from_pretrained returned.")
    if isinstance(dataset, IterableDataset):
        raise ArgumentError(
            "train_dataset is a stream (IterableDataset), whose rows cannot be counted or read twice: pass a Dataset, "
            "for example Dataset.from_list(list(stream.take(1000)))."
        )
    if dataset is None or len(dataset) == 0:
        raise ArgumentError("train_dataset is empty. Expected at least one row with a column 'prompt'.")
    if "prompt" not in dataset.column_names:
        raise ArgumentError(f"train_dataset has no column 'prompt'; it has {', '.join(dataset.column_names)}.")
    first = dataset[:CHECKED_PROMPTS]["prompt"]
    if not isinstance(first[0], str):
        return  # conversations are rendered by TRL, and checked when they are sampled from
    longest = max(map(len, tokenizer(first).input_ids))
    if longest + args.max_completion_length > loaded.max_seq_length:
        raise ArgumentError(
            f"max_seq_length is {loaded.max_seq_length}, too small: the longest prompt has {longest} tokens, and "
            f"max_completion_length asks for {args.max_completion_length} more. Load the model with max_seq_length="
            f"{longest + args.max_completion_length} or more, or lower max_completion_length."
        )


def adapt_arguments(args, loaded: Loaded):
    """The arguments TRL gets: dtype flags from the contract, its engine off, checkpoints inside the run's folder."""
    precision = loaded.precision
    args.bf16, args.fp16 = precision.name == "bfloat16", precision.name == "float16"
    args.mixed_precision = precision.mixed_precision
    args.use_vllm = False
    args.logging_steps = 1
    args.output_dir = str(Path(args.output_dir) / "checkpoints")
    if args.gradient_checkpointing is None:
        args.gradient_checkpointing = loaded.gradient_checkpointing
    return args


def compute_backward_in(accelerator, context) -> None:
    """Run the accelerator's backward pass inside `context()` too; the forward pass enters it where it is made."""
    backward = accelerator.backward

    def backward_in_context(loss, **kwargs):
        with context():
            backward(loss, **kwargs)

    accelerator.backward = backward_in_context
