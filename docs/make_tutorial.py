"""Run docs/tutorial.ipynb and write its outputs into it, and the same as the page docs/tutorial.md:

python docs/make_tutorial.py            # runs every cell, which takes about half a minute
python docs/make_tutorial.py --page     # only the page, from the outputs that the notebook has
"""

from __future__ import annotations

import argparse
import base64
import sys
from pathlib import Path
from typing import Any

import nbformat

DOCS = Path(__file__).resolve().parent
NOTEBOOK, PAGE, PLOTS = DOCS / "tutorial.ipynb", DOCS / "tutorial.md", DOCS / "tutorial"
MADE = "<!-- Made from tutorial.ipynb by `python docs/make_tutorial.py`. -->"


def run() -> None:
    """Run the notebook in a kernel of its own, in the folder of the checkout, and keep what it shows."""
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(DOCS.parent)}}).execute()
    for cell in notebook.cells:
        # Times differ each time; they would only make differences.
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, NOTEBOOK)


def joined(outputs: list[Any]) -> list[Any]:
    """The outputs of a cell with what was printed in several pieces as one."""
    found: list[Any] = []
    for output in outputs:
        if found and output.output_type == "stream" and found[-1].get("name") == output.name:
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def pages() -> tuple[str, dict[str, bytes]]:
    """The page, and the plots that it shows by file name."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    parts, plots = [], {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stdout":
                parts.append(f"```text\n{output.text.rstrip()}\n```")
            elif "image/png" in output.get("data", {}):
                name = f"plot{len(plots)}.png"
                plots[name] = base64.b64decode(output.data["image/png"])
                parts.append(f"![plot {len(plots)}]({PLOTS.name}/{name})")
    title, *rest = "\n\n".join(parts).splitlines()
    return "\n".join([title, "", MADE, *rest, ""]), plots


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="do not run the notebook")
    if not parser.parse_args().page:
        run()
    text, plots = pages()
    PAGE.write_text(text, encoding="utf-8")
    PLOTS.mkdir(exist_ok=True)
    for old in PLOTS.glob("*.png"):
        old.unlink()
    for name, content in plots.items():
        (PLOTS / name).write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
