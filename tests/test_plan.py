"""The memory plan: counts against real models, bytes against measured ones, and answers that hold when tried."""

import json
import math
import re
import subprocess
import sys
import weakref
from dataclasses import asdict, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from kit.cards import CARDS, Hardware, lookup
from kit.cli import main
from kit.errors import ArgumentError
from kit.hardware import UnsupportedDtype, dtypes_of
from kit.memory import GIB, ITEMSIZE, MAX_LORA_RANK, TOKEN_CHUNK, VOCABULARY_CHUNK, Plan, Settings, plan_memory
from kit.plan import DoesNotFit, changes, check_arguments, largest_micro_batch, plan_figure
from kit.shapes import KNOWN, PROJECTIONS, ModelShape, UnknownModel, from_config, shape_of

T4, A100, H200, CPU = (lookup(name) for name in ("T4", "A100", "H200", "CPU"))
QWEN3_4B = shape_of("Qwen3-4B-Base")


def small(family: str, **others) -> dict:
    """A small transformers configuration of a family."""
    sizes = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    config = {"model_type": family, **sizes, **heads, "tie_word_embeddings": True, **others}
    return {key: value for key, value in config.items() if value is not None}


# Each family with everything that changes a count, and the shape of the bundled model.
SMALL = {
    "qwen3": small("qwen3", tie_word_embeddings=False, attention_bias=True),
    "qwen2": small("qwen2", head_dim=None),
    "llama": small("llama", head_dim=None, num_key_value_heads=3, tie_word_embeddings=False),
    "llama biased": small("llama", attention_bias=True, mlp_bias=True),
    "tiny": small(
        "qwen3", vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        head_dim=32,
    ),
}  # fmt: skip


def as_config(shape: ModelShape) -> dict:
    """A transformers configuration of this shape."""
    return {
        "model_type": shape.family, "vocab_size": shape.vocabulary, "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "tie_word_embeddings": shape.tied,
    }  # fmt: skip


def build(config: dict, device: str, dtype: torch.dtype = torch.float32):
    """The transformers model that this configuration describes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**config)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def with_lora(model, rank: int, targets=PROJECTIONS):
    """The model with LoRA on these projections, as PEFT builds it."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, target_modules=list(targets)))


def settings(model=QWEN3_4B, hardware=T4, dtype="float16", **others) -> Settings:
    """The named job: 8 completions of 1,024 tokens, rank 32, unless said."""
    return Settings(model, hardware, dtype, **others)


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_of_the_known_models_are_those_of_transformers(name):
    model = build(as_config(KNOWN[name]), "meta")
    assert KNOWN[name].parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", SMALL)
def test_parameters_of_each_family_are_those_of_transformers(name):
    model = build(SMALL[name], "meta")
    assert from_config(SMALL[name]).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B-Base"])
@pytest.mark.parametrize(("rank", "targets"), [(32, PROJECTIONS), (8, ("q_proj", "v_proj"))])
def test_adapter_parameters_are_those_of_peft(name, rank, targets):
    model = with_lora(build(as_config(KNOWN[name]), "meta"), rank, targets)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert KNOWN[name].adapter_parameters(rank, targets) == trainable


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_bytes_are_those_of_a_real_cache(name, dtype):
    model = build(SMALL[name], "cpu", getattr(torch, dtype))
    cache = model(input_ids=torch.zeros(2, 5, dtype=torch.long), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert from_config(SMALL[name]).kv_bytes_per_token(ITEMSIZE[dtype]) * 2 * 5 == held


def test_the_4b_model_is_the_one_of_the_project():
    assert QWEN3_4B.parameters * 2 / 1e9 == pytest.approx(8.04, abs=0.005)
    assert shape_of("unsloth/Qwen3-4B-Base") == shape_of("Qwen/qwen3-4b-base") == QWEN3_4B


def test_a_local_folder_is_read_and_a_broken_one_named(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL["llama"]))
    assert shape_of(tmp_path).parameters == from_config(SMALL["llama"]).parameters
    for text, words in (
        ("{", "not JSON"),
        ("[]", "list"),
        ('{"model_type": "gpt2"}', "gpt2"),
        ('{"model_type": "qwen3", "vocab_size": 64}', "hidden_size"),
        (json.dumps(SMALL["llama"] | {"num_hidden_layers": 0}), "layers"),
    ):
        file.write_text(text)
        with pytest.raises(ArgumentError, match=words):
            shape_of(tmp_path)


@pytest.mark.parametrize("name", ["", "Qwen3-5B", "meta-llama/Llama-3.1-8B", "/nowhere"])
def test_an_unknown_model_is_named_with_the_known_ones(name):
    with pytest.raises(UnknownModel, match=r"Qwen3-0\.6B.*tiny.*local folder"):
        shape_of(name)


@pytest.fixture
def one_thread():
    """One thread for small sums: two spin against each other when the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive at once: `now`, and `peak` since it was last set."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = weakref.WeakSet()

    def _gone(self, size: int):
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.seen:
                storage = tensor.untyped_storage()
                self.seen.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage.nbytes())
        return result


def train_once(
    config: dict, dtype: str, rank: int, micro_batch: int, length: int, checkpointing: bool = True
) -> dict[str, int]:
    """Bytes alive, by part, in two training steps as TRL takes them: fused head, checkpointing, AdamW, padded rows."""
    from trl.trainer.utils import add_fused_lm_head

    bytes_of, kind = {}, getattr(torch, dtype)
    tokens = torch.randint(0, config["vocab_size"], (micro_batch, length))
    mask = torch.ones_like(tokens)
    mask[0, : length // 8] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    with LiveBytes() as live:
        model = build(config, "cpu", kind)
        bytes_of["base weights"] = sum(p.nbytes for p in model.parameters())
        model = with_lora(model, rank)
        bytes_of["adapter"] = sum(p.nbytes for p in model.parameters()) - bytes_of["base weights"]
        add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy"))
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        for _ in range(2):
            live.peak = live.now
            with torch.autocast("cpu", dtype=kind, enabled=dtype != "float32"):
                out = model(input_ids=tokens, attention_mask=mask, labels=labels, fused_lm_head=True)
            out.log_probs.mean().backward()
            del out
            peak, before = live.peak, live.now
            optimizer.step()
            bytes_of["optimizer"] = bytes_of.get("optimizer", live.now - before)
    bytes_of["gradients"] = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return bytes_of | {"peak": peak}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("others", "rank", "micro_batch", "length", "checkpointing"),
    [
        ({}, 16, 2, 96, True),
        ({"vocab_size": 2048}, 32, 4, 64, True),
        ({"num_hidden_layers": 8, "hidden_size": 320, "num_attention_heads": 16}, 8, 4, 64, True),
        ({"intermediate_size": 8192, "hidden_size": 64, "num_hidden_layers": 2}, 8, 2, 64, True),
        ({"intermediate_size": 2048}, 8, 2, 64, False),
        ({"intermediate_size": 8192}, 8, 2, 64, False),
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_planned_bytes_are_the_measured_ones(dtype, others, rank, micro_batch, length, checkpointing):
    config = SMALL["tiny"] | others
    measured = train_once(config, dtype, rank, micro_batch, length, checkpointing)
    run = {"rank": rank, "length": length, "micro_batch": micro_batch, "checkpointing": checkpointing}
    plan = plan_memory(Settings(from_config(config), CPU, dtype, shared=False, **run))
    exact = ("base weights", "adapter", "gradients")
    assert {name: plan.part(name).bytes for name in exact} == {name: measured[name] for name in exact}
    assert plan.part("optimizer").bytes == pytest.approx(measured["optimizer"], rel=0.001)  # and one step count each
    training = (*exact, "optimizer", "activations", "logits chunk")
    assert sum(plan.part(name).bytes for name in training) == pytest.approx(measured["peak"], rel=0.05)


def test_the_head_is_chunked_as_in_trl():
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    assert (TOKEN_CHUNK, VOCABULARY_CHUNK) == (chunked_logprob.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B-Base"])
def test_parts_add_up_on_every_card_and_the_table_shows_it(card, name):
    for dtype in dtypes_of(card):
        plan = plan_memory(settings(shape_of(name), card, dtype, shared=card.kind == "cuda"))
        assert plan.total == sum(part.bytes for part in plan.parts)
        assert all(part.bytes >= 0 for part in plan.parts)
        rows = re.findall(r"^  (.+?) +(\d+\.\d{3})  ", plan.table(), re.MULTILINE)
        shown = {row: float(gib) for row, gib in rows}
        assert set(shown) >= {part.name for part in plan.parts}
        assert sum(shown[part.name] for part in plan.parts) == pytest.approx(shown["sum"], abs=1e-9)
        assert shown["sum"] == pytest.approx(plan.total_gib, abs=0.0006)
        assert plan.fits == (card.memory_gib is None or card.memory_gib >= plan.total_gib)


def test_a_small_plan_is_in_mib_and_still_adds_up():
    plan = plan_memory(settings(shape_of("tiny"), CPU, "float16", shared=False, length=128, micro_batch=64))
    rows = re.findall(r"^  (.+?) +(\d+\.\d)  ", plan.table(), re.MULTILINE)
    shown = {row: float(mib) for row, mib in rows}
    assert "[MiB]" in plan.table().splitlines()[0] and plan.table().endswith("  MiB")
    assert shown["base weights"] == pytest.approx(plan.part("base weights").bytes / 2**20, abs=0.06)
    assert shown["base weights"] > 1 and shown["adapter"] > 0
    assert sum(shown[part.name] for part in plan.parts) == pytest.approx(shown["sum"], abs=1e-9)
    assert "million x" in plan.table() and "billion" not in plan.table()


def test_the_named_job_on_a_t4_fits_shared_and_not_copied():
    shared, copied = plan_memory(settings()), plan_memory(settings(shared=False))
    assert shared.fits
    assert not copied.fits
    assert copied.total - shared.total == QWEN3_4B.parameters * 2
    assert shared.part("KV cache").bytes == 8 * (1024 + 16) * 147456
    assert "does not fit" in copied.table()


@pytest.mark.parametrize(
    ("smaller", "larger", "growing"),
    [
        ({"rank": 16}, {"rank": 64}, "adapter"),
        ({"length": 512}, {"length": 2048}, "KV cache"),
        ({"group": 4}, {"group": 16}, "KV cache"),
        ({"micro_batch": 1}, {"micro_batch": 8}, "activations"),
        ({"micro_batch": 1}, {"micro_batch": 8}, "logits chunk"),
        ({"checkpointing": True}, {"checkpointing": False}, "activations"),
        ({"eight_bit_optimizer": True}, {"eight_bit_optimizer": False}, "optimizer"),
        ({"load_in_4bit": True}, {"load_in_4bit": False}, "base weights"),
        ({"cuda_graphs": False}, {"cuda_graphs": True}, "CUDA graphs"),
        ({"fast_inference": False}, {"fast_inference": True}, "sampler adapter"),
        ({"shared": True}, {"shared": False}, "base weights, copy"),
    ],
)
def test_what_makes_a_plan_larger(smaller, larger, growing):
    small, large = plan_memory(settings(**smaller)), plan_memory(settings(**larger))
    assert large.part(growing).bytes > small.part(growing).bytes
    assert large.total > small.total


def test_dtypes_and_quantisation_by_their_bytes():
    half, single = plan_memory(settings()), plan_memory(settings(dtype="float32"))
    for name in ("base weights", "sampler adapter", "KV cache"):
        assert single.part(name).bytes == 2 * half.part(name).bytes
    for name in ("adapter", "gradients", "optimizer"):
        assert single.part(name).bytes == half.part(name).bytes
    quantised = plan_memory(settings(load_in_4bit=True)).part("base weights").bytes
    rest = QWEN3_4B.parameters - QWEN3_4B.linear_parameters
    assert quantised == pytest.approx(0.5159 * QWEN3_4B.linear_parameters + 2 * rest, rel=1e-3)


def test_sequences_in_flight_fill_the_kv_cache_and_no_more():
    plan = plan_memory(settings(length=1000, group=8))
    assert plan.sequences_in_flight == 8
    a_sequence = 1024 * 147456  # 63 blocks of 16, and one scheduled ahead
    most = plan.sequences_at_most
    assert most * a_sequence <= plan.part("KV cache").bytes + plan.spare_gib * GIB < (most + 1) * a_sequence
    filled = plan_memory(replace(plan.settings, gpu_memory_utilization=plan.gpu_memory_utilization))
    assert filled.sequences_in_flight >= 8
    assert filled.total - plan.total < 0.011 * T4.memory_gib * GIB


def test_a_share_too_small_leaves_no_kv_cache_and_does_not_fit():
    plan = plan_memory(settings(gpu_memory_utilization=0.5))
    assert plan.part("KV cache").bytes == 0
    assert not plan.fits
    assert "not even one completion" in plan.verdict


def test_changes_come_in_order_of_gain_and_gain_what_they_say():
    plan = plan_memory(settings(shared=False, micro_batch=8, checkpointing=False))
    found = changes(plan)
    assert [change.gain for change in found] == sorted((change.gain for change in found), reverse=True)
    for change in found:
        assert change.gain == plan.total - change.plan.total > 0
        before, after = vars(plan.settings), vars(change.plan.settings)
        differing = [name for name in before if before[name] != after[name]]
        assert set(differing) <= {"group", "prompts"} or len(differing) == 1
    texts = " ".join(change.text for change in found)
    for word in ("share the base", "4bit", "smaller model: Qwen3-1.7B-Base", "checkpointing", "micro-batch 1"):
        assert word in texts
    for word in ("rank 16", "512 tokens", "4 completions", "8-bit optimizer", "CUDA graphs"):
        assert word in texts
    assert changes(plan_memory(settings(shape_of("Qwen3-0.6B"), H200)))[-1].gain > 0


def test_the_largest_micro_batch_fits_and_the_next_does_not():
    plan = plan_memory(settings())
    best = largest_micro_batch(plan)
    assert plan_memory(replace(plan.settings, micro_batch=best)).fits
    assert best == 8 or not plan_memory(replace(plan.settings, micro_batch=2 * best)).fits
    assert largest_micro_batch(plan_memory(settings(shared=False))) == 0
    assert largest_micro_batch(plan_memory(settings(hardware=H200))) == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [(name, bad) for name in ("rank", "length", "group", "prompts", "micro_batch") for bad in (0, -1, 1.5)]
    + [("rank", MAX_LORA_RANK + 1), ("length", 32769)]
    + [("gpu_memory_utilization", share) for share in (0.0, -0.5, 1.1, math.nan)],
)
def test_impossible_settings_are_refused(field, value):
    with pytest.raises(ArgumentError, match=re.escape(str(value)) if value else field.replace("_", ".")):
        settings(**{field: value})


def test_settings_that_contradict_the_hardware_are_refused():
    with pytest.raises(UnsupportedDtype, match="float16"):
        settings(dtype="bfloat16")
    with pytest.raises(ArgumentError, match="repacks"):
        settings(hardware=CPU, dtype="float32")
    with pytest.raises(ArgumentError, match="GPU"):
        settings(hardware=CPU, dtype="float32", shared=False, load_in_4bit=True)
    with pytest.raises(ArgumentError, match="unknown"):
        settings(hardware=Hardware("card", "cuda", (8, 0)), gpu_memory_utilization=0.5)


def test_check_arguments_passes_what_fits_and_returns_its_plan():
    plan = check_arguments("Qwen3-4B-Base", 2048, 32, 0.9, False, H200)
    assert plan.fits
    assert plan.settings.dtype == "float16"
    assert plan.part("KV cache").gib > 100
    assert check_arguments("Qwen3-4B-Base", 1024, 32, 0.8, False, T4).fits
    assert check_arguments("Qwen3-0.6B", 1024, 32, 0.5, False, replace(CPU, memory_gib=23.5), dtype="float32").fits
    assert check_arguments("Qwen3-4B-Base", 1024, 32, 0.5, True, T4, fast_inference=False).fits


@pytest.mark.parametrize("asked", [0.1, 0.5, 0.6, 0.95, 1.0])
def test_a_utilization_that_cannot_work_names_those_that_do(asked):
    with pytest.raises(DoesNotFit) as caught:
        check_arguments("Qwen3-4B-Base", 1024, 32, asked, False, T4)
    named = [float(number) for number in re.findall(r"\b0\.\d\d\b", str(caught.value).split("Give")[1])]
    assert len(named) == 2
    for value in named:
        assert check_arguments("Qwen3-4B-Base", 1024, 32, value, False, T4).fits
    for beyond in (min(named) - 0.01, max(named) + 0.01):
        with pytest.raises(DoesNotFit):
            check_arguments("Qwen3-4B-Base", 1024, 32, round(beyond, 2), False, T4)


def test_a_model_too_large_at_any_utilization_says_what_to_change():
    with pytest.raises(DoesNotFit, match=r"(?s)any gpu_memory_utilization.*change first.*share the base.*-> fits"):
        check_arguments("Qwen3-4B-Base", 1024, 32, 0.9, False, T4, shared=False)
    with pytest.raises(DoesNotFit, match="8-bit optimizer"):
        check_arguments("Qwen3-8B-Base", 1024, 32, 0.9, False, T4, fast_inference=False)


def test_memory_held_by_another_process_counts():
    busy = replace(A100, free_gib=20.0)
    with pytest.raises(DoesNotFit, match=r"another process.*0\.50 or less"):
        check_arguments("Qwen3-4B-Base", 1024, 32, 0.9, False, busy)
    assert check_arguments("Qwen3-4B-Base", 1024, 32, 0.5, False, busy).fits


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Qwen3-4B-Base", 0, 32, 0.5, False, T4), "length"),
        (("Qwen3-4B-Base", 40000, 32, 0.5, False, T4), "32768"),
        (("Qwen3-4B-Base", 1024, 0, 0.5, False, T4), "1 to 512"),
        (("Qwen3-4B-Base", 1024, 1024, 0.5, False, T4), "1 to 512"),
        (("Qwen3-4B-Base", 1024, 32, 0.0, False, T4), "above 0"),
        (("Qwen3-4B-Base", 1024, 32, 1.5, False, T4), "at most 1"),
        (("Qwen3-0.6B", 1024, 32, 0.5, True, CPU), "GPU"),
        (("Qwen3-5B", 1024, 32, 0.5, False, T4), "Qwen3-5B"),
    ],
)
def test_impossible_arguments_are_refused_before_loading(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        check_arguments(*arguments)


def test_the_figure_is_one_bar_of_the_parts_against_the_card():
    plan = plan_memory(settings(micro_batch=4))
    figure = plan_figure(plan)
    (axes,) = figure.axes
    widths = [bar.get_width() for bar in axes.patches]
    assert sum(widths) == pytest.approx(plan.total_gib)
    assert widths == pytest.approx([part.gib for part in plan.parts if part.bytes])
    assert axes.lines[0].get_xdata()[0] == plan.memory_gib
    assert "fits" in axes.get_title(loc="left")
    figure.canvas.draw()
    pixels = figure.canvas.buffer_rgba()
    assert len({tuple(pixel) for row in memoryview(pixels).tolist()[::4] for pixel in row[::4]}) > 10
    colours = [bar.get_facecolor() for bar in axes.patches]
    assert len(set(colours)) == len(colours)
    assert not plan_figure(plan_memory(settings(CPU_SHAPE, CPU, "float32", shared=False))).axes[0].lines


CPU_SHAPE = from_config(SMALL["tiny"], name="tiny")


def cli(capsys, *arguments) -> tuple[int, str]:
    """Exit status and output of `python -m kit plan`."""
    status = main(["plan", *arguments])
    return status, capsys.readouterr().out


def test_the_command_prints_parts_that_add_up_and_both_answers(capsys):
    job = "--model Qwen3-4B-Base --dtype float16 --gpu T4 --rank 32 --group 8 --length 1024"
    status, text = cli(capsys, *job.split())
    rows = dict(re.findall(r"^  (.+?) +(\d+\.\d{3})  ", text, re.MULTILINE))
    parts = {name: float(gib) for name, gib in rows.items() if name not in ("sum", "T4")}
    assert status == 0
    assert sum(parts.values()) == pytest.approx(float(rows["sum"]), abs=1e-9)
    assert re.search(r"with shared weights: .* fits", text)
    assert re.search(r"with copied weights: .* does not fit", text)
    assert "8 completions of 1024 tokens at once" in text


def test_the_command_as_json_and_its_status(capsys):
    status, text = cli(capsys, "--gpu", "RTX 2060", "--json")
    plans = json.loads(text)
    assert status == 1
    assert set(plans) == {"shared", "copied"}
    for plan in plans.values():
        assert sum(part["bytes"] for part in plan["parts"]) == plan["total_bytes"]
        assert plan["changes"][0]["gain_gib"] >= plan["changes"][-1]["gain_gib"]
    assert "change first" in cli(capsys, "--gpu", "RTX 2060")[1]
    assert cli(capsys, "--model", "Qwen3-0.6B", "--gpu", "RTX 2060")[0] == 0


@pytest.mark.parametrize(
    "arguments",
    ["--rank 0", "--length -5", "--gpu T4 --dtype bfloat16", "--gpu foo", "--gpu T4 --memory -1", "--model gpt5",
     "--gpu T4 --utilization 2", "--gpu T4 --micro-batch 0", "--capability 99.0"],
)  # fmt: skip
def test_bad_requests_end_with_status_2(capsys, arguments):
    assert main(["plan", *arguments.split()]) == 2
    assert "error:" in capsys.readouterr().err


def test_planning_imports_nothing_heavy():
    code = "import sys; from kit.cli import main; main(['plan', '--gpu', 'T4']); print(sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"'torch'", "'vllm'", "'trl'", "'transformers'", "'matplotlib'"} & set(re.findall(r"'\w+'", out.stdout))


def test_a_plan_is_plain_values():
    plan = plan_memory(settings())
    assert json.loads(json.dumps(asdict(plan)))["settings"]["rank"] == 32
    assert isinstance(plan, Plan)


def test_the_bundled_model_is_planned_from_its_files():
    from safetensors import safe_open

    from kit.shapes import BUNDLED

    shape = shape_of("tiny")
    with safe_open(BUNDLED / "tiny" / "model.safetensors", framework="pt") as weights:
        stored = sum(weights.get_tensor(name).numel() for name in weights.keys() if name != "lm_head.weight")  # noqa: SIM118
    assert shape.tied
    assert shape.parameters == stored
