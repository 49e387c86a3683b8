"""The pages under /unknowns in the API's description."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from serving import openapi_parts as parts
from serving.errors import (
    AdminOffError,
    AdminTokenError,
    AlreadyLearnedError,
    BadLabelError,
    BrokenImageError,
    CrossSiteError,
    ImageFormatError,
    MalformedRequestError,
    MediaTypeError,
    MethodError,
    NoSuchItemError,
    ParameterError,
    QuarantineAwayError,
    QuarantineOffError,
    RequestError,
    ServerError,
    TooManyBytesError,
)
from serving.unknowns.pictures import MEDIA_TYPES, SIDE
from serving.unknowns.routes import ALL, CONFIRM, FIRST_ITEMS, MOST_ITEMS
from serving.unknowns.wire import (
    LARGEST_ID,
    Changed,
    ChosenBody,
    Deleted,
    ItemList,
    LabelBody,
    MergeBody,
    Merged,
    MoveBody,
    Overview,
)

ANSWERS = (Overview, ItemList, Changed, Merged, Deleted)
BODIES = (ChosenBody, LabelBody, MoveBody, MergeBody)

_MEANINGS = {
    400: "the body cannot be taken apart",
    401: "no valid admin token",
    403: "the server has no admin token, or a page of another site asked",
    404: "an image or a group that is not there (any more)",
    405: "the page takes another method",
    409: "the server has no quarantine, or the label is in a model already",
    413: "too many bytes",
    415: "a body that is not JSON, or a file that is no image",
    422: "a label, a parameter or an image file that cannot be used",
    500: "the server failed",
    503: "database or image folder are away; send the same request again after Retry-After seconds",
}
_EXAMPLES: list[RequestError] = [
    MalformedRequestError("JSON body cannot be read", got="Field required label", allowed='{"ids": [1], "label": "8"}'),
    AdminTokenError("this part needs the admin token", got="none that is valid", allowed="authorization: Bearer TOKEN"),
    AdminOffError("this part is off", got="no admin token in the server's settings", allowed="see its manual"),
    CrossSiteError("asked for by another site", got="cross-site", allowed="the same site, or a program"),
    NoSuchItemError("not in the quarantine", got="no item 99", allowed="what /unknowns/groups lists"),
    MethodError("the page takes another method", got="PUT", allowed="POST"),
    QuarantineOffError("there is no quarantine", got="OPENWORLD_QUARANTINE_URL not set", allowed="a server with it"),
    AlreadyLearnedError("learned already", got="item 17 was learned as '8'", allowed="what no model has learned"),
    TooManyBytesError("body too large", got="2000000 bytes", allowed="up to 1048576 bytes for this content type"),
    MediaTypeError("body cannot be read", got="Content-Type text/plain", allowed="application/json, or no body"),
    ImageFormatError("not an image that is read here", got="content that starts with b'GIF89a'", allowed="PNG, JPEG"),
    BadLabelError("cannot be used as it is", got="label is ''", allowed="1 to 100 printable characters"),
    ParameterError("parameter cannot be read", got="limit=0", allowed=f"1 to {MOST_ITEMS}"),
    BrokenImageError("image cannot be read", got="300 bytes of PNG", allowed="a complete, undamaged file"),
    ServerError("the server failed", got="status 500", allowed="see its log"),
    QuarantineAwayError("the quarantine is away", got="database is locked", allowed="the same request again"),
]
_READ = (401, 403, 404, 405, 409, 422, 500, 503)
_IMAGE = (401, 403, 404, 405, 409, 415, 422, 500, 503)
_CHANGE = (400, 401, 403, 404, 405, 409, 413, 415, 422, 500, 503)
_DELETE = (401, 403, 404, 405, 409, 415, 422, 500, 503)

_NUMBER = {"type": "integer", "minimum": 1, "maximum": LARGEST_ID}
_CHOSEN: dict[str, dict[str, Any]] = {"by number": {"ids": [17, 18]}, "a group": {"group": 3}}


def paths() -> dict[str, Any]:
    """What may be asked of the quarantine."""
    number = parts.parameter("id", _NUMBER, "number of an image", 17, "path")
    first = {"type": "integer", "minimum": 0, "maximum": MOST_ITEMS, "default": FIRST_ITEMS}
    confirm = {"type": "string", "enum": [ALL]}
    return {
        "/unknowns": {
            "get": _operation(
                "unknowns",
                "The page on which people label",
                parts.file("the page", "<!doctype html>", "text/html"),
                (401, 403, 405, 500),
            )
        },
        "/unknowns/groups": {
            "get": _operation(
                "unknown_groups",
                "All groups with their first images, what is in none, and who did what",
                parts.json(Overview),
                _READ,
                parameters=[parts.parameter("items", first, "how many images of each to list", 12)],
            )
        },
        "/unknowns/items": {
            "get": _operation(
                "unknown_items", "Images of a group, or of none", parts.json(ItemList), _READ, parameters=_paging()
            ),
            "delete": _operation(
                "delete_all_unknowns",
                "Delete all images",
                parts.json(Deleted),
                _DELETE,
                parameters=[
                    {**parts.parameter(CONFIRM, confirm, "that this is meant", ALL), "required": True},
                ],
            ),
        },
        "/unknowns/items/{id}": {
            "delete": _operation("delete_unknown", "Delete an image", parts.json(Deleted), _DELETE, parameters=[number])
        },
        "/unknowns/items/{id}/image": {"get": _picture("unknown_image", "The file as it was sent", number)},
        "/unknowns/items/{id}/thumbnail": {
            "get": _picture("unknown_thumbnail", f"The image, of {SIDE} x {SIDE} pixels at most", number)
        },
        "/unknowns/label": {"post": _labels("label_unknowns", "They show a new class", "8")},
        "/unknowns/known": {"post": _labels("mark_known", "They show a class that the model has", "7")},
        "/unknowns/junk": {"post": _change("mark_junk", "They are of no use", ChosenBody, _CHOSEN)},
        "/unknowns/clear": {"post": _change("clear_labels", "As if nobody had looked at them", ChosenBody, _CHOSEN)},
        "/unknowns/move": {
            "post": _change(
                "move_unknowns",
                "They belong into a group, or into none",
                MoveBody,
                {"into a group": {"ids": [17], "group": 3}, "out of all": {"ids": [17], "group": None}},
            )
        },
        "/unknowns/merge": {
            "post": _change("merge_groups", "They are one group", MergeBody, {"two": {"groups": [3, 5]}}, answer=Merged)
        },
    }


def schemas() -> dict[str, Any]:
    return {**parts.schemas(ANSWERS), **parts.schemas(BODIES, "validation")}


def _operation(
    name: str, summary: str, response: dict[str, Any], statuses: tuple[int, ...], **more: Any
) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        "security": parts.ADMIN_ONLY,
        **more,
        "responses": {"200": response, **parts.errors(statuses, _MEANINGS, _EXAMPLES)},
    }


def _paging() -> list[dict[str, Any]]:
    group = {"anyOf": [_NUMBER, {"type": "string", "enum": ["none"]}]}
    after = {"type": "integer", "minimum": 0, "maximum": LARGEST_ID, "default": 0}
    limit = {"type": "integer", "minimum": 1, "maximum": MOST_ITEMS, "default": 100}
    return [
        {**parts.parameter("group", group, "number of a group, or none", 3), "required": True},
        parts.parameter("after", after, "only images with larger numbers", 17),
        parts.parameter("limit", limit, "how many at most", 100),
    ]


def _picture(name: str, summary: str, number: dict[str, Any]) -> dict[str, Any]:
    file = parts.file("the image", parts.A_FILE, *MEDIA_TYPES.values(), schema={"type": "string", "format": "binary"})
    return _operation(name, summary, file, _IMAGE, parameters=[number])


def _labels(name: str, summary: str, label: str) -> dict[str, Any]:
    examples = {which: {**chosen, "label": label} for which, chosen in _CHOSEN.items()}
    return _change(name, summary, LabelBody, examples)


def _change(
    name: str, summary: str, body: type[BaseModel], examples: dict[str, Any], answer: type[BaseModel] = Changed
) -> dict[str, Any]:
    shown = {which: {"value": value} for which, value in examples.items()}
    content = {"application/json": {"schema": parts.reference(body), "examples": shown}}
    request = {"required": True, "content": content}
    return _operation(name, summary, parts.json(answer), _CHANGE, requestBody=request)
