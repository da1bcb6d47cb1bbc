"""Nothing of what libraries say reaches the reader, unless the start fails."""

import io
import os
import subprocess
import sys
import warnings

import pytest

from kit.quiet import quiet


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
