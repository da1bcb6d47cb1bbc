"""JupyterLab in a real browser: notebooks opened, run, clicked and photographed as a person does it.

    with Lab(folder) as lab, chromium() as browser:
        notebook = NotebookPage(browser, lab, "02_grpo_with_vllm.ipynb")
        notebook.run_all()

For the tests and for the README's pictures. Debian's Chromium is driven by playwright, whose own download is not used.
The server and its settings live in a folder of their own: nothing of the user's JupyterLab is read or changed.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from kit.errors import KitError

ROOT = Path(__file__).parents[1]
BINARIES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars")
START_S, WAIT_S = 120.0, 600.0  # limits on a busy machine, not what it takes
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}

# No news from the network, no dialogue, and every cell in the page: a cell out of sight can be looked at too.
LAB_SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},
    "docmanager-extension/plugin": {"autosave": False},
}


class BrowserMissing(KitError, RuntimeError):
    """There is no Chromium, or JupyterLab did not start."""


class CellFailed(KitError, RuntimeError):
    """A cell ended in an error; the message is what the notebook shows of it."""


def chromium_path() -> str | None:
    """The installed Chromium; None where there is none."""
    return next(filter(None, map(shutil.which, BINARIES)), None)


@contextlib.contextmanager
def chromium() -> Iterator[object]:
    """A headless browser (playwright's `Browser`).

    Raises:
        BrowserMissing: none is installed.
    """
    path = chromium_path()
    if path is None:
        raise BrowserMissing("There is no Chromium here. On Debian or Ubuntu: apt-get install chromium.")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(OPTIONS))
        try:
            yield browser
        finally:
            browser.close()


class Lab:
    """A JupyterLab server over copies of the notebooks, on a free port of localhost.

    Args:
        folder: where the copies, the server's settings and its log go.
        environment: variables added for the kernels, for example KIT_STEPS.
    """

    def __init__(self, folder: str | Path, environment: dict[str, str] | None = None):
        self.folder = Path(folder).absolute()
        self.notebooks = self.folder / "notebooks"
        self._own = self.folder / "jupyter"
        self._environment = os.environ | self._places() | {"PYTHONPATH": str(ROOT)} | (environment or {})
        self._token, self._process = secrets.token_hex(16), None
        self.url = ""

    def __enter__(self) -> Self:
        self.notebooks.mkdir(parents=True, exist_ok=True)
        for path in (ROOT / "notebooks").glob("*.ipynb"):
            shutil.copy(path, self.notebooks)
        shutil.copytree(ROOT / "notebooks" / "images", self.notebooks / "images", dirs_exist_ok=True)
        for name, values in LAB_SETTINGS.items():
            self.set(name, values)
        (self._own / "runtime").mkdir(parents=True, exist_ok=True)
        options = {
            "ServerApp.root_dir": self.folder,
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": 0,
            "ServerApp.open_browser": False,
            "ServerApp.allow_root": True,
            "LabApp.expose_app_in_browser": True,
            "IdentityProvider.token": self._token,
        }
        command = [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())]
        with open(self.folder / "jupyterlab.log", "wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment, process_group=0)
        try:
            self.url = self._wait_for_url()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the server; it ends its kernels."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def set(self, plugin: str, values: dict) -> None:
        """A setting of JupyterLab, for pages that are opened from now on."""
        path = self._own / "settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))

    def page_of(self, notebook: str) -> str:
        """The address of a notebook, in a workspace without other tabs."""
        return f"{self.url}lab/tree/notebooks/{notebook}?token={self._token}&reset"

    def _places(self):
        names = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "IPYTHONDIR": "ipython",
        }
        return {name: str(self._own / folder) for name, folder in names.items()}

    def _wait_for_url(self):
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            for path in (self._own / "runtime").glob("jpserver-*.json"):
                with contextlib.suppress(ValueError):  # half-written
                    return json.loads(path.read_text())["url"]
            time.sleep(0.1)
        said = (self.folder / "jupyterlab.log").read_text(errors="replace")[-1000:]
        raise BrowserMissing(f"JupyterLab did not start within {START_S:.0f} s. What it said last:\n{said}")


class NotebookPage:
    """One notebook in a tab. `page` is playwright's; cells are counted from 0, those of text included.

    Args:
        browser: from `chromium`.
        size: of the window [pixels]; scale: device pixels for each of them.
        theme: "light" or "dark".
    """

    def __init__(self, browser, lab: Lab, notebook: str, *, size=(1280, 900), scale: float = 1, theme: str = "light"):
        lab.set("apputils-extension/themes", {"theme": THEMES[theme]})
        self.page = browser.new_page(
            viewport={"width": size[0], "height": size[1]}, device_scale_factor=scale, color_scheme=theme
        )
        self.page.set_default_timeout(1000 * WAIT_S)
        self.page.goto(lab.page_of(notebook))
        self.ready()

    def ready(self) -> None:
        """Returns when the notebook is shown and its kernel waits for work."""
        self.page.wait_for_function(IS_IDLE)

    def reload(self) -> None:
        """As F5."""
        self.page.reload()
        self.ready()

    def command(self, name: str, **arguments: object) -> None:
        """A command of JupyterLab, to its end: what a menu entry does."""
        self.page.evaluate("([name, args]) => window.jupyterapp.commands.execute(name, args).then(() => null)",
                           [name, arguments])  # fmt: skip

    def run_all(self) -> None:
        """Starts "Run all cells" and does not wait for it."""
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")

    def run_through(self, last: int) -> None:
        """Runs the cells up to number `last`, one after the other, as with shift and return."""
        for index in range(last + 1):
            self.page.evaluate(f"() => {{ {CONTENT}.activeCellIndex = {index}; }}")
            self.command("notebook:run-cell")

    def finished(self) -> None:
        """Returns when no cell runs or waits; `has_ended` asks without waiting.

        Raises:
            CellFailed: one ended in an error.
        """
        self.page.wait_for_function(HAS_ENDED)
        errors = self.page.locator('[data-mime-type="application/vnd.jupyter.error"]').all_inner_texts()
        if errors:
            raise CellFailed(errors[-1][-2000:])

    def has_ended(self) -> bool:
        """Whether cells have run and none runs or waits."""
        return self.page.evaluate(HAS_ENDED)

    def cell(self, index: int):
        """The cell's element, as a playwright locator."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def index_of(self, text: str, kind: str = "code") -> int:
        """The number of the first cell of a kind ("code", "markdown") whose source contains the text."""
        matches = "cell.model.type === kind && cell.model.sharedModel.getSource().includes(text)"
        return self.page.evaluate(f"([text, kind]) => {CONTENT}.widgets.findIndex(cell => {matches})", [text, kind])

    def outputs(self, index: int) -> str:
        """The text of a cell's outputs."""
        return "\n".join(self.cell(index).locator(".jp-OutputArea-output").all_inner_texts())

    def show(self, theme: str) -> None:
        """Changes the theme of the page that is open."""
        self.command("apputils:change-theme", theme=THEMES[theme])
        self.page.wait_for_function("light => (document.body.dataset.jpThemeLight === 'true') === light",
                                    arg=theme == "light")  # fmt: skip
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def picture(self, path: str | Path, first: int, last: int | None = None) -> None:
        """A picture of the cells from `first` to `last` (only `first`, if none is given), however high they are."""
        boxes = [self.cell(index).bounding_box() for index in range(first, (last or first) + 1)]
        width = self.page.viewport_size["width"]
        height = max(box["y"] + box["height"] for box in boxes) - boxes[0]["y"]
        self.page.set_viewport_size({"width": width, "height": int(height) + 260})
        self.cell(first).evaluate("element => element.scrollIntoView({block: 'start'})")
        top, end = (self.cell(index).bounding_box() for index in (first, last or first))
        clip = {"x": top["x"], "y": top["y"], "width": top["width"], "height": end["y"] + end["height"] - top["y"]}
        self.page.screenshot(path=str(path), clip=clip)

    def window(self, path: str | Path, index: int, height: int) -> None:
        """A picture of the window, this high, with the cell at its top and without the file browser."""
        self.page.evaluate("() => { window.jupyterapp.shell.collapseLeft(); }")
        self.page.set_viewport_size({"width": self.page.viewport_size["width"], "height": height})
        self.cell(index).evaluate("element => element.scrollIntoView({block: 'start'})")
        self.page.mouse.move(0, 0)
        self.page.screenshot(path=str(path))


CONTENT = "window.jupyterapp.shell.currentWidget.content"
IS_IDLE = """() => {
    const panel = window.jupyterapp && window.jupyterapp.shell.currentWidget;
    const kernel = panel && panel.sessionContext && panel.sessionContext.session && panel.sessionContext.session.kernel;
    return !!kernel && kernel.status === 'idle' && panel.context.isReady && panel.content.widgets.length > 0;
}"""
HAS_ENDED = """() => {
    const cells = window.jupyterapp.shell.currentWidget.content.widgets.filter(cell => cell.model.type === 'code');
    const prompts = cells.map(cell => cell.inputArea.promptNode.textContent);
    return prompts.some(prompt => /[0-9]/.test(prompt)) && !prompts.some(prompt => prompt.includes('*'));
}"""
