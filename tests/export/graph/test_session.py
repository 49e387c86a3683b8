"""A graph that is too large for one session is run task by task, and verified like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from export import exporter
from export.__main__ import main
from export.graph import cascade as choosing
from export.graph import session as opened
from export.graph.assemble import GraphPlan, write_graph
from export.graph.session import GraphByTask, GraphQuery, WholeGraph, is_large, open_written
from export.verify import main as verify_command
from serving.bundle.layout import graph_name
from serving.bundle.manifest import Graph, load_bundle
from serving.bundle.sections import Cascade
from tests.export.conftest import Graphs
from tests.export.networks import learned, pixels_for
from tests.export.test_verify import assert_nothing_is_written


@pytest.mark.parametrize("candidates", [None, 1, 2])
@pytest.mark.parametrize(("method", "precision"), [("hat", "fp32"), ("sup", "fp32"), ("hat", "int8")])
def test_a_graph_run_task_by_task_has_the_same_outputs(
    method: str, precision: str, candidates: int | None, graphs: Graphs
) -> None:
    folder = graphs.folder(method, "convnet", precision, candidates)
    pixels = pixels_for(learned(method, "convnet"), 12)
    (wanted,) = WholeGraph(folder, precision).run([GraphQuery(pixels)])
    got = GraphByTask(folder, precision).run([GraphQuery(pixels, 3), GraphQuery(pixels[:5])])
    for outputs, count in zip(got, (12, 5), strict=True):
        assert outputs.keys() == wanted.keys()
        for name, values in wanted.items():
            np.testing.assert_allclose(outputs[name], values[:count], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", [WholeGraph, GraphByTask])
def test_every_task_can_see_all_images_rotated(way: type[WholeGraph | GraphByTask], graphs: Graphs) -> None:
    pixels = pixels_for(learned("hat", "convnet"), 12)
    (wanted,) = WholeGraph(graphs.folder("hat", "convnet"), "fp32").run([GraphQuery(pixels)])
    got, chosen = way(graphs.folder("hat", "convnet", "fp32", 1), "fp32").run(
        [GraphQuery(pixels, 5, all_rotated=True), GraphQuery(pixels)]
    )
    for name, values in wanted.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-5, atol=1e-5)
    assert not np.allclose(chosen["logits"], wanted["logits"], rtol=1e-5, atol=1e-5)


def opened_counts(patch: pytest.MonkeyPatch) -> list[set[str]]:
    """Record the weight files of each session that is opened from now on."""
    taken: list[set[str]] = []

    def open_session(graph: Graph, *arguments: Any) -> Any:
        taken.append(set(graph.parts))
        return real(graph, *arguments)

    real = opened.open_session
    patch.setattr(opened, "open_session", open_session)
    return taken


@pytest.mark.parametrize("cascade", ["off", "on"])
def test_a_large_graph_is_verified_task_by_task_and_each_is_opened_once(
    cascade: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "LARGE", 1)
    monkeypatch.setattr(choosing, "AGREEMENT", 0.0)
    taken = opened_counts(monkeypatch)
    assert main([str(run), "--out", str(tmp_path / "bundle"), "--cascade", cascade]) == 0
    assert [files for files in taken if files] == [{f"task{task}.bin", f"task{task}.fp32.bin"} for task in range(3)]
    manifest = load_bundle(tmp_path / "bundle").manifest
    assert (manifest.cascade.candidates is None) == (cascade == "off")
    assert verify_command([str(tmp_path / "bundle")]) == 0


@pytest.mark.parametrize(("node", "output"), [("decision/likely/Neg", "p_task"), ("cascade/last/Gather", "logits")])
def test_a_wrong_node_between_the_tasks_of_a_large_graph_is_refused(
    node: str, output: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def write(folder: Path, bake: Any, plan: GraphPlan) -> None:
        write_graph(folder, bake, plan)
        path = folder / graph_name("fp32")
        model = onnx.load(path, load_external_data=False)
        found = next(each for each in model.graph.node if each.name == node)
        if found.op_type == "Neg":
            found.op_type = "Identity"
        else:
            # Run the best task instead of the last candidate.
            found.input[1] = "first_axis"
        path.write_bytes(model.SerializeToString())

    monkeypatch.setattr(opened, "LARGE", 1)
    monkeypatch.setattr(exporter, "write_graph", write)
    chosen = Cascade(candidates=2, margin=1000.0, agreement=None, images=0)
    monkeypatch.setattr(exporter, "choose_cascade", lambda *_: chosen)
    assert f"{output}, batch 1: " in assert_nothing_is_written([str(run)], tmp_path / "place", capsys)


def test_only_a_large_graph_is_run_task_by_task(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    for method, candidates in (("hat", None), ("sup", None), ("hat", 1)):
        folder = graphs.folder(method, "convnet", "fp32", candidates)
        model = onnx.load(folder / graph_name("fp32"))
        weights = sum(np.prod(each.dims) * (8 if "packed" in each.name else 1) for each in model.graph.initializer)
        weights *= 2 if candidates else 1
        monkeypatch.setattr(opened, "LARGE", weights)
        assert is_large(model)
        assert isinstance(open_written(folder, "fp32"), GraphByTask)
        monkeypatch.setattr(opened, "LARGE", weights + 1)
        assert isinstance(open_written(folder, "fp32"), WholeGraph)
