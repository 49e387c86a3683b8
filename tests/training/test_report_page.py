"""RUN/report.html: everything about a run in one file that loads no other resource."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from models.detectors import decisions
from serving.bundle.run_verdict import PARTS
from tests.helpers import HELD_OUT, kill_at_save, use_tiny_preset
from tests.training.conftest import WholeRun
from training import fit
from training.data.datasets import SOURCES
from training.data.images import Images, Source
from training.data.reader import PixelReader
from training.data.sources import Sources
from training.learn import fitting
from training.measure.alternative_rules import AlternativeRule
from training.measure.evaluation import evaluate
from training.report_page import main
from training.run import open_run
from training.show import plots
from training.show.page import MOST_MISTAKES, PAGE, write_page
from training.store.checkpoint import read_config
from training.store.history import HISTORY

CPU = torch.device("cpu")


class Reader(HTMLParser):
    """The tags, the URLs and the visible text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.words = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href", "srcset")]

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_preset(monkeypatch)


def page_of(folder: Path) -> str:
    assert main([str(folder)]) == 0
    return (folder / PAGE).read_text()


@pytest.fixture(scope="module")
def page(whole_run: WholeRun) -> str:
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_preset(patch)
        return page_of(whole_run.folder)


def test_the_page_shows_the_run_and_loads_nothing(page: str, whole_run: WholeRun) -> None:
    read = Reader(page)
    measured = json.loads((whole_run.folder / "metrics.json").read_text())
    for value in (measured["cil_accuracy"], measured["til_accuracy"], measured["lost_to_newer_classes"]):
        assert f"{100 * value:.1f} %" in read.words
    lowest = measured["after_each_task"][-1]["accepted_known_lowest"]
    assert "known acceptedof the task with the lowest shareunknown rejected" in read.words
    assert f"<td>{100 * lowest:.1f}</td>" in page
    for name, title in PARTS.items():
        part = measured["verdict"][name]
        line = f"{title.capitalize()}: {part['grade']}. {part['numbers']}."
        assert line in read.words
        assert read.words.index(line) < read.words.index("CIL accuracy"), "the verdict is on top"
    headings = ("After each task", "What limits each task", "Decisions side by side", "Known or unknown")
    for heading in (*headings, "Mistakes", "Learning"):
        assert heading in read.words
    chosen = re.findall(r'<tr class="chosen"><th class="words">(\w+)</th><td>([0-9.]+)</td>', page)
    assert chosen == [(measured["decision"], f"{100 * measured['cil_accuracy']:.1f}")]
    for name, decision in decisions().items():
        assert (f'<th class="words">{name}</th>' in page) == (not decision.corrected)
    assert f"openworld fit --method {whole_run.method} --out" in read.words
    assert (whole_run.folder / "config.json").read_text() in read.words
    # Over time, held back, theorems, confusion, reliability, scores, ROC, two curves, room, use.
    # Eleven plots, and the map with two marks in its legend.
    assert read.tags.count("svg") == 14
    counted = {"hat": "units", "sup": "weights"}[whole_run.method]
    assert f"% of each layer's {counted} that each task uses" in read.words
    assert f"All bounds hold on\n{measured['test_images']} of {measured['test_images']} images" in read.words
    assert not {"script", "link", "iframe", "object"} & set(read.tags)
    assert all(address.startswith(("data:", "#")) for address in read.addresses)
    assert not re.search(r"url\((?!#)", page)
    assert "default-src 'none'" in page
    # The project's name, the contents, and folds for what only authors of papers need.
    assert "openworld report</title>" in page
    assert read.words.index("report of a run") < read.words.index("After each task")
    anchors = re.findall(r'<a href="#(\w+)">', page)
    assert {"after", "known", "mistakes", "limits", "made", "papers"} <= set(anchors)
    assert all(f'id="{anchor}"' in page for anchor in anchors)
    folded = re.findall(r'<details class="fold" id="(\w+)">', page)
    assert folded == ["measures", "theory", "decisions", "network", "learning"]
    assert "@media print" in page


def test_pictures_take_the_colours_of_the_page(page: str) -> None:
    assert "prefers-color-scheme: dark" in page
    # The map and its legend get their colours from the style sheet.
    drawings = [
        each for each in re.findall(r"<svg.*?</svg>", page, re.DOTALL) if "matplotlib" in each or "<defs>" in each
    ]
    assert len(drawings) == 11
    for drawing in drawings:
        assert "var(--ink)" in drawing
        assert "#000000" not in drawing


def test_mistakes_are_shown_with_their_prediction(page: str, whole_run: WholeRun) -> None:
    measured = json.loads((whole_run.folder / "metrics.json").read_text())
    wrong = round((1 - measured["cil_accuracy"]) * measured["test_images"])
    assert wrong > 0
    assert f"{wrong} wrong class" in page
    accepted = round((1 - measured["unknown"]["rejected_unknown"]) * measured["unknown_images"])
    assert f"{accepted} never learned but accepted as a class" in page
    assert page.count(f"a test image of {HELD_OUT}") == min(accepted, MOST_MISTAKES)
    picture = re.search(r"data:image/png;base64,([^\"]+)\" alt", page)
    assert picture is not None
    with Image.open(io.BytesIO(base64.b64decode(picture[1]))) as image:
        assert image.size == (8, 8)


def without_pictures(patch: pytest.MonkeyPatch) -> None:
    """Skip the drawing, which takes longer than everything else."""
    patch.setattr(plots, "svg", lambda name, *_, **__: f"<svg>{name}</svg>")


def test_learning_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)
    monkeypatch.setattr(fitting, "write_page", write_page)
    assert fit.main(["--out", str(tmp_path / "run")]) == 0
    written = (tmp_path / "run" / PAGE).read_text()
    assert written == page_of(tmp_path / "run")


@pytest.mark.parametrize("tp", ["argmax", "softmax"])
def test_another_rule_shows_the_p_values_that_it_decides_by(
    tp: str, whole_run: WholeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pictures(monkeypatch)
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "scores", lambda *arguments: drawn.append(arguments))
    monkeypatch.setitem(SOURCES, "noise", noise)
    folder = tmp_path / "run"
    shutil.copytree(whole_run.folder, folder)
    assert main([str(folder), "--tp", tp, "--unknown", "noise", "here"]) == 0
    ((known, unknown, line),) = drawn
    tested = evaluate(open_run(folder, CPU), Sources(read_config(folder)), CPU, AlternativeRule(tp))
    assert known == pytest.approx(-np.log10(tested.verdicts.p_value))
    assert ((known > line) == ~tested.verdicts.known).all()
    assert (len(unknown), min(known.min(), unknown.min()) >= 0) == (7, True)
    words = Reader((folder / PAGE).read_text()).words
    assert f"decided by {tp}" in words
    assert "p-value among validation images of all tasks" in words
    assert "7 of classes never learned" in words


def noise(reader: PixelReader, data: str | None) -> Source:
    pixels = np.random.default_rng(0).integers(0, 256, (7, *reader.spec.shape), dtype=np.uint8)
    images = Images(pixels, np.array(["?"] * 7))
    return Source(images, images, ("?",))


def test_a_page_of_fewer_tasks_does_not_outlive_them(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert fit.main(["--out", str(folder), "--tasks", "zero,one"]) == 0
    (folder / PAGE).touch()
    with pytest.MonkeyPatch.context() as patch:
        kill_at_save(patch, 1, written=True)
        assert fit.main(["--out", str(folder), "--add-task", "two"]) == 130
    assert not (folder / PAGE).exists()


def test_labels_cannot_break_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, odd = SOURCES["tiny"], "<b>$x"

    def renamed(images: Images) -> Images:
        labels = images.labels.astype("<U10")
        labels[labels == "one"] = odd
        return Images(images.pixels, labels)

    def source(reader: PixelReader, data: str | None) -> Source:
        real = tiny(reader, data)
        return Source(renamed(real.train), renamed(real.test), tuple(odd if c == "one" else c for c in real.classes))

    monkeypatch.setitem(SOURCES, "tiny", source)
    assert fit.main(["--out", str(tmp_path / "run")]) == 0
    read = Reader(page_of(tmp_path / "run"))
    assert "b" not in read.tags
    assert f"zero, {odd}" in read.words


def test_a_run_without_unknown_images_or_history_has_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert fit.main(["--out", str(folder), "--tasks", "zero,one,two,three,four"]) == 0
    (folder / HISTORY).unlink()
    read = Reader(page_of(folder))
    assert "This run has no history of its epochs." in read.words
    assert "unknown AUROC" not in read.words
    assert "0 never learned but accepted as a class" in read.words


def test_every_point_of_the_map_has_a_small_picture(page: str) -> None:
    found = re.findall(r'<g class="pictured".*?href="data:image/webp;base64,([^"]+)"', page)
    assert len(found) == page.count('<g class="dot"') > 10
    for content in found:
        with Image.open(io.BytesIO(base64.b64decode(content))) as image:
            # Small images keep their size and all their colours.
            assert (image.format, max(image.size) < 64) == ("WEBP", True)


def test_a_map_by_umap_needs_the_extra(
    whole_run: WholeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("serving.bundle.umap_places.installed", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        main([str(whole_run.folder), "--map", "umap"])
    assert "pip install -e '.[umap]'" in capsys.readouterr().err


@pytest.mark.long
def test_a_map_by_umap_has_other_places(page: str, whole_run: WholeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    # UMAP itself is tested with the page /unknowns; compiling it takes most of a minute.
    monkeypatch.setattr("training.show.embedding_map.umap_places", lambda points: -points[:, 1::-1])
    before = re.findall(r'class="dot[^>]*', page)
    assert main([str(whole_run.folder), "--map", "umap"]) == 0
    again = (whole_run.folder / PAGE).read_text()
    assert len(re.findall(r'class="dot[^>]*', again)) == len(before) > 3
    assert re.findall(r'class="dot[^>]*', again) != before
    assert ", made by UMAP" in again


def test_a_folder_that_is_no_run_has_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "not a run" in capsys.readouterr().err
    assert not (tmp_path / PAGE).exists()


def test_a_page_whose_folder_would_control_the_terminal_is_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("training.measure.evaluation.evaluate_chosen", lambda chosen: None)
    monkeypatch.setattr("training.measure.evaluation.measure", lambda evaluation: {})
    monkeypatch.setattr("training.show.page.write_page", lambda run, *_: run / PAGE)
    assert main(["a\x1b[31mb"]) == 0
    assert capsys.readouterr().out == rf"a\x1b[31mb/{PAGE}" + "\n"
