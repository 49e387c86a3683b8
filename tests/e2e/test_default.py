"""All commands on the embedded default, as a user runs them: fit, export, predict, serve."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from serving.bundle.manifest import load_bundle
from serving.bundle.model import BundleModel
from tests.e2e.default import Line, png, run
from tests.helpers_serving import PATIENCE, ROOT, Server, http_post, serving
from training.data.datasets import load_source
from training.evaluate import main as evaluate

pytestmark = pytest.mark.long

STEEP = 1e-3
"""Between two close validation scores a p-value falls by a whole step over a tiny interval, so the rounding of a 32-bit
score changes it more there."""


SERVING_ONLY = ROOT / ".venv-serving" / "bin" / "python"
"""Of an environment without torch, scikit-learn and onnx: only the packages of a server installation."""


@pytest.fixture(scope="module")
def server(line: Line, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """In the environment that has only what a server needs, if it is there."""
    python = SERVING_ONLY if SERVING_ONLY.exists() else Path(sys.executable)
    with serving(tmp_path_factory.mktemp("home"), line.bundle, python=str(python)) as started:
        yield started


def test_the_default_is_learned_well(line: Line) -> None:
    metrics = json.loads((line.folder / "metrics.json").read_text())
    assert (metrics["method"], metrics["preset"], metrics["seed"]) == ("hat", "digits", 0)
    assert metrics["til_accuracy"] >= 0.99
    assert metrics["cil_accuracy"] >= 0.98
    assert metrics["unknown"]["auroc"] >= 0.96
    assert 0.92 <= metrics["unknown"]["accepted_known"] <= 0.99
    assert metrics["unknown"]["rejected_unknown"] >= 0.8
    assert [len(row) for row in metrics["accuracy_matrix"]] == [1, 2, 3, 4]


def test_evaluate_repeats_what_fit_measured(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate([str(line.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((line.folder / "metrics.json").read_text())


def test_no_image_is_stored(line: Line) -> None:
    """Every file of the run and of the bundle, searched for every training image, bit by bit."""
    preset = line.run.config.preset
    train = load_source(preset.dataset, preset.image, None).train
    files = [path.read_bytes() for path in line.folder.rglob("*") if path.is_file()]
    golden = load_bundle(line.bundle).golden.pixels
    assert files
    for pixels in train.pixels[::25]:
        as_float = (pixels.astype(np.float32) / 255).tobytes()
        assert not any(pixels.tobytes() in content or as_float in content for content in files)
        assert not (golden == pixels).all(axis=(1, 2, 3)).any()


def test_served_answers_equal_evaluation_on_the_whole_test_split(line: Line, server: Server) -> None:
    offline = line.offline()
    labels = load_bundle(line.bundle).manifest.labels
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client, ThreadPoolExecutor(4) as pool:

        def ask(pixels: np.ndarray) -> dict[str, Any]:
            answer = client.post("/predict", content=png(pixels), headers={"content-type": "image/png"})
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        served = list(pool.map(ask, line.pixels))
    for row, answer in enumerate(served):
        guess = labels[offline.class_id[row]]
        assert answer["best_guess"] == guess
        assert answer["label"] == (guess if offline.known[row] else "unknown")
        assert answer["task"] == offline.task[row]
        assert answer["unknown_score"] == pytest.approx(offline.unknown_score[row], abs=STEEP)
        assert answer["p_task"] == pytest.approx(offline.p_task[row, offline.task[row]], abs=1e-4)
        assert answer["confidence"] == pytest.approx(offline.probability[row, offline.class_id[row]], abs=1e-4)
        scores = [task["unknown_score"] for task in answer["tasks"]]
        # Far from a task scores are large, and so are the rounding errors of 32 bits.
        assert scores == pytest.approx(offline.task_unknown_score[row].tolist(), rel=1e-5, abs=STEEP)


def test_the_command_line_answers_as_the_server_does(line: Line, server: Server, tmp_path: Path) -> None:
    for number in (0, line.known):
        (tmp_path / f"{number}.png").write_bytes(png(line.pixels[number]))
    files = sorted(tmp_path.iterdir())
    printed = run("serving.predict", str(line.bundle), *map(str, files)).stdout.splitlines()
    for file, text in zip(files, printed, strict=True):
        answer = json.loads(text)
        assert answer.pop("file") == str(file)
        assert answer == http_post(f"{server.url}/predict", files={"image": file.read_bytes()}).json()


def test_an_answer_does_not_depend_on_its_batch(line: Line) -> None:
    model = BundleModel.load(line.bundle, provider="cpu")
    images = line.pixels[:: len(line.pixels) // 8][:8]
    together = model.predict(images)
    alone = [model.predict(images[row : row + 1]) for row in range(len(images))]
    shuffled = model.predict(images[::-1])
    for row in range(len(images)):
        for other, place in ((alone[row], 0), (shuffled, len(images) - 1 - row)):
            assert other.class_id[place] == together.class_id[row]
            assert other.known[place] == together.known[row]
            assert other.unknown_score[place] == pytest.approx(together.unknown_score[row], abs=STEEP)


def test_a_given_task_answers_within_it(line: Line, server: Server) -> None:
    answer = http_post(
        f"{server.url}/predict", params={"task": 2}, files={"image": png(line.pixels[line.known])}
    ).json()
    assert (answer["task"], answer["p_task"]) == (2, 1.0)
    assert answer["best_guess"] in ("4", "5")
    assert answer["confidence"] == answer["p_within_task"]


def test_a_serving_only_environment_serves_the_bundle(line: Line, server: Server) -> None:
    if not SERVING_ONLY.exists():
        pytest.skip("no .venv-serving; `make test` makes it")
    absent = "import importlib.util as u, sys; sys.exit(any(map(u.find_spec, ['torch', 'sklearn', 'onnx'])))"
    assert subprocess.run([SERVING_ONLY, "-c", absent], check=False).returncode == 0
    assert psutil.Process(server.process.pid).cmdline()[0] == str(SERVING_ONLY)
    answer = http_post(f"{server.url}/predict", files={"image": png(line.pixels[0])}).json()
    assert answer["unknown_score"] == pytest.approx(line.offline().unknown_score[0], abs=STEEP)
