"""`onnx:FILE`: a feature extractor that the user brings, such as DINOv2, CLIP or a company's own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from models.suggest import unknown_name
from models.trunks.trunk import Trunk, TrunkError, TrunkRequest, TrunkSpec, file_sha256
from models.trunks.wrapped import CHANNELS, FLOATS, LAYOUTS, POOLS, ImageInput, Normalisation, image_input, wrap

DEFAULT_SIZE = 224
MOST_BYTES = 2**31 - 1
"""The largest serialised model."""
OPTIONS = ("mean", "std", "output", "layout", "pool")
RANGES = {
    "Normalized_0_1": Normalisation((0.0,) * CHANNELS, (1.0,) * CHANNELS),
    "Normalized_1_1": Normalisation((0.5,) * CHANNELS, (0.5,) * CHANNELS),
    "NominalRange_0_255": Normalisation((0.0,) * CHANNELS, (1 / 255,) * CHANNELS),
}
"""What the metadata `Image.NominalPixelRange` of a model means, as (x / 255 - mean) / std."""
PIXEL_RANGE = "Image.NominalPixelRange"


def open_onnx(request: TrunkRequest) -> Trunk:
    """The trunk around an ONNX file. Its name has the absolute path, so that a run may be opened from elsewhere."""
    request.check_options(*OPTIONS)
    path = Path(request.argument).expanduser().resolve()
    model, sha256 = _loaded(request.weights or path)
    options = request.options
    try:
        source = image_input(model, _one_of(options, "layout", LAYOUTS))
        size = request.size or source.side or DEFAULT_SIZE
        normalisation, origin = _normalisation(model, options)
        wanted = [name for name in options.get("output", "").split(",") if name]
        pool = _one_of(options, "pool", POOLS) or POOLS[0]
        wrapped = wrap(model, source, size, normalisation, wanted, pool)
    except Exception as error:
        # A foreign model fails in many ways: in the checker, in the inference of shapes, in the converter of opsets.
        reason = " ".join(str(error).split())[:600]
        raise TrunkError(f"{path}: cannot be used as a feature extractor: {reason}") from error
    settled = {"output": ",".join(wrapped.outputs), "layout": source.layout, "pool": pool}
    settled |= {name: ",".join(f"{value!r}" for value in getattr(normalisation, name)) for name in ("mean", "std")}
    spec = TrunkSpec(f"onnx:{path}", sha256, size, wrapped.depths, settled)
    return Trunk(spec, wrapped.model, (_described(source, settled, origin),))


def _loaded(file: Path) -> tuple[onnx.ModelProto, str]:
    """A model with all its weights, and the checksum of all its files."""
    sha256 = file_sha256(file)
    try:
        bare = onnx.load(file, load_external_data=False)
        outside = {ExternalDataInfo(tensor).location for tensor in bare.graph.initializer if uses_external_data(tensor)}
        model = onnx.load(file) if outside else bare
    except Exception as error:
        # onnx raises protobuf's errors too, whose classes are not its own.
        reason = " ".join(str(error).split())[:300]
        raise TrunkError(f"{file}: not an ONNX model that can be read ({reason}); allowed: an .onnx file") from error
    if not model.graph.node:
        raise TrunkError(f"{file}: not an ONNX model: it has no nodes; allowed: an .onnx file")
    if model.ByteSize() > MOST_BYTES:
        raise TrunkError(f"{file}: {model.ByteSize() / 2**30:.1f} GB with its weights; allowed: less than 2 GB")
    if outside:
        parts = [sha256, *(file_sha256(file.parent / name) for name in sorted(outside))]
        sha256 = hashlib.sha256("".join(parts).encode()).hexdigest()
    return model, sha256


def _normalisation(model: onnx.ModelProto, options: Mapping[str, str]) -> tuple[Normalisation, str]:
    """What is subtracted and divided, and where that is known from: the options, the model, or its likely training."""
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    for origin, given in (("given by options", options), ("noted in the model", metadata)):
        if "mean" in given or "std" in given:
            defaults = {name: ",".join(map(str, value)) for name, value in Normalisation()._asdict().items()}
            mean, std = (_numbers(name, given.get(name, defaults[name])) for name in ("mean", "std"))
            if min(std) <= 0:
                raise ValueError(f"std is {given['std']!r}; allowed: above 0")
            return Normalisation(mean, std), origin
    if metadata.get(PIXEL_RANGE) in RANGES:
        return RANGES[metadata[PIXEL_RANGE]], "noted in the model"
    return (
        Normalisation(),
        "as for networks that were trained on ImageNet; --trunk-option mean=... and std=... change it",
    )


def _numbers(name: str, text: str) -> tuple[float, ...]:
    """One number, which counts for all channels, or one per channel."""
    try:
        values = tuple(map(float, text.split(",")))
    except ValueError:
        values = ()
    values = values * CHANNELS if len(values) == 1 else values
    if len(values) != CHANNELS or not all(map(math.isfinite, values)):
        raise ValueError(f"{name} is {text!r}; allowed: one number or three, of pixels in 0..1, such as 0.48,0.46,0.41")
    return values


def _one_of(options: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str | None:
    value = options.get(name)
    if value is not None and value not in allowed:
        raise ValueError(unknown_name(name, value, allowed))
    return value


def _described(source: ImageInput, settled: Mapping[str, str], origin: str) -> str:
    pixels = f"mean {settled['mean']}, std {settled['std']} of pixels in 0..1 ({origin})"
    shown = pixels if source.kind in FLOATS else "8-bit pixels as they are"
    return f"input {source.name} ({source.layout}): {shown}; output {settled['output']}"
