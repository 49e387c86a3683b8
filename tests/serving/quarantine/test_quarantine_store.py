"""The store, on SQLite and on PostgreSQL."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance
from sqlalchemy import text, update

from serving.quarantine import caps, labels
from serving.quarantine.caps import DAY
from serving.quarantine.database import Database
from serving.quarantine.images import open_image_store
from serving.quarantine.records import Caps, DamagedItemError, FoundGroup, StoreError, UnknownIdError
from serving.quarantine.schema import items
from serving.quarantine.store import Store
from tests.helpers_quarantine import Place, arrival, arrivals, noise, run_python
from tests.helpers_serving import PATIENCE, saved


def test_everything_about_an_image_is_kept(place: Place, store: Store) -> None:
    given = arrival(3, received_at=1_700_000_000.25)
    (item_id,), copies, ids = store.add([given])
    assert (copies, ids) == (0, [item_id])
    (item,) = place.open().items()
    assert (item.id, item.state, item.kind, item.group, item.copies) == (item_id, "new", "unknown", None, 1)
    assert (item.received_at, item.seen_at) == (1_700_000_000.25, 1_700_000_000.25)
    assert (item.model_version, item.answer) == ("abc", given.answer)
    assert (item.width, item.height, item.size, item.media_type) == (24, 24, len(given.content), "image/png")
    assert (item.label, item.labelled_by, item.labelled_at, item.learned_in) == (None, None, None, None)
    assert item.features.dtype == np.float32
    np.testing.assert_array_equal(item.features, given.features)
    assert place.open().image(item_id) == given.content


def test_the_same_bytes_are_counted_and_not_stored_again(place: Place, store: Store) -> None:
    first = arrival(1, received_at=100.0)
    assert store.add([first, first, arrival(2)]) == ([1, 2], 1, [1, 1, 2])
    assert store.add([arrival(1, received_at=200.0), arrival(1, received_at=50.0)]) == ([], 2, [1, 1])
    one, two = store.items()
    assert (one.copies, one.received_at, one.seen_at) == (4, 100.0, 200.0)
    assert two.copies == 1
    assert len(place.files()) == 2


def test_what_looks_the_same_is_counted_and_not_stored_again(place: Place, store: Store) -> None:
    image = noise(1, side=48)
    alike = [
        saved(image, "JPEG", quality=80),
        saved(image.resize((96, 96), Image.Resampling.BILINEAR)),
        saved(ImageEnhance.Brightness(image).enhance(1.04)),
    ]
    store.add([arrival(content=saved(image)), arrival(content=alike[0])])
    store.add([arrival(content=content) for content in alike[1:]])
    (item,) = store.items()
    assert item.copies == 4
    assert store.image(item.id) == saved(image)
    assert len(place.files()) == 1


def test_a_copy_is_noticed_whoever_stored_the_first(place: Place, store: Store) -> None:
    other = place.open()
    store.add([arrival(1)])
    assert other.add([arrival(content=saved(noise(1), "JPEG", quality=95)), arrival(2)]).copies == 1
    assert store.add([arrival(content=saved(noise(2), "JPEG", quality=95))]).copies == 1
    assert [item.copies for item in store.items()] == [2, 2]


def test_what_another_process_deleted_is_stored_again(place: Place, store: Store) -> None:
    store.add(arrivals(range(3)))
    place.open().delete([1, 2])
    again = arrival(content=saved(noise(1), "JPEG", quality=95))
    assert store.add([arrival(0), again]) == ([4, 5], 0, [4, 5])
    assert store.image(5) == again.content
    assert len(place.files()) == 3


def test_an_audited_image_that_is_unknown_later_counts_as_unknown(store: Store) -> None:
    store.add([arrival(1, kind="audit", model_version="old")])
    store.add([arrival(1, model_version="new", features=np.ones(9, dtype=np.float32))])
    (item,) = store.items()
    assert (item.kind, item.model_version, item.copies, len(item.features)) == ("unknown", "new", 2, 9)
    store.add([arrival(1, kind="audit", model_version="newest")])
    assert [(item.kind, item.model_version) for item in store.items()] == [("unknown", "new")]


def test_items_are_chosen_by_what_they_are(store: Store) -> None:
    store.add([*arrivals(range(5)), arrival(5, kind="audit")])
    store.mark_junk([2], "ann")

    def ids(**wanted: object) -> list[int]:
        return [item.id for item in store.items(**wanted)]  # type: ignore[arg-type]

    assert ids() == [1, 2, 3, 4, 5, 6]
    assert ids(state="junk") == [2]
    assert ids(kind="audit") == [6]
    assert ids(state="new", kind="unknown", after=1, limit=2) == [3, 4]
    assert ids(ids=[5, 1, 99, 5]) == [1, 5]
    assert ids(ids=[5, 1], limit=1) == [1]
    assert ids(ids=[]) == []


def test_deletion_takes_the_files_along(place: Place, store: Store) -> None:
    store.add(arrivals(range(4)))
    assert store.delete([2, 3, 99], "ann") == 2
    assert [item.id for item in store.items()] == [1, 4]
    assert len(place.files()) == 2
    with pytest.raises(UnknownIdError, match="no item 2"):
        store.image(2)
    assert store.delete_all() == 2
    assert store.items() == []
    assert place.files() == []
    assert store.usage() == (0, 0, {})
    assert [(change.who, change.what, change.items) for change in store.changes()] == [("ann", "delete", 2)]


# ---- caps


def test_the_oldest_new_ones_go_first_and_a_persons_work_last(place: Place, store: Store) -> None:
    store.add([arrival(number, received_at=time.time() - 100 + number) for number in range(6)])
    store.name([1], "eight", "ann")
    store.mark_known([2], "three", "ann")
    store.mark_junk([6], "ann")
    assert store.enforce(Caps(items=6)) == {}
    assert store.enforce(Caps(items=4)) == {"items": 2}
    assert [item.id for item in store.items()] == [1, 2, 4, 5]
    assert store.enforce(Caps(items=2)) == {"items": 2}
    assert [item.id for item in store.items()] == [1, 2]
    # New images do not displace labelled ones.
    store.add([arrival(9)])
    store.enforce(Caps(items=2))
    assert [item.id for item in store.items()] == [1, 2]
    assert store.enforce(Caps(items=1)) == {"items": 1}
    assert [item.id for item in store.items()] == [2]
    assert len(place.files()) == 1


def test_bytes_are_capped(store: Store) -> None:
    store.add([arrival(number, received_at=time.time() - 100 + number) for number in range(4)])
    held = store.usage()
    sizes = [len(saved(noise(number))) for number in range(4)]
    assert held.items == 4
    assert held.bytes > sum(sizes)
    assert store.enforce(Caps(bytes=held.bytes)) == {}
    assert store.enforce(Caps(bytes=held.bytes - 1)) == {"bytes": 1}
    assert [item.id for item in store.items()] == [2, 3, 4]
    assert store.enforce(Caps(bytes=1)) == {"bytes": 3}


def test_age_is_capped_and_a_label_makes_young(store: Store) -> None:
    long_ago = time.time() - 10 * DAY
    store.add([arrival(number, received_at=long_ago + number) for number in range(3)])
    store.add([arrival(3)])
    store.name([2], "eight", "ann")
    assert store.enforce(Caps(days=11)) == {}
    assert store.enforce(Caps(days=9)) == {"days": 2}
    assert [item.id for item in store.items()] == [2, 4]


def test_labels_of_a_server_that_is_taught_do_not_expire(store: Store) -> None:
    long_ago = time.time() - 40 * DAY
    store.add([arrival(number, received_at=long_ago + number) for number in range(4)])
    store.name([2], "eight", "ann")
    store.mark_known([3], "one", "ann")
    store.mark_junk([4], "ann")
    with store._database.writing() as connection:
        connection.execute(update(items).where(items.c.state != "new").values(labelled_at=long_ago))
    assert store.enforce(Caps(days=30, labels_expire=False)) == {"days": 2}
    assert [item.id for item in store.items()] == [2, 3]
    assert store.enforce(Caps(items=1, labels_expire=False)) == {"items": 1}
    assert store.enforce(Caps(days=30)) == {"days": 1}


def test_many_go_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """More items than fit into one SQL statement."""
    monkeypatch.setattr(caps, "_PAGE", 7)
    monkeypatch.setattr(labels, "_KEYS_PER_STATEMENT", 7)
    store.add(arrivals(range(40)))
    store.name(range(1, 31), "eight", "ann")
    assert store.enforce(Caps(items=12)) == {"items": 28}
    assert [item.id for item in store.items(ids=range(1, 41))] == list(range(19, 31))
    assert store.delete_all() == 12


# ---- files


def test_files_that_no_row_names_are_swept(place: Place, store: Store) -> None:
    store.add(arrivals(range(2)))
    kept = place.files()
    left_behind = kept[0].with_name(kept[0].name[:-8] + "01234567")
    unfinished = kept[0].with_name(kept[0].name[:-8] + "89abcdef.part")
    of_others = [kept[0].with_name("notes.txt"), kept[0].with_name(f"{'0' * 64}-ffffffff-01234567")]
    for path in (left_behind, unfinished, *of_others):
        path.write_bytes(b"half an ima")
    assert store.sweep() == 0, "it may still be getting its row"
    assert store.sweep(unowned_for=-1) == 2
    assert place.files() == sorted([*kept, *of_others])


def test_a_file_that_was_damaged_or_removed_is_not_shown(place: Place, store: Store) -> None:
    store.add(arrivals(range(2)))
    (file,) = [path for path in place.files() if path.read_bytes() == saved(noise(0))]
    file.write_bytes(b"something else")
    with pytest.raises(StoreError, match="image file of item 1 is damaged"):
        store.image(1)
    file.unlink()
    with pytest.raises(StoreError, match="is missing"):
        store.image(1)
    assert store.delete([1]) == 1


def test_images_may_lie_wherever_fsspec_reaches(place: Place, tmp_path: Path) -> None:
    store = Store.open(place.url, f"memory://{tmp_path.name}/{place.url.rpartition('/')[2]}")
    store.add(arrivals(range(3)))
    assert store.image(2) == saved(noise(1))
    assert store.delete([2]) == 1
    assert [item.id for item in store.items()] == [1, 3]
    assert store.sweep(unowned_for=-1) == 0
    assert store.delete_all() == 2
    assert place.files() == []


# ---- opening


def test_tables_of_another_version_are_refused(place: Place, store: Store) -> None:
    with store._database.writing() as connection:
        connection.execute(text("UPDATE openworld_quarantine SET version = 99"))
    with pytest.raises(StoreError, match="have format version 99; allowed: 1") as refused:
        place.open()
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("sqlite://", "in memory; allowed: a file"),
        ("mysql://u:secret@h/d", "is mysql; allowed: sqlite, postgresql"),
        ("secret", "cannot be read; allowed: sqlite:///FILE"),
        ("postgresql://u:secret@h/d", "no image storage given"),
    ],
)
def test_what_cannot_be_a_quarantine_is_refused(url: str, problem: str) -> None:
    with pytest.raises(StoreError, match=problem) as refused:
        Store(url)
    assert "secret" not in str(refused.value)


def test_images_are_stored_beside_the_file_by_default(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/deep/down/q.db")
    store.add([arrival(1)])
    assert len(list((tmp_path / "deep/down/images").iterdir())) == 1


def test_a_file_database_waits_for_the_disk_and_lets_others_read(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/q.db")
    with store._database.reading() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar() == 2
        store.add([arrival(1)])


# ---- several processes

WRITER = """
import sys
from serving.quarantine.store import Store
from tests.helpers_quarantine import arrivals

store = Store.open(sys.argv[1], sys.argv[2])
print("ready", flush=True)
input()
for start in range(0, 60, 5):
    store.add(arrivals(range(start, start + 10)))
"""


@pytest.mark.long
def test_two_processes_write_at_once(place: Place) -> None:
    """Two processes store the same images at once: each is stored once, and each arrival is counted."""
    writers = [run_python(WRITER, place.url, place.images, stdin=-1) for _ in range(2)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    assert [writer.wait(timeout=PATIENCE) for writer in writers] == [0, 0]
    store = place.open()
    items = store.items()
    assert len(items) == 65
    assert sum(item.copies for item in items) == 2 * 12 * 10
    assert {store.image(item.id) for item in items} == {saved(noise(number)) for number in range(65)}
    assert len(place.files()) == 65


def tamper(place: Place, **columns: object) -> None:
    """Change the first row behind the store's back."""
    database = Database(place.url)
    with database.writing() as connection:
        assignments = ", ".join(f'"{name}" = :{name}' for name in columns)
        connection.execute(text(f"UPDATE openworld_items SET {assignments} WHERE id = 1"), columns)
    database.close()


def execute(place: Place, statement: str) -> None:
    """Change rows behind the store's back."""
    database = Database(place.url)
    with database.writing() as connection:
        connection.execute(text(statement))
    database.close()


OF_ANOTHER = f"{'0' * 64}-ffffffff-01234567"
"""A file of another quarantine in the same folder."""


@pytest.mark.parametrize("name", ["../victim", "../../victim", "/etc/passwd", "victim", "x/../victim", OF_ANOTHER, ""])
def test_a_row_that_names_another_file_reaches_none(place: Place, store: Store, tmp_path: Path, name: str) -> None:
    store.add(arrivals(range(2)))
    folder = place.files()[0].parent
    victims = [folder.parent / "victim", folder.parent.parent / "victim", folder / "victim", folder / OF_ANOTHER]
    for victim in victims:
        victim.write_bytes(b"of someone else")
    tamper(place, file=name)
    (damaged, whole) = store.items()
    assert (damaged.id, damaged.damage) == (1, "file is not a name that this quarantine makes")
    assert whole.damage is None
    with pytest.raises(DamagedItemError, match="not of this quarantine"):
        store.image(1)
    assert store.delete([1]) == 1
    assert store.enforce(Caps(items=1)) == {}
    assert all(victim.read_bytes() == b"of someone else" for victim in victims)
    for victim in victims:
        victim.unlink()


@pytest.mark.parametrize("name", ["../victim", "a/b", "x" * 82, "", ".part"])
def test_no_storage_touches_a_file_with_another_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "victim").write_bytes(b"of someone else")
    for images in (open_image_store(str(tmp_path / "images")), open_image_store(f"memory://{tmp_path}/images")):
        with pytest.raises(DamagedItemError, match="not named as"):
            images.read(name)
        with pytest.raises(DamagedItemError, match="not named as"):
            images.remove([name])
        with pytest.raises(DamagedItemError, match="not named as"):
            images.write({name: b""})
    assert (tmp_path / "victim").read_bytes() == b"of someone else"


@pytest.mark.parametrize(
    ("columns", "damage"),
    [
        ({"answer": "not json"}, "answer is not a JSON object"),
        ({"answer": "[" * 100_000}, "answer is not a JSON object"),
        ({"answer": "[1]"}, "answer is not a JSON object"),
        ({"features": b"odd"}, "features are not 32-bit numbers"),
        ({"state": "lost"}, "state or kind is none that exists"),
        ({"kind": ""}, "state or kind is none that exists"),
        ({"answer": '{"best_guess": "\\ud800"}'}, "answer is not a JSON object"),
        ({"received_at": float("inf")}, "received_at is no time that has a date"),
        ({"received_at": 1e30}, "received_at is no time that has a date"),
        ({"seen_at": -1e300}, "seen_at is no time that has a date"),
        ({"labelled_at": 1e18}, "labelled_at is no time that has a date"),
        ({"copies": -5}, "copies is no whole number that is not negative"),
    ],
)
def test_a_damaged_row_is_shown_as_damaged(place: Place, store: Store, columns: dict[str, object], damage: str) -> None:
    store.add(arrivals(range(2)))
    store.name([1, 2], "cat", "ada")
    tamper(place, **columns)
    (damaged, whole) = store.items()
    assert (damaged.id, damaged.damage, damaged.answer, damaged.label) == (1, damage, {}, None)
    assert (whole.damage, whole.label) == (None, "cat")
    assert [item.id for item in store.labelled()["cat"]] == [2]
    assert store.usage().items == 2
    assert store.delete([1]) == 1


NOT_FINITE = np.full(97, np.nan, dtype="<f2").tobytes()


@pytest.mark.parametrize("content", [b"x", b"", b"\0" * 192, NOT_FINITE], ids=["odd", "empty", "short", "not finite"])
def test_a_damaged_fingerprint_is_left_out(
    place: Place, store: Store, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store.add(arrivals(range(2)))
    tamper(place, fingerprint=content)
    again = place.open()
    # The second image is recognised; the first one only if it is the same file.
    alike = [arrival(content=saved(noise(number), "JPEG", quality=95)) for number in range(2)]
    assert again.add([arrival(0), *alike]).ids == [1, 3, 2]
    assert again.add([arrival(5)]).kept == [4]
    again.enforce(Caps())
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith("the fingerprints of 1 images")
    assert warning.endswith("[1]")


def test_a_fingerprint_of_another_type_is_left_out(tmp_path: Path) -> None:
    """SQLite takes any value in any column."""
    place = Place(f"sqlite:///{tmp_path}/quarantine.db", str(tmp_path / "images"))
    place.open().add(arrivals(range(3)))
    for number, value in enumerate(("'text'", "7", "1.5"), 1):
        execute(place, f"UPDATE openworld_items SET fingerprint = {value} WHERE id = {number}")
    assert place.open().add([arrival(9)]).kept == [4]


def test_a_row_in_an_unknown_state_is_removed_first(place: Place, store: Store) -> None:
    store.add([arrival(number, received_at=time.time() - 100 + number) for number in range(4)])
    store.mark_junk([1], "ann")
    execute(place, "UPDATE openworld_items SET state = 'evil' WHERE id = 3")
    assert store.enforce(Caps(items=3)) == {"items": 1}
    assert [item.id for item in store.items()] == [1, 2, 4]
    execute(place, "UPDATE openworld_items SET state = 'evil' WHERE id = 4")
    assert store.enforce(Caps(bytes=store.usage().bytes - 1)) == {"bytes": 1}
    assert [item.id for item in store.items()] == [1, 2]
    assert len(place.files()) == 2


@pytest.mark.parametrize(
    "column", ["at = 1e30", "at = 'never'", "detail = x'00ff'", "who = x'00'", "items = 'all'", "items = -1"]
)
def test_a_damaged_entry_of_the_log_is_shown_as_damaged(tmp_path: Path, column: str) -> None:
    place = Place(f"sqlite:///{tmp_path}/quarantine.db", str(tmp_path / "images"))
    store = place.open()
    store.add(arrivals(range(2)))
    store.name([1], "cat", "ada")
    store.name([2], "dog", "bob")
    execute(place, f"UPDATE openworld_changes SET {column} WHERE detail = 'cat'")
    whole, damaged = store.changes()
    assert (whole.who, whole.what, whole.items, whole.detail) == ("bob", "name", 1, "dog")
    assert (damaged.what, damaged.items, damaged.detail) == ("damaged", 0, "")


@pytest.mark.parametrize(
    "column",
    [
        "copies = 9e999",
        "copies = 9223372036854775807",
        "copies = 'many'",
        "bytes = 9e999",
        "bytes = 9223372036854775807",
        "bytes = 'wide'",
        "label = CAST(x'ff' AS TEXT)",
        "label = x'00ff'",
        "labelled_by = x'00ff'",
        "labelled_at = 9e999",
        "sha256 = CAST(id AS BLOB)",
    ],
)
def test_no_value_of_a_row_makes_counts_fail(tmp_path: Path, column: str) -> None:
    """SQLite takes any value in any column, and fails if a sum is too large or a text is not UTF-8."""
    place = Place(f"sqlite:///{tmp_path}/quarantine.db", str(tmp_path / "images"))
    store = place.open()
    store.add(arrivals(range(3)))
    store.replace_groups([FoundGroup([1, 2, 3], 0.5, None, False)])
    store.name([1, 2, 3], "cat", "ada")
    execute(place, f"UPDATE openworld_items SET {column} WHERE id < 3")
    (group,) = store.groups()
    assert (group.size, store.usage().items, len(store.items()), len(store.outline())) == (3, 3, 3, 3)
    assert group.copies in (1, 3)
    assert store.count_labelled()["cat"] in (1, 3)
    assert 3 in [each.id for each in store.examples()]
    assert sum(store.enforce(Caps(items=1)).values()) == 2
