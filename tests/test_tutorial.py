"""The notebook of the documentation runs, and its page is made from it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from typing import Any

import matplotlib
import nbformat
import pytest

from tests.helpers_serving import ROOT

pytestmark = pytest.mark.long

NOTEBOOK = ROOT / "docs/tutorial.ipynb"


@pytest.fixture(scope="module")
def notebook() -> Any:
    found = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(found)
    return found


def first_words(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line]


def numbers(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"\b\d+\b", text)]


def test_every_cell_runs_and_shows_what_the_notebook_has(
    notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process and in order: a kernel would import torch again, which takes longer than all of it."""
    matplotlib.use("Agg")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # The plots of the report take long to draw, and are not what the notebook shows.
    monkeypatch.setattr("training.show.plots.svg", lambda *_, **__: "")
    names: dict[str, Any] = {}
    printed = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(cell.source, "tutorial.ipynb", "exec"), names)
            printed.append(output.getvalue())
    text = "".join(printed)
    kept = "".join(o.text for cell in notebook.cells for o in cell.get("outputs", []) if o.output_type == "stream")
    # Another processor may round differently, so only what people read is compared.
    assert first_words(text) == first_words(kept)
    right, known = numbers(next(line for line in text.splitlines() if "known images get" in line))
    assert right >= 0.8 * known
    rejected, unknown = numbers(next(line for line in text.splitlines() if "are rejected" in line))
    assert rejected >= 0.8 * unknown
    assert names["model"].labels[-1] == "triangle"
    taught = [names["answer"](image).label for image in names["new"]["triangle"]]
    assert taught.count("triangle") >= 4
    matplotlib.pyplot.close("all")


def test_the_notebook_has_outputs_with_plots_and_no_errors(notebook: Any) -> None:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert {output.output_type for output in outputs} == {"stream", "display_data"}
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 4
    assert all(cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    # Nothing of the machine that made them.
    assert str(Path.home()) not in NOTEBOOK.read_text()
    assert "/tmp/" not in NOTEBOOK.read_text()


def test_the_page_is_made_from_the_notebook() -> None:
    spec = importlib.util.spec_from_file_location("make_tutorial", ROOT / "docs/make_tutorial.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    text, plots = maker.pages()
    assert (ROOT / "docs/tutorial.md").read_text() == text, "run `python docs/make_tutorial.py --page`"
    assert {path.name: path.read_bytes() for path in maker.PLOTS.glob("*.png")} == plots
