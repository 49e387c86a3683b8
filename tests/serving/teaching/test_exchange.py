"""Labels and images as archives: what is exported is imported with the same labels, whatever their names are."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import struct
import time
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from serving.bundle.model import BundleModel
from serving.bundle.pixels import ANY_SIZE, LIMITS
from serving.bundle.sections import ImageSpec
from serving.errors import MalformedRequestError
from serving.inference.loaded import LoadedModel
from serving.quarantine.store import Store
from serving.teaching.exchange import (
    MOST_ENTRIES,
    Labelled,
    Unusable,
    folder_of,
    label_of,
    read_labelled,
)
from serving.teaching.exporting import Format, export_archive, parts_of
from serving.teaching.intake import answered
from serving.teaching.label_studio import advice, labelling_config
from tests.helpers_quarantine import arrival
from tests.helpers_serving import saved
from tests.helpers_teaching import HOSTILE_ARCHIVES, picture, write_bundle

NAMES = [
    "a/b",
    "a:b",
    "a_b",
    "a%2Fb",
    "a%252Fb",
    "100%",
    ".hidden",
    "__MACOSX",
    "dot.",
    "..",
    'what? "this" <|>*\\',
    "Kuh",
]


@pytest.mark.parametrize("kind", ["folders", "label-studio"])
def test_labels_of_any_name_come_back(tmp_path: Path, kind: Format) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/quarantine.db")
    sent = {}
    for number, name in enumerate(NAMES):
        content = picture("elk", number)
        sent[content] = name
        store.teach(store.add([arrival(content=content)]).ids, name, (), "ada")
    archive = b"".join(export_archive(store, kind, store.examples(), NAMES))
    store.close()
    found = list(read_labelled(archive, ANY_SIZE))
    assert {each.content: each.label for each in found if isinstance(each, Labelled)} == sent
    assert len(found) == len(sent)
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        folders = {PurePosixPath(name).parent.name for name in opened.namelist()}
        if kind == "label-studio":
            config = ElementTree.fromstring(opened.read("config.xml"))
            tasks = json.loads(opened.read("tasks.json"))
            written = set(opened.namelist()) - {"config.xml", "tasks.json"}
    assert len(folders) == (len(NAMES) if kind == "folders" else 2)
    if kind == "label-studio":
        # What Label Studio needs: the names in the tasks are those of the configuration, and every image is below the
        # document root of its local storage, in a folder.
        image, choices = config.findall("Image")[0], config.findall("Choices")[0]
        assert [each.get("value") for each in choices] == NAMES
        for each in tasks:
            (result,) = each["annotations"][0]["result"]
            assert (result["from_name"], result["to_name"]) == (choices.get("name"), image.get("name"))
            assert result["to_name"] == choices.get("toName")
            assert result["value"]["choices"][0] in NAMES
        paths = {each["data"][str(image.get("value")).removeprefix("$")] for each in tasks}
        assert {path.removeprefix("/data/local-files/?d=") for path in paths} == written


@given(st.text(st.sampled_from('ab%2Ff5./\\:*?"<>|_ ') | st.characters(categories=["L", "N"]), min_size=1, max_size=12))
def test_a_folder_has_one_label(label: str) -> None:
    folder = folder_of(label)
    assert label_of(folder) == label
    assert not set(folder) & set('/\\:*?"<>|')
    assert not folder.startswith((".", " ", "__MACOSX"))
    assert not folder.endswith((".", " "))


def zipped(files: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stored.getvalue()


def task(image: str, label: str) -> dict[str, object]:
    result = {"type": "choices", "value": {"choices": [label]}}
    return {"data": {"image": image}, "annotations": [{"result": [result]}]}


def test_files_of_equal_names_are_told_apart_by_their_folders() -> None:
    one, two, three = (picture("elk", number) for number in range(3))
    tasks = [
        task("/data/local-files/?d=photos/monday/1.png", "elk"),
        task("/data/local-files/?d=photos/tuesday/1.png", "fox"),
        task("/data/upload/7/1a2b3c4d-other%20name.png", "gnu"),
        task("1.png", "hen"),
    ]
    files = {"monday/1.png": one, "tuesday/1.png": two, "other name.png": three}
    found = list(read_labelled(zipped({"tasks.json": json.dumps(tasks).encode(), **files}), ANY_SIZE))
    assert [(each.label, each.content) for each in found if isinstance(each, Labelled)] == [
        ("elk", one),
        ("fox", two),
        ("gnu", three),
    ]
    (unclear,) = (each for each in found if isinstance(each, Unusable))
    assert "monday/1.png or tuesday/1.png" in unclear.reason


def minimal(image: str, label: Any, **more: Any) -> dict[str, Any]:
    """A task as Label Studio exports it as JSON-MIN, with the names of its template for classification."""
    times = {"created_at": "2024-05-01T12:00:00Z", "updated_at": "2024-05-01T12:00:00Z", "lead_time": 2.5}
    return {"image": image, "id": 3, "choice": label, "annotator": 1, "annotation_id": 5, **times, **more}


def test_json_min_is_read() -> None:
    one, two, three = (picture("elk", number) for number in range(3))
    embedded = f"data:image/png;base64,{base64.b64encode(one).decode()}"
    tasks = [
        minimal(embedded, "elk"),
        minimal("/data/upload/7/1a2b3c4d-fox.png", {"choices": ["fox", "gnu"]}),
        minimal("/data/upload/7/abc-hen.png", "hen", annotator="ada@example.com"),
        {"photo": "fox.png", "id": 1, "animal": "gnu"},
        {"photo": "fox.png", "id": 1, "animal": "gnu", "label": "yak"},
        {"image": "fox.png", "id": 1, "lead_time": 1.0},
        {"image": "fox.png", "id": 1, "animal": "gnu", "colour": "grey"},
    ]
    files = {"images/fox.png": two, "images/hen.png": three}
    for name in ("result.json", "export/result.json"):
        found = list(read_labelled(zipped({name: json.dumps(tasks).encode(), **files}), ANY_SIZE))
        assert [(each.label, each.content) for each in found if isinstance(each, Labelled)] == [
            *(("elk", one), ("fox", two), ("hen", three), ("gnu", two), ("yak", two))
        ]
        none, several = (each.reason for each in found if isinstance(each, Unusable))
        assert "no choice" in none
        assert "which field is the class? got 'animal', 'colour'" in several
    (alone, *_) = read_labelled(json.dumps(tasks).encode(), ANY_SIZE)
    assert isinstance(alone, Labelled)
    assert (alone.label, alone.content) == ("elk", one)


def test_images_are_found_by_the_names_that_label_studio_has_made_of_theirs() -> None:
    one, two, three = (picture("elk", number) for number in range(3))
    tasks = [
        task("/data/upload/1/1a2b3c4d-my_photo_1.png", "elk"),
        task("/data/upload/1/99aabbcc-kept.png", "fox"),
        task("/data/local-files/?d=photos%5Cmonday%5C1.png", "gnu"),
        {**task("", "hen"), "data": {"caption": "a hen", "picture": "s3://bucket/kept.png"}},
    ]
    files = {"my photo (1).png": one, "99aabbcc-kept.png": two, "photos/monday/1.png": three, "tuesday/1.png": one}
    archive = zipped({"tasks.json": json.dumps(tasks).encode(), **files, "kept.png": three})
    found = list(read_labelled(archive, ANY_SIZE))
    assert [(each.label, each.content) for each in found if isinstance(each, Labelled)] == [
        *(("elk", one), ("fox", two), ("gnu", three), ("hen", three))
    ]


def test_missing_images_are_named_with_the_way_to_bring_them() -> None:
    names = [f"/data/upload/1/1a2b3c4d-{number}.png" for number in range(7)]
    for kind in (task, minimal):
        content = json.dumps([kind(name, "elk") for name in names]).encode()
        found = list(read_labelled(content, ANY_SIZE))
        assert [each.missing for each in found if isinstance(each, Unusable)] == names
        inside = list(read_labelled(zipped({"tasks.json": content, "0.png": picture("elk", 1)}), ANY_SIZE))
        assert [each.missing for each in inside if isinstance(each, Unusable)] == names[1:]
    text = advice(names, archive=False)
    assert text is not None
    assert "7 images are not in the JSON file: 1a2b3c4d-0.png, " in text
    assert "1a2b3c4d-4.png and 2 more." in text
    assert "pack the JSON file and the images into one zip archive" in text
    assert "1 image is not in the archive: 1a2b3c4d-0.png. Put them" in str(advice(names[:1], archive=True))
    assert advice([], archive=True) is None


def test_an_export_in_parts_can_be_imported(tmp_path: Path) -> None:
    """No part is larger than an import may be, and all parts together are all examples."""
    store = Store.open(f"sqlite:///{tmp_path}/quarantine.db")
    sent = {}
    for number in range(40):
        content = picture("elk", number)
        sent[content] = NAMES[number % len(NAMES)]
        store.teach(store.add([arrival(content=content)]).ids, sent[content], (), "ada")
    most = 64_000
    parts = parts_of(store.examples(), most, NAMES)
    assert 3 <= len(parts) <= 8
    for kind in ("folders", "label-studio"):
        found: dict[bytes, str] = {}
        names: list[str] = []
        for number, part in enumerate(parts, 1):
            archive = b"".join(export_archive(store, kind, part, NAMES, number))
            assert len(archive) <= most
            found |= {
                each.content: each.label for each in read_labelled(archive, ANY_SIZE) if isinstance(each, Labelled)
            }
            with zipfile.ZipFile(io.BytesIO(archive)) as opened:
                names += opened.namelist()
        assert found == sent
        # They can be unpacked into one folder; only the configuration is in each of them.
        assert len(set(names)) == len(names) - (kind == "label-studio") * (len(parts) - 1)
    # New examples change the last part only.
    store.teach(store.add([arrival(content=picture("elk", 99))]).ids, "elk", (), "ada")
    assert [list(part) for part in parts_of(store.examples(), most, NAMES)][: len(parts) - 1] == parts[:-1]
    assert [len(part) for part in parts_of(store.examples(), 1)] == [1] * 41, "an image is not split"
    assert parts_of([], most) == [[]]
    store.close()


def test_a_labelling_config_is_well_formed_whatever_the_names() -> None:
    config = ElementTree.fromstring(labelling_config([*NAMES, "a \"b\" & 'c'", "<x>"]))
    assert [each.get("value") for each in config.findall("Choices/Choice")] == [*NAMES, "a \"b\" & 'c'", "<x>"]


def test_folders_above_tell_files_apart_whose_folders_have_equal_names() -> None:
    contents = {f"{day}/{side}/1.png": f"{day} {side}".encode() for day in "abc" for side in ("left", "right")}
    images = ["x/b/left/1.png", "left/1.png", "c/right/1.png", "up/1.png", "7-c/left/1.png"]
    files = {"t.json": json.dumps([task(image, "elk") for image in images]).encode(), ".": b"", **contents}
    found = list(read_labelled(zipped(files), ANY_SIZE))
    assert [each.content if isinstance(each, Labelled) else None for each in found] == [
        b"b left",
        None,
        b"c right",
        None,
        None,
    ]
    assert isinstance(found[1], Unusable)
    assert "a/left/1.png or b/left/1.png or c/left/1.png" in found[1].reason


@pytest.mark.parametrize(
    ("folder", "image"),
    [("{0}", "x/1.png"), ("{0}/same", "x/7/same/1.png"), ("x/{0}/a/b/c/d", "x/7/a/b/c/d/1a2b3c4d-1.png")],
)
def test_many_files_of_one_name_take_no_longer(folder: str, image: str) -> None:
    """It once took a time with the third power of their number."""
    files = {f"{folder.format(number)}/1.png": b"x" for number in range(9_999)}
    tasks = json.dumps([task(image, "elk")] * 10_000).encode()
    content = zipped({**files, "t.json": tasks})
    started = time.thread_time()
    assert len(list(read_labelled(content, LIMITS))) == 10_000
    assert time.thread_time() - started < 2


def test_notes_beside_images_are_not_tasks() -> None:
    files = {"elk/notes.json": b'{"by": "ada"}', "elk/1.png": picture("elk", 1)}
    found = list(read_labelled(zipped(files), ANY_SIZE))
    assert [(each.name, each.label) for each in found if isinstance(each, Labelled)][-1] == ("elk/1.png", "elk")
    tasks = {"export/result.json": json.dumps([task("1.png", "fox")]).encode(), "export/1.png": picture("elk", 1)}
    (only,) = read_labelled(zipped(tasks), ANY_SIZE)
    assert isinstance(only, Labelled)
    assert only.label == "fox"


@pytest.mark.parametrize("name", HOSTILE_ARCHIVES)
def test_hostile_archives_raise_one_error_or_name_the_file(name: str) -> None:
    content, reason = HOSTILE_ARCHIVES[name]
    with contextlib.suppress(MalformedRequestError):
        (found,) = read_labelled(content, LIMITS)
        assert isinstance(found, Unusable)
        assert reason in found.reason
        return
    with pytest.raises(MalformedRequestError, match=reason):
        list(read_labelled(content, LIMITS))


def test_a_directory_of_many_entries_is_refused_before_it_is_read() -> None:
    entry = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 20, 20, 0, 0, 0, 33, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"a"
    directory = entry * (MOST_ENTRIES + 1)
    start = b"PK\x03\x04" + bytes(26)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 65_535, 65_535, len(directory), len(start), 0)
    started = time.thread_time()
    with pytest.raises(MalformedRequestError, match=f"{MOST_ENTRIES + 1} entries"):
        list(read_labelled(start + directory + end, LIMITS))
    assert time.thread_time() - started < 0.05


def test_what_is_unpacked_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announced by the archive, or by many tasks that name the same file."""
    monkeypatch.setattr("serving.teaching.exchange.MOST_UNPACKED", 5_000_000)
    files = {f"elk/{number}.png": bytes(1_000_000) for number in range(6)}
    with pytest.raises(MalformedRequestError, match="got 6000000 bytes; allowed: up to 5000000 bytes"):
        list(read_labelled(zipped(files, zipfile.ZIP_DEFLATED), LIMITS))
    tasks = json.dumps([task("1.png", "elk")] * 8).encode()
    found = list(read_labelled(zipped({"t.json": tasks, "1.png": bytes(1_000_000)}, zipfile.ZIP_DEFLATED), LIMITS))
    assert [type(each) for each in found] == [Labelled] * 5 + [Unusable] * 3


def test_json_of_many_parts_is_refused_before_it_is_parsed() -> None:
    content = b"[" + b"[]," * 700_000 + b"0]"
    for each in (content, zipped({"t.json": content}, zipfile.ZIP_DEFLATED)):
        with pytest.raises(MalformedRequestError, match="too many parts"):
            list(read_labelled(each, LIMITS))


def test_large_examples_are_decoded_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding, most = 0, 0

    def slow(image: Image.Image, spec: ImageSpec) -> NDArray[np.uint8]:
        nonlocal decoding, most
        decoding += 1
        most = max(most, decoding)
        time.sleep(0.05)
        decoding -= 1
        return np.zeros(spec.shape, np.uint8)

    monkeypatch.setattr("serving.teaching.intake.to_pixels", slow)
    loaded = LoadedModel.prepare(BundleModel.load(write_bundle(tmp_path / "bundle"), provider="cpu"))
    with ThreadPoolExecutor(4) as threads:
        for side, allowed in ((1200, 1), (100, 4)):
            most = 0
            large = saved(Image.new("L", (side, side)))
            list(threads.map(lambda _, large=large: answered(loaded, large, LIMITS), range(4)))
            assert (most == 1) == (allowed == 1)
