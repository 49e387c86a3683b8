"""The recipes of docs/recipes.md, followed to the letter: one new file, one line in a registry."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from export.__main__ import main as export
from export.graph.cascade import cascaded, rotated_outputs
from export.graph.session import run_graph, whole_session
from models.backbones import BACKBONES
from models.detectors import SCORES
from models.masks import MECHANISMS
from models.network import Network
from models.parameter_counts import capacity_used, count_parameters
from models.registry import Registry
from models.trunks import TRUNKS
from models.trunks.cache_settings import FOLDER_VARIABLE
from serving.bundle.decision import OUTPUT_NAMES, complete
from serving.bundle.model import BundleModel
from tests.export.networks import decider_for, pixels_for, written
from tests.helpers import (
    FEATURES,
    MakeOptimizer,
    assert_same_tensors,
    learn_task,
    random_images,
    tiny_config,
    tiny_network,
    tiny_task,
    use_tiny_preset,
)
from training import fit
from training.evaluate import main as evaluate
from training.learn.decisions import make_decider, offered_decisions
from training.learn.head import fit_ranges
from training.learn.optimizers import Lars
from training.measure.capacity import capacity
from training.run import open_run
from training.store.checkpoint import Progress, load, save

DOCUMENT = Path(__file__).parents[2] / "docs" / "recipes.md"
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=FEATURES.lr, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=FEATURES.lr, momentum=0.9, weight_decay=0.1),
    "lars": lambda parameters: Lars(parameters, lr=FEATURES.lr),
}


class Cook:
    """Follows a recipe for the length of a test, in a folder of its own instead of the package."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self._patch = patch
        self._folder = folder
        patch.syspath_prepend(folder)

    def follow(self, registry: Registry | dict[str, str], name: str) -> None:
        """Write the recipe's file and register the entry that the recipe's line names."""
        text = DOCUMENT.read_text(encoding="utf-8")
        module, attribute = re.findall(rf'^"{name}": "[a-z.]+\.([a-z_]+):([A-Za-z_]+)",$', text, re.MULTILINE)[0]
        (code,) = re.findall(rf"^```python file={module}\.py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        (self._folder / f"{module}.py").write_text(code, encoding="utf-8")
        self._patch.delitem(sys.modules, module, raising=False)
        self._patch.setitem(registry, name, f"{module}:{attribute}")  # type: ignore[arg-type]


@pytest.fixture
def cook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cook:
    (tmp_path / "recipe").mkdir()
    return Cook(monkeypatch, tmp_path / "recipe")


def learn(network: Network, tasks: int, make_optimizer: MakeOptimizer | None = None) -> Network:
    """Tasks of two classes each, learned from noise."""
    for number in range(len(network.heads), tasks):
        data = tiny_task(network.config.channels, seed=number)
        task = learn_task(network, data, *([make_optimizer] if make_optimizer else []))
        fit_ranges(network, task, data.train)
    return network.eval()


@torch.no_grad()
def outputs_of(network: Network, tasks: int) -> list[dict[str, Tensor]]:
    images = random_images(6, network.config.channels, seed=99)
    network.eval()
    return [network.measure(images, task) for task in range(tasks)]


def reloaded(network: Network, folder: Path) -> Network:
    """The network as it comes back from a checkpoint of its run."""
    folder.mkdir(exist_ok=True)
    save(folder, network, None, Progress(task=len(network.heads)))
    fresh = Network(network.config)
    load(folder).load_network(fresh, [int(head.classes) for head in network.heads])  # type: ignore[arg-type]
    return fresh.eval()


def assert_exported(network: Network, folder: Path, decision: str) -> None:
    """The graph's outputs are the network's."""
    folder.mkdir()
    pixels, decider = pixels_for(network, 5), decider_for(network, decision)
    got = run_graph(whole_session(written(folder, network, decision=decision), "fp32"), pixels)
    wanted = complete(cascaded(rotated_outputs(network, decider, pixels), None), decider.rule)
    assert np.ptp(wanted["scores"], axis=0).max() > 1e-4
    for name in OUTPUT_NAMES:
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-3, atol=1e-3, err_msg=name)


# ---- a backbone


@pytest.mark.parametrize("method", ["hat", "sup"])
def test_a_backbone_is_added(method: str, cook: Cook, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="backbone is 'plain_net'; allowed: convnet, resnet18"):
        tiny_config(method, "plain_net")
    cook.follow(BACKBONES, "plain_net")
    network = learn(tiny_network(method, "plain_net", base=8), 1)
    before = outputs_of(network, 1)
    learn(network, 2)
    assert_same_tensors(outputs_of(network, 1)[0], before[0])
    fresh = reloaded(network, tmp_path / "run")
    for task, outputs in enumerate(outputs_of(network, 2)):
        assert_same_tensors(outputs_of(fresh, 2)[task], outputs)
    assert_exported(network, tmp_path / "bundle", "features")
    (tmp_path / "int8").mkdir()
    whole_session(written(tmp_path / "int8", network, "int8"), "int8")
    assert capacity(network).whole.used


def test_an_added_backbone_is_chosen_on_the_command_line(
    cook: Cook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_tiny_preset(monkeypatch)
    run = tmp_path / "run"
    command = ["--backbone", "plain_net", "--tasks", "zero,one", "--out", str(run)]
    assert fit.main(command) == 2
    assert capsys.readouterr().err == "error: backbone is 'plain_net'; allowed: convnet, resnet18, adapter\n"
    cook.follow(BACKBONES, "plain_net")
    assert "convnet, resnet18, adapter, plain_net; default" in " ".join(fit.make_parser().format_help().split())
    assert fit.main(command) == 0
    opened = open_run(run, torch.device("cpu"))
    assert opened.config.preset.network.backbone == "plain_net"
    assert {type(stage).__name__ for stage in opened.network.modules()} >= {"PlainStage"}


# ---- an unknown score


def test_an_unknown_score_is_added(cook: Cook, tmp_path: Path) -> None:
    cook.follow(SCORES, "cosine")
    network = learn(tiny_network(), 2)
    assert "cosine" in offered_decisions(network)
    own = network.detector(0).own.means()["cosine"]
    assert own.shape == (6, 2)
    assert (own.abs() <= 1 + 1e-6).all()
    fresh = reloaded(network, tmp_path / "run")
    assert make_decider(fresh, "cosine", 0.05).rule == make_decider(network, "cosine", 0.05).rule
    assert_exported(network, tmp_path / "bundle", "cosine")


def test_a_run_that_was_learned_before_a_score_existed_does_not_offer_it(cook: Cook, tmp_path: Path) -> None:
    network = learn(tiny_network(), 1)
    save(tmp_path, network, None, Progress(task=1))
    offered, rules = offered_decisions(network), make_decider(network, "fused", 0.05).rule
    cook.follow(SCORES, "cosine")
    fresh = Network(network.config)
    load(tmp_path).load_network(fresh, [2])
    fresh.eval()
    assert offered_decisions(fresh) == offered
    assert make_decider(fresh, "fused", 0.05).rule == rules
    with pytest.raises(ValueError, match="decision cosine needs the score cosine, which was added after this run"):
        make_decider(fresh, "cosine", 0.05)
    # Every task needs it: a later one that has it does not help the earlier one.
    learn(fresh, 2)
    assert "cosine" in fresh.detector(1).own.means()
    assert offered_decisions(fresh) == offered


def test_a_run_can_be_opened_where_a_score_of_it_is_not_registered(
    cook: Cook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Cook(patch, tmp_path).follow(SCORES, "cosine")
        network = learn(tiny_network(), 1)
        save(tmp_path, network, None, Progress(task=1))
        rule = make_decider(network, "fused", 0.05).rule
    fresh = Network(network.config)
    load(tmp_path).load_network(fresh, [2])
    assert "cosine" not in offered_decisions(fresh)
    assert make_decider(fresh.eval(), "fused", 0.05).rule == rule


# ---- a mask mechanism


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_mask_mechanism_is_added(optimizer: str, cook: Cook, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="method is 'pack'; allowed: hat, sup"):
        tiny_config("pack")
    cook.follow(MECHANISMS, "pack")
    network = learn(tiny_network("pack"), 1, OPTIMIZERS[optimizer])
    before, used = outputs_of(network, 1), capacity_used(network)
    weights = {name: value.clone() for name, value in network.named_parameters() if name.endswith("conv.weight")}
    learn(network, 2, OPTIMIZERS[optimizer])
    assert_same_tensors(outputs_of(network, 1)[0], before[0])
    state = dict(network.named_parameters())
    assert not any(torch.equal(state[name], value) for name, value in weights.items())
    fresh = reloaded(network, tmp_path / "run")
    for task, outputs in enumerate(outputs_of(network, 2)):
        assert_same_tensors(outputs_of(fresh, 2)[task], outputs)
    assert_exported(fresh, tmp_path / "bundle", "fused")
    assert used is not None
    assert 0.5 <= used < (capacity_used(network) or 0) < 1
    assert capacity(network).whole.used == pytest.approx((0.5, 0.75), abs=0.01)
    assert count_parameters(network)["shared"] > 0


def test_an_added_mechanism_and_an_added_score_go_through_the_commands(
    cook: Cook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the document promises: `--method pack`, `--decision cosine`."""
    use_tiny_preset(monkeypatch)
    run, bundle = str(tmp_path / "run"), tmp_path / "bundle"
    command = ["--method", "pack", "--tasks", "zero,one; two,three", "--out", run]
    assert fit.main(command) == 2
    assert "method is 'pack'; allowed: hat, sup" in capsys.readouterr().err
    cook.follow(MECHANISMS, "pack")
    cook.follow(SCORES, "cosine")
    assert fit.main(command) == 0
    capsys.readouterr()
    assert evaluate([run, "--decision", "cosine", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert 0 <= measured["cil_accuracy"] <= 1
    assert export([run, "--out", str(bundle), "--decision", "cosine", "--force"]) == 0
    model = BundleModel.load(bundle, provider="cpu")
    assert (model.manifest.method, model.manifest.decision) == ("pack", "cosine")
    model.self_test()


# ---- registries


def test_a_trunk_is_added(cook: Cook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    cook.follow(TRUNKS, "colours")
    photos = tmp_path / "photos"
    random = np.random.default_rng(0)
    for label, colour in {"red": (200, 60, 60), "blue": (60, 60, 200), "green": (60, 200, 60)}.items():
        (photos / label).mkdir(parents=True)
        for number in range(30):
            noise = random.normal(colour, 25, (40, 50, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(noise).save(photos / label / f"{number}.png")
    run, bundle = tmp_path / "run", tmp_path / "bundle"
    assert fit.main(["--data", str(photos), "--trunk", "colours", "--tasks", "red,blue", "--out", str(run)]) == 0
    assert export([str(run), "--out", str(bundle), "--force"]) == 0
    model = BundleModel.load(bundle, provider="cpu")
    assert model.manifest.trunk is not None
    assert model.manifest.trunk.name == "colours"
    new = np.full((1, 64, 64, 3), (190, 70, 60), np.uint8)
    assert model.manifest.labels[model.predict(new).class_id[0]] == "red"


def test_a_name_that_no_tensor_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"score name is 'my\.score'; allowed: letters, digits and _"):
        SCORES["my.score"] = tiny_config
