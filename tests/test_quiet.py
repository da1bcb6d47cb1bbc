"""Nothing of what libraries say reaches the reader, unless the start fails."""

import io
import logging
import os
import subprocess
import sys
import warnings

import pytest

from kit.quiet import keep_quiet, quiet, say


def test_all_three_ways_of_writing_to_stderr_are_held_back(capfd):
    with quiet():
        print("from python", file=sys.stderr)
        os.write(2, b"from c++")
        warnings.warn("a warning", FutureWarning, stacklevel=1)
        print("stdout is not touched")
    os.write(2, b"after")
    captured = capfd.readouterr()
    assert captured.err == "after" and captured.out == "stdout is not touched\n"


def test_an_error_carries_what_was_said(capfd):
    with pytest.raises(RuntimeError, match="no engine") as failure, quiet():
        print("the reason", file=sys.stderr)
        os.write(2, b"and its address")
        raise RuntimeError("no engine")
    (note,) = failure.value.__notes__
    assert "the reason" in note and "and its address" in note
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


def test_an_error_without_words_has_no_note():
    with pytest.raises(KeyboardInterrupt) as failure, quiet():
        raise KeyboardInterrupt
    assert not hasattr(failure.value, "__notes__")


def test_a_child_process_is_held_back_too(capfd):
    with quiet():
        subprocess.run([sys.executable, "-c", "import sys; print('child', file=sys.stderr)"], check=True)
    assert capfd.readouterr().err == ""


def test_a_stdout_without_descriptor_has_one_meanwhile(monkeypatch):
    class Stream(io.StringIO):
        """A notebook's: text only."""

    monkeypatch.setattr(sys, "stdout", Stream())
    with quiet():
        assert sys.stdout.fileno() == 1
    with pytest.raises(io.UnsupportedOperation):
        sys.stdout.fileno()


def test_what_the_kit_does_on_purpose_is_not_announced_and_all_else_is(monkeypatch):
    monkeypatch.delenv("TRL_EXPERIMENTAL_SILENCE", raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # somebody wants to know
    keep_quiet()
    logger, said = logging.getLogger("transformers.training_args"), io.StringIO()
    handler = logging.StreamHandler(said)
    logger.addHandler(handler)
    logger.warning("torch.distributed process group is initialized, but parallel_mode != ParallelMode.DISTRIBUTED.")
    logger.warning("something else")
    logger.removeHandler(handler)
    assert said.getvalue() == "something else\n"
    assert os.environ["TRL_EXPERIMENTAL_SILENCE"] == "1" and os.environ["VLLM_LOGGING_LEVEL"] == "INFO"


def test_making_a_trainer_says_nothing_on_stderr():
    """Where a process group exists, as it does once a CPU engine runs: transformers would say so, in red."""
    code = (
        "from kit.quiet import keep_quiet; keep_quiet(); import tempfile, torch.distributed as d\n"
        "d.init_process_group('gloo', init_method='file://' + tempfile.mktemp(), rank=0, world_size=1)\n"
        "from kit import GRPOConfig; GRPOConfig(output_dir=tempfile.mkdtemp()).device; print(d.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_bar_is_for_what_takes_long():
    code = "from kit.quiet import keep_quiet; keep_quiet(); from tqdm import tqdm\n"
    code += "list(tqdm(range(3))); print(tqdm(range(3)).delay)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("3.0\n", "")


@pytest.mark.parametrize(("notebook", "stream"), [(False, "err"), (True, "out")])
def test_a_line_is_not_red_in_a_notebook(capsys, monkeypatch, notebook, stream):
    if notebook:
        monkeypatch.setitem(sys.modules, "ipykernel", sys)
    else:
        monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    say("Starting")
    printed = capsys.readouterr()._asdict()
    assert printed.pop(stream) == "Starting\n" and list(printed.values()) == [""]
