from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from models.network import Network
from tests.helpers import (
    adam,
    assert_same_tensors,
    learn_task,
    learn_task_features,
    learn_task_head,
    raise_at_call,
    random_images,
    tiny_config,
    tiny_network,
    tiny_task,
)
from training.checkpoint import CURRENT, PREVIOUS, Progress, RunError, load, save, write_json

CLASSES = [2, 3, 2]
NATS = {"features": 5, "fused": 6}
BETWEEN, FEATURES, HEAD, WHOLE = "between tasks", "mid features", "mid head", "whole run"


def half_learned(method: str, where: str) -> tuple[Network, torch.optim.Optimizer | None, Progress]:
    """A network as a run would save it there."""
    network = tiny_network(method)
    data = [tiny_task(1, seed=task, classes=classes) for task, classes in enumerate(CLASSES)]
    learn_task(network, data[0])
    if where == BETWEEN:
        return network, None, Progress(1, nats=NATS)
    network.add_task(CLASSES[1])
    optimizer = learn_task_features(network, 1, data[1])
    if where == FEATURES:
        return network, optimizer, Progress(1, "features", 1, 2.5, NATS)
    network.finish(1)
    optimizer = adam(list(network.head(1).parameters()))
    network.head(1).all_logits(torch.randn(2, network.wires.after.channels)).sum().backward()
    optimizer.step()
    if where == HEAD:
        return network, optimizer, Progress(1, "head", 1, 2.5, NATS)
    learn_task_head(network, 1, data[1])
    learn_task(network, data[2])
    return network, None, Progress(3, nats=NATS, decision="fused")


def parameters_of(network: Network, progress: Progress) -> list[torch.nn.Parameter]:
    return network.trainable(1) if progress.phase == "features" else list(network.head(1).parameters())


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    states = optimizer.state_dict()["state"].items()
    return {f"{number} {name}": value for number, state in states for name, value in state.items()}


@pytest.mark.parametrize("where", [FEATURES, HEAD, BETWEEN, WHOLE])
@pytest.mark.parametrize("method", ["hat", "sup"])
def test_network_and_optimizer_come_back_bit_for_bit(method: str, where: str, tmp_path: Path) -> None:
    network, optimizer, progress = half_learned(method, where)
    save(tmp_path, network, optimizer, progress)
    loaded = load(tmp_path)
    assert loaded.progress == progress
    fresh = Network(tiny_config(method))
    loaded.load_network(fresh, CLASSES)
    images = random_images(4, 1, seed=9)
    network.eval()
    fresh.eval()
    for task in range(progress.task):
        assert_same_tensors(fresh.said(images, task), network.said(images, task))
    state, wanted_state = fresh.state_dict(), network.state_dict()
    # Room for the next task may or may not be there yet; everything learned must be.
    assert_same_tensors({name: state[name] for name in wanted_state}, wanted_state)
    if optimizer is None:
        return
    assert state.keys() == wanted_state.keys()
    other = adam(parameters_of(fresh, progress))
    loaded.load_optimizer(other)
    assert_same_tensors(optimizer_state(other), optimizer_state(optimizer))
    assert [g["lr"] for g in other.param_groups] == [0.05]


def saved(folder: Path, *epochs: int) -> None:
    """Checkpoints of the same network at these epochs."""
    network = tiny_network()
    network.add_task(2)
    for epoch in epochs:
        save(folder, network, None, Progress(epoch=epoch))


def test_a_checkpoint_is_a_json_header_and_raw_numbers_and_no_pickle(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    content = (tmp_path / CURRENT).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert json.loads(header.pop("__metadata__")["progress"])["epoch"] == 1
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(content) - 8 - length


def test_the_checkpoint_before_is_kept_and_nothing_else(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CURRENT, PREVIOUS])
    assert load(tmp_path).progress.epoch == 3
    (tmp_path / CURRENT).unlink()
    assert load(tmp_path).progress.epoch == 2


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "rubbish": os.urandom(len(content))}[how])


@pytest.mark.parametrize("how", ["empty", "cut", "rubbish"])
def test_a_corrupt_checkpoint_falls_back_to_the_one_before(how: str, tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    damage(tmp_path / CURRENT, how)
    assert load(tmp_path).progress.epoch == 1


@pytest.mark.parametrize("how", ["empty", "cut", "rubbish"])
def test_two_corrupt_checkpoints_are_both_named(how: str, tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    damage(tmp_path / CURRENT, how)
    damage(tmp_path / PREVIOUS, how)
    with pytest.raises(RunError) as caught:
        load(tmp_path)
    assert str(tmp_path / CURRENT) in str(caught.value)
    assert str(tmp_path / PREVIOUS) in str(caught.value)


def test_a_folder_without_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"{tmp_path}: no checkpoint yet"):
        load(tmp_path)


@pytest.mark.parametrize("call", [1, 2])
def test_a_save_that_dies_leaves_a_loadable_checkpoint(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        raise_at_call(patch, os, "replace", call)
        with pytest.raises(OSError, match="replace died"):
            saved(tmp_path, 3)
    assert load(tmp_path).progress.epoch == 2
    saved(tmp_path, 4)
    assert load(tmp_path).progress.epoch == 4


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.json"
    write_json(path, {"accuracy": 0.5})
    with monkeypatch.context() as patch:
        raise_at_call(patch, os, "replace", 1)
        with pytest.raises(OSError, match="replace died"):
            write_json(path, {"accuracy": 0.75})
    assert json.loads(path.read_text()) == {"accuracy": 0.5}
    write_json(path, {"accuracy": 0.75})
    assert json.loads(path.read_text()) == {"accuracy": 0.75}
