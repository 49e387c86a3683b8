"""One ONNX graph for a whole network: 8-bit pixels in, what the decision reads out."""

from __future__ import annotations

import logging
import warnings

import onnx
import torch

from export.bake import BakedNetwork
from serving.bundle import INPUT_NAME, ImageSpec
from serving.decision import OUTPUT_NAMES

OPSET = 23


def to_onnx(baked: BakedNetwork, image: ImageSpec, metadata: dict[str, str]) -> bytes:
    """A checked graph with a dynamic batch, as bytes."""
    example = torch.zeros((2, *image.shape), dtype=torch.uint8)
    # The exporter reports on itself at length; what it gets wrong is caught by the checker and by verification.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            baked,
            (example,),
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=[INPUT_NAME],
            output_names=list(OUTPUT_NAMES),
            dynamic_shapes={INPUT_NAME: {0: torch.export.Dim("batch")}},
        )
    assert program is not None
    model = program.model_proto
    for node in model.graph.node:
        # Tracing notes name files of the machine that exported; a bundle says nothing of it.
        del node.metadata_props[:]
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=value)
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))
