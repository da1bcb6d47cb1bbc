"""What libraries say while an engine starts, held back: pages of warnings in a notebook, none of them for its reader.

Nothing is lost where it matters: if the start fails, the error carries all that was said.
"""

import contextlib
import io
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator

MOST = 20_000  # characters of it that an error carries


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back stderr (Python's, and that of C++ code) and warnings; an error gets them as a note.

    Stdout has a file descriptor meanwhile: vLLM 0.31 redirects it as it starts, and that of a notebook may have none
    (ipykernel where it does not capture output by descriptor, under pytest for instance).
    """
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
