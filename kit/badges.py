"""The repository's address in the notebooks, from one place: `Repository` in pyproject.toml. `python -m kit.badges`.

A notebook that is opened in Colab has to say where it comes from before the kit is there, so the address is written
into its first code cell, and into the links above its contents. After a move or in a fork, change pyproject.toml and
run this; `--check` changes nothing and fails where something is left to do.
"""

import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"^\[!\[Open in Colab\].*$", re.MULTILINE)
ADDRESS = re.compile(r'^REPOSITORY = ".*?"', re.MULTILINE)


def repository() -> str:
    """The address, e.g. https://github.com/OWNER/NAME."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"].rstrip("/")


def badges(address: str, notebook: str) -> str:
    """Two linked pictures, a line of Markdown.

    >>> badges("https://github.com/OWNER/NAME", "01_a.ipynb").count("(https://")
    2
    """
    path = f"{address}/blob/main/notebooks/{notebook}"
    colab = path.replace("https://github.com", "https://colab.research.google.com/github", 1)
    kaggle = f"https://kaggle.com/kernels/welcome?src={path}"
    links = {"Colab": colab, "Kaggle": kaggle}
    return " ".join(f"[![Open in {name}](images/open-in-{name.lower()}.svg)]({to})" for name, to in links.items())


def addressed(notebook: dict, name: str, address: str) -> dict:
    """The notebook (as JSON) with this address in its first code cell, and the badges under its title.

    Raises:
        ValueError: it does not begin with a title, or its first code cell has no line `REPOSITORY = "..."`.
    """
    notebook = json.loads(json.dumps(notebook))
    title = notebook["cells"][0]
    first = next((cell for cell in notebook["cells"] if cell["cell_type"] == "code"), {"source": ""})
    text, source = "".join(title["source"]), "".join(first["source"])
    if not text.startswith("# ") or not ADDRESS.search(source):
        raise ValueError(f'{name} does not begin with a title and a first cell with the line REPOSITORY = "..."')
    line = badges(address, name)
    head, _, rest = text.partition("\n")
    text = MARK.sub(lambda _: line, text) if MARK.search(text) else f"{head}\n\n{line}\n{rest}"
    title["source"] = text.splitlines(keepends=True)
    first["source"] = ADDRESS.sub(lambda _: f'REPOSITORY = "{address}"', source).splitlines(keepends=True)
    return notebook


def main(arguments: list[str]) -> int:
    """Writes the notebooks named, or all, where that changes one, and names them; --check: see above."""
    check, stale = "--check" in arguments, []
    named = [Path(word) for word in arguments if word != "--check"]
    for path in named or sorted((ROOT / "notebooks").glob("*.ipynb")):
        before = json.loads(path.read_text())
        after = addressed(before, path.name, repository())
        if after != before:
            stale.append(path.name)
            if not check:
                path.write_text(json.dumps(after, indent=1, ensure_ascii=False) + "\n")
    print(f"{repository()}: {', '.join(stale) or 'nothing to change'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
