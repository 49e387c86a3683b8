"""The paper's systems on the digits, briefly trained: each learns, is evaluated with every rule, and is exported."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export import __main__ as export_command
from export.checks.inspection import inspect
from models.masks.hat import UnitMask
from models.network import Network
from serving.bundle.manifest import load_bundle
from serving.bundle.model import BundleModel
from serving.bundle.sections import ImageSpec
from tests.helpers import FEATURES, adam, random_images, tiny_network, tiny_task
from training import fit, study
from training.config import Augmentation, FeatureLearning, HeadLearning, system_title
from training.data.datasets import SOURCES
from training.data.images import Source, join
from training.data.sources import Sources
from training.evaluate import main as evaluate
from training.learn import fitting
from training.learn.augment import standard_view
from training.learn.correction import corrected
from training.learn.features import learn_features
from training.measure import alternative_rules
from training.measure.alternative_rules import AlternativeRule, learned_logits
from training.measure.baselines import BASELINES
from training.measure.evaluation import evaluate as evaluate_run
from training.measure.evaluation import measure
from training.presets import PRESETS, choose_preset
from training.run import open_run
from training.store.checkpoint import load, read_config

CPU = torch.device("cpu")
CE = replace(FEATURES, loss="ce")
SYSTEMS = [("hat", "csi"), ("sup", "csi"), ("hat", "ce"), ("sup", "ce")]


REAL_DIGITS = SOURCES["digits"]


@cache
def few_digits(*place: Any) -> Source:
    """The digits 0 to 4; for each its training images and 20 test images."""
    source, labels = REAL_DIGITS(*place), tuple("01234")
    test = join([source.test.of([label]).at(np.arange(20)) for label in labels])
    return Source(source.train.of(labels), test, labels)


def toy_preset(patch: pytest.MonkeyPatch) -> None:
    """The digits up to 4, but few and small ones, seen by a small network for a short time."""
    digits = PRESETS["digits"]
    image = ImageSpec(height=8, width=8, mode="L")
    network = replace(digits.network, height=8, width=8, base=16, hidden=64, projection=16)
    features = FeatureLearning(epochs=10, batch_size=16, optimizer="adam", lr=5e-3, warmup_epochs=0)
    head = HeadLearning(epochs=2, batch_size=16, lr=2e-2)
    learning = replace(digits, image=image, network=network, features=features, head=head)
    patch.setitem(PRESETS, "digits", replace(learning, images_per_class=60, buffer=40, held_out=("4",)))
    patch.setitem(SOURCES, "digits", few_digits)
    # Drawing the report takes longer than learning; test_report_page.py draws it.
    patch.setattr(fitting, "write_page", lambda *_: None)
    # A small grid that still leaves ODIN a choice.
    patch.setattr(alternative_rules, "TEMPERATURES", (1.0, 1000.0))
    patch.setattr(alternative_rules, "EPSILONS", (0.0, 0.004))


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    toy_preset(monkeypatch)


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All four systems, as the study learns them."""
    out = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        toy_preset(patch)
        for method, loss in SYSTEMS:
            assert not study.learn(out / f"digits-{method}-{loss}-0", study.Studied("digits"), method, loss, 0)
    return out


def run_of(studied: Path, method: str, loss: str) -> Path:
    return studied / f"digits-{method}-{loss}-0"


def evaluated(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert evaluate([str(folder), "--json", *options]) == 0
    return dict(json.loads(capsys.readouterr().out))


# ---- plain cross-entropy


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("method", ["hat", "sup"])
def test_cross_entropy_forgets_no_bit(method: str, optimizer: str) -> None:
    network = tiny_network(method, rotations=1, projection=0)
    images = random_images(5, 1, seed=9)
    remembered: list[torch.Tensor] = []
    for number in range(3):
        data = tiny_task(1, seed=number)
        task = network.add_task(2)
        parameters = network.trainable(task)
        used = adam(parameters) if optimizer == "adam" else torch.optim.SGD(parameters, 0.05, 0.9, weight_decay=0.1)
        list(learn_features(network, task, data, CE, Augmentation(), used, range(2)))
        network.finish(task)
        network.eval()
        with torch.no_grad():
            logits = [network.logits(images, old) for old in range(number + 1)]
        assert all(torch.equal(new, old) for new, old in zip(logits, remembered, strict=False))
        assert logits[-1].std(dim=0).max() > 0
        remembered = logits


def test_cross_entropy_trains_body_and_head_together_and_has_no_projection() -> None:
    network = tiny_network("hat", rotations=1, projection=0)
    network.add_task(2)
    head = network.head(0)
    assert head.weight.shape[0] == 1
    assert {id(values) for values in head.parameters()} <= {id(values) for values in network.trainable(0)}
    before = [values.detach().clone() for values in network.trainable(0)]
    list(learn_features(network, 0, tiny_task(1), CE, Augmentation(), adam(network.trainable(0)), range(2)))
    assert all(not torch.equal(old, new) for old, new in zip(before, network.trainable(0), strict=True))
    with pytest.raises(ValueError, match="a network with projection=0 has no contrastive loss"):
        network.project(random_images(1, 1), 0)
    assert len([mask for mask in network.masks if isinstance(mask, UnitMask)]) == 4


def test_the_loss_of_cross_entropy_starts_at_chance_and_falls() -> None:
    network = tiny_network("hat", seed=1, rotations=1, projection=0)
    data = tiny_task(1, per_class=6)
    data.train.pixels[data.train.local_classes == 0] //= 8
    network.add_task(2)
    how = replace(CE, epochs=12, batch_size=6, lr=0.02, sparsity_first=0.0)
    optimizer = torch.optim.Adam(network.trainable(0), lr=how.lr)
    losses = list(learn_features(network, 0, data, how, Augmentation(), optimizer, range(12)))
    assert losses[0] == pytest.approx(math.log(2), abs=0.3)
    assert losses[-1] < losses[0] - 0.2


def test_the_standard_view_moves_and_mirrors_whole_images() -> None:
    torch.manual_seed(0)
    images = torch.arange(1.0, 65.0).view(1, 1, 8, 8).repeat(40, 1, 1, 1)
    moved = {tuple(view.flatten().tolist()) for view in standard_view(images, Augmentation())}
    padded = torch.nn.functional.pad(images[:1], [1] * 4)[0, 0]
    windows = [padded[row : row + 8, column : column + 8] for row in range(3) for column in range(3)]
    allowed = {tuple(w.flatten().tolist()) for w in windows} | {tuple(w.flip(1).flatten().tolist()) for w in windows}
    assert moved <= allowed
    assert len(moved) > 9
    upright = {tuple(view.flatten().tolist()) for view in standard_view(images, Augmentation(flip=False))}
    assert upright <= {tuple(window.flatten().tolist()) for window in windows}


@pytest.mark.parametrize("method", ["hat", "sup"])
def test_a_run_of_cross_entropy_exports_and_its_graph_equals_the_network(
    method: str, studied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, bundle = run_of(studied, method, "ce"), tmp_path / "bundle"
    assert export_command.main([str(folder), "--out", str(bundle)]) == 0
    assert f"digits-{method}-ce version" in capsys.readouterr().out
    model, run = BundleModel.load(bundle, provider="cpu"), open_run(folder, CPU)
    pixels = Sources(run.config).test_images()[0].test.pixels[:9]
    wanted = run.outputs(pixels, CPU)
    got = model.session.run(["logits", "distances"], {model.session.get_inputs()[0].name: pixels})
    np.testing.assert_allclose(got[0], wanted["logits"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got[1], wanted["distances"], rtol=1e-4, atol=1e-4)
    manifest = load_bundle(bundle).manifest
    assert (manifest.name, manifest.method, manifest.metrics["loss"]) == (f"digits-{method}-ce", method, "ce")
    assert inspect(load_bundle(bundle)).rotations == 1


def test_a_network_that_sees_no_rotation_has_no_cascade(studied: Path, tmp_path: Path) -> None:
    arguments = [str(run_of(studied, "hat", "ce")), "--out", str(tmp_path / "bundle"), "--cascade", "on"]
    assert export_command.main(arguments) == 2


def test_an_unknown_number_of_rotations_is_refused() -> None:
    with pytest.raises(ValueError, match="rotations is 2; allowed: 1, 4"):
        tiny_network(rotations=2)
    with pytest.raises(ValueError, match="loss is 'ce' with 4 rotations and a projection to 16 dimensions"):
        replace(PRESETS["digits"], features=replace(PRESETS["digits"].features, loss="ce"))


# ---- every system, evaluated with every rule


@pytest.mark.parametrize(("method", "loss"), SYSTEMS)
def test_a_system_learns_the_digits(method: str, loss: str, studied: Path) -> None:
    folder = run_of(studied, method, loss)
    result = json.loads((folder / "metrics.json").read_text())
    assert (result["method"], result["loss"], result["prediction"], result["buffer"]) == (method, loss, "served", 40)
    # Chance level is 1/2 within a task and 1/4 over all classes.
    assert result["til_accuracy"] > 0.7
    assert result["cil_accuracy"] > 0.5
    assert result["parameters"]["inference"] == result["parameters"]["shared"] + sum(result["parameters"]["per_task"])
    assert read_config(folder).loss == loss


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in study.RULES if name != study.SERVED])
@pytest.mark.parametrize(("method", "loss"), SYSTEMS)
def test_a_run_is_evaluated_with_every_rule_without_retraining(
    name: str, method: str, loss: str, studied: Path
) -> None:
    folder = run_of(studied, method, loss)
    before = (folder / "checkpoint.safetensors").read_bytes()
    run = open_run(folder, CPU)
    result = measure(evaluate_run(run, Sources(run.config), CPU, AlternativeRule.named(name)))
    served = json.loads((folder / "metrics.json").read_text())
    assert result["prediction"] == name
    assert result["til_accuracy"] > 0.7
    assert 0.25 < result["cil_accuracy"] <= result["tp_accuracy"] <= 1
    assert result.keys() >= served.keys()
    assert result["unknown"].keys() == served["unknown"].keys()
    assert len(result["accuracy_matrix"]) == 2
    assert (folder / "checkpoint.safetensors").read_bytes() == before


def test_argmax_is_that_of_the_logits_as_they_were_learned(studied: Path) -> None:
    run = open_run(run_of(studied, "hat", "csi"), CPU)
    known = Sources(run.config).test_images()[0].test.of(run.config.labels)
    with torch.no_grad():
        images = torch.from_numpy(known.pixels).permute(0, 3, 1, 2) / 255
        parts = [run.network.measure(images, task)["logits"].mean(dim=0) for task in range(2)]
    guesses = np.array(run.config.labels)[torch.cat(parts, dim=1).argmax(dim=1).numpy()]
    result = measure(evaluate_run(run, Sources(run.config), CPU, AlternativeRule()))
    assert result["cil_accuracy"] == pytest.approx((guesses == known.labels).mean(), abs=0.011)


def test_corrections_lower_the_cross_entropy_of_the_images_that_they_were_fitted_on(studied: Path) -> None:
    folder = run_of(studied, "hat", "ce")
    run, buffer = open_run(folder, CPU), load(folder).buffer()
    assert buffer is not None
    logits = learned_logits(run.network, buffer.pixels.permute(0, 2, 3, 1).numpy(), CPU)["logits"]
    moved = corrected(logits, run.corrections, run.rule.task_of_class)
    before, after = (
        torch.nn.functional.cross_entropy(torch.from_numpy(output).double(), buffer.class_ids)
        for output in (logits, moved)
    )
    assert after < before


def test_the_command_line_evaluates_with_the_requested_rule(studied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_of(studied, "sup", "ce")
    assert evaluated(folder, capsys)["prediction"] == "served"
    printed = evaluated(folder, capsys, "--tp", "softmax", "--tau", "3", "--nu", "0.5", "--corrected")
    assert (printed["prediction"], printed["tau"], printed["nu"]) == ("softmax+c", [3.0], 0.5)
    printed = evaluated(folder, capsys, "--odin", "100", "0.002")
    assert (printed["prediction"], printed["temperature"], printed["epsilon"]) == ("odin", 100, 0.002)
    assert len(evaluated(folder, capsys, "--tp", "power")["tau"]) == 2
    assert evaluate([str(folder), "--tp", "sigmoid"]) == 0
    assert "decided by sigmoid" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--corrected"], "--corrected, --tau and --nu belong to --tp or --odin"),
        (["--odin", "3"], "--odin takes a temperature and an epsilon"),
        (["--odin", "--tp", "softmax"], "--odin has scores of its own"),
        (["--odin", "0", "0.1"], "allowed: temperature above 0"),
        (["--tp", "argmax", "--nu", "2"], "argmax has neither tau nor nu"),
        (["--tp", "power", "--tau", "1", "2", "3"], "--tau has 3 numbers; allowed: 1 or 2, one per task"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: list[str], message: str, studied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate([str(run_of(studied, "sup", "ce")), *options]) == 2
    assert message in capsys.readouterr().err


def test_without_a_buffer_nothing_can_be_corrected(studied: Path) -> None:
    run = replace(open_run(run_of(studied, "sup", "ce"), CPU), correction_history=())
    with pytest.raises(Exception, match=r"this run stores no images for the correction \+c: learn one with --buffer"):
        evaluate_run(run, Sources(run.config), CPU, AlternativeRule(is_corrected=True))


def test_a_run_cannot_change_its_loss(studied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit.main(["--out", str(run_of(studied, "hat", "ce")), "--resume", "--loss", "csi", "--buffer"]) == 2
    assert "leave out --loss, --buffer" in capsys.readouterr().err


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_the_study_prints_a_row_for_each_system_and_prediction(
    studied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predictions = ["served", "argmax", "argmax+c"]
    words = ["--out", str(studied), "--seeds", "0", "--predictions", *predictions]
    assert study.main([*words, "--no-joint"]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    lines, counts = first.splitlines(), second.splitlines()
    shown = (Path(__file__).parents[2] / "docs/reports/results.md").read_text()
    for table in (lines, counts):
        assert table[0] + "\n" + table[1] in shown
    rows = [cells_of(line) for line in lines[2:]]
    systems = [[system_title(*system), name] for system in SYSTEMS for name in predictions]
    assert [row[:2] for row in rows] == [*([study.BASELINE, each.name] for each in BASELINES), *systems]
    stored = cells_of(lines[0]).index("stored images")
    assert [row[stored] for row in rows] == [*"0000", *["0", "0", "40"] * len(SYSTEMS)]
    assert [cells_of(line)[0] for line in counts[2:]] == [system_title(*system) for system in SYSTEMS]


def test_the_study_learns_all_classes_as_one_task_for_an_upper_bound(
    studied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--methods", "hat", "--losses", "ce", "--seeds", "0", "--predictions", "served", "--out", str(studied)]
    assert study.main(words) == 0
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    joint = dict(zip(cells_of(lines[0]), cells_of(lines[-1]), strict=True))
    assert joint["system"] == "HAT"
    assert joint["prediction"] == study.JOINT
    assert joint["TP %"] == joint["task AUROC"] == "-"
    assert joint["TIL %"] == joint["CIL %"]
    assert read_config(studied / "digits-hat-ce-joint-0").tasks == (tuple("0123"),)


def test_baselines_need_no_run_and_leave_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(["--baselines", "--seeds", "0", "1", "--out", str(tmp_path / "none")]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [dict(zip(cells_of(lines[0]), cells_of(line), strict=True)) for line in lines[2:]]
    assert [row["prediction"] for row in rows] == [each.name for each in BASELINES]
    # Four digits of sixty images each are easy.
    assert all(float(row["CIL %"].partition(" ")[0]) > 90 for row in rows)
    assert all(float(row["unknown AUROC"].partition(" ")[0]) > 0.8 for row in rows)
    assert not list(tmp_path.iterdir())


def test_the_study_has_every_rule() -> None:
    assert list(study.RULES) == [
        "served",
        *("argmax", "sigmoid", "softmax", "power", "odin"),
        *("argmax+c", "sigmoid+c", "softmax+c", "power+c", "odin+c"),
        "tpl",
    ]


# ---- presets of the paper

LAMBDAS = {
    "mnist-5t": (0.25, 0.1),
    "cifar10-5t": (1.0, 0.75),
    "cifar100-10t": (1.5, 1.0),
    "cifar100-20t": (3.5, 2.5),
    "tinyimagenet-5t": (0.75, 0.75),
    "tinyimagenet-10t": (1.0, 0.75),
}


@pytest.mark.parametrize("name", LAMBDAS)
def test_presets_hold_what_the_paper_prints(name: str) -> None:
    preset = choose_preset(name, "hat")
    features, head = preset.features, preset.head
    assert (features.sparsity_first, features.sparsity_later) == LAMBDAS[name]
    assert (features.optimizer, features.epochs, features.warmup_epochs) == ("lars", 700, 10)
    assert features.batch_size == (256 if name == "mnist-5t" else 128)
    assert (features.lr * features.warmup_start, features.lr) == (0.1, 1.0)
    assert (head.epochs, head.optimizer, head.lr, head.milestones) == (100, "sgd", 0.1, (0.6, 0.75, 0.9))
    assert preset.buffer == (200 if name in ("mnist-5t", "cifar10-5t") else 2000)
    tasks = {"mnist-5t": 5, "cifar10-5t": 5, "cifar100-10t": 10, "cifar100-20t": 20, "tinyimagenet-5t": 5}.get(name, 10)
    classes = {"mnist": 10, "cifar10": 10, "cifar100": 100, "tinyimagenet": 200}[preset.dataset]
    assert preset.classes_per_task * tasks == classes


def test_sup_learns_mnist_for_longer_in_smaller_batches() -> None:
    features = choose_preset("mnist-5t", "sup").features
    assert (features.epochs, features.batch_size) == (1000, 32)


def test_links_keep_the_given_weights_per_unit_and_at_most_half() -> None:
    network: Network = tiny_network("sup", links=2.0)
    layers = [layer for layer in network.modules() if hasattr(layer, "signs")]
    for layer in layers:
        weights = layer.signs.numel()
        assert layer.keep == max(1, round(min(weights / 2, 2 * sum(layer.signs.shape[:2]))))  # type: ignore[operator]
