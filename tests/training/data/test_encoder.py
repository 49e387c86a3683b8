"""Photos are encoded once by a trunk, whatever happens in between, and read from the cache."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from models.trunks.trunk import Trunk, open_trunk
from serving.bundle.pixels import open_image, to_pixels
from tests.helpers_serving import ROOT, eventually, saved
from training.cache import main as cache_command
from training.data.cache import parts
from training.data.datasets import load_source
from training.data.encoder import Encoder
from training.data.images import DataError, Images, join
from training.data.originals import PHOTOS, FileOriginal, array_originals

SIZE = 64
"""Small images: encoding is fast."""


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    return open_trunk("efficientnet-lite0", size=SIZE)


@pytest.fixture
def encode(trunk: Trunk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Encoder]:
    """A new encoder on each call, with the same cache."""
    monkeypatch.setenv("OPENWORLD_CACHE", str(tmp_path / "cache"))
    return lambda: Encoder(trunk)


def photo(number: int, size: tuple[int, int] = (90, 70)) -> Image.Image:
    """Smooth colours that differ between numbers."""
    coarse = np.random.default_rng(number).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def write_photos(root: Path, counts: dict[str, int], kind: str = "JPEG") -> Path:
    number = 0
    for label, count in counts.items():
        (root / label).mkdir(parents=True, exist_ok=True)
        for place in range(count):
            photo(number).save(root / label / f"{place}.{kind.lower()}", kind)
            number += 1
    return root


def encoded_by_hand(encoder: Encoder, images: Images) -> NDArray[np.float32]:
    assert images.originals is not None
    pixels = [to_pixels(open_image(original.content()), encoder.image) for original in images.originals]
    return np.concatenate([encoder.encode(one[None]) for one in pixels])


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of images of each run of a trunk from now on."""
    runs: list[int] = []
    original = Encoder.encode

    def encode(self: Encoder, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        runs.append(len(pixels))
        return original(self, pixels)

    monkeypatch.setattr(Encoder, "encode", encode)
    return runs


def test_a_folder_is_encoded_as_a_server_sees_it(
    encode: Callable[[], Encoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, encoder = write_photos(tmp_path / "photos", {"cat": 12, "dog": 9}), encode()
    source = load_source("folder", encoder.image, str(folder), encoder)
    assert source.classes == ("cat", "dog")
    assert len(source.train) + len(source.test) == 21
    for images in (source.train, source.test):
        assert images.encoded
        assert images.pixels.shape == (len(images), encoder.spec.dim)
        np.testing.assert_allclose(images.pixels, encoded_by_hand(encoder, images), atol=1e-6)
        assert np.array_equal(np.concatenate(list(images.chunks(4))), images.pixels)
    runs = counting(monkeypatch)
    again = load_source("folder", encoder.image, str(folder), encode())
    assert runs == []
    assert np.array_equal(again.train.pixels, source.train.pixels)
    assert again.test.labels.tolist() == source.test.labels.tolist()


def test_only_new_and_changed_photos_are_encoded(
    encode: Callable[[], Encoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_photos(tmp_path / "photos", {"cat": 6})
    files = sorted((folder / "cat").iterdir())
    runs = counting(monkeypatch)
    first = encode().read([FileOriginal(file) for file in files], ["cat"] * 6)
    assert sum(runs) == 6
    photo(77).save(files[2])
    photo(78).save(folder / "cat" / "new.jpeg")
    moved = files[0].rename(folder / "moved.jpeg")
    files = [moved, *files[1:], folder / "cat" / "new.jpeg"]
    runs.clear()
    second = encode().read([FileOriginal(file) for file in files], ["cat"] * 7)
    assert sum(runs) == 2
    assert first.digests[:2] == second.digests[:2]
    assert first.digests[2] != second.digests[2]
    np.testing.assert_array_equal(second.images.pixels[[0, 1, 3, 4, 5]], first.images.pixels[[0, 1, 3, 4, 5]])
    np.testing.assert_allclose(second.images.pixels, encoded_by_hand(encode(), second.images), atol=1e-6)


def test_copies_have_one_vector(encode: Callable[[], Encoder], tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", {"cat": 1})
    content = (folder / "cat" / "0.jpeg").read_bytes()
    for place in range(1, 30):
        (folder / "cat" / f"{place}.jpeg").write_bytes(content)
    read = encode().read([FileOriginal(file) for file in sorted((folder / "cat").iterdir())], ["cat"] * 30)
    # The split into training and test images goes by digests, so copies stay on one side.
    assert len(set(read.digests)) == 1
    assert len(read.images) == 30
    assert len(np.unique(read.images.pixels, axis=0)) == 1


KINDS: dict[str, Callable[[], bytes]] = {
    "CMYK": lambda: saved(photo(1).convert("CMYK"), "JPEG", quality=95),
    "grey": lambda: saved(photo(1).convert("L")),
    "16 bit": lambda: saved(Image.fromarray(np.asarray(photo(1).convert("L")).astype(np.uint16) * 257)),
    "palette": lambda: saved(photo(1).quantize(256)),
    "RGBA": lambda: saved(photo(1).convert("RGBA")),
    "WebP": lambda: saved(photo(1), "WEBP", quality=95),
    "turned": lambda: saved(photo(1).transpose(Image.Transpose.ROTATE_90), exif=_turned()),
    "huge": lambda: saved(photo(1).resize((4500, 3500)), "JPEG", quality=95),
}


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def test_every_kind_of_photo_is_encoded(encode: Callable[[], Encoder], tmp_path: Path) -> None:
    files = []
    for name, make in {"plain": lambda: saved(photo(1)), "other": lambda: saved(photo(2)), **KINDS}.items():
        files.append(tmp_path / name)
        files[-1].write_bytes(make())
    read = encode().read([FileOriginal(file) for file in files], [file.name for file in files])
    assert read.unreadable == []
    plain, other, *kinds = read.images.pixels
    for name, vector in zip(KINDS, kinds, strict=True):
        grey = name in ("grey", "16 bit")
        assert vector @ plain > (0.6 if grey or name == "palette" else 0.93), name
        assert vector @ plain > vector @ other, name
    np.testing.assert_allclose(kinds[[*KINDS].index("grey")], kinds[[*KINDS].index("16 bit")], atol=1e-6)


def test_what_cannot_be_read_is_named_and_left_out(
    encode: Callable[[], Encoder], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_photos(tmp_path / "photos", {"cat": 3})
    bad = {
        "cut.jpeg": saved(photo(5), "JPEG")[:-200],
        "empty.png": b"",
        "notes.txt": b"these are my photos",
        "many.png": saved(Image.new("L", (2000, 1000))),
    }
    for name, content in bad.items():
        (folder / "cat" / name).write_bytes(content)
    monkeypatch.setattr("training.data.originals.PHOTOS", replace(PHOTOS, pixels=1_000_000))
    encoder = encode()
    with caplog.at_level(logging.WARNING):
        source = load_source("folder", encoder.image, str(folder), encoder)
    assert len(source.train) + len(source.test) == 3
    for name in bad:
        assert f"skipped {folder / 'cat' / name}: " in caplog.text
    assert "4 files skipped, 3 images read" in caplog.text


def test_a_file_that_vanishes_is_named(encode: Callable[[], Encoder], tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", {"cat": 2})
    read = encode().read([FileOriginal(folder / "cat" / name) for name in ("0.jpeg", "gone.jpeg")], ["cat"] * 2)
    assert len(read.images) == 1
    ((name, reason),) = read.unreadable
    assert name.endswith("gone.jpeg")
    assert "No such file" in reason


def test_other_data_sets_are_encoded_too(encode: Callable[[], Encoder]) -> None:
    encoder = encode()
    arrays = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    images = encoder.read(array_originals("digits", arrays), list("01234")).images
    by_hand = to_pixels(Image.fromarray(arrays[3]), encoder.image)
    np.testing.assert_allclose(images.pixels[3], encoder.encode(by_hand[None])[0], atol=1e-6)
    assert images.originals is not None
    assert images.originals[3].name == "image 3 of digits"
    assert np.array_equal(to_pixels(images.originals[3].image(b""), encoder.image), by_hand)


def test_parts_of_images_are_joined_and_divided(encode: Callable[[], Encoder], tmp_path: Path) -> None:
    folder, encoder = write_photos(tmp_path / "photos", {"cat": 5, "dog": 5}), encode()
    files = [FileOriginal(file) for file in sorted(folder.glob("*/*"))]
    cats = encoder.read(files[:5], ["cat"] * 5).images
    dogs = encoder.read(files[5:], ["dog"] * 5).images
    whole = join([cats, dogs])
    assert np.array_equal(whole.pixels, np.concatenate([cats.pixels, dogs.pixels]))
    assert [original.path.parent.name for original in whole.of(["dog"]).originals]  # type: ignore[union-attr] == ["dog"] * 5
    kept, taken = whole.split(0.2, seed=0)
    assert (len(kept), len(taken)) == (8, 2)
    np.testing.assert_allclose(taken.pixels, encoded_by_hand(encoder, taken), atol=1e-6)


ENCODE = """
import sys
from training.data.encoder import Encoder
from training.data.originals import PHOTOS, FileOriginal, array_originals
from models.trunks.trunk import open_trunk
from pathlib import Path
files = [FileOriginal(file) for file in sorted(Path(sys.argv[1]).glob("*/*"))]
Encoder(open_trunk("efficientnet-lite0", size=int(sys.argv[2]))).read(files, ["x"] * len(files))
"""


def test_encoding_goes_on_after_kill_9(
    encode: Callable[[], Encoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_photos(tmp_path / "photos", {"cat": 200})
    process = subprocess.Popen([sys.executable, "-c", ENCODE, str(folder), str(SIZE)], cwd=ROOT)
    try:
        eventually(lambda: process.poll() is not None or _encoded_bytes(tmp_path / "cache") > 20 * 40)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL, "it had finished before it was killed"
    files = [FileOriginal(file) for file in sorted(folder.glob("*/*"))]
    runs = counting(monkeypatch)
    read = encode().read(files, ["x"] * len(files))
    assert len(read.images) == 200
    assert 0 < sum(runs) < 200
    some = read.images.at(np.arange(0, 200, 37))
    np.testing.assert_allclose(some.pixels, encoded_by_hand(encode(), some), atol=1e-6)


def _encoded_bytes(cache: Path) -> int:
    return sum(file.stat().st_size for file in cache.glob("encoded/*/index"))


def test_the_cache_keeps_to_its_limit(
    trunk: Trunk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encode: Callable[[], Encoder]
) -> None:
    folder = write_photos(tmp_path / "photos", {"cat": 30})
    files = [FileOriginal(file) for file in sorted(folder.glob("*/*"))]
    width = 4 * trunk.spec.dim
    limit = 25 * (width + 60)
    monkeypatch.setenv("OPENWORLD_CACHE_GB", str(limit / 1024**3))
    vectors = lambda: sum(part.bytes for part in parts(tmp_path / "cache") if part.about())  # noqa: E731
    others = Encoder(open_trunk("efficientnet-lite0", size=SIZE + 1))
    others.read(files[:15], ["cat"] * 15)
    first = encode().read(files[:15], ["cat"] * 15).images
    # The other trunk was used longest ago.
    assert [part.about()["size"] for part in parts(tmp_path / "cache") if part.about()] == [SIZE]
    second = encode().read(files[15:], ["cat"] * 15).images
    assert vectors() <= limit
    # What another encoder has read before can still be read.
    both = join([first.at(np.arange(3))])
    np.testing.assert_allclose(both.pixels, encoded_by_hand(encode(), both), atol=1e-6)
    np.testing.assert_allclose(second.pixels, encoded_by_hand(encode(), second), atol=1e-6)
    with pytest.raises(DataError, match=r"30 more encoded images need 0\.00 GB .* larger OPENWORLD_CACHE_GB"):
        encode().read(files, ["cat"] * 30)
    one = encode()
    one.read(files[:15], ["cat"] * 15)
    with pytest.raises(DataError, match="15 more encoded images"):
        one.read(files[15:], ["cat"] * 15)


def test_a_cache_that_cannot_be_used_is_named(trunk: Trunk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPENWORLD_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"the cache .*/file cannot be used .*OPENWORLD_CACHE"):
        Encoder(trunk).read([], [])
    monkeypatch.setenv("OPENWORLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OPENWORLD_CACHE_GB", "lots")
    write_photos(tmp_path / "photos", {"cat": 1})
    with pytest.raises(DataError, match="OPENWORLD_CACHE_GB is 'lots'; allowed: gigabytes above 0, such as 20"):
        Encoder(trunk).read([FileOriginal(tmp_path / "photos" / "cat" / "0.jpeg")], ["cat"])


def test_the_command_shows_and_clears_the_cache(
    encode: Callable[[], Encoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_photos(tmp_path / "photos", {"cat": 2})
    encode().read([FileOriginal(file) for file in sorted(folder.glob("*/*"))], ["cat"] * 2)
    assert cache_command([]) == 0
    shown = capsys.readouterr().out
    assert str(tmp_path / "cache") in shown
    assert f"efficientnet-lite0 at {SIZE}, view plain" in shown
    assert cache_command(["--clear"]) == 0
    assert "0.0 MB removed" in capsys.readouterr().out
    assert parts(tmp_path / "cache") == []
    assert cache_command(["--json"]) == 0
    assert '"parts": []' in capsys.readouterr().out


def test_a_cache_folder_whose_name_would_control_the_terminal_is_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENWORLD_CACHE", f"{tmp_path}/a\x1b[31mb")
    assert cache_command([]) == cache_command(["--clear"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert shown.count(r"a\x1b[31mb: 0.0 MB") == 2
