"""Many images into one file: equal to single answers, and the same file whatever is killed on the way."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest

pa = pytest.importorskip("pyarrow", reason="the extra `batch` is not installed")
import pyarrow.parquet as pq  # noqa: E402

from serving.batch import sources, workers  # noqa: E402
from serving.batch.entries import read_file  # noqa: E402
from serving.batch.errors import BatchError  # noqa: E402
from serving.batch.plan import BatchPlan, WorkFolder, batch_size  # noqa: E402
from serving.batch.progress import BatchProgress  # noqa: E402
from serving.batch.run import BatchRequest, make_batch_plan, run_batch  # noqa: E402
from serving.batch.sources import Chunk, find  # noqa: E402
from serving.batch.workers import Answered, Done, _serve, _Work, _Worker  # noqa: E402
from serving.bundle.model import BundleModel  # noqa: E402
from serving.bundle.pixels import LIMITS  # noqa: E402
from serving.bundle.terminal import duration  # noqa: E402
from serving.inference.answers import PredictionOptions, answer_image  # noqa: E402
from serving.predict import main  # noqa: E402
from serving.settings import Settings  # noqa: E402
from tests.helpers_serving import (  # noqa: E402
    COLOURS,
    FAILS,
    GREY,
    PATIENCE,
    ROOT,
    eventually,
    image_bytes,
    write_bundle,
)

NUMBERS = ("class_id", "task", "confidence", "p_within_task", "p_task", "p_value", "unknown_score")
CHUNK = 8


def content(number: int) -> bytes:
    colours = [*COLOURS.values(), GREY, (250, 20, 10)]
    return image_bytes(colours[number % len(colours)])


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """43 images in two folders, a damaged one among them, and a file that is no image."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "below").mkdir()
    for number in range(43):
        (folder / ("below" if number % 3 else "") / f"{number:02}.png").write_bytes(content(number))
    (folder / "07.png").write_bytes(b"not an image")
    (folder / "notes.txt").write_text("ignored")
    return folder


@pytest.fixture(scope="module", autouse=True)
def quick_processes() -> Iterator[None]:
    """Processes that answer are forked from one that has imported everything, which saves seconds for each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["serving.batch.workers"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda method=None: context)
        yield


def request(bundle: Path, source: Path, out: Path, **options: Any) -> BatchRequest:
    return BatchRequest(bundle, str(source), out, **{"workers": 1, "chunk": CHUNK, **options})


def rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return found


def answer(bundle: Path, images: Path, out: Path, **options: Any) -> Path:
    run_batch(request(bundle, images, out, **options), Settings())
    return out


@pytest.fixture(scope="module")
def whole(bundle: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a run that nothing disturbed."""
    return answer(bundle, images, tmp_path_factory.mktemp("whole") / "answers.parquet")


def test_every_row_is_the_answer_of_the_image_alone(model: BundleModel, images: Path, whole: Path) -> None:
    found = rows(whole)
    assert [row["row"] for row in found] == list(range(44))
    assert [row["file"] for row in found] == sorted(str(path.relative_to(images)) for path in images.rglob("*.png"))
    options = PredictionOptions.for_model(model)
    for row in found:
        if row["file"] == "07.png":
            assert (row["error_code"], row["label"], row["p_value"]) == ("unsupported_image", None, None)
            continue
        alone = answer_image(model, (images / row["file"]).read_bytes(), options)
        assert (row["label"], row["known"], row["best_guess"]) == (alone.label, alone.known, alone.best_guess)
        assert [row[name] for name in NUMBERS] == pytest.approx([getattr(alone, name) for name in NUMBERS], rel=1e-5)
        assert row["error"] is row["error_code"] is None
    about = pq.read_schema(whole).metadata
    assert about[b"openworld.version"].decode() == model.manifest.version


def test_a_bundle_that_does_not_work_warns_before_the_run_and_in_its_file(
    images: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = write_bundle(tmp_path / "bundle", verdict=FAILS)
    out = answer(failing, images, tmp_path / "answers.parquet")
    assert f"warning: {FAILS.warning}\n" in capsys.readouterr().err
    assert pq.read_schema(out).metadata[b"openworld.warning"].decode() == FAILS.warning
    assert b"openworld.warning" not in pq.read_schema(whole).metadata


def test_the_command_writes_csv_and_json_lines(bundle: Path, images: Path, whole: Path, tmp_path: Path) -> None:
    for suffix in (".csv", ".jsonl"):
        out = tmp_path / f"answers{suffix}"
        top = ["--top", "2"] if suffix == ".jsonl" else []
        assert main([str(bundle), str(images), "--out", str(out), "--workers", "1", *top]) == 1
        lines = out.read_text().splitlines()
        if suffix == ".csv":
            import csv

            found = list(csv.DictReader(lines))
            assert [row["label"] or None for row in found] == [row["label"] for row in rows(whole)]
        else:
            answers = [json.loads(line) for line in lines]
            assert [row.get("label") for row in answers] == [row["label"] for row in rows(whole)]
            assert all(len(row["top_labels"]) == 2 for row in answers if "label" in row)
            assert answers[0]["top_probabilities"][0] == answers[0]["confidence"]
        assert not WorkFolder(out).path.exists()


def test_without_a_bundle_the_settings_name_it(
    bundle: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENWORLD_BUNDLE", str(bundle))
    assert main([str(images), "--out", str(tmp_path / "a.csv"), "--workers", "1"]) == 1
    assert (tmp_path / "a.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{images}", "--out", "{out}/a.txt"], "no such format"),
        (["{images}", "--out", "{out}/a.csv", "--top", "2"], "CSV has no lists"),
        (["{images}/notes.txt", "--out", "{out}/a.csv"], "nothing to answer"),
        (["{empty}", "--out", "{out}/a.csv"], "no images"),
        (["{images}", "--out", "{out}/a.csv", "--keep", "id"], "no columns"),
        (["{images}", "--out", "{out}/missing/a.csv"], "cannot be made"),
        (["{images}", "--out", "{out}/a.csv", "--task", "9"], "no such task"),
    ],
)
def test_what_cannot_run_exits_with_2_and_leaves_nothing(
    arguments: list[str], message: str, bundle: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "out").mkdir()
    places = {"images": images, "empty": tmp_path / "empty", "out": tmp_path / "out"}
    assert main([str(bundle), *(word.format(**places) for word in arguments)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert list((tmp_path / "out").iterdir()) == []


# ---- Killed and continued


@contextmanager
def started(bundle: Path, source: Path, out: Path, workers: int = 1) -> Iterator[psutil.Process]:
    """A run in another process."""
    given = f"Path({str(bundle)!r}), Path({str(source)!r}), Path({str(out)!r}), workers={workers}"
    code = f"from tests.serving.batch.test_batch import *\nif __name__ == '__main__':\n    answer({given})"
    script = out.with_suffix(".py")
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(script)], cwd=ROOT, env=environment) as process:
        try:
            yield psutil.Process(process.pid)
        finally:
            process.kill()


@pytest.fixture
def stuck(images: Path, tmp_path: Path) -> Path:
    """The same images, but one of them is a pipe that nobody writes into: the run stops there."""
    folder = tmp_path / "stuck"
    (folder / "below").mkdir(parents=True)
    for path in images.rglob("*.png"):
        (folder / path.relative_to(images)).write_bytes(path.read_bytes())
    (folder / "below/31.png").unlink()
    os.mkfifo(folder / "below/31.png")
    return folder


def finished_chunks(out: Path) -> int:
    return len(list(WorkFolder(out).path.glob("*.arrow")))


def answering_processes(process: psutil.Process) -> list[psutil.Process]:
    alive = [child for child in process.children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "spawn_main" in " ".join(child.cmdline())]


def same_rows(one: Path, other: Path) -> bool:
    return bool(pq.read_table(one).equals(pq.read_table(other)))


def test_a_killed_run_is_continued_to_the_same_file(bundle: Path, stuck: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.parquet"
    with started(bundle, stuck, out) as process:
        eventually(lambda: finished_chunks(out) == 4)
        for each in [process, *process.children(recursive=True)]:
            each.send_signal(signal.SIGKILL)
    assert not out.exists()
    (stuck / "below/31.png").unlink()
    (stuck / "below/31.png").write_bytes(content(31))
    # Chunks that are complete are not answered again.
    (stuck / "below/01.png").write_bytes(content(0))
    before = (WorkFolder(out).path / "00000000.arrow").stat()
    with pytest.raises(BatchError, match=r"other options: alpha 0\.05, now 0\.2"):
        answer(bundle, stuck, out, alpha=0.2)
    with WorkFolder(out).alone(), pytest.raises(BatchError, match="one at a time"):
        answer(bundle, stuck, out)
    assert (WorkFolder(out).path / "00000000.arrow").stat() == before
    # A chunk that was damaged is.
    damaged = WorkFolder(out).path / "00000002.arrow"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    (stuck / "below/01.png").write_bytes(content(1))
    answer(bundle, stuck, out)
    once = answer(bundle, stuck, tmp_path / "once.parquet")
    assert out.read_bytes() == once.read_bytes()
    assert not WorkFolder(out).path.exists()


@pytest.mark.long
def test_a_process_that_dies_is_replaced(bundle: Path, stuck: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.parquet"
    with started(bundle, stuck, out) as process:
        eventually(lambda: finished_chunks(out) == 4)
        (first,) = answering_processes(process)
        first.send_signal(signal.SIGKILL)
        eventually(lambda: [each for each in answering_processes(process) if each.pid != first.pid])
        # Opening a pipe waits for its reader, the next process.
        (stuck / "below/31.png").write_bytes(content(31))
        assert process.wait(timeout=PATIENCE) == 0
    assert same_rows(out, whole)


@contextmanager
def held_open(pipe: Path) -> Iterator[int]:
    """Wait until a process opens a pipe for reading, and let it read nothing; yields its id."""

    def opened() -> int | None:
        with contextlib.suppress(OSError):
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        return None

    def reader() -> int | None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(OSError):
                if any(os.path.realpath(each) == str(pipe) for each in Path(f"/proc/{process.pid}/fd").iterdir()):
                    return process.pid
        return None

    writer = eventually(opened)
    assert writer is not None
    try:
        found = eventually(reader)
        assert found is not None
        yield found
    finally:
        os.close(writer)


def test_an_image_that_ends_every_process_is_a_row(bundle: Path, stuck: Path, whole: Path, tmp_path: Path) -> None:
    out, pipe = tmp_path / "answers.parquet", stuck / "below/31.png"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(answer, bundle, stuck, out)
        # Twice anything may have ended it; then the process says which image it works on.
        for _ in range(3):
            with held_open(pipe) as reader:
                os.kill(reader, signal.SIGKILL)
                # Until it is gone, the next turn would find the same process.
                eventually(lambda: not psutil.pid_exists(reader))
        running.result()
    found, undisturbed = rows(out), rows(whole)
    (place,) = [at for at, row in enumerate(found) if row["file"] == "below/31.png"]
    assert (found[place]["error_code"], found[place]["label"]) == ("process_died", None)
    found[place] = undisturbed[place]
    assert found == undisturbed


def test_rows_that_end_every_process_before_an_image_are_errors(tmp_path: Path) -> None:
    work = _Work(Chunk(0, 0, 3))
    for _ in range(2):
        work.died(None)
    assert (work.careful, work.lost) == (True, set())
    work.died(None)
    work.died(2)
    assert work.lost == {2}
    work.died(None)
    assert work.lost == {0, 1, 2}


def test_no_chunk_waits_for_a_busy_process(bundle: Path, stuck: Path, whole: Path, tmp_path: Path) -> None:
    """While one process is busy with one chunk, the other one answers all the rest."""
    out = tmp_path / "answers.parquet"
    with started(bundle, stuck, out, workers=2) as process:
        eventually(lambda: finished_chunks(out) == 5)
        (stuck / "below/31.png").write_bytes(content(31))
        assert process.wait(timeout=120) == 0
    assert same_rows(out, whole)


def test_a_chunk_is_answered_while_the_one_before_is_stored(
    bundle: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But only one waits for the disk, and it counts as done when it is there."""
    out = tmp_path / "answers.parquet"
    WorkFolder(out).path.mkdir()
    plan = _begun(bundle, images, out)
    disk, store = threading.Semaphore(0), WorkFolder.store

    def slow(self: WorkFolder, number: int, answers: Any) -> None:
        assert disk.acquire(timeout=PATIENCE)
        store(self, number, answers)

    monkeypatch.setattr(WorkFolder, "store", slow)
    ours, theirs = multiprocessing.Pipe()

    def heard(count: int) -> list[str]:
        """So many messages of the process, after which it is silent."""
        found = [type(ours.recv()).__name__ for _ in range(count)]
        assert not ours.poll(0.2)
        return found

    def parent() -> None:
        chunks = sources.chunks(plan, WorkFolder(out).items())
        try:
            assert heard(1) == ["Done"]
            ours.send((next(chunks), frozenset(), False))
            assert heard(1) == ["Answered"]
            ours.send((next(chunks), frozenset(), False))
            # It is answered, but its process has room for one chunk that is not stored.
            assert heard(0) == []
            disk.release()
            assert heard(2) == ["Done", "Answered"]
            assert finished_chunks(out) == 1
            disk.release()
            assert heard(1) == ["Done"]
        finally:
            disk.release(2)
            ours.close()

    on_ctrl_c = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as pool:
        talking = pool.submit(parent)
        _serve(theirs, plan, out)
        signal.signal(signal.SIGINT, on_ctrl_c)
        talking.result()
    assert finished_chunks(out) == 2


class Scripted:
    """A process whose part a thread plays: the first one answers at once, and the second one is slow to start."""

    Pipe = staticmethod(multiprocessing.Pipe)
    exitcode = 0

    def __init__(self) -> None:
        self.started: list[Connection] = []

    def Process(self, target: object, args: tuple[Connection, ...], daemon: bool) -> Scripted:  # noqa: N802
        # The parent closes its copy.
        self.started.append(Connection(os.dup(args[0].fileno())))
        return self

    def start(self) -> None:
        first = len(self.started) == 1
        threading.Thread(target=self._answer if first else self._hesitate, args=self.started[-1:], daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError):
            connection.send(Done(0, 0))
            while True:
                chunk, _, _ = connection.recv()
                connection.send(Answered())
                connection.send(Done(chunk.rows, 0))

    def _hesitate(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError), connection:
            connection.poll(PATIENCE)

    def join(self) -> None: ...

    def terminate(self) -> None: ...


def test_the_end_does_not_wait_for_a_process_that_is_still_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Scripted()
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: processes)
    given: Any = iter([Chunk(number, 3 * number, 3) for number in range(4)])
    outcomes = list(workers.answer_chunks(None, tmp_path / "out", given, workers=2))  # type: ignore[arg-type]
    assert sum(done.images for done in outcomes) == 12
    assert len(processes.started) == 2


def test_a_file_is_read_up_to_one_byte_more_than_allowed(tmp_path: Path) -> None:
    for size, read in ((0, 0), (5, 5), (LIMITS.size, LIMITS.size), (LIMITS.size + 9, LIMITS.size + 1)):
        with (tmp_path / "file").open("wb") as file:
            file.truncate(size)
        assert len(read_file(str(tmp_path / "file"))) == read


def test_a_disk_that_fails_ends_the_run(
    bundle: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it fails at the last chunk, after which nothing is asked of the process."""
    out = tmp_path / "answers.parquet"
    WorkFolder(out).path.mkdir()
    plan = _begun(bundle, images, out)
    WorkFolder(out).clear()
    WorkFolder(out).path.rmdir()
    chunk = Chunk(0, 0, 1, ("00.png",))
    with pytest.raises(BatchError, match="FileNotFoundError"):
        list(workers.answer_chunks(plan, out, iter([chunk]), workers=1))


class Gone:
    """A process that has ended."""

    exitcode = -9

    def join(self) -> None: ...


def test_a_process_that_dies_gives_back_the_chunk_that_it_stores(tmp_path: Path) -> None:
    """Only the one that was answered is blamed; then each has a process to itself."""
    ours, _theirs = multiprocessing.Pipe()
    before, after = (_Work(Chunk(number, 0, 3)) for number in range(2))
    worker = _Worker(Gone(), ours)  # type: ignore[arg-type]
    worker.heard(Done(0, 0))
    worker.give(before)
    worker.heard(Answered())
    assert worker.free
    worker.give(after)
    assert worker.taken_back() == [after, before]
    assert (after.deaths, before.deaths) == (1, 0)
    again = _Worker(Gone(), ours)  # type: ignore[arg-type]
    again.heard(Done(0, 0))
    again.give(before)
    again.heard(Answered())
    assert not again.free
    assert again.taken_back() == [before]
    assert before.deaths == 1
    with pytest.raises(BatchError, match="ended with code -9 before its first image"):
        _Worker(Gone(), ours).taken_back()  # type: ignore[arg-type]


def test_the_batch_size_is_not_measured(bundle: Path, images: Path, tmp_path: Path) -> None:
    """So that two runs of the same bundle compute the same numbers; photos get smaller batches than small images."""
    assert [batch_size(shape) for shape in ((8, 8, 1), (32, 32, 3), (224, 224, 3), (2000, 2000, 3))] == [64, 64, 8, 1]
    out = tmp_path / "answers.parquet"
    (tmp_path / "answers.parquet.unfinished").mkdir()
    assert [_begun(bundle, images, out, batch).batch for batch in (0, 3)] == [64, 3]


def _begun(bundle: Path, images: Path, out: Path, batch: int = 0, **options: Any) -> BatchPlan:
    """The plan of a new run; `batch` as in the settings, 0 if it is not given."""
    WorkFolder(out).clear()
    return _planned(bundle, images, out, batch, **options)


def _planned(bundle: Path, images: Path, out: Path, batch: int = 0, **options: Any) -> BatchPlan:
    settings = Settings(**({"batch": batch} if batch else {}))
    plan = make_batch_plan(request(bundle, images, out, **options), settings, WorkFolder(out))
    assert isinstance(plan, BatchPlan)
    return plan


def test_the_threads_of_a_process_stay_the_same(
    bundle: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many chunks are left, and wherever the run is continued: they may change the last bits of numbers."""
    out = tmp_path / "answers.parquet"
    (tmp_path / "answers.parquet.unfinished").mkdir()
    monkeypatch.setattr("serving.batch.run.available_cpus", lambda: 8)
    assert _begun(bundle, images, out, workers=None).threads == 1
    assert _begun(bundle, images, out, workers=2).threads == 4
    # One chunk of all images.
    assert _begun(bundle, images, out, workers=2, chunk=100).threads == 8
    assert _begun(bundle, images, out, workers=None, ray=True).threads == 1
    monkeypatch.setattr("serving.batch.run.available_cpus", lambda: 2)
    assert _begun(bundle, images, out, workers=1).threads == 2
    assert _planned(bundle, images, out, workers=2).threads == 2


def test_a_run_that_was_killed_after_its_last_step_is_known_to_be_complete(
    bundle: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.parquet"
    words = [str(bundle), str(images), "--out", str(out), "--workers", "1"]
    with monkeypatch.context() as patch:
        # As if it was killed before the folder is removed.
        patch.setattr("shutil.rmtree", lambda path, ignore_errors: None)
        assert main(words) == 1
    assert WorkFolder(out).path.exists()
    before = out.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path, ignore_errors: None)
        assert main([*words, "--alpha", "0.2"]) == 2
        assert f"{out} exists" in capsys.readouterr().err
    # One image has an error, as the run itself has said.
    assert main(words) == 1
    assert "complete already" in capsys.readouterr().err
    assert not WorkFolder(out).path.exists()
    assert out.read_bytes() == before


def test_an_existing_file_is_only_replaced_on_request(bundle: Path, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    out.write_text("mine")
    with pytest.raises(BatchError, match="--overwrite"):
        answer(bundle, images, out)
    assert out.read_text() == "mine"
    answer(bundle, images, out, overwrite=True)
    assert len(out.read_text().splitlines()) == 44


# ---- Parquet


@pytest.mark.parametrize("form", ["bytes", "paths", "structs"])
def test_images_in_parquet_files(form: str, bundle: Path, images: Path, whole: Path, tmp_path: Path) -> None:
    """Row groups that are larger and smaller than a chunk, in two files."""
    names = [row["file"] for row in rows(whole)]
    contents = [(images / name).read_bytes() for name in names]
    paths = [str(images / name) for name in names]
    structs = [{"bytes": content, "path": name} for content, name in zip(contents, names, strict=True)]
    values: list[Any] = {"bytes": contents, "paths": paths, "structs": structs}[form]
    source = tmp_path / "source"
    source.mkdir()
    table = pa.table(
        {"photo": [*values, None], "id": [f"id{n}" for n in range(45)], "label": ["x"] * 45, "number": range(45)}
    )
    pq.write_table(table.slice(0, 30), source / "a.parquet", row_group_size=21)
    pq.write_table(table.slice(30), source / "b.parquet", row_group_size=5)
    out = answer(bundle, source, tmp_path / "a.parquet", column="photo", keep=("id", "label"))
    found = rows(out)
    assert [row["row"] for row in found] == list(range(45))
    assert [row["id"] for row in found] == [f"id{n}" for n in range(45)]
    assert [row["source_label"] for row in found] == ["x"] * 45
    for row, alone in zip(found, rows(whole), strict=False):
        assert [row[name] for name in (*NUMBERS, "label", "error_code")] == [
            alone[name] for name in (*NUMBERS, "label", "error_code")
        ]
    assert found[-1]["error_code"] == "unreadable_file"
    with pytest.raises(BatchError, match="no such column: got 'image'; allowed: photo, id, label, number"):
        answer(bundle, source, tmp_path / "b.parquet")
    with pytest.raises(BatchError, match="'number' has no images: got int64; allowed: bytes, paths"):
        answer(bundle, source, tmp_path / "b.parquet", column="number")


@pytest.fixture
def source(images: Path, whole: Path, tmp_path: Path) -> Path:
    """Two Parquet files of the images, in small pages, with copied columns that differ."""
    folder = tmp_path / "source"
    folder.mkdir()
    contents = [(images / row["file"]).read_bytes() for row in rows(whole)]
    first = pa.table({"image": contents[:30], "id": pa.array(range(30), pa.int32()), "note": ["x"] * 30})
    second = pa.table({"image": contents[30:], "id": pa.array(range(14), pa.int64())})
    for name, table in (("a", first), ("b", second)):
        # A page has one row: the smallest that a writer makes.
        pq.write_table(table, folder / f"{name}.parquet", data_page_size=1, write_batch_size=1, compression="none")
    return folder


def test_a_damaged_page_makes_errors_of_its_rows(bundle: Path, source: Path, whole: Path, tmp_path: Path) -> None:
    """Those after it in its row group cannot be read either; all others are answered."""
    file = source / "a.parquet"
    content = bytearray(file.read_bytes())
    column = pq.read_metadata(file).row_group(0).column(0)
    middle = column.data_page_offset + column.total_compressed_size // 2
    content[middle : middle + 400] = b"\xff" * 400
    file.write_bytes(content)
    out = answer(bundle, source, tmp_path / "answers.parquet", keep=("id", "note"))
    found, undisturbed = rows(out), rows(whole)
    lost = [row["row"] for row in found if row["error_code"] == "unreadable_file"]
    assert lost
    assert lost == list(range(lost[0], 30))
    assert [row["label"] for row in found[: lost[0]]] == [row["label"] for row in undisturbed[: lost[0]]]
    assert [row["label"] for row in found[30:]] == [row["label"] for row in undisturbed[30:]]
    assert [row["id"] for row in found[30:]] == list(range(14))
    assert found[lost[0]]["id"] is None
    assert found[lost[0]]["file"] == str(file)
    # However the rows are cut into chunks.
    again = rows(answer(bundle, source, tmp_path / "again.parquet", chunk=64))
    assert [row["row"] for row in again if row["error_code"] == "unreadable_file"] == lost


def test_a_file_that_is_gone_makes_errors_of_its_rows(bundle: Path, source: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.parquet"
    (tmp_path / "answers.parquet.unfinished").mkdir()
    _begun(bundle, source, out)
    (source / "a.parquet").unlink()
    found = rows(answer(bundle, source, out))
    assert {row["error_code"] for row in found[:30]} == {"unreadable_file"}
    assert [row["label"] for row in found[30:]] == [row["label"] for row in rows(whole)[30:]]


def test_copied_columns_may_differ_between_files_if_one_type_has_room_for_all(
    bundle: Path, source: Path, tmp_path: Path
) -> None:
    found = answer(bundle, source, tmp_path / "answers.parquet", keep=("note", "id"))
    assert pq.read_schema(found).field("id").type == pa.int64()
    assert [row["id"] for row in rows(found)] == [*range(30), *range(14)]
    assert [row["note"] for row in rows(found)] == ["x"] * 30 + [None] * 14
    pq.write_table(pa.table({"image": [b""], "id": ["seven"]}), source / "c.parquet")
    with pytest.raises(BatchError, match=r"c\.parquet: copied columns differ between files: .*id"):
        answer(bundle, source, tmp_path / "other.parquet", keep=("id",))
    # Before anything is answered.
    assert not WorkFolder(tmp_path / "other.parquet").path.exists()
    pq.write_table(pa.table({"picture": [b""]}), source / "c.parquet")
    last = rows(answer(bundle, source, tmp_path / "last.parquet", keep=("id",)))[-1]
    assert (last["error_code"], last["id"]) == ("unreadable_file", None)
    assert "no column 'image'" in last["error"]


def test_images_behind_a_url(bundle: Path, images: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.parquet"
    run_batch(BatchRequest(bundle, images.as_uri(), out, workers=1, chunk=CHUNK), Settings())
    assert same_rows(out, whole)


def test_a_url_lists_the_same_names_in_the_same_order_as_a_folder(tmp_path: Path) -> None:
    names = ("a/b.png", "a.png", "a/c/d.JPG", "z.jpg", "notes.txt", "b/2.png", "b/10.png")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    fsspec.filesystem("memory").pipe({f"/bucket/{name}": b"" for name in names})
    listed = [list(find(source)[1]) for source in (str(tmp_path), tmp_path.as_uri(), "memory://bucket")]
    assert listed == [["a/b.png", "a/c/d.JPG", "a.png", "b/10.png", "b/2.png", "z.jpg"]] * 3


# ---- Progress


class Screen:
    def __init__(self, terminal: bool) -> None:
        self.terminal, self.text = terminal, ""

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...


def test_progress_shows_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("serving.batch.progress.time.monotonic", lambda: now)
    screen: Any = Screen(terminal=False)
    progress = BatchProgress(10_000, 1_000, screen)
    now += 20
    progress.add(2_000, 3)
    assert screen.text == "3,000 of 10,000 images (30.0 %), 100 per second, 3 errors, 1 min 10 s left\n"
    now += 1
    progress.add(1_000, 0)
    assert len(screen.text.splitlines()) == 1
    assert progress.finish() == "3,000 images in 21.0 s, 143 per second and 1,000 before; 3 have an error"


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.21, "4.2 s"), (725, "12 min 5 s"), (12_000, "3 h 20 min"), (190_000, "2 d 4 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
