"""What libraries say while an engine starts, held back: pages of warnings in a notebook, none of them for its reader.

Nothing is lost where it matters: if the start fails, the error carries all that was said.
"""

import contextlib
import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator

MOST = 20_000  # characters of it that an error carries

# Said later, about what this kit does on purpose: a `rollout_func` is experimental (TRL 1.16, a variable), a process
# group exists, which is the sampler's, a tracker gets no loss scale where nothing is scaled (transformers 5.17), and
# Triton, which no CPU needs, is not there or only in part (torch 2.13, and vLLM 0.31 when TRL imports it).
ON_PURPOSE = {
    "torch._library.triton": "Triton not available",
    "vllm.triton_utils.importing": "Triton is installed",
    "transformers.training_args": "process group is initialized",
    "transformers.integrations.integration_utils": 'attempting to log a value of "None"',
}


def keep_quiet() -> None:
    """For the rest of the process: no notices on what the kit does on purpose, of vLLM errors alone, and a progress bar
    only for what takes longer than three seconds.

    To be called before TRL is imported, which may import vLLM, and tqdm. Variables that are set stay as they are.
    """
    os.environ.setdefault("TQDM_DELAY", "3")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for name in ON_PURPOSE:
        logging.getLogger(name).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return ON_PURPOSE[record.name] not in str(record.msg)


def say(text: str) -> None:
    """One line on what is going on: on stderr, but in a notebook on stdout, because there stderr is red."""
    print(text, file=sys.stdout if "ipykernel" in sys.modules else sys.stderr, flush=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back stderr (Python's, and that of C++ code) and warnings; an error gets them as a note. Calls `keep_quiet`.

    Stdout has a file descriptor meanwhile: vLLM 0.31 redirects it as it starts, and that of a notebook may have none
    (ipykernel where it does not capture output by descriptor, under pytest for instance).
    """
    keep_quiet()
    said = io.StringIO()
    with tempfile.TemporaryFile() as low_level:
        kept = os.dup(2)
        os.dup2(low_level.fileno(), 2)
        try:
            with contextlib.redirect_stderr(said), warnings.catch_warnings(), _stdout_with_descriptor():
                warnings.simplefilter("ignore")
                yield
        except BaseException as error:
            low_level.seek(0)
            text = (said.getvalue() + low_level.read().decode(errors="replace")).strip()
            if text:
                error.add_note(f"Said before that:\n{text[-MOST:]}")
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


@contextlib.contextmanager
def _stdout_with_descriptor() -> Iterator[None]:
    try:
        sys.stdout.fileno()
    except io.UnsupportedOperation:
        stream = sys.stdout
        stream.fileno = lambda: 1
        try:
            yield
        finally:
            del stream.fileno
    else:
        yield
