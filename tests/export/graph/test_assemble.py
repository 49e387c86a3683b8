"""The ONNX graph has the outputs of the network, and readable names."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto

from export.graph.cascade import RotatedOutputs, cascaded, rotated_outputs, seen_again
from export.graph.session import run_graph, whole_session
from models.network import Network
from serving.bundle.decision import FEATURES, NETWORK_NAMES, OUTPUT_NAMES, complete
from serving.bundle.layout import graph_name
from serving.bundle.manifest import INPUT_NAME
from tests.export.conftest import Graphs
from tests.export.networks import decider_for, learned, pixels_for, written

IMAGES = 12


@cache
def outputs_of(network: Network) -> RotatedOutputs:
    return rotated_outputs(network, decider_for(network), pixels_for(network, IMAGES))


def relative(got: NDArray[np.floating], wanted: NDArray[np.floating]) -> float:
    return float((np.abs(got - wanted) / (1 + np.abs(wanted))).max())


SHAPES = [("convnet", None), ("convnet", 1), ("convnet", 2), ("resnet18", None), ("resnet18", 1)]


@pytest.mark.parametrize(("backbone", "candidates"), SHAPES)
@pytest.mark.parametrize("method", ["hat", "sup"])
def test_the_graph_has_the_outputs_of_the_network(
    method: str, backbone: str, candidates: int | None, graphs: Graphs
) -> None:
    network = learned(method, backbone)
    rule, pixels = decider_for(network).rule, pixels_for(network, IMAGES)
    got = run_graph(graphs.session(method, backbone, "fp32", candidates), pixels)
    wanted = complete(cascaded(outputs_of(network), candidates), rule)
    for name in OUTPUT_NAMES:
        assert got[name].shape == wanted[name].shape
        assert np.ptp(wanted[name], axis=0).max() > 1e-3, name
        assert relative(got[name], wanted[name]) < 5e-5, name


def columns_agree(got: NDArray[np.floating], wanted: NDArray[np.floating]) -> float:
    """The lowest correlation between a column and its counterpart."""
    return min(float(np.corrcoef(one, other)[0, 1]) for one, other in zip(got.T, wanted.T, strict=True))


@pytest.mark.parametrize("backbone", ["convnet", "resnet18"])
@pytest.mark.parametrize("method", ["hat", "sup"])
@pytest.mark.parametrize(("precision", "agreeing"), [("fp16", 0.999), ("int8", 0.9)])
def test_a_coarser_graph_has_almost_the_outputs_of_the_network(
    precision: str, agreeing: float, method: str, backbone: str, graphs: Graphs
) -> None:
    network = learned(method, backbone)
    got = run_graph(graphs.session(method, backbone, precision), pixels_for(network, IMAGES))
    wanted = outputs_of(network).full
    for name in NETWORK_NAMES:
        assert columns_agree(got[name], wanted[name]) > agreeing, name
    # Outputs computed from logits and distances are as exact as in fp32.
    completed = complete(got, decider_for(network).rule)
    assert max(relative(got[name], completed[name]) for name in OUTPUT_NAMES) < 1e-5


@pytest.mark.parametrize(
    ("method", "backbone", "precision", "candidates"),
    [
        ("hat", "convnet", "int8", 1),
        ("sup", "convnet", "int8", 2),
        ("hat", "resnet18", "int8", 1),
        ("sup", "resnet18", "int8", 1),
        ("hat", "convnet", "fp16", 2),
        ("sup", "resnet18", "fp16", 1),
    ],
)
def test_a_coarser_cascade_rotates_images_for_the_given_number_of_tasks(
    method: str, backbone: str, precision: str, candidates: int, graphs: Graphs
) -> None:
    network = learned(method, backbone)
    rule, pixels = decider_for(network).rule, pixels_for(network, IMAGES)
    full = run_graph(graphs.session(method, backbone, precision), pixels)["distances"]
    got = run_graph(graphs.session(method, backbone, precision, candidates), pixels)["distances"]
    upright = outputs_of(network).upright["distances"]
    # In half precision, sums round differently in batches of another size.
    close = 2e-3 if precision == "fp16" else 1e-4
    rotated = np.stack(
        [np.isclose(got[:, own], full[:, own], rtol=close, atol=close).all(axis=1) for own in rule.columns], axis=1
    )
    assert (rotated.sum(axis=1) == candidates).all()
    kept = ~rotated[:, rule.task_of_class]
    assert np.corrcoef(got[kept], upright[kept])[0, 1] > 0.97


def test_tasks_of_one_size_need_no_filling_up(tmp_path: Path) -> None:
    network = learned(sizes=(2, 2, 2))
    rule, pixels = decider_for(network).rule, pixels_for(network, IMAGES)
    got = run_graph(whole_session(written(tmp_path, network, "fp32", 1), "fp32"), pixels)
    wanted = complete(cascaded(rotated_outputs(network, decider_for(network), pixels), 1), rule)
    assert max(relative(got[name], wanted[name]) for name in OUTPUT_NAMES) < 1e-4


def test_a_task_that_falls_behind_by_a_margin_is_left_out(tmp_path: Path) -> None:
    network = learned(sizes=(2, 2, 2))
    decider, pixels = decider_for(network), pixels_for(network, IMAGES)
    outputs = rotated_outputs(network, decider, pixels)
    two = np.sort(complete(outputs.upright, decider.rule)["scores"], axis=1)[:, :2]
    # Half of the images have a second task within it.
    margin = float(np.median(two[:, 1] - two[:, 0]))
    again = seen_again(outputs, 2, margin).sum(axis=1)
    assert sorted(np.unique(again)) == [1, 2]
    graph = written(tmp_path, network, "fp32", 2, margin=margin * 1.0001)
    got = run_graph(whole_session(graph, "fp32"), pixels)
    wanted = complete(cascaded(outputs, 2, margin * 1.0001), decider.rule)
    assert max(relative(got[name], wanted[name]) for name in OUTPUT_NAMES) < 1e-4


@pytest.mark.parametrize(
    ("precision", "backbone", "candidates"),
    [("fp32", "convnet", 1), ("fp32", "convnet", 2), ("int8", "convnet", 1), ("fp32", "resnet18", 1)],
)
def test_an_image_is_answered_alone_as_among_others(
    precision: str, backbone: str, candidates: int, graphs: Graphs
) -> None:
    """A task without candidate images is skipped, others see their candidates only: no row may change."""
    network = learned("hat", backbone)
    rule, pixels = decider_for(network).rule, pixels_for(network, IMAGES)
    foreign = complete(outputs_of(network).upright, rule)["scores"]
    best = foreign.argsort(axis=1)[:, :candidates]
    # Cover every case of images that need a task: none, some, and all or none in a batch of one.
    assert len(np.unique(best)) > candidates
    session = graphs.session("hat", backbone, precision, candidates)
    together = run_graph(session, pixels)
    shuffled = run_graph(session, pixels[::-1].copy())
    alone = run_graph(session, pixels, size=1)
    for name in (*OUTPUT_NAMES, FEATURES):
        for other in (alone[name], shuffled[name][::-1]):
            np.testing.assert_allclose(other, together[name], rtol=1e-4, atol=1e-4, err_msg=name)


def test_only_the_tasks_that_may_win_see_an_image_rotated(graphs: Graphs) -> None:
    network = learned("hat", "convnet")
    rule, pixels = decider_for(network).rule, pixels_for(network, IMAGES)
    full, upright = outputs_of(network).full, outputs_of(network).upright
    got = run_graph(graphs.session("hat", "convnet", "fp32", 1), pixels)["distances"]
    foreign = complete(upright, rule)["scores"]
    for row, best in enumerate(foreign.argmin(axis=1)):
        for task, own in enumerate(rule.columns):
            wanted = full if task == best else upright
            np.testing.assert_allclose(got[row, own], wanted["distances"][row, own], rtol=1e-4, atol=1e-5)
            other = upright if task == best else full
            assert not np.allclose(got[row, own], other["distances"][row, own], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["hat", "sup"])
def test_convolutions_in_a_branch_have_weights_of_their_own(method: str, graphs: Graphs) -> None:
    # onnxruntime gives a convolution the fast layout only if the graph that it is in holds its weights.
    branches = [
        attribute.g
        for node in graphs.model(method, "convnet", "fp32", 1).graph.node
        for attribute in node.attribute
        if node.op_type == "If" and attribute.name == "then_branch"
    ]
    assert branches
    for branch in branches:
        made = {output for node in branch.node if node.op_type == "Reshape" for output in node.output}
        convolutions = [node for node in branch.node if node.op_type == "Conv"]
        assert convolutions
        assert {name for node in convolutions for name in node.input[1:]} <= made


def test_features_are_every_tasks_own_of_the_upright_image(graphs: Graphs) -> None:
    network = learned("hat", "convnet")
    pixels = pixels_for(network, 4)
    full, quick = (run_graph(graphs.session("hat", "convnet", "fp32", count), pixels) for count in (None, 1))
    live = [len(network.connection.after.live(task)) for task in range(len(network.heads))]
    assert full[FEATURES].shape == (4, sum(live))
    np.testing.assert_allclose(quick[FEATURES], full[FEATURES], rtol=1e-5, atol=1e-5)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        own = [
            network.detector(task).mahalanobis.standardised(network.live_features(images, task).deep)[0]
            for task in range(len(network.heads))
        ]
    np.testing.assert_allclose(full[FEATURES], torch.cat(own, dim=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "int8", "fp16"])
def test_the_graph_is_checked_and_its_batch_is_free(precision: str, graphs: Graphs) -> None:
    path = graphs.folder("hat", "convnet", precision, 1) / graph_name(precision)
    onnx.checker.check_model(path, full_check=True)
    model = onnx.load(path)
    (pixels,) = model.graph.input
    assert (pixels.name, pixels.type.tensor_type.elem_type) == (INPUT_NAME, TensorProto.UINT8)
    batch, *shape = pixels.type.tensor_type.shape.dim
    assert batch.dim_param == "batch"
    assert [side.dim_value for side in shape] == [8, 8, 1]
    assert [output.name for output in model.graph.output] == [*OUTPUT_NAMES, FEATURES]
    assert all(output.type.tensor_type.elem_type == TensorProto.FLOAT for output in model.graph.output)
    assert {entry.key: entry.value for entry in model.metadata_props} == {"name": "tiny"}


@pytest.mark.parametrize("candidates", [None, 1])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_every_node_name_contains_its_task(precision: str, candidates: int | None, graphs: Graphs) -> None:
    graph = graphs.model("hat", "resnet18", precision, candidates).graph
    nodes = [*graph.node]
    for branch in (attribute.g for node in graph.node for attribute in node.attribute if node.op_type == "If"):
        nodes += branch.node
    names = [node.name for node in nodes]
    assert len(set(names)) == len(names)
    rooms = {name.split("/")[0] for name in names}
    own = {"pixels", "task0", "task1", "logits", "distances", "features", "decision"}
    assert rooms == own | ({"cascade"} if candidates else set())
    assert "task1/body/2/first/Conv" in names
    assert ("task1/body/2/first/Conv@turned" in names) == (candidates is not None)


def test_writing_twice_gives_the_same_bytes(graphs: Graphs, tmp_path: Path) -> None:
    first = graphs.folder("sup", "convnet", "int8", 2)
    for path in written(tmp_path, learned("sup", "convnet"), "int8", 2).iterdir():
        assert path.read_bytes() == (first / path.name).read_bytes(), path.name
