"""The model card of a bundle: read by the Hugging Face Hub's own library, and the same for the same content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from serving.bundle.card import model_card
from serving.bundle.layout import CARD
from serving.bundle.manifest import Manifest, fingerprint, load_bundle
from serving.bundle.run_verdict import PartVerdict, summarise
from serving.bundle.sections import Origin
from serving.model import Model
from tests.helpers_teaching import TASKS, pictures, write_bundle

METRICS = {
    "cil_accuracy": 0.875,
    "test_images": 48,
    "unknown_images": 12,
    "memory": {"training_images": 192, "buffer_images": 0},
    "unknown": {"auroc": 0.93, "rejected_unknown": 0.75},
    "untested_tasks": [1],
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("card") / "bundle")


@pytest.fixture(scope="module")
def manifest(bundle: Path) -> Manifest:
    good = PartVerdict(grade="good", numbers="TP 100 %")
    weak = PartVerdict(grade="weak", numbers="WP 70 % of 48", advice="More images help.")
    return load_bundle(bundle).manifest.model_copy(
        update={
            "metrics": METRICS,
            "origin": Origin(data=("folder",), commands=("openworld fit --data FOLDER --out RUN",)),
            "verdict": summarise(weak, good, good, "What to expect of few photos."),
            "versions": {"numpy": "2.4.6"},
        }
    )


def test_the_hub_reads_the_header(manifest: Manifest) -> None:
    data = ModelCard(model_card(manifest)).data
    assert (data.library_name, data.pipeline_tag) == ("openworld", "image-classification")
    found = {(each.metric_name, each.metric_value, each.dataset_name) for each in data.eval_results}
    assert ("accuracy among all classes (CIL)", 0.875, "folder") in found
    assert ("AUROC, known against unknown", 0.93, "folder") in found


def test_data_classes_metrics_verdict_limits_and_commands(manifest: Manifest) -> None:
    card = model_card(manifest)
    assert "| training images | 192 |" in card
    assert f"| 0 | run | {', '.join(TASKS[0])} |" in card
    assert "| accuracy among all classes (CIL) | 87.5 % |" in card
    assert "| classes within a task | weak | WP 70 % of 48 |" in card
    assert "What to expect of few photos." in card
    limits = card.partition("## Limits")[2].partition("\n## ")[0]
    for limit in (
        "Only 48 test images",
        "More images help.",
        "Tasks that have no test images: 1",
        "inherits what `tiny`",
    ):
        assert limit in limits
    assert "task prediction" not in limits
    assert "openworld fit --data FOLDER --out RUN\nopenworld export RUN --out BUNDLE\n" in card
    assert manifest.trunk is not None
    assert manifest.trunk.sha256 in card


def test_the_options_of_the_export_are_part_of_how_to_reproduce_it(manifest: Manifest) -> None:
    assert manifest.origin is not None
    options = ("--precision", "int8", "--decision", "a b", "--no-teaching", "--force")
    after = manifest.model_copy(update={"origin": manifest.origin.model_copy(update={"export": options})})
    assert (
        "\nopenworld export RUN --out BUNDLE --precision int8 --decision 'a b' --no-teaching --force\n"
        in model_card(after)
    )
    assert fingerprint(after) != fingerprint(manifest)


def test_a_manifest_without_the_options_of_its_export_keeps_its_version(manifest: Manifest) -> None:
    """It was written before they were recorded."""
    content = manifest.model_dump(mode="json")
    del content["origin"]["export"]
    content["precisions"] = ["fp32", "int8"]
    before = Manifest.model_validate(content)
    assert "\nopenworld export RUN --out BUNDLE --precision int8\n" in model_card(before)
    for name in ("version", "created", "before"):
        del content[name]
    for task in content["tasks"]:
        del task["unchanged"]
    for name in ("consolidated", "taught"):
        assert content.pop(name) == []
    written = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    assert fingerprint(before) == hashlib.sha256(written).hexdigest()[:12]


def test_labels_are_shown_as_they_are(manifest: Manifest) -> None:
    task = manifest.tasks[0].model_copy(update={"labels": ("a|b", "<img src=x>", "[c](d)", *map(str, range(60)))})
    card = model_card(manifest.model_copy(update={"tasks": (task,)}))
    assert r"a\|b, \<img src=x\>, \[c\](d), 0, 1" in card
    assert "36 and 23 more |" in card


def test_a_taught_bundle_has_its_own_card(bundle: Path, tmp_path: Path) -> None:
    model = Model.load(bundle, threads=1)
    model.teach({"elk": pictures("elk", 6), "ant": pictures("fox", 5)}, who="ada@example.org")
    saved = load_bundle(model.save(tmp_path / "taught"))
    saved.check()
    card = (saved.path / CARD).read_text()
    assert "| 2 | taught | elk |" in card
    assert "Lessons added examples to: ant." in card
    assert "- Lesson 0: 6 of elk, 5 of ant" in card or "- Lesson 0: 5 of ant, 6 of elk" in card
    assert "before these lessons" in card
    # Names and times are not part of the version, so they are not in the card either.
    assert "ada" not in card
    assert saved.manifest.lessons[0].taught_at not in card
