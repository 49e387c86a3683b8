"""The diagnosis of a run, on decisions computed by hand and on tiny runs."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from models.network import Network
from models.parameter_counts import capacity_used
from tests.helpers import (
    adam,
    finish_with_random_statistics,
    kill_at_save,
    learn_task_features,
    open_gates,
    tiny_network,
    tiny_task,
    unit_masks,
    use_tiny_preset,
)
from tests.training.conftest import WholeRun
from training import fit
from training.data.sources import Sources
from training.diagnose import main
from training.measure.alternative_rules import AlternativeRule
from training.measure.bounds import BoundCheck, check_bounds
from training.measure.capacity import capacity, layer_usage
from training.measure.diagnosis import Confusion, TaskDiagnosis, confusions
from training.measure.evaluation import evaluate
from training.measure.task_prediction import DEFINITIONS
from training.measure.theory import tempered_tp_bound
from training.run import open_run

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_preset(monkeypatch)


def two_tasks(method: str) -> Network:
    torch.manual_seed(0)
    network = tiny_network(method)
    for seed in (0, 1):
        task = network.add_task(2)
        if method == "hat":
            open_gates(network, task, 0.5)
            finish_with_random_statistics(network, task)
        else:
            learn_task_features(network, task, tiny_task(1, seed), adam)
            network.finish(task)
    return network


def test_the_use_of_a_layer_by_hand() -> None:
    masks = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [1, 1, 0, 0, 0]]).bool()
    found = layer_usage("conv", iter(masks))
    assert (found.name, found.size) == ("conv", 5)
    assert found.used == pytest.approx((0.4, 0.4, 0.4))
    assert found.first_used == pytest.approx((0.4, 0.2, 0.0))
    assert (found.shared, found.free) == pytest.approx((0.4, 0.4))


def test_hat_usage_follows_its_gates() -> None:
    network = two_tasks("hat")
    found = capacity(network)
    assert found.of == "units"
    assert [layer.name for layer in found.layers] == [
        *(f"body.{number}.conv" for number in range(3)),
        "body.3.linear",
        "projection.hidden",
    ]
    for layer, mask in zip(found.layers, unit_masks(network), strict=True):
        assert layer.size == mask.channels
        assert layer.free == pytest.approx(1 - mask.used.double().mean().item())
        assert layer.used == pytest.approx([len(mask.live(task)) / mask.channels for task in (0, 1)])
    assert found.frozen_weights == capacity_used(network)
    assert 0 < found.frozen_weights < 1


def test_every_mask_of_a_residual_network_is_counted_once() -> None:
    network = tiny_network("hat", "resnet18")
    open_gates(network, network.add_task(2), 0.5)
    network.finish(0)
    assert [layer.size for layer in capacity(network).layers] == [mask.channels for mask in unit_masks(network)]


def test_sup_has_the_configured_density() -> None:
    found = capacity(two_tasks("sup"))
    assert (found.of, found.frozen_weights) == ("weights", None)
    assert found.whole.used == pytest.approx((0.32, 0.32), abs=0.005)
    # Each task uses 0.32 of the weights; their union is everything except the free weights.
    assert found.whole.shared == pytest.approx(0.64 - (1 - found.whole.free), abs=0.01)
    assert sum(found.whole.first_used) + found.whole.free == pytest.approx(1)


def test_confusions_are_counted_by_pair() -> None:
    true, predicted = np.array([0, 0, 0, 0, 1, 1, 2]), np.array([0, 1, 1, 2, 1, 0, 2])
    assert confusions(true, predicted, ["a", "b", "c"]) == (
        Confusion("a", "b", 2, 0.5),
        Confusion("b", "a", 1, 0.5),
        Confusion("a", "c", 1, 0.25),
    )


def test_the_limiting_factor_is_the_larger_loss() -> None:
    nats = {"nats_wp": 2.0, "nats_tp": 1.0, "nats_cil": 3.0}
    task = TaskDiagnosis(10, 0.5, 0.9, 0.6, lost_to_wp=0.1, lost_to_tp=0.4, **nats, accepted=1.0)
    assert task.held_back_by == "TP"
    assert replace(task, lost_to_wp=0.4).held_back_by == "WP"
    assert replace(task, cil_accuracy=1.0, lost_to_wp=0.0, lost_to_tp=0.0).held_back_by == "-"


def test_a_run_is_diagnosed(whole_run: WholeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.png"
    assert main([str(whole_run.folder), "--json", "--out", str(plot)]) == 0
    found = json.loads(capsys.readouterr().out)
    measured = json.loads((whole_run.folder / "metrics.json").read_text())
    whole = found["whole"]
    assert whole["cil_accuracy"] == measured["cil_accuracy"]
    assert whole["wp_accuracy"] - whole["lost_to_tp"] == pytest.approx(whole["cil_accuracy"])
    assert whole["tp_accuracy"] - whole["lost_to_wp"] == pytest.approx(whole["cil_accuracy"])
    assert whole["nats_wp"] + whole["nats_tp"] == pytest.approx(whole["nats_cil"])
    assert whole["nats_cil"] == pytest.approx(measured["nats"]["cil"], abs=2e-6)
    assert [each["all"] for each in found["detectors"]] == pytest.approx(measured["nats"]["ood_per_task"], abs=2e-6)
    assert [each["theorem"] for each in found["theorems"]] == ["1", "2 i", "2 ii", "3", "ext. i", "ext. ii"]
    for each in found["theorems"]:
        assert each["holds"] == each["images"] == measured["test_images"] >= each["useful"]
    assert sum(task["images"] for task in found["tasks"]) == measured["test_images"]
    wrong = round((1 - measured["cil_accuracy"]) * measured["test_images"])
    assert sum(pair["images"] for pair in found["class_confusions"]) == wrong
    assert found["capacity"]["of"] == {"hat": "units", "sup": "weights"}[whole_run.method]
    with Image.open(plot) as picture:
        assert picture.size[0] > 1000


def test_the_tables_fit_a_terminal(whole_run: WholeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(whole_run.folder)]) == 0
    printed = capsys.readouterr().out
    for words in (
        "limited",
        "least",
        "H_OOD,k",
        "ext. ii",
        "confused tasks",
        "confused classes",
        "body.1.conv",
        "free",
    ):
        assert words in printed
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert ("% of the weights used at inference are protected" in printed) == (whole_run.method == "hat")


def test_broken_and_vacuous_bounds_are_counted() -> None:
    found = BoundCheck("1", "", np.array([0.1, 0.5, 2.0]), np.array([0.1, 0.4, np.inf]), guess=0.3).summary()
    assert (found["images"], found["holds"], found["useful"]) == (3, 2, 1)
    assert (found["measured_median"], found["bound_mean"], found["bound_median"]) == (0.5, None, 0.4)


@pytest.mark.parametrize("tp", [None, *DEFINITIONS])
def test_the_theorems_hold_for_every_rule_with_its_own_detectors(tp: str | None, whole_run: WholeRun) -> None:
    run = open_run(whole_run.folder, CPU)
    tested = evaluate(run, Sources(run.config), CPU, None if tp is None else AlternativeRule(tp))
    assert all(claim.holds.all() for claim in check_bounds(tested))
    # Outputs that increase with P'_k, [n, tasks, classes of the task]: two tasks of two classes.
    outputs = tested.outputs["logits"] if tp is not None else -tested.outputs["distances"]
    outputs = outputs.astype(float).reshape(-1, 2, 2)
    own = tested.tasks[:, None] == np.arange(2)
    if tp == "softmax":
        p_in = np.exp(outputs / 5).max(axis=2) / np.exp(outputs / 5).sum(axis=2)
        wanted = -np.log(np.where(own, p_in, 1 - p_in))
    else:
        odds = outputs.max(axis=2)
        wanted = np.logaddexp(0, np.where(own, -odds, odds))
    np.testing.assert_allclose(tested.losses.ood, np.minimum(wanted, 708.4), rtol=1e-4)


def test_exponents_are_those_of_the_extension(whole_run: WholeRun) -> None:
    run = open_run(whole_run.folder, CPU)
    tested = evaluate(run, Sources(run.config), CPU, AlternativeRule("power", taus=(0.5, 2.0)))
    found = {claim.theorem: claim for claim in check_bounds(tested)}
    tau = np.array([0.5, 2.0])
    assert found["ext. ii"].measured.tolist() == tested.losses.tp.tolist()
    assert found["ext. ii"].bound == pytest.approx(tempered_tp_bound(tested.losses.ood, tested.tasks, tau))
    assert not np.allclose(found["2 ii"].measured, tested.losses.tp)


def test_every_image_has_its_losses_and_bounds_in_a_file(
    whole_run: WholeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "losses.csv", tmp_path / "losses.npz"]
    for file in files:
        assert main([str(whole_run.folder), "--json", "--samples", str(file)]) == 0
    found = json.loads(capsys.readouterr().out.split("\n}\n")[0] + "}")
    with files[0].open() as file:
        rows = list(csv.DictReader(file))
    arrays = np.load(files[1])
    assert list(rows[0]) == list(arrays)
    assert len(rows) == len(arrays["label"]) == found["whole"]["images"]
    for name, value in (("h_wp", "nats_wp"), ("h_tp", "nats_tp"), ("h_cil", "nats_cil")):
        assert arrays[name].mean() == pytest.approx(found["whole"][value])
        assert [float(row[name]) for row in rows] == arrays[name].tolist()
    assert arrays["h_ood_1"].mean() == pytest.approx(found["detectors"][1]["all"])
    assert (arrays["theorem_3_measured"] <= arrays["theorem_3_bound"] + 1e-9).all()
    assert main([str(whole_run.folder), "--samples", "/nowhere/losses.csv"]) == 2
    assert "--samples /nowhere/losses.csv: cannot be written (No such file or directory)" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([str(whole_run.folder), "--samples", "losses.txt"])
    assert "'losses.txt' ends in '.txt'; allowed: .csv, .npz" in capsys.readouterr().err


def test_an_unfinished_run_cannot_be_diagnosed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_at_save(patch, 6, written=True)
        assert fit.main(["--out", str(tmp_path / "run")]) == 130
    assert main([str(tmp_path / "run")]) == 2
    assert "1 of 2 tasks are learned; finish it with" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing")]) == 2
    assert "not a run" in capsys.readouterr().err


def test_a_plot_that_cannot_be_drawn_is_refused(whole_run: WholeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(whole_run.folder), "--out", "plot.doc"]) == 2
    assert "'plot.doc' ends in '.doc'; allowed:" in capsys.readouterr().err
    assert main([str(whole_run.folder), "--out", "/nowhere/plot.png"]) == 2
    assert "--out /nowhere/plot.png: cannot be written (No such file or directory)" in capsys.readouterr().err
