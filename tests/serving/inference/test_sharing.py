"""Versions of a bundle that were taught share their trunk: its session, precision and batch size are found once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from serving.bundle import model as models
from serving.bundle.errors import BundleError
from serving.bundle.layout import TRUNK
from serving.bundle.model import BundleModel
from serving.inference import loaded
from serving.inference.loaded import LoadedModel
from serving.model import Model
from tests import helpers_teaching
from tests.helpers_teaching import SPEC, pictures, write_bundle


@pytest.fixture
def versions(tmp_path: Path) -> tuple[Path, Path]:
    """A bundle, and the version of it that was taught a class."""
    first = write_bundle(tmp_path / "first")
    model = Model.load(first)
    model.teach({"elk": pictures("elk", 8)})
    return first, model.save(tmp_path / "second")


def test_a_taught_version_shares_the_session(versions: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    served = LoadedModel.prepare(BundleModel.load(versions[0], provider="cpu", threads=1))

    def refuse(*given: object) -> None:
        raise AssertionError("it was opened or measured again")

    alone = BundleModel.load(versions[1], provider="cpu", threads=1)
    monkeypatch.setattr(models, "open_session", refuse)
    monkeypatch.setattr(loaded, "fastest_runs", refuse)
    model = BundleModel.load(versions[1], provider="cpu", threads=1, like=served.model)
    model.self_test()
    found = LoadedModel.prepare(model, like=served)
    assert model.session is served.model.session
    assert (found.max_batch, found.quick) == (served.max_batch, served.quick)
    assert served.model.pooled is not None
    assert model.pooled is not None
    assert all(one is other for one, other in zip(model.pooled.detectors, served.model.pooled.detectors, strict=False))
    assert found.default_options.top == served.default_options.top
    assert "elk" in found.model.manifest.labels
    pixels = np.random.default_rng(0).integers(0, 256, (3, *SPEC.shape), dtype=np.uint8)
    np.testing.assert_array_equal(model.run(pixels)["logits"], alone.run(pixels)["logits"])


def test_another_trunk_has_its_own_session(
    versions: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = BundleModel.load(versions[0], provider="cpu", threads=1)
    graph = onnx.load_from_string(helpers_teaching.trunk_graph())
    graph.producer_name = "somebody else"
    monkeypatch.setattr(helpers_teaching, "trunk_graph", graph.SerializeToString)
    other = BundleModel.load(write_bundle(tmp_path / "other"), provider="cpu", threads=1, like=served)
    assert other.session is not served.session


def test_a_damaged_trunk_is_refused_although_its_session_is_at_hand(versions: tuple[Path, Path]) -> None:
    served = BundleModel.load(versions[0], provider="cpu", threads=1)
    content = bytearray((versions[1] / TRUNK).read_bytes())
    content[len(content) // 2] ^= 1
    # The file is a link, which the first version has too.
    (versions[1] / TRUNK).unlink()
    (versions[1] / TRUNK).write_bytes(content)
    with pytest.raises(BundleError, match=TRUNK):
        BundleModel.load(versions[1], provider="cpu", threads=1, like=served)
