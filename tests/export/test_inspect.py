from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from export.__main__ import main as export
from export.checks import overview, parity
from export.checks.inspection import cascade_summary, detector_summary, inspect
from export.checks.overview import print_overview
from export.inspect import main
from serving.bundle.manifest import Bundle, load_bundle
from tests.export.conftest import Exported
from tests.export.graph import test_cascade
from tests.export.networks import evidence_for, learned, put_run, run_of
from tests.helpers import unit_masks
from tests.helpers_serving import edit_manifest


def test_units_are_the_live_ones_of_every_layer(exported_hat: Exported) -> None:
    masks = unit_masks(exported_hat.run.network)
    for task, part in enumerate(inspect(exported_hat.bundle).tasks):
        # The last mask is the projection's, which is not exported.
        assert part.units == tuple(len(mask.live(task)) for mask in masks[:-1])
        assert part.labels == exported_hat.run.config.tasks[task]
        assert part.milliseconds["fp32"] > 0


def multiplications_by_hand(bundle: Bundle, units: tuple[int, ...]) -> int:
    """Multiply-adds of the convnet for one image in all rotations."""
    side, before, macs = bundle.manifest.image.height, bundle.manifest.image.channels, 0
    for own, kernel in zip(units[:-1], (3, 3, 2), strict=True):
        side = side + 2 * (kernel // 2) - kernel + 1
        macs += own * before * kernel**2 * side**2
        side, before = side // 2, own
    return 4 * (macs + units[-1] * before * side**2)


def test_multiplications_by_hand(exported: Exported) -> None:
    part = inspect(exported.bundle).tasks[0]
    assert part.macs == multiplications_by_hand(exported.bundle, part.units)


def test_the_command_shows_tasks_and_verification(exported: Exported, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(exported.bundle.path), "--verbose"]) == 0
    shown = capsys.readouterr().out
    assert exported.bundle.manifest.version in shown
    assert "replaces no other version" in shown
    assert "no cascade: every task sees an image in all rotations, 8 views" in shown
    assert "logits difference batch 7" in shown


def test_a_bundle_is_one_screen_whatever_its_size(
    exported_hat: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([str(exported_hat.bundle.path)]) == 0
    shown = capsys.readouterr().out
    manifest = exported_hat.bundle.manifest
    assert manifest.version in shown
    assert "fp32: " in shown
    for title, part in manifest.verdict.parts.items():
        assert f"{title}: {part.grade}, {part.numbers}"[:79] in shown
    # Thirty tasks of twelve classes with long names.
    task = manifest.tasks[0]
    tasks = [
        task.model_copy(
            update={
                "task": number,
                "first_class_id": 12 * number,
                "labels": tuple(f"class {number} {n:090}" for n in range(12)),
            }
        )
        for number in range(30)
    ]
    monkeypatch.setattr(overview, "seconds_per_image", lambda *_: 0.0123)
    print_overview(replace(exported_hat.bundle, manifest=manifest.model_copy(update={"tasks": tuple(tasks)})))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert any("and 22 more tasks" in line for line in lines)
    assert "fp32: 12.3 ms per image on this CPU" in lines


@pytest.fixture(scope="module")
def rich_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A residual network in two precisions, with a cascade."""
    place, network = tmp_path_factory.mktemp("rich"), learned("hat", "resnet18", (1, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "AGREEING", {})
        patch.setattr(parity, "AUROC_CHANGE", 2)
        test_cascade.answer_with(patch, test_cascade.outputs_of(40, 2, surprising=0))
        folder = put_run(patch, place / "run", run_of(network), evidence_for(network))
        assert export([str(folder), "--out", str(place / "bundle"), "--precision", "int8", "--cascade", "on"]) == 0
    tasks = [task.model_dump(mode="json") for task in load_bundle(place / "bundle").manifest.tasks]
    edit_manifest(place / "bundle", before="859549a0961c", tasks=[{**tasks[0], "unchanged": True}, tasks[1]])
    return load_bundle(place / "bundle")


def test_every_precision_is_measured_and_a_cascade_counts_a_layer_once(rich_bundle: Bundle) -> None:
    found = inspect(rich_bundle)
    masks = unit_masks(learned("hat", "resnet18", (1, 1)))
    assert found.milliseconds.keys() == {"fp32", "int8"}
    assert all(value > 0 for value in found.milliseconds.values())
    for task, part in enumerate(found.tasks):
        # A stem, eight blocks of two layers and three shortcuts; selecting channels for a sum is not a layer.
        assert len(part.units) == 1 + 16 + 3
        assert set(part.units) <= {len(mask.live(task)) for mask in masks}
        sizes = {name: info.size for name, info in rich_bundle.manifest.files.items()}
        own = {key: sizes[f"task{task}.{key}.bin"] for key in ("fp32", "int8")}
        assert part.stored_bytes == {None: sizes[f"task{task}.bin"], **own}
        assert part.stored_bytes["int8"] < part.stored_bytes["fp32"]
        assert part.milliseconds.keys() == {"fp32", "int8"}
        assert part.macs > 0
    assert [part.unchanged for part in found.tasks] == [True, False]


def test_the_command_shows_precisions_cascade_and_what_is_unchanged(
    rich_bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(rich_bundle.path)]) == 0
    assert "replaces version 859549a0961c: 1 of 2 tasks are unchanged" in capsys.readouterr().out
    assert main([str(rich_bundle.path), "--verbose"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "replaces version 859549a0961c: 1 of 2 tasks are unchanged" in shown
    assert "cascade: at most 1 of 2 tasks see an image in all rotations, 1 on average: 5 views instead of 8" in shown
    assert "100.00% of 40 validation images are answered as without" in shown
    for column in ("kB fp32", "kB int8", "ms fp32", "ms int8"):
        assert column in shown
    assert "label agreement" in shown
    assert "images of task" not in shown
    assert "tasks with images │ │ 2 of 2" in shown


def test_a_bundle_without_fp32_is_shown_by_what_it_has(rich_bundle: Bundle, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(rich_bundle.path, tmp_path / "bundle"))
    edit_manifest(folder, precisions=["int8"])
    alone, together = inspect(load_bundle(folder)), inspect(rich_bundle)
    assert alone.milliseconds.keys() == {"int8"}
    assert alone.rotations == together.rotations
    for part, other in zip(alone.tasks, together.tasks, strict=True):
        assert (part.units, part.macs) == (other.units, other.macs)


def test_a_rejected_cascade_is_described_as_off(exported_hat: Exported, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported_hat.bundle.path, tmp_path / "bundle"))
    edit_manifest(folder, cascade={"candidates": None, "agreement": 0.98, "images": 1000})
    summary = cascade_summary(load_bundle(folder).manifest, rotations=4)
    assert summary.endswith(
        "8 views; the best cascade was not used: "
        "it would answer 98.00% of 1000 validation images as the full evaluation does"
    )


def test_a_cascade_that_saves_too_little_is_described_so(exported_hat: Exported, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported_hat.bundle.path, tmp_path / "bundle"))
    edit_manifest(folder, cascade={"candidates": None, "seen": 1.9, "agreement": 1.0, "images": 1000})
    summary = cascade_summary(load_bundle(folder).manifest, rotations=4)
    assert summary.endswith(
        "8 views; the best cascade was not used: it would leave 7.7 of them, and a cascade must leave at most 75%"
    )


def test_a_missing_bundle_exits_with_2_and_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_the_bytes_of_detectors_are_those_of_the_scores_of_the_decision(exported_hat: Exported) -> None:
    run, costs = exported_hat.run, inspect(exported_hat.bundle).tasks
    network, decider = run.need_decider("a test")
    for task, part in enumerate(costs):
        detector = network.detector(task)
        needed = detector.needs(decider.scorers[task].decision)
        scores = [detector.score(name) for name in needed if name != "logits"]
        least = sum(values.nbytes for score in scores for values in score.buffers())
        assert least <= part.detector_bytes < part.stored_bytes[None]
    summary = detector_summary(exported_hat.bundle, costs)
    assert f"{sum(part.detector_bytes for part in costs) / 1e3:.1f} kB" in summary
    assert f"the scores of {sum(task.images for task in run.rule.tasks)} images" in summary
