"""Photos with the real weights of the default trunk: from a folder to an answer of a server."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from export.__main__ import main as export
from export.checks import photo_evidence, trunk_inspection
from export.inspect import main as inspect
from export.loop import main as learn_unknowns
from export.publish import main as publish
from models.trunks.cache_settings import FOLDER_VARIABLE
from serving.bundle.decision import FEATURES, OUTPUT_NAMES, decide
from serving.bundle.errors import BundleError
from serving.bundle.layout import CARD, EMBEDDING, MAPS, POOLED, STATISTICS, TRUNK, trunk_name
from serving.bundle.manifest import Graph, load_bundle
from serving.bundle.model import BundleModel
from serving.bundle.pixels import decode, to_pixels
from serving.bundle.session import open_session, session_options
from serving.client import Client, ServiceError
from serving.quarantine.records import Arrival
from serving.quarantine.store import Store
from serving.teaching.curriculum import Curriculum
from serving.teaching.errors import TeachError
from tests.helpers import assert_same_tensors, raise_at_call, run_tensors
from tests.helpers_photos import grown_run, photo, write_photos
from tests.helpers_serving import PATIENCE, ROOT, eventually, reseal, saved, serving
from training import fit
from training.data.opening import open_sources
from training.discover import main as discover
from training.evaluate import main as evaluate
from training.learn import pooled_learner
from training.measure.evaluation import evaluate as evaluate_run
from training.measure.evaluation import known_and_unknown
from training.measure.verdict import LATER
from training.report_page import main as write_report
from training.run import open_run
from training.store.checkpoint import read_config

TASKS = "disc,stripes; checks,triangle"
COUNTS = {"disc": 20, "stripes": 20, "checks": 20, "triangle": 20, "ring": 8, "dots": 24}


class Line(NamedTuple):
    """A folder of photos, a quick run of four of its six classes, and its bundle."""

    photos: Path
    run: Path
    bundle: Path


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        # Every photo that an export verifies is decoded and encoded again.
        patch.setattr(photo_evidence, "MOST_PHOTOS", 24)
        yield


@pytest.fixture(scope="module")
def line(own_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Line:
    place = tmp_path_factory.mktemp("photos")
    photos = write_photos(place / "photos", **COUNTS)
    assert fit.main(["--data", str(photos), "--tasks", TASKS, "--quick", "--out", str(place / "run")]) == 0
    assert export([str(place / "run"), "--out", str(place / "bundle")]) == 0
    return Line(photos, place / "run", place / "bundle")


def pixels_of(line: Line, *photos: str) -> Any:
    spec = load_bundle(line.bundle).manifest.image
    return np.stack([to_pixels(decode((line.photos / name).read_bytes()), spec) for name in photos])


def test_photos_get_a_trunk_by_default_and_are_told_apart(line: Line) -> None:
    config = read_config(line.run)
    assert (config.preset.name, config.method, config.quick) == ("photos", "pooled", True)
    assert config.trunk is not None
    assert (config.trunk.name, config.trunk.size) == ("efficientnet-lite0", 224)
    found = json.loads((line.run / "metrics.json").read_text())
    assert found["cil_accuracy"] >= 0.9
    assert found["unknown"]["auroc"] >= 0.9
    assert found["accepted_known"] >= 0.6
    assert (found["decision"], found["trunk"]) == ("pooled", "efficientnet-lite0")
    assert "Half of the classes were learned from 1" in found["verdict"]["note"]


def test_without_unknown_images_the_run_before_each_task_is_measured_on_its_images(line: Line) -> None:
    cpu = torch.device("cpu")
    run = open_run(line.run, cpu)
    sources = open_sources(run.config, None, run=line.run)
    known, _ = known_and_unknown(sources.test_images()[0], run.config)
    found = evaluate_run(run, sources, cpu, other_unknown=known.at(np.empty(0, int)))
    assert found.verdict.unknown.numbers.endswith(LATER)


def test_a_bundle_holds_the_trunk_once_and_little_else(line: Line) -> None:
    bundle = load_bundle(line.bundle)
    bundle.check()
    sizes = {path.name: path.stat().st_size for path in line.bundle.iterdir()}
    answering = {"manifest.json", "rule.json", "golden.npz", TRUNK, POOLED, "task0.npz", "task1.npz"}
    # What a server learns from, and maps for people; nothing reads them to answer an image.
    assert {*sizes} == {*answering, STATISTICS, EMBEDDING, MAPS, CARD}
    assert sum(sizes[name] for name in answering) - sizes[TRUNK] <= 1.5e6 * len(bundle.manifest.tasks)
    config = read_config(line.run)
    assert bundle.manifest.trunk is not None
    assert config.trunk is not None
    assert bundle.manifest.trunk.sha256 == config.trunk.sha256
    assert bundle.rule.joint
    assert bundle.rule.by_expectation


def test_a_bundle_without_teaching_answers_the_same_and_cannot_be_taught(line: Line, tmp_path: Path) -> None:
    assert export([str(line.run), "--out", str(tmp_path / "small"), "--no-teaching"]) == 0
    small, whole = load_bundle(tmp_path / "small"), load_bundle(line.bundle)
    assert {*whole.manifest.files} - {*small.manifest.files} == {STATISTICS}
    assert small.manifest.files[POOLED] == whole.manifest.files[POOLED]
    with pytest.raises(TeachError, match=r"no statistics\.npz"):
        Curriculum.of(small)
    assert len(Curriculum.of(whole).teachable.factors.classes) == 4


def test_an_answer_does_not_depend_on_the_rest_of_its_batch(line: Line) -> None:
    model = BundleModel.load(line.bundle, provider="cpu")
    pixels = pixels_of(line, *(f"{label}/00{number}.jpg" for label in ("disc", "dots") for number in range(4)))[:7]
    together = model.run(pixels, features=True)
    assert {*together} == {*OUTPUT_NAMES, FEATURES}
    assert together[FEATURES].shape == (7, model.manifest.trunk.dim)  # type: ignore[union-attr]
    for row in range(len(pixels)):
        alone = model.run(pixels[row : row + 1], features=True)
        for name, values in alone.items():
            assert np.array_equal(values[0], together[name][row]), name


WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(("torch", "onnx", "safetensors", "models", "training"), None))
from serving.predict import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_server_needs_neither_torch_nor_onnx_and_gives_the_same_answer(line: Line, tmp_path: Path) -> None:
    known, unknown = line.photos / "disc" / "003.jpg", line.photos / "dots" / "003.jpg"
    command = [sys.executable, "-c", WITHOUT_TORCH, str(line.bundle), str(known), str(unknown)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    predicted = [json.loads(each) for each in done.stdout.splitlines()]
    assert [each["label"] for each in predicted] == ["disc", "unknown"]
    with serving(tmp_path / "home", line.bundle) as server:
        for file, wanted in zip((known, unknown), predicted, strict=True):
            answer = httpx.post(f"{server.url}/predict", files={"image": file.read_bytes()}, timeout=PATIENCE).json()
            assert answer == {name: value for name, value in wanted.items() if name != "file"}


def test_a_photo_of_another_format_and_size_is_answered_alike(line: Line) -> None:
    spec = load_bundle(line.bundle).manifest.image
    large = photo("stripes", 77).resize((1200, 960))
    model = BundleModel.load(line.bundle, provider="cpu")
    for kind in ("PNG", "WEBP", "JPEG"):
        verdicts = model.predict(to_pixels(decode(saved(large, kind)), spec)[None])
        assert model.manifest.labels[verdicts.class_id[0]] == "stripes"


# ---- more tasks


@pytest.fixture(scope="module")
def grown(line: Line, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grown_run(line.run, line.photos, tmp_path_factory.mktemp("grown"))


@pytest.mark.long
def test_a_run_that_dies_while_it_encodes_or_learns_ends_the_same(
    line: Line, grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is also the same to the bit as a run that was taught its last task later."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    run = tmp_path / "run"
    words = ["--data", str(line.photos), "--tasks", f"{TASKS}; dots", "--quick", "--out", str(run)]
    command = [sys.executable, "-m", "training.fit", *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: process.poll() is not None or len([*_encoded(tmp_path / "cache")]) > 0)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert not run.exists()
    with pytest.MonkeyPatch.context() as patch:
        raise_at_call(patch, pooled_learner, "save", 3)
        assert fit.main([*words, "--resume"]) == 2
    assert fit.main(["--out", str(run), "--resume"]) == 0
    assert_same_tensors(run_tensors(run), run_tensors(grown))


def _encoded(cache: Path) -> Iterator[Path]:
    """Parts of the cache that have a vector."""
    return (file for file in cache.glob("encoded/*/index") if file.stat().st_size)


def test_a_task_is_published_and_what_was_known_stays_known(
    line: Line, grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shelf = tmp_path / "shelf"
    assert publish([str(line.run), str(shelf)]) == 0
    capsys.readouterr()
    assert publish([str(grown), str(shelf)]) == 0
    printed = capsys.readouterr()
    assert "3 tasks (2 unchanged)" in printed.out
    assert "pooled statistics change with every task" in printed.err
    assert "CIL of the earlier classes on" in printed.err
    bundle, before = load_bundle(shelf / "current"), load_bundle(shelf / "previous")
    assert bundle.manifest.labels == ("disc", "stripes", "checks", "triangle", "dots")
    for name in (TRUNK, "task0.npz", "task1.npz"):
        assert (bundle.path / name).read_bytes() == (before.path / name).read_bytes()
    # The distances of earlier tasks, on which "known" rests, are the same to the bit; the posterior is of all classes.
    pixels = pixels_of(line, "dots/001.jpg", "disc/002.jpg", "checks/003.jpg")
    new, old = (BundleModel.load(each.path, provider="cpu").run(pixels) for each in (bundle, before))
    assert np.array_equal(new["distances"][:, :4], old["distances"])
    assert not np.array_equal(new["logits"][:, :4], old["logits"])
    assert bundle.rule.tasks[:2] == before.rule.tasks
    assert new["probability"].argmax(axis=1).tolist() == [4, 0, 2]
    # The run without the third task would take it away again.
    assert publish([str(line.run), str(shelf)]) == 2
    assert "has tasks that the new bundle lacks" in capsys.readouterr().err
    assert load_bundle(shelf / "current").manifest.version == bundle.manifest.version


@pytest.mark.long
def test_a_detector_that_changed_is_not_published(
    line: Line, grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shelf = tmp_path / "shelf"
    assert publish([str(line.run), str(shelf)]) == 0
    content = dict(np.load(shelf / "current" / "task1.npz"))
    content["bias"] = content["bias"] + np.float32(1e-3)
    stored = io.BytesIO()
    np.savez(stored, **content)
    reseal((shelf / "current").resolve(), "task1.npz", stored.getvalue())
    capsys.readouterr()
    assert publish([str(grown), str(shelf)]) == 2
    assert "task1.npz differs from version" in capsys.readouterr().err


# ---- int8


@pytest.mark.long
def test_int8_answers_like_fp32_and_stays_the_same_when_a_task_is_added(
    line: Line, grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shelf = tmp_path / "shelf"
    assert publish([str(line.run), str(shelf), "--precision", "int8"]) == 0
    assert "int8: ranges of the trunk were measured on 8 photos" in capsys.readouterr().err
    first = load_bundle(shelf / "current")
    assert first.manifest.precisions == ("fp32", "int8")
    checked = first.manifest.verification["int8"]
    assert checked["images"] == 16, "photos that set the ranges do not judge the result"
    assert checked["label_agreement"] == 1
    sizes = {name: (first.path / name).stat().st_size for name in (TRUNK, trunk_name("int8"))}
    assert sizes[trunk_name("int8")] < 0.3 * sizes[TRUNK]
    pixels = pixels_of(line, *(f"{label}/01{number}.jpg" for label in COUNTS if label != "ring" for number in range(3)))
    exact, coarse = (BundleModel.load(first.path, provider="cpu", precision=name) for name in ("fp32", "int8"))
    coarse.self_test()
    vectors = [each.run(pixels, features=True)[FEATURES] for each in (exact, coarse)]
    assert 0.95 < float((vectors[0] * vectors[1]).sum(axis=1).min()) < 0.9999
    assert np.mean(exact.predict(pixels).class_id == coarse.predict(pixels).class_id) >= 0.9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trunk_inspection, "SECONDS", 0.0)
        assert inspect([str(first.path), "--verbose"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (TRUNK, trunk_name("int8"), "label agreement"))
    # The next task does not measure the ranges again: earlier tasks keep their answers.
    assert publish([str(grown), str(shelf)]) == 0
    assert "ranges of the trunk" not in capsys.readouterr().err
    second = load_bundle(shelf / "current")
    assert second.manifest.precisions == ("fp32", "int8")
    assert [task.unchanged for task in second.manifest.tasks] == [True, True, False]
    assert (second.path / trunk_name("int8")).read_bytes() == (first.path / trunk_name("int8")).read_bytes()


# ---- unknown photos


@pytest.mark.long
def test_unknown_photos_are_grouped_named_learned_and_served(
    line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The encoded vectors that a server keeps separate two new classes; the run is taught the named photos."""
    run, shelf, url = (
        Path(shutil.copytree(line.run, tmp_path / "run")),
        tmp_path / "shelf",
        f"sqlite:///{tmp_path}/q.db",
    )
    assert publish([str(run), str(shelf)]) == 0
    model = BundleModel.load(shelf / "current", provider="cpu")
    truth: dict[int, str] = {}
    with closing(Store.open(url)) as store:
        for label in ("ring", "dots"):
            arrivals = [_arrival(model, photo(label, 500 + number)) for number in range(24)]
            kept = store.add([each for each in arrivals if each is not None]).kept
            assert len(kept) >= 20, "drawn shapes that no task knows are called unknown"
            truth |= dict.fromkeys(kept, label)
        assert discover(["--quarantine", url, "--bundle", str(shelf / "current"), "--min-size", "8", "--json"]) == 0
        groups = [[truth[member] for member in store.members(group.id)] for group in store.groups()]
        assert sorted(len(set(labels)) for labels in groups) == [1, 1], "one group per class"
        assert {labels[0] for labels in groups} == {"ring", "dots"}
        for label in ("ring", "dots"):
            store.name([number for number, true in truth.items() if true == label], label, "ann")
    assert learn_unknowns([str(run), "--quarantine", url, "--publish", str(shelf)]) == 0
    served = BundleModel.load(shelf / "current", provider="cpu")
    assert served.manifest.labels[-2:] == ("dots", "ring")
    spec = served.manifest.image
    fresh = np.stack([to_pixels(photo(label, 900), spec) for label in ("ring", "dots", "disc")])
    assert [served.manifest.labels[each] for each in served.predict(fresh).class_id] == ["ring", "dots", "disc"]
    with closing(Store.open(url)) as store:
        assert {item.state for item in store.items()} == {"learned"}


def _arrival(model: BundleModel, image: Image.Image) -> Arrival | None:
    """What a server stores of a photo that it calls unknown."""
    outputs = model.run(to_pixels(image, model.manifest.image)[None], features=True)
    verdicts = decide(outputs, model.bundle.rule)
    if verdicts.known[0]:
        return None
    answer = {"best_guess": model.manifest.labels[verdicts.class_id[0]], "confidence": 0.5}
    return Arrival(saved(image), "unknown", 1000.0, model.manifest.version, answer, outputs[FEATURES][0])


# ---- what is refused


def test_another_trunk_is_refused_by_name(line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(shutil.copytree(line.run, tmp_path / "run"))
    content = json.loads((run / "config.json").read_text())
    content["trunk"]["sha256"] = "0" * 64
    (run / "config.json").write_text(json.dumps(content))
    for command in (
        lambda: evaluate([str(run)]),
        lambda: export([str(run), "--out", str(tmp_path / "bundle")]),
        lambda: fit.main(["--out", str(run), "--resume"]),
        lambda: fit.main(["--out", str(run), "--add-task", "dots"]),
    ):
        assert command() == 2
        error = capsys.readouterr().err
        assert "trunk efficientnet-lite0: the weights have sha256" in error
        assert "--trunk-weights FILE" in error


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--tp", "softmax"], "decision rule softmax is not available for this run: it decides by statistics"),
        (["--odin"], "decision rule odin is not available"),
        (["--decision", "fused"], "decision fused is not available for this run"),
    ],
)
def test_what_needs_a_network_is_refused_in_plain_words(
    line: Line, capsys: pytest.CaptureFixture[str], options: list[str], reason: str
) -> None:
    assert evaluate([str(line.run), *options]) == 2
    assert reason in capsys.readouterr().err


def test_a_precision_that_a_trunk_has_not_is_refused(
    line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export([str(line.run), "--out", str(tmp_path / "bundle"), "--precision", "fp16"]) == 2
    assert "fp16 is not available with a trunk; allowed: fp32, int8" in capsys.readouterr().err


def test_a_damaged_classifier_is_refused_by_name(line: Line, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(line.bundle, tmp_path / "bundle"))
    (copy / POOLED).write_bytes(b"")
    with pytest.raises(BundleError, match=rf"{POOLED}: corrupt"):
        BundleModel.load(copy, provider="cpu")
    reseal(copy, POOLED, b"nothing")
    with pytest.raises(BundleError, match=rf"{POOLED}: .*export the run again"):
        BundleModel.load(copy, provider="cpu")


# ---- Why this answer


def blanked(pixels: Any, cells: Any) -> Any:
    """The image [height, width, 3] with these cells of a grid in its mean colour."""
    rows, columns = (np.arange(side) * count // side for side, count in zip(pixels.shape, cells.shape, strict=False))
    return np.where(cells[np.ix_(rows, columns)][:, :, None], pixels.mean(axis=(0, 1)).astype(np.uint8), pixels)


def test_blanking_where_the_evidence_lies_changes_more_than_elsewhere(line: Line) -> None:
    """By the margin over the next class, because these drawings are told apart so well that probabilities stay at 1."""
    model, random = BundleModel.load(line.bundle, provider="cpu"), np.random.default_rng(0)
    lost, elsewhere = [], []
    for photo_name in [f"{label}/{number:03}.jpg" for label in ("disc", "triangle") for number in range(6)]:
        pixels = pixels_of(line, photo_name)
        class_id = int(model.predict(pixels).class_id[0])
        found = model.explain(pixels, class_id=class_id, unknown=False)
        assert found.grid.shape == (7, 7)
        assert found.grid.sum() == pytest.approx(found.total, rel=1e-3)
        cells = np.zeros(49, bool)
        cells[np.argsort(-found.grid, axis=None)[:10]] = True
        others = np.zeros(49, bool)
        others[random.choice(np.flatnonzero(~cells), 10, replace=False)] = True
        variants = [pixels[0], *(blanked(pixels[0], each.reshape(7, 7)) for each in (cells, others))]
        logits = model.run(np.stack(variants))["logits"]
        margins = logits[:, class_id] - np.delete(logits, class_id, axis=1).max(axis=1)
        lost.append(margins[0] - margins[1])
        elsewhere.append(margins[0] - margins[2])
    assert np.mean(lost) > 2 * np.mean(elsewhere)


def test_feature_maps_change_no_answer(line: Line) -> None:
    """The graph with them gives the vectors of the graph without them, to the bit."""
    from models.trunks.trunk import open_trunk

    assert (line.bundle / TRUNK).read_bytes() == open_trunk("efficientnet-lite0").model
    # Its weights are those of the trunk.
    assert (line.bundle / MAPS).stat().st_size < 300_000
    plain = open_session(Graph((line.bundle / TRUNK).read_bytes(), {}), session_options(1))
    with_maps = open_session(load_bundle(line.bundle).maps_graph(), session_options(1))
    assert len(with_maps.get_outputs()) > len(plain.get_outputs()) == 1
    pixels = pixels_of(line, "disc/001.jpg", "ring/001.jpg")
    vectors = [session.run(["encoded"], {"pixels": pixels})[0] for session in (plain, with_maps)]
    assert np.array_equal(*vectors)


@pytest.mark.long
def test_an_answer_is_explained_on_request_and_on_the_page(line: Line, browser: Any, tmp_path: Path) -> None:
    content = (line.photos / "disc/001.jpg").read_bytes()
    with serving(tmp_path / "home", line.bundle) as server, Client(server.url, timeout=PATIENCE) as client:
        assert client.model().explains
        assert client.predict(content).explanation is None
        found = client.predict(content, explain="true").explanation
        assert found is not None
        assert (found.evidence_for, len(found.grid), found.png) == ("disc", 7, None)
        shown = client.predict(content, explain="png").explanation
        assert shown is not None
        assert Image.open(io.BytesIO(base64.b64decode(shown.png or ""))).size == (224, 224)
        strange = client.predict(line.photos / "ring/001.jpg", explain="true")
        assert strange.explanation is not None
        assert strange.explanation.evidence_for == strange.label
        with pytest.raises(ServiceError, match="allowed"):
            client.predict(content, explain="maybe")  # type: ignore[arg-type]

        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(1000 * PATIENCE)
        page.goto(server.url)
        page.wait_for_selector("#model-chip:not([hidden])")
        page.set_input_files("#file", line.photos / "disc/001.jpg")
        page.click("#why")
        page.wait_for_selector("#why[aria-pressed=true]")
        assert "Orange speaks for “disc”" in page.inner_text("#why-text")
        inexact = abs(found.remainder) > 0.05 * abs(found.total)
        assert ("not exact" in page.inner_text("#why-text")) == inexact
        page.screenshot(path=tmp_path / "why.png", full_page=True)
        painted = "canvas => canvas.getContext('2d').getImageData(0, 0, 512, 512).data.some(value => value > 100)"
        assert page.locator("#evidence").evaluate(painted)
        page.click("#why")
        assert page.locator("#evidence").is_hidden()

        def inexactly(route: Any) -> None:
            answered = route.fetch()
            body = answered.json()
            body["explanation"]["remainder"] = -0.06 * body["explanation"]["total"]
            route.fulfill(response=answered, json=body)

        page.route(lambda url: "explain=" in url, inexactly)
        page.click("#why")
        page.wait_for_selector("#why[aria-pressed=true]")
        assert "The map is not exact: its parts do not add up" in page.inner_text("#why-text")
        page.click("#why")
        page.set_viewport_size({"width": 390, "height": 800})
        page.click("#why")
        page.wait_for_selector("#why[aria-pressed=true]")
        page.screenshot(path=tmp_path / "why-phone.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.close()


@pytest.fixture(scope="module")
def report(line: Line, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Path(shutil.copytree(line.run, tmp_path_factory.mktemp("report") / "run"))
    assert write_report([str(run)]) == 0
    return run / "report.html"


def pictured(url: str) -> Any:
    with Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))) as image:
        return np.asarray(image.convert("RGB").resize((96, 96)), np.float64)


def test_the_report_draws_the_evidence_over_the_photos_of_mistakes(line: Line, report: Path) -> None:
    figures = re.findall(
        r'<figure><img src="(data:[^"]+)"[^>]*><img src="(data:[^"]+)" alt="where the evidence', report.read_text()
    )
    assert figures
    for photo_url, evidence_url in figures:
        plain, over = pictured(photo_url), pictured(evidence_url)
        assert np.abs(over - plain).mean() > 3
        # Orange or blue, and not the same everywhere.
        redder = (over[..., 0] - over[..., 2]) - (plain[..., 0] - plain[..., 2])
        assert np.abs(redder).max() > 30
        assert np.ptp(redder) > 30
    # Said above the photos, if it is said below any.
    assert ("(map not exact)" in report.read_text()) == ("Where “not exact” is added" in report.read_text())


@pytest.mark.long
def test_the_map_of_the_report_shows_images_to_a_mouse_and_to_a_finger(
    report: Path, browser: Any, tmp_path: Path
) -> None:
    seen = "group => getComputedStyle(group.querySelector('image')).visibility"
    for look, width in (("wide", 1280), ("phone", 375)):
        phone = look == "phone"
        context = browser.new_context(viewport={"width": width, "height": 800}, has_touch=phone, is_mobile=phone)
        page = context.new_page()
        page.goto(report.as_uri())
        marks = page.locator("svg.map .pictured")
        assert marks.count() > 3
        # The last one is above all others.
        mark = marks.last
        mark.scroll_into_view_if_needed()
        assert mark.evaluate(seen) == "hidden"
        shape = mark.locator("path, circle")
        if phone:
            shape.tap()
        else:
            shape.hover()
        assert mark.evaluate(seen) == "visible"
        assert mark.locator("title").text_content()
        assert marks.first.evaluate(seen) == "hidden"
        loaded = "images => images.every((image) => image.complete && image.naturalWidth > 0)"
        assert page.locator("figure img").evaluate_all(loaded)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.screenshot(path=tmp_path / f"report-{look}.png")
        context.close()
