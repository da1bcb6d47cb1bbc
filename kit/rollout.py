"""From prompts to sampled completions in the form TRL's `rollout_func` returns them."""

import hashlib
import math

from kit.errors import ArgumentError
from kit.sampler import Completion, SamplingSettings


def request_seed(run_seed: int, step: int, index: int) -> int:
    """Seed of one request, from (run seed, step, index): a resumed run draws what the unbroken one would have drawn.

    Example:
        >>> request_seed(0, 1, 2) == request_seed(0, 1, 2) != request_seed(0, 2, 1)
        True
    """
    digest = hashlib.blake2b(f"{run_seed}/{step}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2  # vLLM takes a signed 64-bit seed


def sample_policy(model, prompt_ids: list[list[int]], settings: SamplingSettings, seed: int) -> list[Completion]:
    """One completion for each prompt, by the sampler of a model that the kit loaded: of its adapter when it has one.

    Args:
        model: the base model, or a PEFT model of it.
        prompt_ids: token ids of each prompt.
        settings: how to sample.
        seed: of the run; each prompt's place gives its request's own.
    """
    from peft import PeftModel

    sampler = model.kit.sampler
    if isinstance(model, PeftModel):
        sampler.load_adapter(model)
    else:
        sampler.drop_adapter()
    return sampler.generate(prompt_ids, settings, [request_seed(seed, 0, i) for i in range(len(prompt_ids))])


def sampling_settings(args) -> SamplingSettings:
    """The sampling part of a `trl.GRPOConfig`."""
    further = args.generation_kwargs or {}
    unknown = sorted(set(further) - {"stop", "ignore_eos"})
    if unknown:
        raise ArgumentError(f"generation_kwargs {', '.join(unknown)} are not supported; expected stop or ignore_eos.")
    stop = further.get("stop", ())
    return SamplingSettings(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k or 0,
        min_p=args.min_p or 0.0,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_eos=further.get("ignore_eos", False),
    )


def rollout_output(prompt_ids: list[list[int]], completions: list[Completion], eos_token_id: int) -> dict:
    """What TRL's `rollout_func` must return.

    A completion without tokens (a stop string at once) becomes one end token that is masked out of loss and metrics,
    since TRL needs a token to look at. A logprob that is not finite is passed on as NaN, and counted later.
    """
    ids, logprobs, masks = [], [], []
    for completion in completions:
        empty = not completion.token_ids
        ids.append([eos_token_id] if empty else completion.token_ids)
        values = [math.nan] if empty else completion.logprobs
        logprobs.append([x if math.isfinite(x) else math.nan for x in values])
        masks.append([0] if empty else [1] * len(completion.token_ids))
    output = {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logprobs}
    if any(mask == [0] for mask in masks):
        output["env_mask"] = masks
    return output
