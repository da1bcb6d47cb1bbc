"""A trained run as a folder that others can load, the adapter or the merged model: `python -m kit save`.

The adapter is added to the base weights once, in float32, and the sum is rounded once to the format that is saved; what
that rounding costs is measured, in each format. The folder appears whole or not at all. Nothing leaves the machine
unless `--push` asks for it.
"""

import argparse
import contextlib
import json
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kit.adapters import adapter_weights
from kit.errors import ArgumentError, KitError
from kit.precision import EXPECTED_ABS_MEAN, NAMES, Precision
from kit.records import Run

# Parameters above which the logprobs are measured in the saved format alone: each format is a forward pass in float32.
MEASURED_PARAMETERS = 1e9


class SaveExists(KitError, FileExistsError):
    """The folder to save to is there already."""


class PushRefused(KitError, OSError):
    """The hub did not take the folder; it is on the disk all the same."""


@dataclass(frozen=True)
class Rounding:
    """What rounding the merged weights to a dtype costs.

    `relative` is the mean absolute rounding error over the mean absolute weight, of the merged projections; `lost` the
    mean absolute error over the mean absolute change that training made to them: 1 means that as much was rounded as
    was learnt. `logprob_abs` is mean |logprob after - before rounding| [nats] of the probe text, both computed in
    float32; None where the model is too large to do that for every format.
    """

    dtype: str
    relative: float
    lost: float
    logprob_abs: float | None


def merged(weight: torch.Tensor, low_rank) -> torch.Tensor:
    """W + scaling * B A in float32 (outputs x inputs), from a weight of any dtype and a `kit.adapters.LowRank`."""
    change = low_rank.b.float() @ low_rank.a.float()
    return weight.detach().float() + low_rank.scaling * change.to(weight.device)


def merge_into(model, dtype: torch.dtype) -> None:
    """Put merged weights, rounded once to `dtype`, into the base of a PEFT model, and cast the rest of it.

    One projection at a time is in float32, so a 4B model takes little more than its own size. The adapter is used up:
    take it off with `model.unload()`.
    """
    modules = dict(model.get_base_model().named_modules())
    for name, low_rank in adapter_weights(model).items():
        layer = modules[name].get_base_layer()
        layer.weight.data = merged(layer.weight, low_rank).to(dtype)
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def rounding_costs(model, token_ids: list[int]) -> list[Rounding]:
    """What saving merged weights in each dtype would cost, of a PEFT model on a float32 base.

    Args:
        model: it is put back as it was.
        token_ids: the probe text.
    """
    layers = [(module.get_base_layer(), low_rank) for module, low_rank in _adapted(model)]
    small = sum(p.numel() for p in model.parameters()) < MEASURED_PARAMETERS
    policy = _logprobs(model, token_ids) if small else None
    found = []
    for name in NAMES:
        dtype, error, change, size, originals = getattr(torch, name), 0.0, 0.0, 0.0, []
        for layer, low_rank in layers:
            exact = merged(layer.weight, low_rank)
            rounded = exact.to(dtype).float()
            error += (rounded - exact).abs().sum().item()
            change += (exact - layer.weight.float()).abs().sum().item()
            size += exact.abs().sum().item()
            if small:
                originals.append(layer.weight.data)
                layer.weight.data = rounded
        logprob = None
        if small:
            with model.disable_adapter():
                logprob = (_logprobs(model, token_ids) - policy).abs().mean().item()
            for (layer, _), original in zip(layers, originals, strict=True):
                layer.weight.data = original
        found.append(Rounding(name, error / size, error / change if change else 0.0, logprob))
    return found


def _adapted(model):
    modules = dict(model.get_base_model().named_modules())
    return [(modules[name], low_rank) for name, low_rank in adapter_weights(model).items()]


def _logprobs(model, token_ids):
    from kit.probe import trainer_score

    return trainer_score(model, token_ids, Precision("float32"))


@contextlib.contextmanager
def whole_folder(out: Path):
    """A folder to fill beside `out`, put in its place at the end; an error or an interrupt leaves nothing.

    Raises:
        SaveExists: something is there already; it is left as it is.
    """
    if out.exists() or out.is_symlink():
        free = next(p for n in range(2, 10**6) if not (p := out.with_name(f"{out.name}-{n}")).exists())
        raise SaveExists(f"{out} is there already and is left as it is. Remove it, or save to {free}.")
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a save that was killed
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def load_trained(run: Run, base: torch.dtype | None = None):
    """(PEFT model with the run's adapter, tokenizer) for saving; the base in the run's dtype, or rounded to that and
    then held in `base`.

    Raises:
        ArgumentError: the run has no adapter, or does not say which model it was.
        kit.loading.ModelNotFound: the base model is gone.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = base_model(run)
    if not (run.adapter_dir / "adapter_model.safetensors").exists():
        raise ArgumentError(f"{run.path} has no adapter: the run stopped before it saved one.")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=run_precision(run).base_weights)
    model = PeftModel.from_pretrained(model if base is None else model.to(base), run.adapter_dir)
    return model.eval(), with_run_template(AutoTokenizer.from_pretrained(path), run)


def with_run_template(tokenizer, run: Run):
    """The tokenizer with the chat template that the run's prompts were rendered with."""
    template = run.info.get("chat_template")
    if template:
        tokenizer.chat_template = template
    return tokenizer


def run_precision(run: Run) -> Precision:
    """The contract that the run was trained under."""
    return Precision(run.info["precision"]["name"])


def base_model(run: Run) -> str:
    """Folder of the model that the run started from."""
    from kit.loading import resolve

    name = run.info.get("train_settings", {}).get("model")
    config = run.adapter_dir / "adapter_config.json"
    if name is None and config.exists():
        name = json.loads(config.read_text())["base_model_name_or_path"]
    if name is None:
        raise ArgumentError(f"{run.path} does not say which model it was trained from.")
    return resolve(name)


def save_adapter(run: Run, out: Path) -> Path:
    """The adapter in PEFT's format, the tokenizer and a model card; returns the folder."""
    from transformers import AutoTokenizer

    from kit.saving_card import card, is_hub_name

    path = base_model(run)
    if not (run.adapter_dir / "adapter_model.safetensors").exists():
        raise ArgumentError(f"{run.path} has no adapter: the run stopped before it saved one.")
    with whole_folder(out) as part:
        shutil.copy(run.adapter_dir / "adapter_model.safetensors", part)
        config = json.loads((run.adapter_dir / "adapter_config.json").read_text())
        name = run.info.get("train_settings", {}).get("model", "")
        if is_hub_name(name):  # not the folder of this machine's cache
            config["base_model_name_or_path"] = name
        (part / "adapter_config.json").write_text(json.dumps(config, indent=2))
        with_run_template(AutoTokenizer.from_pretrained(path), run).save_pretrained(part)
        (part / "README.md").write_text(card(run, merged_dtype=None, roundings=[]))
    return out


def save_merged(run: Run, out: Path, dtype: str | None = None) -> list[Rounding]:
    """The model with the adapter merged, safetensors in `dtype` (the run's own by default), tokenizer and model card.

    Returns:
        What the rounding costs in each dtype.
    """
    from kit.saving_card import card

    precision = Precision(dtype) if dtype else run_precision(run)
    with whole_folder(out) as part:
        model, tokenizer = load_trained(run)
        small = sum(p.numel() for p in model.parameters()) < MEASURED_PARAMETERS
        probe = _probe_ids(run, tokenizer)
        roundings = rounding_costs(load_trained(run, torch.float32)[0] if small else model, probe)
        merge_into(model, precision.base_weights)
        plain = model.unload()
        plain.config.dtype = precision.base_weights
        plain.save_pretrained(part)
        tokenizer.save_pretrained(part)
        (part / "README.md").write_text(card(run, merged_dtype=precision.name, roundings=roundings))
    return roundings


def _probe_ids(run, tokenizer):
    """A text the model is at home in: a prompt of the run with its completion, else a plain sentence."""
    rows = [row for row in run.completions if isinstance(row.get("prompt"), str)]
    text = rows[-1]["prompt"] + rows[-1]["completion"] if rows else "Q: 24+67=?\nA: 91, because 24 and 67 make 91."
    return tokenizer(text).input_ids[:512]


def push(folder: Path, name: str) -> str:
    """Upload a saved folder to the hub; returns its address there.

    Raises:
        PushRefused: no token, no rights, no connection, or the hub refused; the folder stays.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(name, exist_ok=True, private=True)
        return str(api.upload_folder(folder_path=folder, repo_id=name, commit_message="Saved by kit"))
    except Exception as error:  # offline, no token, no rights, a bad name: as many classes as reasons
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise PushRefused(
            f"{name} was not uploaded: {reason} The folder {folder} is saved. Check the name, the connection, and that "
            f"HF_TOKEN is a token with write access to it; then: hf upload {name} {folder}."
        ) from error


def rounding_table(roundings: list[Rounding]) -> str:
    """The costs as a text table."""
    lines = [
        f"{'merged, saved in':18}{'weights':>12}{'of the update':>16}{'logprobs [nats]':>18}  rounding alone explains"
    ]
    for row in roundings:
        logprob = "not measured" if row.logprob_abs is None else f"{row.logprob_abs:.2g}"
        band = f"up to {EXPECTED_ABS_MEAN[row.dtype][1]:g}"
        lines.append(f"{row.dtype:18}{row.relative:>12.2g}{row.lost:>16.2g}{logprob:>18}  {band}")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m kit save`."""
    parser.add_argument("run", help="the run's folder, for example runs/NAME")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to save to; must not be there")
    parser.add_argument("--merged", action="store_true", help="a whole model instead of the adapter alone")
    parser.add_argument("--dtype", choices=NAMES, help="of the merged weights; default: the run's")
    parser.add_argument("--push", metavar="NAME", help="also upload it to the hub under this name, as a private repo")
    parser.add_argument("--json", action="store_true", help="print what was saved as JSON")


def run(args: argparse.Namespace) -> int:
    """`python -m kit save`: save, print what it cost, return the exit status."""
    if args.dtype and not args.merged:
        raise ArgumentError(
            "--dtype is for merged weights; adapters are saved in float32. Add --merged, or leave it out."
        )
    loaded, out = Run.load(args.run), Path(args.out)
    with contextlib.redirect_stdout(sys.stderr):
        print(f"Saving {loaded.path} to {out} ...")
        roundings = save_merged(loaded, out, args.dtype) if args.merged else []
        if not args.merged:
            save_adapter(loaded, out)
        address = push(out, args.push) if args.push else None
    files = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    if args.json:
        told = {"out": str(out), "files": files, "rounding": [asdict(row) for row in roundings], "address": address}
        print(json.dumps(told, indent=2))
    else:
        print(*(f"{size:>13,}  {name}" for name, size in files.items()), sep="\n")
        if roundings:
            print("", rounding_table(roundings), sep="\n")
        print(f"\nSaved: {out}" + (f"\nUploaded: {address}" if address else ""))
    return 0
