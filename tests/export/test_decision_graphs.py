"""Every decision is exported as a graph with the network's outputs, which stores nothing that it does not need."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest

from export.checks.parity import ALLOWED
from export.graph.cascade import cascaded, rotated_outputs
from export.graph.session import run_graph, whole_session
from export.graph.writer import GraphWriter
from models.detectors import decisions
from serving.bundle.decision import OUTPUT_NAMES, complete
from serving.bundle.layout import graph_name
from tests.export.networks import decider_for, learned, pixels_for, written

IMAGES = 6
SIZES = (2, 3)


def assert_graph_equals_network(
    folder: Path, method: str, backbone: str, decision: str, candidates: int | None = None
) -> None:
    network = learned(method, backbone, SIZES)
    decider, pixels = decider_for(network, decision), pixels_for(network, IMAGES)
    got = run_graph(whole_session(written(folder, network, "fp32", candidates, decision), "fp32"), pixels)
    wanted = complete(cascaded(rotated_outputs(network, decider, pixels), candidates), decider.rule)
    assert np.ptp(wanted["scores"], axis=0).min() > 1e-4
    for name in OUTPUT_NAMES:
        difference = np.abs(got[name] - wanted[name]) / (1 + np.abs(wanted[name]))
        assert difference.max() <= ALLOWED, name


@pytest.mark.long
@pytest.mark.parametrize("decision", decisions())
@pytest.mark.parametrize("backbone", ["convnet", "resnet18"])
@pytest.mark.parametrize("method", ["hat", "sup"])
def test_every_decision_is_exported(method: str, backbone: str, decision: str, tmp_path: Path) -> None:
    assert_graph_equals_network(tmp_path, method, backbone, decision)


@pytest.mark.parametrize("decision", decisions())
def test_every_decision_is_exported_with_a_cascade(decision: str, tmp_path: Path) -> None:
    assert_graph_equals_network(tmp_path, "hat", "convnet", decision, candidates=1)


@pytest.mark.parametrize("decision", ["features", "relative", "vim", "mahalanobis", "paper"])
def test_a_graph_holds_only_the_measurements_that_its_decision_needs(decision: str, tmp_path: Path) -> None:
    network = learned("hat", "convnet", SIZES)
    graph = onnx.load(written(tmp_path, network, decision=decision) / graph_name("fp32")).graph
    numbers = [tensor.name for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    owners = {name.split("/")[1] for name in numbers if name.startswith("task0/")}
    assert "head" in owners
    detector = network.detector(0)
    assert owners & set(detector.own.means()) == set(detector.needs(decisions()[decision])) - {"logits"}


@pytest.mark.parametrize("decision", ["mahalanobis", "vim"])
def test_a_graph_stores_no_number_that_it_can_make_of_others(decision: str, tmp_path: Path) -> None:
    network = learned("hat", "convnet", SIZES)
    graph = onnx.load(written(tmp_path, network, decision=decision) / graph_name("fp32")).graph
    sizes = {each.name: math.prod(each.dims) for each in graph.initializer}
    detector = network.detector(0)
    tied, vim = detector.mahalanobis, detector.score("vim")
    wanted = {
        "mahalanobis": sum(each.numel() for each in (*tied.buffers(), tied.level[0])),
        "vim": sum(each.numel() for each in vim.buffers())
        + sum(each[0].numel() for each in (tied.axes, tied.scales, tied.gain, tied.level)),
    }
    owners = tuple(f"task0/{owner}/" for owner in ("mahalanobis", "vim", "features"))
    assert sum(size for name, size in sizes.items() if name.startswith(owners)) == wanted[decision]


# ---- the branches of a cascade


def branches(folder: Path, precision: str) -> list[onnx.GraphProto]:
    """The branches that compute the images which tasks see again."""
    graph = onnx.load(folder / graph_name(precision)).graph
    return [
        attribute.g
        for node in graph.node
        if node.op_type == "If"
        for attribute in node.attribute
        if attribute.name == "then_branch"
    ]


@pytest.mark.parametrize("backbone", ["convnet", "resnet18"])
@pytest.mark.parametrize(("method", "precision"), [("hat", "fp32"), ("sup", "fp32"), ("hat", "fp16")])
def test_convolutions_of_a_branch_have_weights_of_their_own(
    method: str, precision: str, backbone: str, tmp_path: Path
) -> None:
    network = learned(method, backbone, SIZES)
    found = branches(written(tmp_path, network, precision, candidates=1, decision="features"), precision)
    assert len(found) == len(SIZES)
    for branch in found:
        kinds = {name: node.op_type for node in branch.node for name in node.output}
        convolutions = [node for node in branch.node if node.op_type == "Conv"]
        assert len(convolutions) >= 3
        for node in convolutions:
            assert [kinds.get(name) for name in node.input[1:]] == ["Reshape"] * len(node.input[1:]), node.name


@pytest.mark.parametrize("backbone", ["convnet", "resnet18"])
@pytest.mark.parametrize(("method", "precision"), [("hat", "fp32"), ("sup", "fp32"), ("hat", "int8")])
def test_weights_of_their_own_change_no_answer(
    method: str, precision: str, backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = learned(method, backbone, SIZES)
    pixels, answers = pixels_for(network, IMAGES), []
    for name in ("own", "shared"):
        (tmp_path / name).mkdir()
        folder = written(tmp_path / name, network, precision, 1, "features")
        answers.append(run_graph(whole_session(folder, precision), pixels))
        monkeypatch.setattr(GraphWriter, "_with_own_weights", lambda self, nodes: list(nodes))
    own, shared = answers
    for name in OUTPUT_NAMES:
        np.testing.assert_allclose(own[name], shared[name], rtol=1e-3, atol=1e-3, err_msg=name)
