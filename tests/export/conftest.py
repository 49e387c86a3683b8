from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import onnx
import onnxruntime as ort
import pytest
import torch

from export.__main__ import main
from export.graph.session import whole_session
from serving.bundle.layout import graph_name
from serving.bundle.manifest import Bundle, load_bundle
from tests.export.networks import evidence_for, learned, put_run, run_of, written
from training.run import Run, open_run


class Exported(NamedTuple):
    """A finished run, its network and rule, and the bundle made of it."""

    folder: Path
    run: Run
    bundle: Bundle


@pytest.fixture(scope="session")
def export_tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    def make(method: str) -> Exported:
        place = tmp_path_factory.mktemp(method)
        folder: Path = request.getfixturevalue(f"tiny_{method}")
        assert main([str(folder), "--out", str(place / "bundle"), "--force"]) == 0
        return Exported(folder, open_run(folder, torch.device("cpu")), load_bundle(place / "bundle"))

    return make


@pytest.fixture(scope="session")
def exported_hat(export_tiny: Callable[[str], Exported]) -> Exported:
    return export_tiny("hat")


@pytest.fixture(scope="session")
def exported_sup(export_tiny: Callable[[str], Exported]) -> Exported:
    return export_tiny("sup")


@pytest.fixture(params=["hat", "sup"])
def exported(request: pytest.FixtureRequest) -> Exported:
    made: Exported = request.getfixturevalue(f"exported_{request.param}")
    return made


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with available validation images."""
    network = learned("hat", "convnet")
    return put_run(monkeypatch, tmp_path / "run", run_of(network), evidence_for(network))


class Graphs:
    """Writes every graph once, at its first use."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory

    @cache  # noqa: B019
    def folder(self, method: str, backbone: str, precision: str = "fp32", candidates: int | None = None) -> Path:
        return written(self._factory.mktemp("graph"), learned(method, backbone), precision, candidates)

    @cache  # noqa: B019
    def session(
        self, method: str, backbone: str, precision: str = "fp32", candidates: int | None = None
    ) -> ort.InferenceSession:
        return whole_session(self.folder(method, backbone, precision, candidates), precision)

    def model(
        self, method: str, backbone: str, precision: str = "fp32", candidates: int | None = None
    ) -> onnx.ModelProto:
        """The graph with its weights."""
        return onnx.load(self.folder(method, backbone, precision, candidates) / graph_name(precision))


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    return Graphs(tmp_path_factory)
