"""Pausing and stopping a run from outside: flags that the trainer asks for after each step.

`RunControl` is plain Python and works from any thread. In a notebook the difficulty is that a kernel does not process
a button's message while a cell runs, and `trainer.train()` is a running cell. So `check`, which the trainer calls
between steps, first lets those messages through (`serve_widgets`). That way a run stays in its cell, in the main
thread, where errors, interrupts and "Run all" mean what they always do.
"""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

POLL_S = 0.05
IDLE, BUSY = ("ready", "ended", "failed"), ("running", "paused", "stopping")
T = TypeVar("T")


def serve_widgets() -> bool:
    """Processes the widget messages that wait while a cell runs; all other messages keep their place in the queue.

    True if the kernel lets us. False outside a kernel, in another thread than the kernel's main one (where nothing is
    held up) and for a kernel built otherwise; buttons then work when the cell has ended.

    Tried with ipykernel 6.17 (Colab), 6.30, 7.0, 7.1 and 7.4. JupyterLab 4.4 and newer with ipykernel 7 sends widget
    messages to a second thread of the kernel by itself (subshells), and then none wait here.
    """
    if "ipykernel" not in sys.modules or threading.current_thread() is not threading.main_thread():
        return False
    import zmq
    from IPython import get_ipython
    from zmq.eventloop.zmqstream import ZMQStream

    kernel = getattr(get_ipython(), "kernel", None)
    stream = _waiting_stream(kernel)
    if not isinstance(stream, ZMQStream):
        return False
    waiting, dispatch = [], stream._recv_callback
    stream.on_recv(waiting.append, copy=False)
    try:
        stream.flush(zmq.POLLIN)
    finally:
        stream.on_recv(dispatch, copy=False)
    for message in waiting:
        identities, parts = kernel.session.feed_identities(message, copy=False)
        kind = kernel.session.deserialize(parts, content=False, copy=False)["header"]["msg_type"]
        if kind in ("comm_open", "comm_msg", "comm_close"):
            parsed = kernel.session.deserialize(parts, content=True, copy=False)
            kernel._publish_status("busy", "shell", parent=parsed)  # the front end waits for busy and idle
            kernel.shell_handlers[kind](stream, identities, parsed)
            kernel._publish_status("idle", "shell", parent=parsed)
        else:
            stream._run_callback(dispatch, message)
    return True


def _waiting_stream(kernel: object) -> object | None:
    """The stream on which messages for the main thread wait: the shell's own, or the shell thread's pair to it."""
    if kernel is None:
        return None
    thread = getattr(kernel, "shell_channel_thread", None)  # ipykernel 7
    if thread is None:
        return kernel.shell_stream
    return thread.manager.get_shell_channel_to_subshell_pair(None).to_stream


class RunControl:
    """Pause, resume, stop: set from anywhere, obeyed by the trainer between two steps.

        control = RunControl()
        trainer = kit.GRPOTrainer(..., run_control=control)
        control_panel(control, start=trainer.train)     # kit.widgets; or control.pause() and so on from other code
        result = control.result(trainer.train)          # runs it now, unless the start button has

    `state` is "ready", "running", "paused", "stopping", "ended" or "failed"; the last two are known of a run that
    `start` or `result` began. `error` is what a failed one raised.
    """

    def __init__(self):
        self._lock, self._state = threading.Lock(), "ready"
        self._listeners: list[Callable[[str], None]] = []
        self._future: Future | None = None
        self.error: BaseException | None = None

    @property
    def state(self) -> str:
        return self._state

    def listen(self, listener: Callable[[str], None]) -> None:
        """Calls `listener` with each new state."""
        self._listeners.append(listener)

    def pause(self) -> None:
        """Hold the run before its next step. Does nothing once it is stopping or over."""
        self._change("paused", "ready", "running")

    def resume(self) -> None:
        """Go on after a pause."""
        self._change("running", "paused")

    def stop(self) -> None:
        """End the run after this step; the trainer saves what it has. Also ends a pause."""
        self._change("stopping", "ready", "running", "paused")

    def check(self) -> str:
        """ "run" or "stop"; blocks while paused. Called by the trainer after each step."""
        self._change("running", *IDLE)
        serve_widgets()
        while self._state == "paused":
            time.sleep(POLL_S)
            serve_widgets()
        return "stop" if self._state == "stopping" else "run"

    def start(self, function: Callable[[], T]) -> "Future[T]":
        """Runs `function` in a thread, for a start button: the kernel stays free. Once; then gives the same future."""
        if self._future is None:
            self._future = Future()
            threading.Thread(target=self._run, args=(function,), name="kit.RunControl", daemon=True).start()
        return self._future

    def result(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises: waits for it if it was started, else runs it here and now.

        After a failure it can be asked again, and then runs `function` again.
        """
        if self._future is None:
            return self._observed(function)
        while not self._future.done():
            serve_widgets()
            time.sleep(POLL_S)
        future = self._future
        if future.exception() is not None:
            self._future = None
        return future.result()

    def _run(self, function: Callable[[], T]) -> None:
        future = self._future
        try:
            future.set_result(self._observed(function))
        except BaseException as error:
            future.set_exception(error)

    def _observed(self, function: Callable[[], T]) -> T:
        """Calls it; the state says that it runs, and how it ended."""
        self.error = None
        self._change("running", *IDLE)
        serve_widgets()
        try:
            value = function()
        except BaseException as error:
            self.error = error
            self._change("failed", *BUSY)
            raise
        self._change("ended", *BUSY)
        return value

    def _change(self, new: str, *old: str) -> None:
        with self._lock:
            if self._state not in old:
                return
            self._state = new
        for listener in self._listeners:
            listener(new)
