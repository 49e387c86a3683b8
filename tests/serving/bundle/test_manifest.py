from __future__ import annotations

import io
import json
import os
import resource
import shutil
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from serving.bundle.decision import OUTPUT_NAMES
from serving.bundle.errors import BundleError
from serving.bundle.files import MOST_MANIFEST
from serving.bundle.labels import check_new_label
from serving.bundle.layout import GOLDEN, MANIFEST, RULE
from serving.bundle.manifest import FORMAT, load_bundle
from tests.helpers_serving import GRAPH, SPEC, edit_manifest, reseal


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


def test_a_valid_bundle_is_read_whole(bundle: Path) -> None:
    read = load_bundle(bundle)
    assert read.manifest.labels == ("red", "green", "blue", "yellow")
    assert read.golden.pixels.shape[1:] == SPEC.shape
    assert [task.classes for task in read.rule.tasks] == [2, 2]


@pytest.mark.parametrize("name", [RULE, GRAPH, GOLDEN])
@pytest.mark.parametrize("where", [0, -1])
def test_one_wrong_byte_is_refused(copy: Path, name: str, where: int) -> None:
    content = bytearray((copy / name).read_bytes())
    content[where] ^= 1
    (copy / name).write_bytes(bytes(content))
    with pytest.raises(BundleError, match=f"{name}: corrupt: sha256 .*; export the run again with `openworld export`$"):
        load_bundle(copy).graph("fp32")
    with pytest.raises(BundleError, match=f"{name}: corrupt: sha256 .*; export the run again with `openworld export`$"):
        load_bundle(copy).check()


def test_a_manifest_that_is_not_json_is_refused(copy: Path) -> None:
    (copy / MANIFEST).write_bytes((copy / MANIFEST).read_bytes().rstrip()[:-1])
    with pytest.raises(BundleError, match=r"cannot be read as JSON: .*; export the run again with `openworld export`$"):
        load_bundle(copy)


def test_a_manifest_that_was_edited_is_refused(copy: Path) -> None:
    text = (copy / MANIFEST).read_text()
    (copy / MANIFEST).write_text(text.replace('"green"', '"greem"'))
    with pytest.raises(
        BundleError, match=r"manifest\.json: corrupt or edited: .*; export the run again with `openworld export`$"
    ):
        load_bundle(copy)


@pytest.mark.parametrize("name", [RULE, GRAPH, GOLDEN])
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(BundleError, match=f"{name}: cannot be read"):
        load_bundle(copy).graph("fp32")


def test_a_file_that_is_not_listed_is_named(copy: Path) -> None:
    edit_manifest(copy, files={})
    with pytest.raises(BundleError, match=rf"lists no {RULE}, {GOLDEN}, {GRAPH}"):
        load_bundle(copy)


def test_no_directory_and_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such bundle directory"):
        load_bundle(tmp_path / "nothing")
    with pytest.raises(BundleError, match="not a bundle"):
        load_bundle(tmp_path)


def test_a_newer_format_is_refused(copy: Path) -> None:
    edit_manifest(copy, format=FORMAT + 1)
    with pytest.raises(BundleError, match=f"format {FORMAT + 1}; this version reads format {FORMAT}: update openworld"):
        load_bundle(copy)


@pytest.mark.parametrize("found", [None, "4", True])
def test_a_format_that_is_no_version_is_refused(copy: Path, found: object) -> None:
    content = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps({**content, "format": found}))
    with pytest.raises(BundleError, match=f"format {found!r}; this version reads format {FORMAT}: export the run"):
        load_bundle(copy)


def test_an_older_format_is_refused(copy: Path) -> None:
    edit_manifest(copy, format=1)
    with pytest.raises(BundleError, match=f"format 1; this version reads format {FORMAT}: export the run again"):
        load_bundle(copy)


def test_a_precision_that_is_not_in_it_is_refused(copy: Path) -> None:
    with pytest.raises(BundleError, match="no int8 graph; the bundle has fp32"):
        load_bundle(copy).graph("int8")


def test_weights_of_a_task_that_are_not_listed_are_named(copy: Path) -> None:
    tasks = [task.model_dump(mode="json") for task in load_bundle(copy).manifest.tasks]
    tasks[1]["parts"] = ["task1.fp32.bin"]
    edit_manifest(copy, tasks=tasks)
    with pytest.raises(BundleError, match=r"lists no task1\.fp32\.bin"):
        load_bundle(copy)


def test_a_version_does_not_depend_on_what_came_before(copy: Path) -> None:
    """The same weights give the same version, regardless of the bundle that came before."""
    version = load_bundle(copy).manifest.version
    tasks = [{**task.model_dump(mode="json"), "unchanged": True} for task in load_bundle(copy).manifest.tasks]
    edit_manifest(copy, before="859549a0961c", tasks=tasks)
    assert load_bundle(copy).manifest.version == version
    edit_manifest(copy, seed=7)
    assert load_bundle(copy).manifest.version != version


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../b", "..", "a\0b", "\x1b[2J"])
def test_a_file_name_may_not_leave_the_bundle(copy: Path, name: str) -> None:
    files = {key: info.model_dump() for key, info in load_bundle(copy).manifest.files.items()}
    edit_manifest(copy, files={**files, name: {"sha256": "0", "size": 0}})
    with pytest.raises(BundleError, match="outside the bundle"):
        load_bundle(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": []}, "tasks"),
        ({"image": {"height": 0, "width": 8, "mode": "RGB"}}, "image.height"),
        ({"image": {"height": 8, "width": 8, "mode": "CMYK"}}, "image.mode"),
        ({"surprise": 1}, "surprise"),
        ({"precisions": ["fp32", "int4"]}, "got int4; allowed: fp32, int8, fp16"),
    ],
)
def test_a_manifest_that_breaks_its_own_rules_is_refused(copy: Path, change: dict[str, object], message: str) -> None:
    edit_manifest(copy, **change)
    with pytest.raises(BundleError, match=f"{message}.*; export the run again with `openworld export`$"):
        load_bundle(copy)


def test_tasks_are_numbered_in_order(copy: Path) -> None:
    tasks = [task.model_dump(mode="json") for task in load_bundle(copy).manifest.tasks]
    edit_manifest(copy, tasks=tasks[::-1])
    with pytest.raises(BundleError, match="numbered in order"):
        load_bundle(copy)


def test_rule_and_manifest_must_agree(copy: Path) -> None:
    rule = load_bundle(copy).rule
    reseal(copy, RULE, rule.model_copy(update={"tasks": rule.tasks[:1]}).model_dump_json().encode())
    with pytest.raises(BundleError, match=r"tasks of \[2\] classes; the manifest has \[2, 2\]"):
        load_bundle(copy)


def test_golden_images_must_have_the_size_of_the_model(copy: Path) -> None:
    stored = io.BytesIO()
    outputs = {f"fp32.{name}": np.zeros((1, 4)) for name in OUTPUT_NAMES}
    np.savez(stored, pixels=np.zeros((1, 4, 4, 3), np.uint8), **outputs)  # type: ignore[arg-type]
    reseal(copy, GOLDEN, stored.getvalue())
    with pytest.raises(BundleError, match=r"needed uint8 \(8, 8, 3\)"):
        load_bundle(copy)


@pytest.mark.parametrize("content", [b"junk", b"", b"PK\x03\x04junk"])
def test_golden_file_that_cannot_be_read_is_refused(copy: Path, content: bytes) -> None:
    reseal(copy, GOLDEN, content)
    with pytest.raises(BundleError, match=GOLDEN):
        load_bundle(copy)


def npz(*members: tuple[str, bytes]) -> bytes:
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return stored.getvalue()


def damaged_npz(method: int) -> bytes:
    """An archive with one member, of which the compressed bytes are changed."""
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w", method) as archive:
        archive.writestr("pixels.npy", npy_header("(2000,)") + bytes(range(250)) * 8)
    content = bytearray(stored.getvalue())
    start = 30 + len("pixels.npy") + 9
    content[start : start + 16] = bytes(byte ^ 0xFF for byte in content[start : start + 16])
    return bytes(content)


def npy_text(text: bytes) -> bytes:
    """An array whose header is any text."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text + b"\n" + bytes(50)


def npy_header(shape: str, kind: str = "|u1") -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


HOSTILE_GOLDEN = {
    "more numbers than bytes": (npz(("pixels.npy", npy_header("(1000000000000000,)"))), "announces"),
    "more memory than there is": (npz(("pixels.npy", npy_header("(4, 1000000, 1000000)", "<f8"))), "announces"),
    "much when unpacked": (npz(("a.npy", bytes(3_000_000)), ("b.npy", bytes(3_000_000))), "6000000 bytes when"),
    "many members": (npz(*[(f"{number}.npy", b"") for number in range(1100)]), "1100 arrays"),
    "objects": (npz(("pixels.npy", npy_header("(1,)", "|O") + b"12345678")), "allowed: numbers"),
    "a long header": (npz(("pixels.npy", npy_header("(" + "1," * 20_000 + ")"))), "header|dictionary|large"),
    "bzip2": (damaged_npz(zipfile.ZIP_BZIP2), "allowed: stored or deflated"),
    "LZMA": (damaged_npz(zipfile.ZIP_LZMA), "allowed: stored or deflated"),
    "damaged": (damaged_npz(zipfile.ZIP_DEFLATED), "error|CRC"),
    "a header of signs": (npz(("pixels.npy", npy_text(b"-" * 9000 + b"1"))), "MemoryError|RecursionError|malformed"),
    "a header of brackets": (npz(("pixels.npy", npy_text(b"(" * 9000))), "TokenError|SyntaxError|header|MemoryError"),
    "a shape that is no number": (npz(("pixels.npy", npy_header("(True,)") + b"1")), "TypeError|allowed|shape"),
    "a shape beyond all integers": (npz(("pixels.npy", npy_header(f"(0, {2**70})"))), "OverflowError|large|dimension"),
}


@pytest.mark.parametrize("name", HOSTILE_GOLDEN)
def test_a_hostile_golden_file_is_refused_before_it_is_unpacked(
    copy: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("serving.bundle.arrays.MOST_UNPACKED", 5_000_000)
    content, message = HOSTILE_GOLDEN[name]
    reseal(copy, GOLDEN, content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BundleError, match=f"{GOLDEN}.*({message})"):
        load_bundle(copy)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"metrics":['])
def test_a_nested_manifest_is_refused(copy: Path, opening: bytes) -> None:
    (copy / MANIFEST).write_bytes(opening * 100_000)
    with pytest.raises(BundleError, match="cannot be read as JSON: recursion limit exceeded"):
        load_bundle(copy)


def test_a_manifest_of_many_megabytes_is_refused_before_it_is_parsed(copy: Path) -> None:
    (copy / MANIFEST).write_bytes(b"[" + b"[]," * 3_000_000 + b"0]")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BundleError, match=f"{MANIFEST}: cannot be read.*allowed: up to {MOST_MANIFEST}"):
        load_bundle(copy)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_a_nested_rule_is_refused(copy: Path) -> None:
    reseal(copy, RULE, b"[" * 100_000)
    with pytest.raises(BundleError, match="recursion limit exceeded"):
        load_bundle(copy)


@pytest.mark.parametrize("name", [MANIFEST, RULE, GRAPH, GOLDEN])
@pytest.mark.parametrize("kind", ["pipe", "device", "link to a device", "folder", "sparse"])
def test_what_is_no_regular_file_is_refused_at_once(copy: Path, name: str, kind: str) -> None:
    (copy / name).unlink()
    if kind == "pipe":
        os.mkfifo(copy / name)
    elif kind == "folder":
        (copy / name).mkdir()
    elif kind == "sparse":
        with (copy / name).open("wb") as file:
            file.truncate(2**40)
    else:
        (copy / name).symlink_to("/dev/zero" if kind == "device" else "/dev/stdin")
    message = "cannot be read.*(not a regular file|Is a directory)"
    if kind == "sparse":
        message = "(cannot be read|corrupt).* 1099511627776 bytes; allowed: up to"
    with pytest.raises(BundleError, match=f"{name}: {message}"):
        load_bundle(copy).graph("fp32")


@pytest.mark.parametrize("name", [RULE, GRAPH, GOLDEN])
def test_a_file_that_is_longer_than_recorded_is_refused_before_it_is_read(copy: Path, name: str) -> None:
    recorded = (copy / name).stat().st_size
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (copy / name).open("r+b") as file:
        file.truncate(200 * 1024**2)
    message = f"{name}: corrupt: 209715200 bytes; allowed: up to {recorded}, as the manifest records; export the run"
    with pytest.raises(BundleError, match=message):
        load_bundle(copy).check()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_a_manifest_that_records_too_many_bytes_is_refused(copy: Path) -> None:
    files = json.loads((copy / MANIFEST).read_text())["files"]
    for size in (-1, 2**60):
        edit_manifest(copy, files={**files, GRAPH: {**files[GRAPH], "size": size}})
        with pytest.raises(BundleError, match=f"{GRAPH}: cannot be read: {size} bytes by the manifest; allowed: up to"):
            load_bundle(copy).graph("fp32")


def test_a_bundle_may_have_classes_with_names_that_new_ones_may_not_have(copy: Path) -> None:
    tasks = json.loads((copy / MANIFEST).read_text())["tasks"]
    odd = [" cat", "x" * 150, "unknown"]
    tasks[0]["labels"][: len(odd)] = odd[: len(tasks[0]["labels"])]
    edit_manifest(copy, tasks=tasks)
    assert load_bundle(copy).manifest.tasks[0].labels == tuple(tasks[0]["labels"])
    for label in odd:
        with pytest.raises(ValueError, match=r"allowed: 1 to 100 printable characters without spaces around them"):
            check_new_label(label)


@pytest.mark.parametrize(
    "labels", [["red", "red"], ["red", "\x1b[2Jgreen"], ["red", ""], ["red", " "], ["red", "a\nb"], ["red", "x" * 201]]
)
def test_labels_are_printable_and_different(copy: Path, labels: list[str]) -> None:
    tasks = json.loads((copy / MANIFEST).read_text())["tasks"]
    tasks[0]["labels"] = labels
    edit_manifest(copy, tasks=tasks)
    with pytest.raises(BundleError, match=r"given twice: red|allowed: 1 to 200 printable") as refused:
        load_bundle(copy)
    assert str(refused.value).isprintable()
