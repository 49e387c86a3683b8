"""Images that people labelled in the quarantine become the next task."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from serving.quarantine.records import Arrival
from serving.quarantine.store import Store
from tests.helpers import SPEC, TINY_PRESET, assert_same_tensors, kill_at_save, run_tensors, use_tiny_preset
from training import fit
from training.config import Lesson, RunConfig
from training.data.images import DataError
from training.data.quarantined import QUARANTINE, TEST_SHARE, Address, choose_unknowns, load_unknowns
from training.data.tasks import task_data
from training.evaluate import main as evaluate
from training.run import open_run
from training.store.checkpoint import METRICS, load, read_config

CPU = torch.device("cpu")
OLD = RunConfig(TINY_PRESET, 0, (Lesson((("zero", "one"),), "tiny"),))


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_preset(monkeypatch)


@pytest.fixture
def run(tiny_hat: Path, tmp_path: Path) -> Path:
    """A run of zero, one, two and three."""
    return Path(shutil.copytree(tiny_hat, tmp_path / "run"))


def png(kind: int, number: int) -> bytes:
    """A bright column that identifies the class, plus noise that differs in every image."""
    pixels = np.random.default_rng(1000 * kind + number).integers(0, 120, (8, 8), dtype=np.uint8)
    pixels[:, kind] += 120
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def named(store: Store, counts: Mapping[str, int]) -> dict[str, list[int]]:
    """This many images of each new class, labelled as by a person."""
    found = {}
    for kind, (label, count) in enumerate(counts.items()):
        arrivals = [
            Arrival(png(kind, number), "unknown", 1000.0, "v1", {"best_guess": "zero"}, np.zeros(4, np.float32))
            for number in range(count)
        ]
        found[label] = store.add(arrivals).kept
        assert len(found[label]) == count
        store.name(found[label], label, "ann")
    return found


def add_unknowns(run: Path, url: str, *more: str) -> int:
    return fit.main(["--add-unknowns", str(run), "--quarantine", url, *more])


# ---- what is learned


def test_what_was_named_is_learned_as_one_task(run: Path, store: Store, url: str, tmp_path: Path) -> None:
    items = named(store, {"six": 20, "five": 25})
    before = open_run(run, CPU)
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 1), dtype=np.uint8)
    old_outputs = before.outputs(pixels, CPU)
    assert add_unknowns(run, url) == 0
    config = read_config(run)
    assert config.tasks == (("zero", "one"), ("two", "three"), ("five", "six"))
    assert config.lessons[1].items == {label: tuple(items[label]) for label in ("five", "six")}
    after = open_run(run, CPU)
    for name, values in after.outputs(pixels, CPU).items():
        assert values[:, :4].tobytes() == old_outputs[name].tobytes()
    assert after.rule.tasks[:2] == before.rule.tasks
    measured = json.loads((run / METRICS).read_text())
    # Five test images of each old class, and a fifth of the new images, which were not trained on.
    assert measured["test_images"] == 4 * 5 + 5 + 4
    assert {item.state for item in store.items()} == {"named"}, "learned by the run, but served by nobody yet"


def test_the_network_sees_what_the_server_saw(store: Store, url: str) -> None:
    items = named(store, {"five": 10})
    big = Image.new("RGBA", (31, 20), (250, 30, 60, 128))
    content = io.BytesIO()
    big.save(content, "PNG")
    arrival = Arrival(content.getvalue(), "unknown", 1.0, "v1", {}, np.zeros(4, np.float32))
    items["five"] += store.add([arrival]).kept
    lesson = Lesson((("five",),), QUARANTINE, url, None, {"five": tuple(items["five"])})
    source = load_unknowns(lesson, replace(OLD, lessons=(*OLD.lessons, lesson)))
    assert source.validation is not None
    every = np.concatenate([source.train.pixels, source.validation.pixels, source.test.pixels])
    from serving.bundle.pixels import decode, to_pixels

    wanted = {to_pixels(decode(store.image(number)), SPEC).tobytes() for number in items["five"]}
    assert {pixels.tobytes() for pixels in every} == wanted
    assert len(every) == len(wanted) == 11


def lesson_of(items: Mapping[str, list[int]], url: str) -> tuple[Lesson, RunConfig]:
    numbers = {label: tuple(some) for label, some in items.items()}
    lesson = Lesson((tuple(numbers),), QUARANTINE, url, None, numbers)
    return lesson, replace(OLD, lessons=(*OLD.lessons, lesson))


def test_every_image_trains_validates_or_tests(store: Store, url: str) -> None:
    lesson, config = lesson_of(named(store, {"five": 20, "six": 30}), url)
    source = load_unknowns(lesson, config)
    data = task_data(source, config, 1, CPU)
    assert len(source.test) == TEST_SHARE * 50
    # The tiny preset validates with 40 % of what is left.
    assert (len(data.train), len(data.validation)) == (24, 16)
    assert data.train.local_classes.bincount().tolist() == [10, 14]
    parts = [source.test.pixels, data.train.pixels.permute(0, 2, 3, 1), data.validation.pixels.permute(0, 2, 3, 1)]
    every = [np.ascontiguousarray(pixels).tobytes() for part in parts for pixels in part]
    assert len(set(every)) == len(every) == 50


def test_an_image_that_was_deleted_moves_no_other(store: Store, url: str, caplog: pytest.LogCaptureFixture) -> None:
    items = named(store, {"five": 20, "six": 20})
    lesson, config = lesson_of(items, url)
    before = load_unknowns(lesson, config)
    store.delete(items["five"][:5])
    after = load_unknowns(lesson, config)
    assert "5 of the 40 images of five, six no longer exist" in caplog.text
    assert after.validation is not None
    assert before.validation is not None
    for was, is_now in ((before.train, after.train), (before.validation, after.validation), (before.test, after.test)):
        assert {one.tobytes() for one in is_now.pixels} <= {one.tobytes() for one in was.pixels}
    store.delete(items["five"])
    with pytest.raises(DataError, match="too few images left of five"):
        load_unknowns(lesson, config)


def test_a_damaged_file_is_named_and_skipped(
    store: Store, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lesson, config = lesson_of(named(store, {"five": 20}), url)
    file = next(path for path in sorted((tmp_path / "images").rglob("*")) if path.is_file())
    file.write_bytes(b"damaged")
    source = load_unknowns(lesson, config)
    assert source.validation is not None
    assert len(source.train) + len(source.validation) + len(source.test) == 19
    assert "of the quarantine: the image file of item" in caplog.text


# ---- what is not learned


def test_too_few_images_are_refused_with_what_there_is(
    run: Path, store: Store, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    assert add_unknowns(run, url) == 2
    assert "nothing to learn yet: no image is labelled as a new class" in capsys.readouterr().err
    named(store, {"five": 19, "six": 3})
    assert add_unknowns(run, url) == 2
    error = capsys.readouterr().err
    assert "'five' has 19 images of the 20 that a class needs; 'six' has 3 images of the 20" in error
    assert "lower --min-images" in error
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.parametrize("minimum", ["0", "4"])
def test_a_class_needs_images_to_train_to_validate_and_to_test(
    minimum: str, run: Path, store: Store, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert add_unknowns(run, url, "--min-images", minimum) == 2
    assert f"--min-images is {minimum}; allowed: 5 or more" in capsys.readouterr().err


def test_a_class_that_waits_does_not_hold_up_the_others(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    chosen = choose_unknowns({"a": range(30), "b": range(30, 33), "zero": range(40, 70)}, OLD, 20)
    assert chosen == {"a": tuple(range(30))}
    assert "left for later: 'b' has 3 images of the 20 that a class needs" in caplog.text
    assert "left for later: 'zero' is already learned (mark its 30 images as known)" in caplog.text


def test_a_single_new_class_is_a_task(run: Path, store: Store, url: str) -> None:
    named(store, {"five": 20})
    assert add_unknowns(run, url) == 0
    assert read_config(run).tasks[-1] == ("five",)
    measured = json.loads((run / METRICS).read_text())
    assert measured["accuracy_matrix"][2][2] is not None


def test_known_junk_and_new_images_are_not_learned(run: Path, store: Store, url: str) -> None:
    items = named(store, {"five": 30, "zero": 10, "six": 10, "seven": 10})
    store.mark_known(items["zero"], "zero", "ann")
    store.mark_junk(items["six"], "ann")
    store.clear(items["seven"], "ann")
    assert add_unknowns(run, url) == 0
    assert read_config(run).lessons[1].items == {"five": tuple(items["five"])}


def test_a_missing_quarantine_is_an_error_message(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit.main(["--add-unknowns", str(run)]) == 2
    assert "no quarantine to learn from: give its URL with --quarantine" in capsys.readouterr().err
    assert add_unknowns(run, f"sqlite:///{tmp_path}/nothing.db") == 2
    assert f"{tmp_path}/nothing.db: no such file" in capsys.readouterr().err
    assert not (tmp_path / "nothing.db").exists()


# ---- resuming


def test_resuming_uses_the_images_it_started_with(run: Path, store: Store, url: str, tmp_path: Path) -> None:
    named(store, {"five": 20, "six": 20})
    whole = Path(shutil.copytree(run, tmp_path / "whole"))
    assert add_unknowns(whole, url) == 0
    with pytest.MonkeyPatch.context() as patch:
        kill_at_save(patch, 1, written=True)
        assert add_unknowns(run, url) == 130
    # People continue to label in the meantime.
    more = store.add([Arrival(png(6, n), "unknown", 1.0, "v1", {}, np.zeros(4, np.float32)) for n in range(9)]).kept
    store.name(more, "five", "ann")
    assert fit.main(["--out", str(run), "--resume"]) == 0
    assert_same_tensors(run_tensors(run), run_tensors(whole))
    assert load(run).progress.nats == load(whole).progress.nats


def test_the_old_command_line_names_the_one_that_publishes(
    run: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    named(store, {"five": 20})
    before = run_tensors(run)
    url = "postgresql://ann:secret@db/unknowns"
    assert add_unknowns(run, url, "--min-images", "9", "--publish", "shelf") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"with: openworld learn-unknowns {run} --publish shelf --quarantine 'postgresql://ann:***@db" in error
    assert error.endswith("--min-images 9\n")
    assert_same_tensors(run_tensors(run), before)


def test_a_quarantine_that_is_gone_is_left_out_of_the_metrics(
    run: Path, store: Store, url: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    named(store, {"five": 20, "six": 20})
    assert add_unknowns(run, url) == 0
    store.delete_all()
    capsys.readouterr()
    assert evaluate([str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["untested_tasks"] == [2]
    assert "not measured: no test images of five, six" in caplog.text


# ---- addresses


def test_a_password_is_not_written_down() -> None:
    address = Address("postgresql+psycopg://ann:secret@db.example:5432/unknowns?sslmode=require&password=secret")
    assert address.public == "postgresql+psycopg://ann@db.example:5432/unknowns?sslmode=require"
    with pytest.raises(DataError) as caught:
        _ = Address("ann:secret").public
    assert "secret" not in str(caught.value)


def test_the_environment_knows_the_password_of_a_recorded_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    from training.data.quarantined import address_of

    lesson = Lesson((("five",),), QUARANTINE, "postgresql://ann@db.example/unknowns", "/images")
    assert address_of(lesson) == Address("postgresql://ann@db.example/unknowns", "/images")
    monkeypatch.setenv("OPENWORLD_QUARANTINE_URL", "postgresql://ann:secret@db.example/unknowns")
    monkeypatch.setenv("OPENWORLD_QUARANTINE_IMAGES", "/images")
    assert address_of(lesson).url == "postgresql://ann:secret@db.example/unknowns"
    monkeypatch.setenv("OPENWORLD_QUARANTINE_URL", "postgresql://ann:secret@elsewhere.example/unknowns")
    assert address_of(lesson).url == "postgresql://ann@db.example/unknowns"


def test_a_relative_file_is_recorded_by_its_full_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Address("sqlite:///q.db").public == f"sqlite:///{tmp_path}/q.db"
