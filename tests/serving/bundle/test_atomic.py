from __future__ import annotations

from pathlib import Path

import pytest

from serving.bundle.atomic import replace_file, replacing


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"one", b"two"):
        replace_file(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("shared", [False, True])
def test_an_error_leaves_the_old_file(tmp_path: Path, shared: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail_halfway() -> None:
        with replacing(path, shared=shared) as temporary:
            temporary.write_bytes(b"ne")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_halfway()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_that_share_a_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "link"
    with replacing(path, durable=False, shared=True) as one, replacing(path, durable=False, shared=True) as other:
        assert one != other
        one.symlink_to("one")
        other.symlink_to("other")
    assert path.readlink() == Path("one")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("durable", [True, False])
def test_only_a_durable_file_is_flushed(tmp_path: Path, durable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr("serving.bundle.atomic.sync", flushed.append)
    replace_file(tmp_path / "file", b"content", durable=durable)
    assert flushed == ([tmp_path / "file.part", tmp_path] if durable else [])
