"""A run on data of one's own, from the command line, and what is saved of it: adapter, merged model, card.

One training run and one engine of a saved model serve the whole file.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
import torch
from engines import MODEL, ROOT, kit_command

from kit import saving
from kit.cli import main
from kit.precision import EXPECTED_ABS_MEAN, Precision
from kit.probe import trainer_score
from kit.records import Run, RunWriter
from kit.saving import PushRefused, SaveExists, load_trained, merged, push, rounding_table, whole_folder

REWARD = "def brevity(completions, **columns):\n    return [1 / (1 + len(c)) for c in completions]\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The finished run: the bundled model in float32 on a JSONL file, warmed up, with three rewards."""
    folder = tmp_path_factory.mktemp("data")
    pairs = [(a, b) for a in range(10, 26) for b in (11, 23)]
    sums = [{"q": f"{a}+{b}=?", "a": str(a + b), "w": f"steps: {a}+{b}={a + b}"} for a, b in pairs]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    (folder / "mine.py").write_text(REWARD)
    process = kit_command(
        "train", "--model", MODEL, "--dtype", "float32", "--task", folder / "sums.jsonl", "--question", "q",
        "--answer", "a", "--solution", "w", "--rewards", f"answer,format=0.5,{folder}/mine.py:brevity=0.1",
        "--steps", 2, "--warm-up", 3, "--completions", 16, "--max-completion-length", 48, "--held-out", 3,
        "--learning-rate", 5e-3, "--top-k", 40, "--out", folder / "run", "--json",
    )  # fmt: skip
    printed, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    return SimpleNamespace(run=Run.load(folder / "run"), result=json.loads(printed), errors=errors)


@pytest.mark.engine
def test_every_reward_is_a_column_of_the_record_and_of_the_completions(trained):
    names = ("correct_answer", "exact_format", "brevity")
    for record in trained.result["records"]:
        means = [record[f"rewards/{name}/mean"] for name in names]
        assert record["accuracy"] == means[0]
        assert record["reward"] == pytest.approx(means[0] + 0.5 * means[1] + 0.1 * means[2], abs=1e-5)
    assert all(set(row["rewards"]) == set(names) for row in trained.run.completions)
    assert all(row["prompt"].endswith("=?\nA: <think>") for row in trained.run.completions)
    assert "top_k=40" in trained.run.info["sampling_bias"]


@pytest.mark.engine
def test_the_run_says_where_it_came_from(trained):
    info = trained.run.info
    assert info["task"].endswith("sums.jsonl") and "<think>" in info["chat_template"]
    assert info["warm_up"]["steps"] == 3 and info["warm_up"]["probe_after"] < 1e-5
    assert info["summary"]["held_out_difference"]["interval"][0] <= info["summary"]["held_out_difference"]["mean"]
    for said in ("the kit's chat template (the model has none)", "training problems, 512 were asked for",
                 "renormalises over the tokens it keeps", "Warm-up: 3 steps"):  # fmt: skip
        assert said in trained.errors


def policy_scores(run, token_ids):
    """The trained policy's logprobs under the run's own contract [nats]."""
    return trainer_score(load_trained(run)[0], token_ids, Precision(run.info["precision"]["name"]))


def probe(run, tokenizer):
    row = run.completions[-1]
    return tokenizer(row["prompt"] + row["completion"]).input_ids[:60]


@pytest.mark.engine
def test_a_merged_model_is_the_trained_policy_in_transformers_and_in_vllm(trained, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kit import FastLanguageModel
    from kit.loading import close_current
    from kit.task_evaluate import evaluated
    from kit.training import TrainSettings

    out = tmp_path / "merged"
    assert main(["save", str(trained.run.path), "--merged", "--out", str(out)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = probe(trained.run, tokenizer)
    wanted = policy_scores(trained.run, ids)
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    base = trainer_score(AutoModelForCausalLM.from_pretrained(ROOT / "kit/models/tiny", dtype=torch.float32), ids,
                         Precision("float32"))  # fmt: skip
    assert (base - wanted).abs().mean() > 1e-3  # training did something
    assert (trainer_score(plain, ids, Precision("float32")) - wanted).abs().mean() < 1e-5
    close_current()
    loaded = FastLanguageModel.from_pretrained(str(out), max_seq_length=160, dtype="float32", max_lora_rank=0)
    try:
        sampled = torch.tensor(loaded[0].kit.sampler.score(ids))
        assert (sampled - wanted).abs().mean() < 1e-5
        assert loaded[1].chat_template == trained.run.info["chat_template"]
        settings = TrainSettings(model=str(out), dtype="float32", tags="<think>,</think>,,")
        found = evaluated(settings, problems=4, samples=2, loaded=loaded)["results"]
        assert [row["weights"] for row in found] == ["base"] and found[0]["problems"] == 4
    finally:
        close_current()


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_weights_are_rounded_once_and_stay_within_the_band(trained, tmp_path, dtype, capsys):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "merged"
    assert main(["save", str(trained.run.path), "--merged", "--dtype", dtype, "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    costs = {row["dtype"]: row for row in told["rounding"]}
    assert 0 == costs["float32"]["relative"] < costs["float16"]["relative"] < costs["bfloat16"]["relative"] < 2**-8
    assert costs["float32"]["logprob_abs"] < 1e-5
    assert costs[dtype]["logprob_abs"] < EXPECTED_ABS_MEAN[dtype][1]
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = probe(trained.run, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == getattr(torch, dtype)
    again = trainer_score(model.float(), ids, Precision("float32"))
    assert (again - policy_scores(trained.run, ids)).abs().mean() < EXPECTED_ABS_MEAN[dtype][1]
    weights = load_file(out / "model.safetensors")
    policy = load_trained(trained.run)[0]
    from kit.adapters import adapter_weights

    for name, low_rank in adapter_weights(policy).items():
        layer = policy.get_base_model().get_submodule(name).get_base_layer()
        exact = layer.weight.double() + low_rank.scaling * (low_rank.b.double() @ low_rank.a.double())
        assert torch.equal(weights[f"{name}.weight"], merged(layer.weight, low_rank).to(getattr(torch, dtype)))
        assert torch.allclose(weights[f"{name}.weight"].double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.engine
def test_the_adapter_is_saved_in_pefts_format_with_a_card(trained, tmp_path, capsys):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "adapter"
    assert main(["save", str(trained.run.path), "--out", str(out)]) == 0
    assert "adapter_model.safetensors" in capsys.readouterr().out
    base = AutoModelForCausalLM.from_pretrained(ROOT / "kit/models/tiny", dtype=torch.float32)
    ids = probe(trained.run, AutoTokenizer.from_pretrained(out))
    loaded = trainer_score(PeftModel.from_pretrained(base, out), ids, Precision("float32"))
    assert torch.equal(loaded, policy_scores(trained.run, ids))
    card = (out / "README.md").read_text()
    for said in ("library_name: peft", "2 steps on sums.jsonl", "| learning_rate | 0.005 |", "| held_out_before |",
                 "| torch |", "mismatch_abs_mean_median"):  # fmt: skip
        assert said in card
    assert str(trained.run.path.parent) not in card  # no path of this machine


@pytest.mark.engine
def test_saving_again_is_refused_and_what_is_there_stays(trained, tmp_path, capsys):
    out = tmp_path / "taken"
    out.mkdir()
    (out / "file").write_text("mine")
    assert main(["save", str(trained.run.path), "--merged", "--out", str(out)]) == 2
    assert f"save to {out}-2" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"] and (out / "file").read_text() == "mine"


@pytest.mark.engine
def test_the_hub_that_does_not_take_it_is_said_and_the_folder_stays(trained, tmp_path, monkeypatch, capsys):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    out = tmp_path / "adapter"
    assert main(["save", str(trained.run.path), "--out", str(out), "--push", "nobody/model"]) == 2
    assert "nobody/model was not uploaded" in (said := capsys.readouterr().err) and "HF_TOKEN" in said
    assert (out / "adapter_model.safetensors").exists()


# ---- without a run


class Refusing(BaseHTTPRequestHandler):
    """A hub that knows the token and gives it no rights."""

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(403)
        self.send_header("X-Error-Message", "You don't have the rights to create a model under the namespace someone")
        self.end_headers()

    def log_message(self, *args):
        pass


def test_a_token_that_lacks_rights_is_said(tmp_path, monkeypatch):
    import huggingface_hub.constants

    server = HTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_readonly")
    try:
        with pytest.raises(PushRefused, match=r"someone/model was not uploaded: 403 .*write access"):
            push(tmp_path, "someone/model")
    finally:
        server.shutdown()
        server.server_close()


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with whole_folder(tmp_path / "out") as part:
        (part / "a").write_text("1")
        assert not (tmp_path / "out").exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]
    for error in (KeyboardInterrupt, OSError):
        with pytest.raises(error), whole_folder(tmp_path / "other") as part:
            (part / "a").write_text("1")
            raise error
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(SaveExists, match="out-2"), whole_folder(tmp_path / "out"):
        raise AssertionError("not reached")


KILLED = """
import sys, time
from pathlib import Path
from kit.saving import whole_folder
with whole_folder(Path(sys.argv[1])) as part:
    (part / "half").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def test_a_save_that_was_killed_leaves_no_folder_of_that_name_and_the_next_one_is_clean(tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(out)], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout.readline() == b"writing\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not out.exists()
    with whole_folder(out) as part:
        (part / "whole").write_text("1")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (out / "whole").exists()


@pytest.mark.parametrize(
    ("info", "words", "said"),
    [
        ({"train_settings": {"model": "tiny"}}, [], "has no adapter"),
        ({}, [], "does not say which model"),
        ({"train_settings": {"model": "./gone"}}, [], "no folder ./gone"),
        ({}, ["--dtype", "float16"], "--dtype is for merged weights"),
    ],
)
def test_a_run_that_cannot_be_saved_is_said_in_one_line(tmp_path, capsys, info, words, said):
    with RunWriter.create(tmp_path / "run", info):
        pass
    assert main(["save", str(tmp_path / "run"), "--out", str(tmp_path / "out"), *words]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_merging_is_exact_where_float32_is():
    low_rank = SimpleNamespace(a=torch.eye(2, 3), b=torch.ones(4, 2), scaling=2.0)
    weight = torch.zeros(4, 3, dtype=torch.bfloat16)
    assert torch.equal(merged(weight, low_rank), 2.0 * torch.tensor([[1.0, 1.0, 0.0]] * 4))
    assert merged(weight, low_rank).dtype == torch.float32


def test_the_table_has_a_line_a_dtype():
    table = rounding_table([saving.Rounding("float16", 1e-4, 0.5, None), saving.Rounding("bfloat16", 1e-3, 4.0, 0.01)])
    assert len(table.splitlines()) == 3 and "not measured" in table and "0.01" in table
