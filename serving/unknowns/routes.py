"""The pages under /unknowns; who may see them is checked before a request comes here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar, cast

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from serving.bundle import Manifest
from serving.errors import (
    AlreadyLearnedError,
    BadLabelError,
    NoSuchItemError,
    ParameterError,
    QuarantineAwayError,
    QuarantineOffError,
    RequestError,
    ServerError,
)
from serving.page import FRESH, STATIC
from serving.quarantine import LabelError, LearnedError, StoreError, UnavailableError, UnknownIdError
from serving.queue import InferenceQueue
from serving.schemas import ModelName, Wire
from serving.security import USER
from serving.unknowns.overview import item_list, overview
from serving.unknowns.pictures import Picture, picture, thumbnail
from serving.unknowns.wire import (
    LARGEST_ID,
    MOST_IDS,
    Changed,
    ChosenBody,
    Deleted,
    LabelBody,
    MergeBody,
    Merged,
    MoveBody,
)
from serving.upload import FEW_PARTS, from_json, read_body

if TYPE_CHECKING:
    from serving.quarantine.keeper import Keeper
    from serving.quarantine.store import Store

LARGEST_BODY = 1024 * 1024
FIRST_ITEMS, MOST_ITEMS = 24, 500
CONFIRM, ALL = "confirm", "all"
"""What has to be said before everything is deleted."""
PRIVATE = {"cache-control": "no-store", "cross-origin-resource-policy": "same-origin"}
# A number never comes to mean another image.
KEPT = {"cache-control": "private, max-age=3600", "cross-origin-resource-policy": "same-origin"}
WHICH = '"ids": [1, 2, ...] or "group": 3'

T = TypeVar("T")
Body = TypeVar("Body", bound=Wire)

_threads = ThreadPoolExecutor(4, "unknowns")
"""Of our own: a database that hangs holds up this page, and no other."""


async def _page(request: Request) -> Response:
    return FileResponse(STATIC / "unknowns.html", headers=FRESH)


async def _groups(request: Request) -> Response:
    first = _number(_query(request, "items"), "items", FIRST_ITEMS, least=0, most=MOST_ITEMS)
    manifest = _manifest(request)
    user: str = request.scope[USER]
    model, known = ModelName(name=manifest.name, version=manifest.version), manifest.labels
    settings = request.app.state.settings
    return _json(
        await _ask(
            request,
            lambda store: overview(store, user=user, model=model, known=known, settings=settings, first=first),
        )
    )


async def _items(request: Request) -> Response:
    given = _query(request, "group", "after", "limit")
    group = _number(given, "group", None, least=1) if given.get("group") != "none" else None
    if "group" not in given:
        raise ParameterError("no group given", got="no group", allowed="group=NUMBER, or group=none")
    after = _number(given, "after", 0, least=0)
    limit = _number(given, "limit", 100, least=1, most=MOST_ITEMS)
    return _json(await _ask(request, lambda store: item_list(store, group, after=after, limit=limit)))


async def _image(request: Request) -> Response:
    return await _picture(request, picture)


async def _thumbnail(request: Request) -> Response:
    return await _picture(request, thumbnail)


async def _picture(request: Request, shown: Callable[[bytes], Picture]) -> Response:
    number = _item_id(request)
    content, media_type = await _ask(request, lambda store: shown(store.image(number)))
    return Response(content, media_type=media_type, headers=KEPT)


async def _label(request: Request) -> Response:
    body = await _body(request, LabelBody, f'{{{WHICH}, "label": "8"}}')
    if body.label.strip() in _manifest(request).labels:
        allowed = "a new class; /unknowns/known takes images of a class that the model has"
        raise BadLabelError("the model has such a class", got=repr(body.label), allowed=allowed)
    return await _change(request, body, ("junk", "learned"), lambda store, ids, who: store.name(ids, body.label, who))


async def _known(request: Request) -> Response:
    body = await _body(request, LabelBody, f'{{{WHICH}, "label": "7"}}')
    labels = _manifest(request).labels
    if body.label.strip() not in labels:
        raise BadLabelError("the model has no such class", got=repr(body.label), allowed=", ".join(labels))
    return await _change(
        request, body, ("junk", "learned"), lambda store, ids, who: store.mark_known(ids, body.label, who)
    )


async def _junk(request: Request) -> Response:
    body = await _body(request, ChosenBody, f"{{{WHICH}}}")
    return await _change(request, body, ("learned",), lambda store, ids, who: store.mark_junk(ids, who))


async def _clear(request: Request) -> Response:
    body = await _body(request, ChosenBody, f"{{{WHICH}}}")
    return await _change(request, body, ("learned",), lambda store, ids, who: store.clear(ids, who))


async def _move(request: Request) -> Response:
    body = await _body(request, MoveBody, '{"ids": [1, 2, ...], "group": 3 or null}')
    who: str = request.scope[USER]
    await _ask(request, lambda store: store.move(body.ids, body.group, who))
    return _json(Changed(items=tuple(dict.fromkeys(body.ids))))


async def _merge(request: Request) -> Response:
    body = await _body(request, MergeBody, '{"groups": [3, 5, ...]}')
    who: str = request.scope[USER]
    return _json(Merged(group=await _ask(request, lambda store: store.merge(body.groups, who))))


async def _delete(request: Request) -> Response:
    number, who = _item_id(request), request.scope[USER]
    deleted = await _ask(request, lambda store: store.delete([number], who))
    if not deleted:
        raise _no_such(f"no item {number}")
    return _json(Deleted(deleted=deleted))


async def _delete_all(request: Request) -> Response:
    said, who = _query(request, CONFIRM).get(CONFIRM), request.scope[USER]
    if said != ALL:
        got = "no confirmation" if said is None else f"{CONFIRM}={said}"
        raise ParameterError("everything would be deleted", got=got, allowed=f"{CONFIRM}={ALL}, if that is meant")
    return _json(Deleted(deleted=await _ask(request, lambda store: store.delete_all(who))))


async def _change(
    request: Request,
    body: ChosenBody,
    spared: tuple[str, ...],
    change: Callable[[Store, list[int], str], None],
) -> Response:
    """Do it to the items given; in a group, those in a `spared` state stay as they are, unless there are no others."""
    who: str = request.scope[USER]

    def work(store: Store) -> Changed:
        ids = list(dict.fromkeys(body.ids or ()))
        if body.group is not None:
            members = store.members(body.group)
            if not members:
                raise UnknownIdError(f"no group {body.group}")
            ids = [number for number, state in members.items() if state not in spared]
            ids = ids or [number for number, state in members.items() if state != "learned"] or list(members)
        change(store, ids, who)
        return Changed(items=tuple(ids))

    return _json(await _ask(request, work))


async def _ask(request: Request, work: Callable[[Store], T]) -> T:
    """Off the event loop; what goes wrong in the store gets its status here."""
    keeper: Keeper | None = request.app.state.keeper
    if keeper is None:
        raise QuarantineOffError(
            "there is no quarantine",
            got="OPENWORLD_QUARANTINE_URL not set",
            allowed="a server that is started with it, as in sqlite:////var/lib/openworld/quarantine.db",
        )
    try:
        return await asyncio.get_running_loop().run_in_executor(_threads, work, keeper.store)
    except UnknownIdError as error:
        raise _no_such(str(error)) from None
    except LabelError as error:
        got, _, allowed = str(error).partition("; allowed: ")
        raise BadLabelError("cannot be used as it is", got=got, allowed=allowed) from None
    except LearnedError as error:
        raise AlreadyLearnedError("learned already", got=str(error), allowed="what no model has learned") from None
    except UnavailableError as error:
        allowed = "the same request again, in a while"
        raise QuarantineAwayError("the quarantine is away", got=str(error), allowed=allowed) from None
    except StoreError as error:
        raise ServerError("the quarantine failed", got=str(error), allowed="one that is whole") from error


def _no_such(got: str) -> RequestError:
    return NoSuchItemError("not in the quarantine", got=got, allowed="what /unknowns/groups and /unknowns/items list")


async def _body(request: Request, model: type[Body], allowed: str) -> Body:
    announced = request.headers.get("content-length", "").encode()
    body = await read_body(request.receive, announced, LARGEST_BODY)
    return from_json(model, body, allowed, FEW_PARTS + 2 * MOST_IDS)


def _query(request: Request, *names: str) -> dict[str, str]:
    """The parameters that were given; a name that is not known would otherwise be ignored in silence."""
    given: dict[str, str] = {}
    for name, text in request.query_params.multi_items():
        if name not in names or name in given:
            problem = "parameter given twice" if name in given else "no such parameter"
            raise ParameterError(problem, got=name, allowed=f"{', '.join(names)}, each once")
        given[name] = text
    return given


def _number(given: dict[str, str], name: str, otherwise: T, *, least: int, most: int = LARGEST_ID) -> int | T:
    if name not in given:
        return otherwise
    text = given[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and least <= int(text) <= most):
        raise ParameterError("parameter cannot be read", got=f"{name}={text}", allowed=f"{least} to {most}")
    return int(text)


def _item_id(request: Request) -> int:
    text: str = request.path_params["id"]
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= LARGEST_ID):
        raise _no_such(f"no item {text}")
    return int(text)


def _manifest(request: Request) -> Manifest:
    return cast(InferenceQueue, request.app.state.queue).served.model.manifest


def _json(answer: Wire) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json", headers=PRIVATE)


routes = [
    Route("/unknowns", _page),
    Route("/unknowns/groups", _groups),
    Route("/unknowns/items", _items, methods=["GET"]),
    Route("/unknowns/items", _delete_all, methods=["DELETE"]),
    Route("/unknowns/items/{id}", _delete, methods=["DELETE"]),
    Route("/unknowns/items/{id}/image", _image),
    Route("/unknowns/items/{id}/thumbnail", _thumbnail),
    Route("/unknowns/label", _label, methods=["POST"]),
    Route("/unknowns/known", _known, methods=["POST"]),
    Route("/unknowns/junk", _junk, methods=["POST"]),
    Route("/unknowns/clear", _clear, methods=["POST"]),
    Route("/unknowns/move", _move, methods=["POST"]),
    Route("/unknowns/merge", _merge, methods=["POST"]),
]
