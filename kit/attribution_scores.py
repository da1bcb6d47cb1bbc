"""The measuring half of `kit.attribution`: engines and trainers one after the other, and what their scores come to."""

import tempfile
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import torch

from kit import drawn_policy
from kit.attribution import AttributionSettings
from kit.decomposition import by_bins, decompose
from kit.errors import ArgumentError
from kit.intervals import bootstrap, interval_note
from kit.mismatch import mismatch_metrics
from kit.precision import Precision
from kit.teacher_forcing import (
    Texts,
    check_sizes,
    float32_head,
    open_sampler,
    sample_texts,
    sampler_kernels,
    sampler_scores,
    sampler_scores_cached,
    trainer_scores,
)

PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.01)
# what is raised by kernels that a machine does not have, and by arguments that an older vLLM does not know
CANNOT_RUN = (RuntimeError, ValueError, ImportError, TypeError)
TEMPERATURE, TOP_P = 0.7, 0.9  # of the settings that the trainer is made to forget


@dataclass
class Scores:
    """Logprobs of the same tokens under each setting; `chain` lists are [coarse, + head, + activations, + weights]."""

    texts: Texts
    rollout: torch.Tensor
    sampler: list[torch.Tensor] = field(default_factory=list)
    trainer: list[torch.Tensor] = field(default_factory=list)
    sampler_changes: dict[str, torch.Tensor] = field(default_factory=dict)
    trainer_changes: dict[str, torch.Tensor] = field(default_factory=dict)
    native: tuple[torch.Tensor, torch.Tensor] | None = None  # trainer, sampler
    forgotten: dict[str, tuple[torch.Tensor, Texts]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    kernels: dict[str, str | bool] = field(default_factory=dict)


def attribute(settings: AttributionSettings) -> dict:
    """Measure and split the mismatch; progress is printed.

    Returns:
        Plain values: `total`, `parts`, `pairs`, `grid`, `changes`, `forgotten`, `by_position`, `by_probability`,
        `not_separated`, `rollout`; means a token of d^2 [nats^2] with intervals as {"value", "low", "high"}.

    Raises:
        kit.errors.ArgumentError: no coarse dtype, too few sequences or tokens, or a length beyond the model's; nothing
            is loaded then.
    """
    from kit.length import prompts_for
    from kit.loading import resolve

    if settings.dtype == "float32":
        raise ArgumentError("dtype is float32, which the others are compared with; expected bfloat16 or float16.")
    precision, path = Precision.of(settings.dtype), resolve(settings.model)
    prompts, longest = prompts_for(path, settings.model, settings.sequences)
    check_sizes(path, settings.sequences, settings.tokens, longest)
    with tempfile.TemporaryDirectory(prefix="kit-policy-") as folder:
        folders = drawn_policy.write_policy(path, folder, precision, spread=settings.spread, seed=settings.seed)
        scores = _score_by_samplers(folders, precision, prompts, longest, settings)
        _score_by_trainers(folders, precision, scores, settings)
    return split(scores, settings.dtype) | {"model": settings.model, "settings_used": asdict(settings)}


# ---- scoring


def _score_by_samplers(folders, precision, prompts, longest, settings) -> Scores:
    from transformers import AutoTokenizer

    from kit.loading import close_current
    from kit.sampler import SamplingSettings

    length, count, coarse = longest + settings.tokens, len(prompts), precision.name
    prompt_ids = AutoTokenizer.from_pretrained(folders.coarse)(prompts).input_ids
    sampler = open_sampler(folders.coarse, coarse, length, count)
    scores = Scores(*sample_texts(sampler, prompt_ids, SamplingSettings(settings.tokens), settings.seed))
    scores.kernels = {f"sampler_{name}": value for name, value in sampler_kernels(sampler).items()}
    _coarse_sampler(sampler, scores)
    for name, changed in (
        (f"temperature {TEMPERATURE}", SamplingSettings(settings.tokens, TEMPERATURE)),
        (f"top_p {TOP_P}", SamplingSettings(settings.tokens, top_p=TOP_P)),
    ):
        other, logprobs = sample_texts(sampler, prompt_ids, changed, settings.seed)
        scores.forgotten[name] = (logprobs, other)
    for path in (folders.coarse, folders.exact):
        scores.sampler.append(sampler_scores(open_sampler(path, "float32", length, count), scores.texts))
    sampler = open_sampler(folders.base, coarse, length, count, max_lora_rank=drawn_policy.RANK)
    policy = drawn_policy.native_policy(folders, precision, spread=settings.spread, seed=settings.seed)
    sampler.load_adapter(policy)
    scores.native = (
        trainer_scores(policy, scores.texts, precision, batch=settings.batch), sampler_scores(sampler, scores.texts)
    )  # fmt: skip
    _other_engines(folders, coarse, length, count, settings, scores)
    close_current()
    return scores


def _coarse_sampler(sampler, scores):
    """What one coarse engine can answer: head, batch, prefix cache."""
    texts = scores.texts
    scores.sampler.append(sampler_scores(sampler, texts))
    with float32_head(sampler) as possible:
        scores.sampler.append(sampler_scores(sampler, texts) if possible else scores.sampler[0])
    if not possible:
        scores.notes.append("This vLLM has no float32 head: the sampler's head changes with its activations.")
    scores.sampler_changes["sampler: one text at a time"] = sampler_scores(sampler, texts, together=False)
    cached, tokens = sampler_scores_cached(sampler, texts)
    if tokens:
        scores.sampler_changes["sampler: start of each text from the prefix cache"] = cached
    else:
        scores.notes.append("The prefix cache never answered: it keeps whole blocks, and these texts fill none.")


def _other_engines(folders, coarse, length, count, settings, scores):
    """Coarse engines with other kernels. One that cannot start here is named in the notes, and costs itself alone."""
    engines = {f"sampler: attention {name}": {"engine_arguments": {"attention_config": {"backend": name}}}
               for name in settings.backends}  # fmt: skip
    if settings.compiled:
        engines["sampler: compiled"] = {"start": "compiled"}
    for name, arguments in engines.items():
        try:
            sampler = open_sampler(folders.coarse, coarse, length, count, **arguments)
        except CANNOT_RUN as error:
            scores.notes.append(_could_not_run(name, error))
            continue
        found = sampler_kernels(sampler)
        if name.endswith(found["attention"]) or (name == "sampler: compiled" and not found["eager"]):
            scores.sampler_changes[name] = sampler_scores(sampler, scores.texts)
        else:
            kind = "eager" if found["eager"] else "not eager"
            scores.notes.append(f"{name}: not had here; the engine runs attention {found['attention']}, {kind}.")


def _could_not_run(name, error):
    said = (str(error).splitlines() or [""])[0]
    return f"{name}: could not run here ({type(error).__name__}: {said})."


def _score_by_trainers(folders, precision, scores, settings) -> None:
    print(f"Scoring by the trainer in {precision.name} and float32 ...", flush=True)
    texts, batch, exact = scores.texts, settings.batch, Precision("float32")
    model = drawn_policy.load_trainer(folders.coarse, precision)
    scores.trainer.append(trainer_scores(model, texts, precision, batch=batch))
    scores.trainer.append(trainer_scores(model, texts, precision, batch=batch, head_float32=True))
    scores.trainer_changes["trainer: one text at a time"] = trainer_scores(model, texts, precision, batch=1)
    for name, (logprobs, other) in scores.forgotten.items():
        scores.forgotten[name] = (trainer_scores(model, other, precision, batch=batch) - logprobs, other)
    if settings.compiled:
        try:
            forward = torch.compile(model, dynamic=True)
            compiled = trainer_scores(model, texts, precision, batch=batch, forward=forward)
            scores.trainer_changes["trainer: compiled"] = compiled
        except CANNOT_RUN as error:
            scores.notes.append(_could_not_run("trainer: compiled", error))
    before = scores.kernels["trainer_attention"] = model.config._attn_implementation
    model.set_attn_implementation("eager")
    changed = f"trainer: attention eager (was {before})"
    scores.trainer_changes[changed] = trainer_scores(model, texts, precision, batch=batch)
    del model
    for path in (folders.coarse, folders.exact):
        scores.trainer.append(trainer_scores(drawn_policy.load_trainer(path, exact), texts, exact, batch=batch))


# ---- reducing


def split(scores: Scores, coarse: str) -> dict:
    """Scores -> parts, pairs, grid, single changes and bins, as plain values."""
    # in float64, where the steps of the chain add up to the last digit
    t, s, mask = [x.double() for x in scores.trainer], [x.double() for x in scores.sampler], scores.texts.mask
    added = {
        "trainer: head": t[0] - t[1],
        "sampler: head": s[1] - s[0],
        "trainer: activations": t[1] - t[2],
        "sampler: activations": s[2] - s[1],
        "weights, both sides": (t[2] - t[3]) - (s[2] - s[3]),
    }
    base = t[0] - s[0]
    found = decompose(base, t[3] - s[3], added, mask)
    position = torch.arange(mask.shape[1])[None].expand(mask.shape)
    edges = torch.linspace(0, mask.shape[1], 5).round().int().tolist()
    places = [f"{low + 1} to {high}" for low, high in pairwise(edges)]
    shares = [f"{low:g} to {min(high, 1):g}" for low, high in pairwise(PROBABILITIES)]
    return {
        "coarse": coarse,
        "sequences": found.sequences,
        "tokens": found.tokens,
        "dropped": found.dropped,
        "intervals": interval_note(found.sequences),
        "total": {name: asdict(getattr(found, name)) for name in ("coarse", "exact", "difference")},
        "parts": [asdict(part) for part in found.parts],
        "remainder": found.remainder,
        "pairs": [{"pair": list(pair), **asdict(value)} for pair, value in found.pairs.items()],
        "grid": _grid(t, s, mask),
        "steps": [{"name": name, **_mean((t[i] - s[j]) ** 2, mask)} for name, i, j in STEPS],
        "weights_move": _mean((t[2] - t[3]).abs(), mask),
        "changes": _changes(scores, base),
        "forgotten": [
            {"name": name, "abs_mean": _mean(d.abs(), other.mask), "square": _mean(d**2, other.mask)}
            for name, (d, other) in scores.forgotten.items()
        ],
        "by_position": [asdict(part) for part in by_bins(base, mask, position, edges, places)],
        "by_probability": [asdict(part) for part in by_bins(base, mask, s[0].exp(), PROBABILITIES, shares)],
        "rollout": mismatch_metrics(t[0], scores.rollout, mask),
        "kernels": scores.kernels,
        "not_separated": [*NOT_SEPARATED, *scores.notes],
    }


# (what is changed next, trainer's and sampler's place in their chains): each a setting that was measured
STEPS = (
    ("nothing yet", 0, 0),
    ("trainer's head in float32", 1, 0),
    ("sampler's head too", 1, 1),
    ("trainer's activations too", 2, 1),
    ("sampler's activations too", 2, 2),
    ("weights too: float32 everything", 3, 3),
)
NOT_SEPARATED = [
    "float32 weights with 16-bit activations do not exist: a product takes both operands in one format. So on each "
    "side the order is head, activations, weights.",
    "Weights count once for both sides: they must be the same, and rounding them moves both logprobs alike.",
    "vLLM has one dtype for activations and KV cache: they change together.",
    "Prompt logprobs are computed like a prefill. What decoding adds is known for the coarse sampler alone, which "
    "sampled the texts.",
]


def _changes(scores, base):
    """One thing changed at the coarse end: mismatch after it, what that is less or more, how far the logprobs moved."""
    t, s, mask = scores.trainer, scores.sampler, scores.texts.mask
    native_trainer, native_sampler = scores.native
    changed = {"sampler: logprobs of the sampling itself (decoding)": t[0] - scores.rollout}
    changed |= {name: t[0] - score for name, score in scores.sampler_changes.items()}
    changed |= {name: score - s[0] for name, score in scores.trainer_changes.items()}
    changed |= {
        "adapter native on both sides": native_trainer - native_sampler,
        "adapter merged in the sampler, native in the trainer": native_trainer - s[0],
        "only the trainer in float32, with float32 weights": t[3] - s[0],
        "only the sampler in float32, with float32 weights": t[0] - s[3],
    }
    rows = []
    for name, d in changed.items():
        kept = mask & d.isfinite() & base.isfinite()
        quantities = [d**2, d**2 - base**2, (d - base).abs(), d.abs()]
        totals = torch.stack([torch.where(kept, q, 0.0).double().sum(-1) for q in quantities], 1)
        square, change, moved, absolute = map(asdict, bootstrap(totals, kept.sum(-1)))
        rows.append({"name": name, "square": square, "change": change, "moved": moved, "abs_mean": absolute})
    return rows


def _grid(t, s, mask):
    """mean d^2 of every trainer setting (rows) against every sampler setting (columns)."""
    return [[_mean((trainer - sampler) ** 2, mask)["value"] for sampler in s] for trainer in t]


def _mean(values, mask):
    kept = mask & values.isfinite()
    return asdict(bootstrap(torch.where(kept, values, 0.0).double().sum(-1)[:, None], kept.sum(-1))[0])
