"""Maps on disk that only grow: what is stored survives kill -9, torn records, damage and other writers."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers_serving import ROOT, eventually
from training.data.records import INDEX, VALUES, Records

WIDTH = 64


def key(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def values(*names: object) -> NDArray[np.uint8]:
    return np.stack([np.frombuffer(hashlib.shake_256(str(name).encode()).digest(WIDTH), np.uint8) for name in names])


def stored(folder: Path, *names: object) -> Records:
    records = Records(folder, WIDTH)
    records.append([key(name) for name in names], values(*names))
    return records


def test_what_is_appended_is_found_again(tmp_path: Path) -> None:
    stored(tmp_path, "a", "b").close()
    records = stored(tmp_path, "c")
    rows = records.find([key(name) for name in ("c", "missing", "a", "b")])
    assert rows.tolist() == [2, -1, 0, 1]
    assert np.array_equal(records.rows(np.uint8)[rows[[0, 2, 3]]], values("c", "a", "b"))
    assert records.rows(np.float32).shape == (3, WIDTH // 4)


def test_nothing_is_found_in_an_empty_map(tmp_path: Path) -> None:
    records = Records(tmp_path / "new", WIDTH)
    assert records.find([key("a")]).tolist() == [-1]
    assert records.rows(np.float32).shape == (0, WIDTH // 4)


@pytest.mark.parametrize("lost", [1, 39, 40, 41, 79])
def test_a_torn_record_is_missing_and_is_overwritten(tmp_path: Path, lost: int) -> None:
    stored(tmp_path, "a", "b").close()
    index = (tmp_path / INDEX).read_bytes()
    (tmp_path / INDEX).write_bytes(index[:-lost])
    records = Records(tmp_path, WIDTH)
    kept = [name for place, name in enumerate("ab") if (place + 1) * len(index) // 2 <= len(index) - lost]
    assert [name for name in "ab" if records.has(key(name))] == kept
    records.append([key("c"), key("b")], values("c", "b"))
    for again in (records, Records(tmp_path, WIDTH)):
        rows = again.find([key("c"), key("b")])
        assert rows.tolist() == [len(kept), len(kept) + 1]
        assert np.array_equal(again.rows(np.uint8)[rows], values("c", "b"))


@pytest.mark.parametrize("file", [INDEX, VALUES])
def test_a_damaged_value_is_missing_and_is_replaced(tmp_path: Path, file: str) -> None:
    stored(tmp_path, "a", "b").close()
    content = bytearray((tmp_path / file).read_bytes())
    content[3] ^= 1
    (tmp_path / file).write_bytes(content)
    records = Records(tmp_path, WIDTH)
    assert records.find([key("a"), key("b")]).tolist() == [-1, 1]
    records.append([key("a")], values("a"))
    assert Records(tmp_path, WIDTH).find([key("a"), key("b")]).tolist() == [2, 1]


def test_lost_values_are_missing(tmp_path: Path) -> None:
    """After a power failure the records may be on the disk without their values."""
    stored(tmp_path, "a", "b").close()
    (tmp_path / VALUES).write_bytes((tmp_path / VALUES).read_bytes()[: WIDTH + 1])
    assert Records(tmp_path, WIDTH).find([key("a"), key("b")]).tolist() == [0, -1]


def test_two_writers_do_not_disturb_each_other(tmp_path: Path) -> None:
    one, other = Records(tmp_path, WIDTH), Records(tmp_path, WIDTH)
    for place in range(10):
        (one if place % 2 else other).append([key(place)], values(place))
    for records in (one, other):
        rows = records.find([key(place) for place in range(10)])
        assert rows.tolist() == list(range(10))
        assert np.array_equal(records.rows(np.uint8)[rows], values(*range(10)))


def test_an_open_map_outlives_the_removal_of_its_files(tmp_path: Path) -> None:
    records = stored(tmp_path, "a")
    (tmp_path / INDEX).unlink()
    (tmp_path / VALUES).unlink()
    other = stored(tmp_path, "b")
    records.append([key("c")], values("c"))
    assert np.array_equal(records.rows(np.uint8), values("a", "c"))
    assert np.array_equal(other.rows(np.uint8), values("b"))


WRITER = """
import sys
from pathlib import Path
from tests.training.data.test_records import WIDTH, key, values
from training.data.records import Records
name, folder = sys.argv[1:]
records = Records(Path(folder), WIDTH)
for place in range(10**9):
    names = [f"{name} {place} {part}" for part in range(3)]
    records.append([key(each) for each in names], values(*names))
    print(names[-1], flush=True)
"""


def test_kill_9_of_two_writers_loses_nothing_that_was_appended(tmp_path: Path) -> None:
    logs = [tmp_path / f"{name}.log" for name in "xy"]
    writers = []
    for log in logs:
        with log.open("wb") as file:
            command = [sys.executable, "-c", WRITER, log.stem, str(tmp_path / "map")]
            writers.append(subprocess.Popen(command, stdout=file, cwd=ROOT))
    try:
        eventually(lambda: all(log.read_text().count("\n") > 20 for log in logs))
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
    appended = [line.rpartition(" ")[0] for log in logs for line in log.read_text().splitlines()]
    names = [f"{each} {part}" for each in appended for part in range(3)]
    records = Records(tmp_path / "map", WIDTH)
    rows = records.find([key(name) for name in names])
    assert (rows >= 0).all()
    assert np.array_equal(records.rows(np.uint8)[rows], values(*names))
    records.append([key("after")], values("after"))
    assert records.has(key("after"))
