"""openworld for programs: learn, measure, export and answer from Python, and a clear error where a name is taken."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import openworld
from tests.helpers import use_tiny_preset
from tests.helpers_serving import ROOT
from training.data.tasks import parse_tasks
from training.fit import _as_words
from training.store.checkpoint import METRICS
from training.store.history import History


def test_learn_measure_export_and_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_tiny_preset(monkeypatch)
    run = openworld.fit(tmp_path / "run", seed=3, quiet=True)
    assert capsys.readouterr() == ("", "")
    assert (run.folder, run.config.seed) == (tmp_path / "run", 3)
    assert History(tmp_path / "run").commands == [["openworld", "fit", "--out", str(tmp_path / "run"), "--seed", "3"]]
    opened = openworld.Run.open(tmp_path / "run", device="cpu")
    assert opened.evaluate() == json.loads((tmp_path / "run" / METRICS).read_bytes())
    bundle = openworld.export(opened, tmp_path / "bundle", force=True)
    content = io.BytesIO()
    Image.new("L", (8, 8), 200).save(content, "PNG")
    model = openworld.Model.load(bundle)
    assert model.labels == opened.config.labels
    assert model.predict(content.getvalue()).best_guess in model.labels
    with pytest.raises(ValueError, match=r"no such option: got --sed; allowed: .*; did you mean '--seed'"):
        openworld.fit(tmp_path / "other", sed=1)
    assert not (tmp_path / "other").exists()


def test_options_become_words_of_the_command() -> None:
    tasks = [["cat", 'a "b", c'], ["d;e"]]
    option, text = _as_words("tasks", tasks)
    assert option == "--tasks"
    assert parse_tasks(text) == (("cat", 'a "b", c'), ("d;e",))
    assert [*_as_words("quick", True), *_as_words("resume", False), *_as_words("seed", None)] == ["--quick"]
    assert [*_as_words("trunk_option", {"mean": 0.5, "pool": "max"})] == [
        *("--trunk-option", "mean=0.5"),
        *("--trunk-option", "pool=max"),
    ]
    assert [*_as_words("log", ["mlflow"])] == ["--log", "mlflow"]


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = openworld.nothing


@pytest.mark.parametrize("form", ["package", "folder", "module"])
def test_another_package_of_the_same_name_is_named(form: str, tmp_path: Path) -> None:
    """A folder without __init__.py does not hide a package, so it is no error."""
    taken = tmp_path / "models.py" if form == "module" else tmp_path / "models"
    if form == "module":
        taken.touch()
    else:
        taken.mkdir()
    if form == "package":
        (taken / "__init__.py").touch()
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import openworld; sys.exit(openworld.main(['--help']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    if form == "folder":
        assert (done.returncode, done.stderr) == (0, "")
        return
    assert done.returncode == 2
    message = f"error: the package models is {taken}, not openworld's ({ROOT / 'models'}): install openworld into an"
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1
    # The same for a program, which gets the exception.
    code = f"import sys; import openworld; sys.path.insert(0, {str(tmp_path)!r}); from openworld import Model"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"openworld.ShadowedError: {message.removeprefix('error: ')}")
