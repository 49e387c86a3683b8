from __future__ import annotations

import os
from pathlib import Path

import pytest

from export.samples import main, write_samples
from tests.export.conftest import Exported
from tests.helpers import raise_at_call, use_tiny_preset


def test_samples_are_replaced_whole_or_not_at_all(
    exported_hat: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tiny_preset(monkeypatch)
    out = tmp_path / "samples"
    out.mkdir()
    (out / "old.png").write_bytes(b"old")
    with monkeypatch.context() as patch:
        # The first rename moves the older folder away, the second moves the new one to its place.
        patch.setattr("serving.bundle.directory.exchange", lambda *_: False)
        raise_at_call(patch, os, "rename", 2)
        with pytest.raises(OSError, match="rename died"):
            write_samples(exported_hat.folder, exported_hat.bundle.path, out)
    assert [path.name for path in out.iterdir()] == ["old.png"]
    assert main([str(exported_hat.folder), "--bundle", str(exported_hat.bundle.path), "--out", str(out)]) == 0
    assert {f"{label}.png" for label in exported_hat.run.config.labels} <= {path.name for path in out.iterdir()}
    assert not (out / "old.png").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["samples"]


@pytest.mark.parametrize("name", ["thesis.txt", "folder"])
def test_another_folder_is_not_replaced(
    exported_hat: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "0.png").write_bytes(b"mine")
    (out / name).mkdir() if name == "folder" else (out / name).write_text("mine")
    assert main([str(exported_hat.folder), "--bundle", str(exported_hat.bundle.path), "--out", str(out)]) != 0
    assert f"{out} exists and holds more than samples" in capsys.readouterr().err
    assert {path.name for path in out.iterdir()} == {"0.png", name}
