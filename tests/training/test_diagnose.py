"""What holds a run back, on decisions that are known by hand and on tiny runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from models.network import Network
from tests.helpers import (
    adam,
    finish_with_random_statistics,
    kill_at_save,
    learn_task_features,
    open_gates,
    tiny_network,
    tiny_task,
    use_tiny_preset,
)
from tests.training.conftest import WholeRun
from training import fit
from training.capacity import capacity, layer_use
from training.diagnose import main
from training.diagnosis import Confusion, TaskDiagnosis, confusions


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
    found = layer_use("conv", masks)
    assert (found.name, found.size) == ("conv", 5)
    assert found.used == pytest.approx((0.4, 0.4, 0.4))
    assert found.first_used == pytest.approx((0.4, 0.2, 0.0))
    assert (found.shared, found.free) == pytest.approx((0.4, 0.4))


def test_hat_is_as_full_as_its_gates_say() -> None:
    network = two_tasks("hat")
    found = capacity(network)
    assert found.of == "units"
    assert [layer.name for layer in found.layers] == [
        *(f"body.{number}.conv" for number in range(3)),
        "body.3.linear",
        "projection.hidden",
    ]
    for layer, mask in zip(found.layers, network.unit_masks(), strict=True):
        assert layer.size == mask.channels
        assert layer.free == pytest.approx(1 - mask.taken.double().mean().item())
        assert layer.used == pytest.approx([len(mask.live(task)) / mask.channels for task in (0, 1)])
    frozen = [part for layer in network.task_layers() for _, part in layer.frozen()]
    assert found.frozen_weights == pytest.approx(torch.cat([part.flatten() for part in frozen]).double().mean().item())
    assert 0 < found.frozen_weights < 1


def test_every_mask_of_a_residual_network_is_counted_once() -> None:
    network = tiny_network("hat", "resnet18")
    open_gates(network, network.add_task(2), 0.5)
    network.finish(0)
    assert [layer.size for layer in capacity(network).layers] == [mask.channels for mask in network.unit_masks()]


def test_sup_is_as_dense_as_it_was_told_to_be() -> None:
    found = capacity(two_tasks("sup"))
    assert (found.of, found.frozen_weights) == ("weights", None)
    assert found.whole.used == pytest.approx((0.32, 0.32), abs=0.005)
    # Each has 0.32 of the weights, together all but the free ones.
    assert found.whole.shared == pytest.approx(0.64 - (1 - found.whole.free), abs=0.01)
    assert sum(found.whole.first_used) + found.whole.free == pytest.approx(1)


def test_confusions_are_counted_by_pair() -> None:
    true, said = np.array([0, 0, 0, 0, 1, 1, 2]), np.array([0, 1, 1, 2, 1, 0, 2])
    assert confusions(true, said, ["a", "b", "c"]) == (
        Confusion("a", "b", 2, 0.5),
        Confusion("b", "a", 1, 0.5),
        Confusion("a", "c", 1, 0.25),
    )


def test_what_holds_a_task_back_is_what_costs_more() -> None:
    task = TaskDiagnosis(10, 0.5, 0.9, 0.6, lost_to_wp=0.1, lost_to_tp=0.4, nats_wp=2.0, nats_tp=1.0, accepted=1.0)
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
    assert whole["nats_wp"] + whole["nats_tp"] == pytest.approx(measured["nats"]["cil"], abs=2e-6)
    assert sum(task["images"] for task in found["tasks"]) == measured["test_images"]
    wrong = round((1 - measured["cil_accuracy"]) * measured["test_images"])
    assert sum(pair["images"] for pair in found["class_confusions"]) == wrong
    assert found["capacity"]["of"] == {"hat": "units", "sup": "weights"}[whole_run.method]
    with Image.open(plot) as picture:
        assert picture.size[0] > 1000


def test_the_tables_fit_a_terminal(whole_run: WholeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(whole_run.folder)]) == 0
    said = capsys.readouterr().out
    for words in ("back by", "tasks taken for", "classes taken for", "body.1.conv", "free"):
        assert words in said
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= 80
    assert ("% of all weights are protected" in said) == (whole_run.method == "hat")


def test_an_unfinished_run_cannot_be_diagnosed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_at_save(patch, 6, written=True)
        assert fit.main(["--out", str(tmp_path / "run")]) == 130
    assert main([str(tmp_path / "run")]) == 2
    assert "1 of 2 tasks are learned; go on with" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing")]) == 2
    assert "not a run" in capsys.readouterr().err


def test_a_plot_that_cannot_be_drawn_is_refused(whole_run: WholeRun, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(whole_run.folder), "--out", "plot.doc"])
    assert "'plot.doc' ends in '.doc'; allowed:" in capsys.readouterr().err
    assert main([str(whole_run.folder), "--out", "/nowhere/plot.png"]) == 2
    assert "--out /nowhere/plot.png: cannot be written (No such file or directory)" in capsys.readouterr().err
