"""The Open Inference Protocol, version 2, over REST: what clients of KServe, Triton and MLServer speak.

A request has one input tensor `image` of the type BYTES with one image file per element: base64 texts in JSON, or the
files themselves after the JSON (the protocol's extension for binary data). The outputs are one tensor per field of an
answer. The protocol has no errors for single images, so an invalid image is the error of its request. Why answers
should not be relied on is the parameter `warning` of the response, as it holds for all of them.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from serving import errors
from serving.bundle.manifest import Manifest
from serving.errors import MalformedRequestError, ParameterError, RequestError, TooManyImagesError
from serving.http.guards import Guard, GuardedRouter
from serving.http.predict_routes import PREDICTION_ERRORS, PredictionQuery, Predictions, UploadedImages
from serving.http.responses import PROTOCOL_PATHS, no_such_page
from serving.http.schemas import field
from serving.http.upload import FEW_PARTS, JSON, RAW, Upload, from_base64, from_json

INPUT, BYTES = "image", "BYTES"
OUTPUTS = {
    "label": BYTES,
    "known": "BOOL",
    "best_guess": BYTES,
    "class_id": "INT64",
    "task": "INT64",
    "confidence": "FP64",
    "p_value": "FP64",
    "unknown_score": "FP64",
}
"""The tensors of a response by name, each with one element per image, and their types."""
JSON_LENGTH = "inference-header-content-length"
"""The header with the position at which the JSON of a body ends and binary data begins."""
PLATFORM = "openworld"

Text = Annotated[str, StringConstraints(max_length=200)]


class ProtocolModel(BaseModel):
    """A JSON object of the protocol; servers ignore parameters that they do not know."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class TensorInfo(ProtocolModel):
    name: str = field("name of the tensor", INPUT)
    datatype: str = field("type of its elements", BYTES)
    shape: tuple[int, ...] = field("-1: any number", [-1])


class ServerInfo(ProtocolModel):
    """The server."""

    name: str = field("name of the server", PLATFORM)
    version: str = field("version of the served bundle", "ef3557a7ea7e")
    extensions: tuple[str, ...] = field("extensions of the protocol", ["binary_tensor_data"])


class ModelInfo(ProtocolModel):
    """The served model."""

    name: str = field("preset and method", "digits-hat")
    versions: tuple[str, ...] = field("the one version that is served", ["ef3557a7ea7e"])
    platform: str = field("what runs it", PLATFORM)
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


class Health(ProtocolModel):
    """Whether something works."""

    live: bool | None = field("the process is alive", True, default=None)
    ready: bool | None = field("requests are answered", None, default=None)


class ProtocolError(ProtocolModel):
    """Why a request was not answered."""

    error: str = field("what was wrong, what was received and what is allowed", "no image: got 0 bytes; allowed: 1 ...")


class InputTensor(ProtocolModel):
    name: Text = field("name of the tensor", INPUT)
    datatype: Text = field("type of its elements", BYTES)
    shape: tuple[int, ...] = field("number of images", [1], max_length=4)
    parameters: dict[str, Any] = Field(default={}, description="binary_data_size: bytes of this tensor after the JSON")
    data: tuple[str, ...] | None = field(
        "one base64 text per image; none with binary data", ["iVBORw0KGgo..."], default=None
    )


class OutputRequest(ProtocolModel):
    name: Text = field("one of the outputs of the model", "label")


class InferRequest(ProtocolModel):
    """Images to classify."""

    id: Text = field("returned in the response", "42", default="")
    parameters: dict[str, Any] = Field(default={}, description="`alpha` and `task`, as for /predict")
    inputs: tuple[InputTensor, ...] = Field(description="one tensor of images", max_length=8)
    outputs: tuple[OutputRequest, ...] = Field(default=(), description="all, if none is named", max_length=64)


class OutputTensor(TensorInfo):
    data: tuple[str | bool | int | float, ...] = field("one element per image", ["cat"])


class InferResponse(ProtocolModel):
    """One element per image in every tensor."""

    model_name: str = field("preset and method", "digits-hat")
    model_version: str = field("version of the bundle", "ef3557a7ea7e")
    id: str = field("that of the request", "42", default="")
    parameters: dict[str, str] | None = field(
        "`warning`: why the answers should not be relied on; absent if there is no reason",
        {"warning": "Does not work here: task prediction (TP 51.5 %)."},
        default=None,
    )
    outputs: tuple[OutputTensor, ...]


def read_request(body: bytes, json_length: str | None, most: int) -> tuple[InferRequest, list[bytes]]:
    """The request and its image files."""
    length = len(body)
    if json_length is not None:
        if not (json_length.isascii() and json_length.isdigit() and int(json_length) <= len(body)):
            allowed = f"the number of bytes of the JSON, up to {len(body)}"
            raise MalformedRequestError(f"{JSON_LENGTH} cannot be used", got=json_length, allowed=allowed)
        length = int(json_length)
    allowed = "a request of the Open Inference Protocol"
    parsed = from_json(InferRequest, body[:length], allowed, FEW_PARTS + 4 * most + 128)
    images = [tensor for tensor in parsed.inputs if tensor.name == INPUT]
    if len(images) != 1 or len(parsed.inputs) != 1 or images[0].datatype != BYTES:
        got = ", ".join(f"{tensor.name} of type {tensor.datatype}" for tensor in parsed.inputs) or "no input"
        raise MalformedRequestError("inputs cannot be used", got=got, allowed=f"one input {INPUT} of type {BYTES}")
    for name in (output.name for output in parsed.outputs):
        if name not in OUTPUTS:
            raise ParameterError("no such output", got=name, allowed=", ".join(OUTPUTS))
    (tensor,) = images
    files = _binary(tensor, body[length:], most) if tensor.data is None else _texts(tensor.data, body[length:])
    if not 1 <= len(files) <= most:
        raise TooManyImagesError("number of images", got=str(len(files)), allowed=f"1 to {most}")
    if _elements(tensor.shape) != len(files):
        raise MalformedRequestError(
            "shape does not fit the data", got=f"{list(tensor.shape)}", allowed=f"[{len(files)}]"
        )
    return parsed, files


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _texts(data: tuple[str, ...], rest: bytes) -> list[bytes]:
    if rest:
        raise MalformedRequestError(
            "data is given twice",
            got=f"{len(rest)} bytes after the JSON",
            allowed="either JSON data or binary data, not both",
        )
    return [from_base64(text) for text in data]


def _binary(tensor: InputTensor, rest: bytes, most: int) -> list[bytes]:
    """The elements of a tensor after the JSON: each is its length in four bytes, little-endian, and its content."""
    size = tensor.parameters.get("binary_data_size")
    if size != len(rest):
        raise MalformedRequestError(
            "binary data cannot be read",
            got=f"binary_data_size {size}",
            allowed=f"{len(rest)}, the bytes after the JSON",
        )
    files: list[bytes] = []
    at = 0
    while at < len(rest) and len(files) <= most:
        if at + 4 > len(rest) or at + 4 + (length := struct.unpack_from("<I", rest, at)[0]) > len(rest):
            raise MalformedRequestError(
                "binary data cannot be read",
                got="an element beyond the end",
                allowed="length and content of each element",
            )
        files.append(rest[at + 4 : at + 4 + length])
        at += 4 + length
    return files


def respond(parsed: InferRequest, answers: list[dict[str, Any]], manifest: Manifest) -> InferResponse:
    """The response from the answers, one per image."""
    names = [output.name for output in parsed.outputs] or list(OUTPUTS)
    warning = next((answer["warning"] for answer in answers if answer["warning"]), None)
    return InferResponse(
        model_name=manifest.name,
        model_version=manifest.version,
        id=parsed.id,
        parameters={"warning": warning} if warning else None,
        outputs=tuple(
            OutputTensor(
                name=name, datatype=OUTPUTS[name], shape=(len(answers),), data=tuple(answer[name] for answer in answers)
            )
            for name in names
        ),
    )


def _responses(*kinds: type[RequestError]) -> dict[int | str, dict[str, Any]]:
    """The responses of a route for these errors, in the form of the protocol."""
    described: dict[int | str, dict[str, Any]] = {}
    every: tuple[type[RequestError], ...] = (*kinds, errors.MethodError, errors.ServerError)
    for kind in every:
        before = described.get(kind.status, {}).get("description")
        described[kind.status] = {
            "model": ProtocolError,
            "description": f"{before}, or {kind.__doc__}" if before else kind.__doc__,
        }
    return described


_OPTIONS: dict[str, Any] = {"tags": ["Open Inference Protocol"], "responses": _responses()}
router = APIRouter(prefix=PROTOCOL_PATHS, **_OPTIONS)
models = GuardedRouter(Guard.KEY, prefix=f"{PROTOCOL_PATHS}/models", **_OPTIONS)
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])
_NAMED = _responses(errors.PageError, *Guard.KEY.value, errors.ParameterError)
_INFER = _responses(errors.PageError, *Guard.KEY.value, *PREDICTION_ERRORS)


def _manifest(request: Request, name: str | None = None, version: str | None = None) -> Manifest:
    manifest: Manifest = request.app.state.engine().loaded.model.manifest
    if (name not in (None, manifest.name)) or (version not in (None, manifest.version)):
        raise no_such_page(request.url.path, allowed=f"/v2/models/{manifest.name}/versions/{manifest.version}")
    return manifest


@router.get("", response_model=ServerInfo)
async def server_info(request: Request) -> ServerInfo:
    """The server, in the Open Inference Protocol."""
    manifest = _manifest(request)
    return ServerInfo(name=PLATFORM, version=manifest.version, extensions=("binary_tensor_data",))


@router.get("/health/live", response_model=Health, response_model_exclude_none=True)
async def health_live() -> Health:
    """Succeeds while the process is alive."""
    return Health(live=True)


@router.get("/health/ready", response_model=Health, response_model_exclude_none=True)
async def health_ready(request: Request) -> Health:
    """Succeeds while the model answers."""
    _manifest(request)
    return Health(ready=True)


def _with_version(path: str, version_name: str, **options: Any) -> Callable[[_Endpoint], _Endpoint]:
    """Register an endpoint of a model twice: for the served version, and for a version by its name."""

    def register(endpoint: _Endpoint) -> _Endpoint:
        models.add_api_route(f"/{{name}}/versions/{{version}}{path}", endpoint, name=version_name, **options)
        models.add_api_route(f"/{{name}}{path}", endpoint, **options)
        return endpoint

    return register


@_with_version("", "model_version_info", response_model=ModelInfo, responses=_NAMED)
async def model_info(request: Request, name: str, version: str | None = None) -> ModelInfo:
    """The inputs and outputs of the model, in the Open Inference Protocol."""
    manifest = _manifest(request, name, version)
    return ModelInfo(
        name=manifest.name,
        versions=(manifest.version,),
        platform=PLATFORM,
        inputs=(TensorInfo(name=INPUT, datatype=BYTES, shape=(-1,)),),
        outputs=tuple(TensorInfo(name=name, datatype=kind, shape=(-1,)) for name, kind in OUTPUTS.items()),
    )


@_with_version(
    "/ready", "model_version_ready", response_model=Health, response_model_exclude_none=True, responses=_NAMED
)
async def model_ready(request: Request, name: str, version: str | None = None) -> Health:
    """Succeeds if the server answers for this model."""
    _manifest(request, name, version)
    return Health(ready=True)


def _inlined(part: Any, definitions: dict[str, Any]) -> Any:
    """A JSON schema with its definitions in the places that refer to them."""
    if isinstance(part, dict):
        if "$ref" in part:
            return _inlined(definitions[part["$ref"].rpartition("/")[2]], definitions)
        return {name: _inlined(value, definitions) for name, value in part.items() if name != "$defs"}
    return [_inlined(value, definitions) for value in part] if isinstance(part, list) else part


_SCHEMA = InferRequest.model_json_schema()
_BODY = {"requestBody": {"required": True, "content": {JSON: {"schema": _inlined(_SCHEMA, _SCHEMA["$defs"])}}}}


@_with_version(
    "/infer", "infer_version", methods=["POST"], response_model=InferResponse, responses=_INFER, openapi_extra=_BODY
)
async def infer(request: Request, name: str, version: str | None = None) -> Response:
    """Classify images, in the Open Inference Protocol."""
    predictions: Predictions = request.app.state.predictions
    manifest = _manifest(request, name, version)
    requests: list[InferRequest] = []

    async def split(upload: Upload) -> UploadedImages:
        length, most = request.headers.get(JSON_LENGTH), predictions.max_images
        parsed, files = await asyncio.to_thread(read_request, upload.body, length, most)
        requests.append(parsed)
        return UploadedImages([partial(_given, file) for file in files], len(upload.body), _query(parsed.parameters))

    outcomes = await predictions.split_by(request, split, content_types=(JSON, RAW))
    answers = []
    for outcome in outcomes:
        if isinstance(outcome, RequestError):
            raise outcome
        answers.append(json.loads(outcome))
    response = respond(requests[0], answers, manifest)
    return Response(response.model_dump_json(exclude_none=True), media_type=JSON)


def _given(file: bytes) -> bytes:
    return file


def _query(parameters: dict[str, Any]) -> PredictionQuery:
    """The parameters of the protocol that /predict knows, too."""
    known = {name: value for name, value in parameters.items() if name in ("alpha", "task")}
    try:
        return PredictionQuery.model_validate(known)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        got = " ".join([first["msg"], *map(str, first["loc"])])
        raise ParameterError("parameter cannot be used", got=got, allowed="alpha and task, as for /predict") from None
