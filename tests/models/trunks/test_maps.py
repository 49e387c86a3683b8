"""Which trunks have feature maps, and that the average of a map is the vector that the trunk computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from models.trunks.maps import maps_beside, with_maps
from models.trunks.trunk import Trunk, open_trunk
from serving.bundle.explanation import cell_vectors
from serving.bundle.graph_outputs import output_names
from serving.bundle.manifest import Graph
from serving.bundle.session import open_session, session_options

SIDE, WIDTH = 32, 6
PIXELS = np.random.default_rng(1).integers(0, 256, (3, SIDE, SIDE, 3), dtype=np.uint8)


def node(kind: str, inputs: str, output: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), [output], **attributes)


POOL = [node("GlobalAveragePool", "maps", "average")]
MEAN = [node("ReduceMean", "maps axes", "average")]
FLAT = [node("ReduceMean", "maps axes", "average", keepdims=0)]
CONSTANTS = {"axes": [2, 3], "last": [-1, -2], "rows": [2], "channels": [1, 3], "sides": [-1, WIDTH], "mixed": [1]}
AVERAGES = {
    "GlobalAveragePool": [*POOL, node("Flatten", "average", "features")],
    "ReduceMean and Reshape": [*MEAN, node("Reshape", "average sides", "features")],
    "ReduceMean of the last axes": [
        node("ReduceMean", "maps last", "average"),
        node("Squeeze", "average axes", "features"),
    ],
    "constants that are nodes": [
        node("Constant", "", "written", value=numpy_helper.from_array(np.array([2, 3]))),
        node("ReduceMean", "maps written", "features", keepdims=0),
    ],
    "names and types": [
        *FLAT,
        node("Cast", "average", "half", to=TensorProto.FLOAT16),
        node("Identity", "half", "features"),
    ],
    "maps themselves": [node("Identity", "maps", "features")],
}
OTHERS = {
    "every number of a map": [node("Flatten", "maps", "features")],
    "changed after the average": [*FLAT, node("Sqrt", "average", "features")],
    "rounded": [
        *FLAT,
        node("Cast", "average", "whole", to=TensorProto.INT32),
        node("Cast", "whole", "features", to=TensorProto.FLOAT),
    ],
    "one axis": [node("ReduceMean", "maps rows", "average"), node("Flatten", "average", "features")],
    "other axes": [node("ReduceMean", "maps channels", "average"), node("Flatten", "average", "features")],
    "tokens": [
        node("Reshape", "maps three", "lines"),
        node("ReduceMean", "lines mixed", "features", keepdims=0),
    ],
}


def extractor(folder: Path, tail: list[onnx.NodeProto], kind: int = TensorProto.FLOAT) -> Trunk:
    """A trunk of one layer of filters with this graph behind its maps [n, 6, 8, 8]."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    weight = np.random.default_rng(0).normal(size=(WIDTH, 3, 4, 4)).astype(dtype)
    nodes = [node("Conv", "images weight", "sums", strides=[4, 4]), node("Relu", "sums", "maps"), *tail]
    tensors = [numpy_helper.from_array(np.array(value), name) for name, value in CONSTANTS.items()]
    tensors += [numpy_helper.from_array(np.array([0, WIDTH, 64]), "three"), numpy_helper.from_array(weight, "weight")]
    graph = helper.make_graph(
        nodes,
        "mine",
        [helper.make_tensor_value_info("images", kind, ["n", 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("features", TensorProto.UNDEFINED, None)],
        tensors,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(onnx.shape_inference.infer_shapes(model), folder / "mine.onnx")
    return open_trunk(f"onnx:{folder / 'mine.onnx'}", size=SIDE)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16])
@pytest.mark.parametrize("tail", AVERAGES)
def test_the_cells_of_an_averaged_map_add_up_to_the_vector(tmp_path: Path, tail: str, kind: int) -> None:
    trunk = extractor(tmp_path, AVERAGES[tail], kind)
    content = with_maps(trunk.model)
    assert content is not None
    session = open_session(Graph(content, {}), session_options(1))
    encoded, maps = session.run(["encoded", "map0"], {"pixels": PIXELS})
    plain = open_session(Graph(trunk.model, {}), session_options(1)).run(["encoded"], {"pixels": PIXELS})[0]
    # Nodes that onnxruntime merges round half-precision numbers less often, and a map that is an output is not merged.
    assert encoded == pytest.approx(plain, abs=0 if kind == TensorProto.FLOAT else 1e-3)
    assert maps.shape == (3, WIDTH, 8, 8)
    cells, shape = cell_vectors({0: maps[0]}, trunk.spec.depths)
    assert shape == (8, 8)
    assert cells.sum(axis=0) == pytest.approx(encoded[0], abs=2e-3)


@pytest.mark.parametrize("tail", OTHERS)
def test_a_vector_that_is_no_average_over_space_has_no_map(tmp_path: Path, tail: str) -> None:
    trunk = extractor(tmp_path, OTHERS[tail])
    assert with_maps(trunk.model) is None
    assert maps_beside(trunk.model, "trunk.onnx") is None


def test_the_outputs_of_a_graph_are_read_without_opening_it(tmp_path: Path) -> None:
    trunk = extractor(tmp_path, AVERAGES["GlobalAveragePool"])
    assert output_names(trunk.model) == ["encoded"]
    content = with_maps(trunk.model)
    assert content is not None
    assert output_names(content) == ["encoded", "map0"]
    for damaged in (b"\xff", content[:1] + b"\xff" * 4, b"\x0b"):
        with pytest.raises(ValueError, match="a serialised model"):
            output_names(damaged)
