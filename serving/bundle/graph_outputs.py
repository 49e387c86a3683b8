"""The names of the outputs of a serialised ONNX model, without opening a session: that would load its weights."""

from __future__ import annotations

from collections.abc import Iterator

GRAPH, OUTPUT, NAME = 7, 12, 1
"""Fields of ModelProto, GraphProto and ValueInfoProto in onnx.proto."""
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""How a field is stored (protobuf.dev/programming-guides/encoding)."""


def output_names(model: bytes) -> list[str]:
    """The outputs of the graph in their order; a ValueError if this is not a serialised model."""
    outputs = (output for graph in _fields(memoryview(model), GRAPH) for output in _fields(graph, OUTPUT))
    return [bytes(name).decode() for output in outputs for name in _fields(output, NAME)]


def _fields(message: memoryview, wanted: int) -> Iterator[memoryview]:
    """The contents of the fields of a message with this number, which have to be messages or texts."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if (kind := tag & 7) == VARINT:
            _, at = _varint(message, at)
            continue
        if kind == BYTES:
            length, at = _varint(message, at)
        elif kind in (FIXED64, FIXED32):
            length = 8 if kind == FIXED64 else 4
        else:
            raise ValueError(f"a field of a serialised model is stored as {kind}; allowed: 0, 1, 2 or 5")
        if kind == BYTES and tag >> 3 == wanted:
            yield message[at : at + length]
        at += length


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """A number, seven bits in each byte, and where it ends."""
    number = shift = 0
    while at < len(message):
        byte = message[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at
    raise ValueError("a serialised model ends within a number; allowed: a whole file")
