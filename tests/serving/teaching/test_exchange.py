"""Labels and images as archives: what is exported is imported with the same labels, whatever their names are."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.bundle.pixels import ANY_SIZE
from serving.quarantine.store import Store
from serving.teaching.exchange import Format, Labelled, Unusable, export_archive, folder_of, label_of, read_labelled
from tests.helpers_quarantine import arrival
from tests.helpers_teaching import picture

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
    archive = b"".join(export_archive(store, kind))
    store.close()
    found = list(read_labelled(archive, ANY_SIZE))
    assert {each.content: each.label for each in found if isinstance(each, Labelled)} == sent
    assert len(found) == len(sent)
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        folders = {PurePosixPath(name).parent.name for name in opened.namelist()}
    assert len(folders) == (len(NAMES) if kind == "folders" else 2)


@given(st.text(st.sampled_from('ab%2Ff5./\\:*?"<>|_ ') | st.characters(categories=["L", "N"]), min_size=1, max_size=12))
def test_a_folder_has_one_label(label: str) -> None:
    folder = folder_of(label)
    assert label_of(folder) == label
    assert not set(folder) & set('/\\:*?"<>|')
    assert not folder.startswith((".", " ", "__MACOSX"))
    assert not folder.endswith((".", " "))


def zipped(files: Mapping[str, bytes]) -> bytes:
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w") as archive:
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


def test_notes_beside_images_are_not_tasks() -> None:
    files = {"elk/notes.json": b'{"by": "ada"}', "elk/1.png": picture("elk", 1)}
    found = list(read_labelled(zipped(files), ANY_SIZE))
    assert [(each.name, each.label) for each in found if isinstance(each, Labelled)][-1] == ("elk/1.png", "elk")
    tasks = {"export/result.json": json.dumps([task("1.png", "fox")]).encode(), "export/1.png": picture("elk", 1)}
    (only,) = read_labelled(zipped(tasks), ANY_SIZE)
    assert isinstance(only, Labelled)
    assert only.label == "fox"
