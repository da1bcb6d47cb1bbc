"""Offline mismatch against length: does a sequence's log-ratio walk or drift? `python -m kit experiment length`.

Completions of equal length are sampled and scored in each dtype; `kit.growth` reduces them and holds the theory. The
same measurement, without its density, is what a report card holds (`kit.report_cards`).
"""

import argparse
import time
from collections.abc import Sequence

from kit.errors import ArgumentError
from kit.growth import density, expected_abs, summary
from kit.summary import number, plural

# The bundled model's answer to a sum ends within half as many tokens, and is almost certain. Sampled on beyond its end,
# the model settles into an even text of higher entropy; what adds up is counted from there, or the change of text would
# pass for growth.
ANSWER_TOKENS = 128
SUBJECTS = ("fox", "ship", "king", "robot", "teacher", "farmer", "doctor", "river", "castle", "mountain")


def measure_lengths(
    model_name: str, dtypes: Sequence[str], *, sequences: int, tokens: int, seed: int = 0, densities: bool = True
) -> dict:
    """Sample completions of equal length in each dtype, score them by the trainer, and reduce by length.

    End-of-text tokens are sampled over (`ignore_eos`): every completion has `tokens` tokens. Of the bundled model the
    first `ANSWER_TOKENS` come before these and are not counted. One engine after the other; progress is printed.

    Returns:
        {"model", "parameters", "sequences", "tokens", "skip", "seed", "dtypes": {name: `kit.growth.summary`, "kernels",
        "weights", "seconds", and "density" if asked for}}.

    Raises:
        kit.errors.ArgumentError: fewer than two sequences, or a length beyond the model's; nothing is loaded then.
    """
    from kit.loading import close_current, resolve
    from kit.precision import Precision

    if not dtypes:
        raise ArgumentError("No dtype was given; expected some of float32, float16, bfloat16.")
    for name in dtypes:
        Precision.of(name)
    path = resolve(model_name)
    prompts, longest = prompts_for(path, model_name, sequences)
    skip = skipped(model_name)
    _check_sizes(sequences, tokens, context_of(path) - longest - skip)
    found, measured = {}, {}
    for name in dtypes:
        started = time.perf_counter()
        measured[name], about = _measure(model_name, name, prompts, longest, tokens, skip, seed)
        found[name] = summary(measured[name], seed) | about | {"seconds": round(time.perf_counter() - started, 1)}
        print(f"{name}: mean |d| {number(found[name]['mismatch/abs_mean'])} nats, {found[name]['seconds']:.0f} s")
    close_current()
    if densities:
        scale = max(found[name]["mismatch/abs_p99"] for name in dtypes) or 1e-6
        for name in dtypes:
            found[name]["density"] = density(measured[name], scale)
    settings = {"sequences": sequences, "tokens": tokens, "skip": skip, "seed": seed}
    parameters = [about.pop("parameters") for about in found.values()]
    return {"model": model_name, "parameters": parameters[0], **settings, "dtypes": found}


def prompts_for(path: str, model_name: str, count: int) -> tuple[list[str], int]:
    """(prompts, length of the longest [tokens]): sums for the bundled model, stories for others, by their chat template
    where they have one."""
    from transformers import AutoTokenizer

    from kit import arithmetic

    tokenizer = AutoTokenizer.from_pretrained(path)
    if model_name == "tiny":
        texts = list(arithmetic.make_dataset("test", min(max(count, 1), 256), 0)["prompt"])
    elif tokenizer.chat_template:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": f"Write a long story about a {subject}."}],
                add_generation_prompt=True, tokenize=False,
            )
            for subject in SUBJECTS
        ]  # fmt: skip
    else:
        texts = [f"A long story about a {subject}.\n\n" for subject in SUBJECTS]
    longest = max(map(len, tokenizer(texts).input_ids))
    return [texts[i % len(texts)] for i in range(count)], longest


def context_of(path: str) -> int:
    """Longest text that the model has positions for [tokens]."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path).get_text_config().max_position_embeddings


def skipped(model_name: str) -> int:
    """Tokens at the start of each completion that are not counted."""
    return ANSWER_TOKENS if model_name == "tiny" else 0


def room_of(path: str, model_name: str) -> int:
    """The longest completion that can be measured [tokens]: the context less the longest prompt and what is skipped."""
    return context_of(path) - prompts_for(path, model_name, 256)[1] - skipped(model_name)


def _check_sizes(sequences, tokens, room):
    if sequences < 2:
        raise ArgumentError(
            f"sequences is {sequences}; expected at least 2, and 32 or more for a figure worth quoting."
        )
    if not 2 <= tokens <= room:
        raise ArgumentError(f"tokens is {tokens}; this model's context leaves room for 2 to {room} after the prompt.")


def _measure(model_name, dtype, prompts, longest_prompt, tokens, skip, seed):
    """(Measurement, what it was measured with) of one dtype, from a new engine without adapters."""
    from kit import FastLanguageModel
    from kit.measure import Measurement, measure_mismatch
    from kit.sampler import SamplingSettings

    print(f"{dtype}: starting the engine, then {plural(len(prompts), 'sequence')} of {tokens} tokens ...", flush=True)
    length = longest_prompt + skip + tokens
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name, max_seq_length=length, dtype=dtype, max_lora_rank=0, max_num_seqs=len(prompts)
    )
    settings = SamplingSettings(max_tokens=skip + tokens, ignore_eos=True)
    whole = measure_mismatch(model, tokenizer, prompts, settings, seed=seed, batch=_scored_at_once(model, length))
    sides = (whole.trainer_logprobs, whole.sampler_logprobs, whole.mask)
    about = {"weights": model.kit.shared_weights, "kernels": kernels(model)}
    about["parameters"] = sum(p.numel() for p in model.parameters())
    return Measurement(*(side[:, skip:] for side in sides)), about


def _scored_at_once(model, tokens):
    """Sequences in one trainer forward pass: its float32 logits are there about five times over."""
    import torch

    free = torch.cuda.mem_get_info()[0] / 2 if torch.cuda.is_available() else 2**31
    return max(1, int(free / (5 * 4 * tokens * model.config.get_text_config().vocab_size)))


def kernels(model) -> dict:
    """What computes the logprobs: attention of both sides, whether the sampler runs without graphs, float32 products,
    and the CPU's vector instructions or CUDA's version."""
    import torch

    engine = model.kit.sampler.llm
    backends = engine.apply_model(_attention_backends)[0]
    return {
        "sampler_attention": ", ".join(backends) or "unknown",
        "sampler_eager": bool(engine.llm_engine.vllm_config.model_config.enforce_eager),
        "trainer_attention": str(model.config._attn_implementation),
        "float32_products": torch.get_float32_matmul_precision(),
        "cpu_instructions": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
    }


def _attention_backends(engine_model) -> list[str]:
    """Runs inside the engine."""
    return sorted({m.get_attn_backend().get_name() for m in engine_model.modules() if hasattr(m, "get_attn_backend")})


# ---- the experiment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m kit experiment length`."""
    parser.add_argument("--model", default="tiny", help="tiny, a folder, or a name on the hub")
    parser.add_argument("--dtypes", default="float32,float16,bfloat16", help="comma-separated")
    parser.add_argument("--sequences", type=int, default=64, help="completions in each dtype")
    parser.add_argument("--tokens", type=int, default=1024, help="length of each completion")
    parser.add_argument("--seed", type=int, default=0)


def measure(args: argparse.Namespace) -> dict:
    """`python -m kit experiment length`."""
    dtypes = [name.strip() for name in args.dtypes.split(",") if name.strip()]
    return measure_lengths(args.model, dtypes, sequences=args.sequences, tokens=args.tokens, seed=args.seed)


def figure(result: dict):
    """Density and growth of the result."""
    from kit.mismatch_plots import length_figure

    return length_figure(result)


def text(result: dict) -> str:
    """What the figure shows, in words: a sentence a dtype, the ratio of the 16-bit dtypes, what others published."""
    from kit.published import published_text

    parts = [_dtype_text(name, found) for name, found in result["dtypes"].items()]
    both = [result["dtypes"].get(name) for name in ("float16", "bfloat16")]
    if all(both):
        small, large = both
        size, kl = (large[key] / small[key] for key in ("rms", "mismatch/k3"))
        parts.append(
            f"bfloat16 / float16: d {number(size, 2)} times, KL a token {number(kl, 2)} times; unit roundoffs "
            f"2^-8 and 2^-11 give 8 and 64."
        )
    return "\n".join([*parts, published_text(("sequence KL",))])


def _dtype_text(name, found):
    last, g = found["by_length"][-1], found["growth"]
    interval = "" if g["low"] is None else f" (95 % interval {g['low']:.2f} to {g['high']:.2f})"
    grows = "no growth to fit" if g["slope"] is None else f"grows as length^{g['slope']:.2f}{interval}"
    theory = expected_abs(found["mismatch/k3"], last["length"])
    where = "never drifts" if found["crossover"] is None else f"drifts from {number(found['crossover'])} tokens on"
    return (
        f"{name:>8}: mean |sequence log-ratio| {number(last['abs'])} nats at {last['length']} tokens "
        f"(independent tokens would give {number(theory)}), {grows}; "
        f"KL of such a sequence {number(last['kl'])} nats; by theory it {where}."
    )
