"""Bundles that are pushed to a URL and pulled from it: the same answers, and nothing half or damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from export.cli import main
from serving.bundle.errors import BundleError
from serving.bundle.files import MOST_MANIFEST
from serving.bundle.layout import CARD, MANIFEST, POOLED, TRUNK
from serving.bundle.manifest import load_bundle
from serving.bundle.transfer import CURRENT, HUB_CARD, TransferError, pull, push
from serving.model import Model
from tests.helpers_hub import Hub, running_hub
from tests.helpers_serving import PATIENCE
from tests.helpers_teaching import ALL, picture, pictures, write_bundle

PHOTOS = [picture(label, 40) for label in ALL]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("transfer") / "bundle")


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("remote", ["memory://models/x", "FOLDER", "file://FOLDER"])
def test_a_bundle_that_was_pushed_and_pulled_answers_the_same(
    remote: str, bundle: Path, tmp_path: Path, memory: MemoryFileSystem, capsys: pytest.CaptureFixture[str]
) -> None:
    url = remote.replace("FOLDER", str(tmp_path / "remote"))
    assert main(["push", str(bundle), url]) == 0
    version = load_bundle(bundle).manifest.version
    assert f"{url}/{version}: photos-pooled version {version}" in capsys.readouterr().out
    assert main(["pull", url, str(tmp_path / "pulled")]) == 0
    assert files(tmp_path / "pulled") == files(bundle)
    before, after = Model.load(bundle, threads=1), Model.load(tmp_path / "pulled", threads=1)
    assert [after.predict(photo) for photo in PHOTOS] == [before.predict(photo) for photo in PHOTOS]
    # One version is a bundle in itself.
    assert main(["pull", f"{url}/{version}", str(tmp_path / "single")]) == 0
    assert files(tmp_path / "single") == files(bundle)


def test_a_second_version_becomes_the_current_one_and_the_first_one_stays(bundle: Path, tmp_path: Path) -> None:
    first, url = load_bundle(bundle).manifest.version, f"{tmp_path}/remote"
    model = Model.load(bundle, threads=1)
    model.teach({"elk": pictures("elk", 6)})
    taught = model.save(tmp_path / "taught")
    push(bundle, url)
    pull(url, tmp_path / "here")
    push(taught, url)
    # It replaces the older bundle in the same folder.
    assert pull(url, tmp_path / "here").manifest.version == model.version
    assert files(tmp_path / "here") == files(taught)
    assert pull(url, tmp_path / "old", first).manifest.version == first
    with pytest.raises(TransferError, match="no bundle, or an incomplete push"):
        pull(url, tmp_path / "none", "0123456789ab")
    # The first push may be cut off before `current` is there; a version that is complete can be pulled.
    (tmp_path / "remote" / CURRENT).unlink()
    assert pull(url, tmp_path / "early", first).manifest.version == first
    assert files(tmp_path / "early") == files(bundle)
    with pytest.raises(TransferError, match="no bundle: neither current nor"):
        pull(url, tmp_path / "none")
    with pytest.raises(TransferError, match="no bundle, or an incomplete push"):
        pull(url, tmp_path / "none", "0123456789ab")
    with pytest.raises(TransferError, match=r"version: got '\.\./x'; allowed: 12 hexadecimal digits"):
        pull(url, tmp_path / "none", "../x")
    assert not (tmp_path / "none").exists()


class Torn(MemoryFileSystem):  # type: ignore[misc]
    """Loses the connection at one file, once."""

    protocol = "torn"
    store: dict[str, Any] = {}  # noqa: RUF012
    at: str | None = None

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb" and self.at is not None and path.endswith(self.at):
            Torn.at = None
            raise ConnectionResetError("connection lost")
        return super().open(path, mode, **options)


@pytest.fixture
def torn() -> Iterator[None]:
    fsspec.register_implementation(Torn.protocol, Torn, clobber=True)
    yield
    Torn.store.clear()


@pytest.mark.parametrize("at", [POOLED, MANIFEST, CURRENT])
def test_an_interrupted_push_shows_the_older_bundle_and_is_continued(
    at: str, bundle: Path, tmp_path: Path, torn: None
) -> None:
    model = Model.load(bundle, threads=1)
    model.teach({"elk": pictures("elk", 6)})
    taught, url = model.save(tmp_path / "taught"), "torn://models"
    push(bundle, url)
    Torn.at = at
    with pytest.raises(TransferError, match="torn://models: cannot be used: connection lost"):
        push(taught, url)
    pull(url, tmp_path / "seen")
    assert files(tmp_path / "seen") == files(bundle)
    again = push(taught, url)
    assert again.sent < sum(info.size for info in again.manifest.files.values())
    pull(url, tmp_path / "seen")
    assert files(tmp_path / "seen") == files(taught)


def test_a_damaged_or_incomplete_bundle_is_not_pushed(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    (copy / TRUNK).write_bytes(b"?" + (copy / TRUNK).read_bytes()[1:])
    with pytest.raises(BundleError, match=r"trunk\.onnx: corrupt"):
        push(copy, f"{tmp_path}/remote")
    (copy / TRUNK).unlink()
    with pytest.raises(BundleError, match=r"trunk\.onnx: cannot be read"):
        push(copy, f"{tmp_path}/remote")
    assert not (tmp_path / "remote").exists()


def edited(content: bytes) -> bytes:
    manifest = json.loads(content)
    manifest["alpha"] = 0.5
    return json.dumps(manifest).encode()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (POOLED, lambda content: content[:-1], r"pooled\.npz: corrupt: sha256"),
        (POOLED, lambda content: content + b"more", r"pooled\.npz: corrupt: sha256"),
        (CARD, lambda content: content.replace(b"weak", b"good") + b" ", r"MODEL_CARD\.md: corrupt"),
        (TRUNK, lambda _: None, r"trunk\.onnx: missing: the bundle is not complete"),
        (MANIFEST, lambda _: None, "no bundle, or an incomplete push"),
        (MANIFEST, edited, "corrupt or edited"),
        (MANIFEST, lambda _: b"{", "cannot be read as JSON"),
        (MANIFEST, lambda _: b" " * (MOST_MANIFEST + 1), r"manifest\.json: too large"),
        (f"../{CURRENT}", lambda _: b"../../etc", "allowed: the version of a bundle"),
    ],
)
def test_a_damaged_or_incomplete_bundle_is_not_pulled(
    name: str, change: Any, message: str, bundle: Path, tmp_path: Path
) -> None:
    place = Path(push(bundle, f"{tmp_path}/remote").place) / name
    content = change(place.read_bytes())
    place.unlink() if content is None else place.write_bytes(content)
    shutil.copytree(bundle, tmp_path / "here")
    with pytest.raises((TransferError, BundleError), match=message):
        pull(f"{tmp_path}/remote", tmp_path / "here")
    # What was there is still there.
    assert files(tmp_path / "here") == files(bundle)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as running:
        running.models["ada/flowers"] = {".gitattributes": b""}
        yield running


ONE_AFTER_THE_OTHER = """\
import json, sys
from serving.remote import main
for words in json.loads(sys.argv[1]):
    code = main(words)
    for stream in (sys.stdout, sys.stderr):
        print(f"exit code {code}\\0", end="", file=stream, flush=True)
"""


def on_the_hub(hub: Hub, home: Path, *commands: list[str]) -> list[tuple[str, str]]:
    """What each command prints, and its exit code. The library of the Hub reads its settings when it is imported."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": "hf_x",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",  # the Hub's other way to upload large files, with a server of its own
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    words = [sys.executable, "-c", ONE_AFTER_THE_OTHER, json.dumps(commands)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True)
    return list(zip(done.stdout.split("\0")[:-1], done.stderr.split("\0")[:-1], strict=True))


def test_a_bundle_goes_to_a_repository_of_the_hub_and_comes_back(bundle: Path, hub: Hub, tmp_path: Path) -> None:
    version, url = load_bundle(bundle).manifest.version, "hf://ada/flowers"
    first, again, pulled = on_the_hub(
        hub, tmp_path, ["push", str(bundle), url], ["push", str(bundle), url], ["pull", url, str(tmp_path / "here")]
    )
    assert [errors for _, errors in (first, again, pulled)] == ["exit code 0"] * 3
    assert first[0].startswith(f"{url}/{version}: photos-pooled version {version}")
    assert "0.00 of" in again[0]
    stored = hub.models["ada/flowers"]
    assert {name.removeprefix(f"{version}/"): stored[name] for name in stored if "/" in name} == files(bundle)
    # The Hub shows README.md as the card of a repository.
    assert stored[HUB_CARD] == (bundle / CARD).read_bytes()
    # Each file is one commit: the manifest after the files that it describes, and `current` last.
    # The second push commits nothing.
    assert [len(paths) for paths in hub.commits] == [1] * (len(files(bundle)) + 2)
    assert hub.commits[-3:] == [[f"{version}/{MANIFEST}"], [HUB_CARD], [CURRENT]]
    assert files(tmp_path / "here") == files(bundle)
    before, after = Model.load(bundle, threads=1), Model.load(tmp_path / "here", threads=1)
    assert [after.predict(photo) for photo in PHOTOS] == [before.predict(photo) for photo in PHOTOS]


def test_a_repository_that_the_hub_does_not_have_is_a_one_line_error(bundle: Path, hub: Hub, tmp_path: Path) -> None:
    (_, pushed), (_, pulled) = on_the_hub(
        hub,
        tmp_path,
        ["push", str(bundle), "hf://ada/nothing"],
        ["pull", "hf://ada/nothing", str(tmp_path / "here")],
    )
    assert pushed.startswith("error: hf://ada/nothing: cannot be used: ")
    assert "repository not found" in pushed
    assert pulled.startswith("error: hf://ada/nothing: no bundle: neither current nor manifest.json is there")
    assert [errors.splitlines()[1:] for errors in (pushed, pulled)] == [["exit code 2"]] * 2
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["push", "BUNDLE", "nosuch://place"], "allowed: a URL that fsspec knows"),
        (["push", "missing", "memory://x"], "no such bundle directory"),
        (["pull", "memory://user:secret@nothing", "OUT"], "neither current nor manifest.json is there"),
        (["pull", "memory://x", "FILES"], "exists and is not a bundle"),
    ],
)
def test_errors_are_one_line(
    words: list[str], message: str, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").touch()
    places = {"BUNDLE": str(bundle), "OUT": str(tmp_path / "out"), "FILES": str(tmp_path / "files")}
    assert main([places.get(word, word) for word in words]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert "secret" not in printed


def test_a_folder_whose_name_would_control_the_terminal_is_escaped(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, pulled = f"{tmp_path}/a\x1b[31mb", f"{tmp_path}/c\x1b[31md"
    assert main(["push", str(bundle), url]) == 0
    assert main(["pull", url, pulled]) == 0
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    assert r"a\x1b[31mb" in shown.out
    assert r"c\x1b[31md: " in shown.out
    assert load_bundle(Path(pulled)).manifest == load_bundle(bundle).manifest


def test_progress_counts_every_byte_twice(bundle: Path, tmp_path: Path) -> None:
    """Each file is sent, and read back."""
    seen: list[tuple[str, int, int]] = []
    total = sum(
        info.size for info in push(bundle, f"{tmp_path}/a", lambda *step: seen.append(step)).manifest.files.values()
    )
    assert seen[-1][1:] == (2 * total, 2 * total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert {what.split()[0] for what, *_ in seen} == {"sending", "checking"}
    seen.clear()
    assert push(bundle, f"{tmp_path}/a", lambda *step: seen.append(step)).sent == 0
    assert all(what.endswith("is there") for what, *_ in seen)
