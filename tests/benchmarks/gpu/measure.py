"""GPU measurements, one process each, as JSON: `python tests/benchmarks/gpu/measure.py PART --out FILE ...`.

Parts: `numerics` (mismatch by dtype and length, real weights), `step` (GRPO step of the kit or of TRL's colocate mode),
`cap` (the kit's step on a card where only so much memory is free),
`sampler` (tokens a second with and without an adapter, or by transformers), `reload` (memory that comes back),
`weights` (a random model of a known shape, for the other two).
Every file holds hardware, versions and settings beside the figures.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def wait_for_gpu() -> None:
    """Until everything asked of the GPU is done; on a machine without one (a dry run) nothing."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory() -> dict:
    """Peaks of the allocator, and memory in use on the card (of the process, in a dry run) [GiB].

    `outside_gib` is what the card holds besides the allocator's: context and libraries (and other processes).
    """
    import torch

    from kit.process_memory import used_memory_gib

    if not torch.cuda.is_available():
        return {"used_gib": used_memory_gib()}
    return {
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30, "used_gib": used_memory_gib(),
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "outside_gib": used_memory_gib() - torch.cuda.memory_reserved() / 2**30,
    }  # fmt: skip


def spread(values: list[float]) -> dict:
    """Median and range of repeated measurements."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values), "n": len(values)}


def weights(args) -> dict:
    """Write a random model of Qwen3-4B's exact shape (bf16) with a given tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

    config = Qwen3Config(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=32768, tie_word_embeddings=True, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(args.model)
    tokenizer.save_pretrained(args.model)
    return {"parameters": sum(p.numel() for p in model.parameters())}


def numerics(args) -> dict:
    """Sampler against trainer on a real model: every metric, and the sequence log-ratio at growing lengths."""
    from kit import FastLanguageModel
    from kit.loading import close_current
    from kit.measure import measure_mismatch
    from kit.sampler import SamplingSettings

    subjects = ["fox", "ship", "king", "robot", "teacher", "farmer", "doctor", "river", "castle", "mountain"]
    found = {}
    for dtype in args.dtypes.split(","):
        model, tokenizer = FastLanguageModel.from_pretrained(
            args.model, max_seq_length=args.length + 256, dtype=dtype, max_num_seqs=args.sequences, max_lora_rank=0
        )
        prompts = [_story(tokenizer, subjects[i % len(subjects)]) for i in range(args.sequences)]
        settings = SamplingSettings(max_tokens=args.length, ignore_eos=True)
        started = time.perf_counter()
        measured = measure_mismatch(model, tokenizer, prompts, settings, batch=8)
        difference = measured.trainer_logprobs - measured.sampler_logprobs
        by_length = {
            n: difference[:, :n].sum(-1).abs().mean().item() for n in (256, 512, 1024, 2048) if n <= args.length
        }
        found[dtype] = {"tokens": measured.tokens, "seconds": time.perf_counter() - started}
        found[dtype] |= {"weights": model.kit.shared_weights, **measured.metrics(), "sequence_abs_by_length": by_length}
        del model
    close_current()
    return {"dtypes": found}


def _story(tokenizer, subject):
    message = [{"role": "user", "content": f"Write a long story about a {subject}."}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)


def digits(completions, **kwargs):
    """Share of digits: a reward that differs between random completions."""
    return [sum(c in "0123456789" for c in text) / max(1, len(text)) for text in completions]


def step(args) -> dict:
    """Seconds of GRPO steps, kit or TRL colocate: same model, prompts, lengths and adapter."""
    from datasets import Dataset

    dataset = Dataset.from_dict({"prompt": [f"What is {a}+{b}? " for a in range(10) for b in range(10)]})
    shared = {
        "output_dir": args.run_dir, "max_steps": args.steps, "per_device_train_batch_size": args.micro_batch,
        "gradient_accumulation_steps": args.completions // args.micro_batch, "num_generations": args.group,
        "max_completion_length": args.length, "learning_rate": 1e-5, "gradient_checkpointing": True,
        "save_strategy": "no", "report_to": "none", "generation_kwargs": {"ignore_eos": True}, "logging_steps": 1,
    }  # fmt: skip
    started = time.perf_counter()
    build = _kit_trainer if args.side == "kit" else _trl_trainer
    trainer, sync_seconds, extra = build(args, dataset, shared)
    loaded = time.perf_counter() - started
    clock = _Clock()
    trainer.add_callback(clock.callback())
    trainer.train()
    step_seconds = clock.seconds[2:]  # the first two compile and warm up
    return {
        "side": args.side, "dtype": args.dtype, "load_seconds": loaded, "step_seconds": spread(step_seconds),
        "all_step_seconds": clock.seconds, "sync_seconds": spread(sync_seconds()[2:]),
        **memory(), **extra(),
    }  # fmt: skip


class _Clock:
    """Wall time between the ends of optimizer steps."""

    def __init__(self):
        self.seconds, self._last = [], None

    def callback(self):
        from transformers import TrainerCallback

        clock = self

        class Tick(TrainerCallback):
            def on_train_begin(self, *args, **kwargs):
                clock._last = time.perf_counter()

            def on_step_end(self, *args, **kwargs):
                wait_for_gpu()
                now = time.perf_counter()
                clock.seconds.append(now - clock._last)
                clock._last = now

        return Tick()


def _kit_trainer(args, dataset, shared):
    import kit

    before = memory()["used_gib"]
    model, tokenizer = kit.FastLanguageModel.from_pretrained(
        args.model, max_seq_length=args.length + 64, dtype=args.dtype, max_lora_rank=32, max_num_seqs=args.completions,
        gpu_memory_utilization=args.utilization, start=args.start,
    )  # fmt: skip
    after_load = memory()["used_gib"] - before
    sampler = model.kit.sampler
    model = kit.FastLanguageModel.get_peft_model(model, r=32, lora_alpha=64)
    records = []
    trainer = kit.GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=digits, args=kit.GRPOConfig(**shared),
        train_dataset=dataset, on_record=records.append,
    )  # fmt: skip

    def extra():
        return {
            "engine_seconds": sampler.start_seconds, "loaded_gib": after_load, "weights": model.kit.shared_weights,
            "kv_cache_bytes": sampler.llm.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes, "records": records,
        }  # fmt: skip

    return trainer, lambda: [record["sync/seconds"] for record in records], extra


def _trl_trainer(args, dataset, shared):
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation.vllm_generation import VLLMGeneration

    seconds, original = [], VLLMGeneration.sync_weights

    def timed(self):
        wait_for_gpu()
        started = time.perf_counter()
        original(self)
        wait_for_gpu()
        seconds.append(time.perf_counter() - started)

    VLLMGeneration.sync_weights = timed
    lora = LoraConfig(r=32, lora_alpha=64, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    config = GRPOConfig(
        **shared, use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=args.utilization,
        vllm_max_model_length=args.length + 64, bf16=args.dtype == "bfloat16", fp16=args.dtype == "float16",
        model_init_kwargs={"dtype": args.dtype},
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=args.model, reward_funcs=digits, args=config, train_dataset=dataset, peft_config=lora,
        processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
    )  # fmt: skip
    return trainer, lambda: seconds, lambda: {"metrics": trainer.state.log_history}


BALLAST = """
import sys, torch
wanted = float(sys.argv[1]) * 2**30
free, total = torch.cuda.mem_get_info()
hold = torch.empty(int(free - wanted), dtype=torch.uint8, device="cuda")
print(torch.cuda.mem_get_info()[0] / 2**30, flush=True)
sys.stdin.read()
"""


def cap(args) -> dict:
    """A run of the kit on a card whose other memory another process holds: `--cap` GiB are all there is."""
    import subprocess
    import sys

    command = [sys.executable, "-c", BALLAST, str(args.cap)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ballast:
        try:
            free_gib = float(ballast.stdout.readline())
            args.side = "kit"
            return {"free_before_gib": free_gib, **step(args)}
        finally:
            ballast.stdin.close()


def sampler(args) -> dict:
    """Tokens a second of the sampler, with or without an adapter, at several batch sizes."""
    import torch

    from kit.loading import FastLanguageModel
    from kit.sampler import SamplingSettings

    sizes = [int(size) for size in args.batches.split(",")]
    model, tokenizer = FastLanguageModel.from_pretrained(
        args.model, max_seq_length=args.length + 64, dtype=args.dtype, max_lora_rank=32 if args.adapter else 0,
        max_num_seqs=max(sizes), gpu_memory_utilization=args.utilization, start=args.start,
        fast_inference=args.sampler == "vllm",
    )  # fmt: skip
    engine = model.kit.sampler
    if args.adapter:
        peft_model = FastLanguageModel.get_peft_model(model, r=32, lora_alpha=64)
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.01)
        engine.load_adapter(peft_model)
    prompt = tokenizer("What is 2+3? ").input_ids
    settings = SamplingSettings(max_tokens=args.length, ignore_eos=True)
    rates = {}
    for size in sizes:
        prompts = [prompt] * size
        engine.generate(prompts, SamplingSettings(max_tokens=16, ignore_eos=True))  # kernels are compiled on first use
        timings = {}
        for seeded in (False, True):
            seconds = []
            for _ in range(args.repeats):
                started = time.perf_counter()
                engine.generate(prompts, settings, list(range(size)) if seeded else None)
                seconds.append(time.perf_counter() - started)
            timings["seeded" if seeded else "unseeded"] = size * args.length / statistics.median(seconds)
        rates[size] = timings
    return {
        "adapter": args.adapter, "start": args.start, "dtype": args.dtype, "tokens_per_s": rates,
        "engine_seconds": getattr(engine, "start_seconds", None),
        "fused": os.environ.get("KIT_FUSED_ADAPTERS", "1") == "1",
    }  # fmt: skip


def reload(args) -> dict:
    """Memory in use on the card after loading, sampling and closing, in one dtype after the other [GiB]."""
    import torch

    from kit.loading import FastLanguageModel, close_current
    from kit.process_memory import used_memory_gib
    from kit.sampler import SamplingSettings

    torch.zeros(1, device="cuda")
    used = [used_memory_gib()]
    for dtype in args.dtypes.split(","):
        model, tokenizer = FastLanguageModel.from_pretrained(
            args.model, max_seq_length=args.length + 64, dtype=dtype, gpu_memory_utilization=args.utilization
        )
        model.kit.sampler.generate(tokenizer(["What is 2+3? "] * 8).input_ids, SamplingSettings(64, ignore_eos=True))
        loaded = used_memory_gib()
        del model
        close_current()
        used += [loaded, used_memory_gib()]
    return {"dtypes": args.dtypes, "used_gib": used}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["weights", "numerics", "step", "cap", "sampler", "reload"])
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--dtypes", default="bfloat16,float16,float32")
    parser.add_argument("--side", choices=["kit", "trl"], default="kit")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--completions", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--cap", type=float, default=14.7, help="GiB of the card left to the run")
    parser.add_argument("--utilization", type=float, default=0.25)
    parser.add_argument("--start", default="fast")
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument("--sampler", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--batches", default="32,256")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--run-dir", default="runs/benchmark")
    args = parser.parse_args()
    result = globals()[args.part](args)
    from kit import provenance

    settings = {
        name: value for name, value in vars(args).items() if name not in ("out", "model", "tokenizer", "run_dir")
    }
    origin = {"settings": settings, "hardware": provenance.machine(), "versions": provenance.versions()}
    Path(args.out).write_text(json.dumps({**origin, **result}, indent=1, default=str))


if __name__ == "__main__":
    main()
