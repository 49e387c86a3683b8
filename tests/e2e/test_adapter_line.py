"""The shortest way of adapters from photos to an answer, with the real weights of the default trunk: learned with HAT
and with Sup, exported and loaded as a server does. `test_photo_adapters.py` proves more, and takes long."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from export.__main__ import main as export
from export.checks import photo_evidence
from models.trunks.cache_settings import FOLDER_VARIABLE
from serving.bundle.manifest import load_bundle
from serving.bundle.model import BundleModel
from serving.bundle.pixels import decode, to_pixels
from tests.helpers_photos import write_photos
from training import fit
from training.learn import fitting
from training.learn.adapters import state
from training.learn.adapters.choice import Candidate, Choice, JudgedAdapters, choose

SMALL = ["--size", "64", "--epochs", "1", "--width", "16", "--batch-size", "16", "--tasks", "disc,stripes; checks,ring"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos") / "photos", disc=6, stripes=6, checks=6, ring=6)


@pytest.mark.parametrize("method", ["hat", "sup"])
def test_adapters_are_learned_exported_and_served(
    method: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used(judged: Sequence[JudgedAdapters], most: int) -> Choice:
        return replace(choose(judged, most), weight=0.5, rotations=1, best=Candidate(0.5, 1))

    # Both methods learn from the same views. What people look at is not drawn, and few photos verify the export.
    monkeypatch.setenv(FOLDER_VARIABLE, str(photos.parent / "cache"))
    monkeypatch.setattr(fitting, "write_page", lambda *_: None)
    monkeypatch.setattr(photo_evidence, "MOST_PHOTOS", 2)
    monkeypatch.setattr(state, "choose", used)
    run, bundle = tmp_path / "run", tmp_path / "bundle"
    assert fit.main(["--data", str(photos), "--method", method, *SMALL, "--out", str(run)]) == 0
    assert json.loads((run / "metrics.json").read_text())["decision"] == "pooled+logits"
    assert export([str(run), "--out", str(bundle), "--force"]) == 0
    found = load_bundle(bundle)
    assert (found.rule.score, found.manifest.labels) == ("pooled+logits", ("disc", "stripes", "checks", "ring"))
    model = BundleModel.load(bundle, provider="cpu")
    assert model.pooled is not None
    assert len(model.pooled.adapters) == 2
    labels = [label for label in found.manifest.labels for _ in range(2)]
    files = [photos / label / f"00{number}.jpg" for label in found.manifest.labels for number in range(2)]
    pixels = np.stack([to_pixels(decode(file.read_bytes()), found.manifest.image) for file in files])
    answers = [found.manifest.labels[each] for each in model.predict(pixels).class_id]
    assert sum(answer == label for answer, label in zip(answers, labels, strict=True)) >= 6
