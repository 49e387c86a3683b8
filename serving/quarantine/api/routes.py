"""The routes under /unknowns; the middleware checks the admin token before."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, cast

from fastapi import Path, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from serving import errors
from serving.bundle.errors import ImageError
from serving.bundle.labels import did_you_mean, same_label
from serving.bundle.manifest import Manifest
from serving.bundle.umap_places import UmapError
from serving.http.context import RequestContext
from serving.http.guards import Guard, GuardedRouter
from serving.http.openapi import error_responses, file_response
from serving.http.page import page_response
from serving.http.schemas import ApiModel, ModelName, Whole, field
from serving.inference.engine import Engine
from serving.quarantine.api import schemas
from serving.quarantine.api.embedding import PlaceCache
from serving.quarantine.api.overview import item_list, overview
from serving.quarantine.api.pictures import MEDIA_TYPES, SIDE, Picture, picture, thumbnail
from serving.quarantine.records import (
    DamagedItemError,
    LabelError,
    LearnedError,
    StoreError,
    UnavailableError,
    UnknownIdError,
)

if TYPE_CHECKING:
    from serving.quarantine.keeper import Keeper
    from serving.quarantine.store import Store

FIRST_ITEMS, MAX_ITEMS = 24, 500
PRIVATE = {"cache-control": "no-store", "cross-origin-resource-policy": "same-origin"}
# The number of a deleted image is never reused.
CACHED = {"cache-control": "private, max-age=3600", "cross-origin-resource-policy": "same-origin"}

T = TypeVar("T")

_threads = ThreadPoolExecutor(4, "unknowns")
"""A separate thread pool: a database that hangs must not delay other routes."""


class GroupsQuery(ApiModel):
    items: Whole = field("how many images of each group to list", 12, ge=0, le=MAX_ITEMS, default=FIRST_ITEMS)


class ItemsQuery(ApiModel):
    group: Annotated[Whole, Field(ge=1, le=schemas.LARGEST_ID)] | Literal["none"] = field(
        "number of a group, or none", 3
    )
    after: Whole = field("only images with larger numbers", 17, ge=0, le=schemas.LARGEST_ID, default=0)
    limit: Whole = field("how many at most", 100, ge=1, le=MAX_ITEMS, default=100)


class MapQuery(ApiModel):
    method: schemas.MapMethod = field(
        "pca: the two main directions; umap: groups come apart, once it is computed", "pca", default="pca"
    )


class DeleteQuery(ApiModel):
    confirm: Literal["all"] = field("confirms that all images are to be deleted", "all")


ItemId = Annotated[Whole, Path(ge=0, le=schemas.LARGEST_ID, description="number of an image", examples=[17])]

router = GuardedRouter(
    Guard.ADMIN,
    errors.NoSuchItemError,
    errors.QuarantineOffError,
    errors.AlreadyLearnedError,
    errors.ParameterError,
    errors.QuarantineAwayError,
    prefix="/unknowns",
    tags=["Unknown images"],
)
_image_errors = error_responses(errors.ImageFormatError, errors.ParameterError, errors.BrokenImageError)
_change_errors = error_responses(
    errors.MalformedRequestError,
    errors.TooManyBytesError,
    errors.MediaTypeError,
    errors.ParameterError,
    errors.BadLabelError,
    errors.DeadlineError,
)
_delete_errors = error_responses(errors.MediaTypeError)


@router.get("", response_class=HTMLResponse)
async def unknowns() -> Response:
    """The page for labelling."""
    return page_response("unknowns.html")


@router.get("/groups", response_model=schemas.Overview)
async def unknown_groups(request: Request, query: Annotated[GroupsQuery, Query()]) -> Response:
    """All groups with their first images, the images in no group, and the latest changes."""
    manifest, settings = _manifest(request), request.app.state.settings
    model = ModelName(name=manifest.name, version=manifest.version)
    return await _answer(
        request,
        lambda store, who: overview(
            store, user=who, model=model, known=manifest.labels, settings=settings, first=query.items
        ),
    )


@router.get("/map", response_model=schemas.EmbeddingMap)
async def unknown_map(request: Request, query: Annotated[MapQuery, Query()]) -> Response:
    """All images on a flat map of their features, together with images of the learned classes."""
    state, bundle = request.app.state, cast(Engine, request.app.state.engine()).loaded.model.bundle

    def work(store: Store, who: str) -> schemas.EmbeddingMap:
        places: PlaceCache | None = getattr(state, "places", None)
        if places is None or places.version != bundle.manifest.version:
            places = state.places = PlaceCache(bundle)
        return places.overview(store, query.method)

    try:
        return await _answer(request, work)
    except UmapError as error:
        problem, _, rest = str(error).partition(": got ")
        got, _, allowed = rest.partition("; allowed: ")
        raise errors.ParameterError(problem, got=got, allowed=allowed) from None


@router.get("/items", response_model=schemas.ItemList)
async def unknown_items(request: Request, query: Annotated[ItemsQuery, Query()]) -> Response:
    """Images of a group, or of no group."""
    group = None if query.group == "none" else query.group
    return await _answer(request, lambda store, who: item_list(store, group, after=query.after, limit=query.limit))


@router.get(
    "/items/{id}/image",
    response_class=Response,
    responses=_image_errors | file_response("the file as it was sent", *MEDIA_TYPES.values()),
)
async def unknown_image(request: Request, id: ItemId) -> Response:
    """The file as it was sent."""
    return await _picture(request, id, picture)


@router.get(
    "/items/{id}/thumbnail",
    response_class=Response,
    responses=_image_errors | file_response(f"at most {SIDE} x {SIDE} pixels", *MEDIA_TYPES.values()),
)
async def unknown_thumbnail(request: Request, id: ItemId) -> Response:
    """A small version of the image."""
    return await _picture(request, id, thumbnail)


@router.post("/label", response_model=schemas.Changed, responses=_change_errors)
async def label_unknowns(request: Request, body: schemas.LabelBody) -> Response:
    """Label images with a new class."""
    if same_label(body.label, _manifest(request).labels):
        allowed = "a new class; /unknowns/known takes images of a class that the model has"
        raise errors.BadLabelError("the model has such a class", got=repr(body.label), allowed=allowed)
    return await _change(request, body, ("junk", "learned"), lambda store, ids, who: store.name(ids, body.label, who))


@router.post("/known", response_model=schemas.Changed, responses=_change_errors)
async def mark_known(request: Request, body: schemas.LabelBody) -> Response:
    """Label images with a class that the model has."""
    labels = _manifest(request).labels
    label = same_label(body.label, labels)
    if label is None:
        allowed = f"{', '.join(labels)}{did_you_mean(body.label.strip(), labels)}"
        raise errors.BadLabelError("the model has no such class", got=repr(body.label), allowed=allowed)
    return await _change(request, body, ("junk", "learned"), lambda store, ids, who: store.mark_known(ids, label, who))


@router.post("/junk", response_model=schemas.Changed, responses=_change_errors)
async def mark_junk(request: Request, body: schemas.ChosenBody) -> Response:
    """Mark images as useless."""
    return await _change(request, body, ("learned",), lambda store, ids, who: store.mark_junk(ids, who))


@router.post("/clear", response_model=schemas.Changed, responses=_change_errors)
async def clear_labels(request: Request, body: schemas.ChosenBody) -> Response:
    """Remove the labels of images."""
    return await _change(request, body, ("learned",), lambda store, ids, who: store.clear(ids, who))


@router.post("/move", response_model=schemas.Changed, responses=_change_errors)
async def move_unknowns(request: Request, body: schemas.MoveBody) -> Response:
    """Move images to a group, or out of their groups."""

    def move(store: Store, who: str) -> schemas.Changed:
        store.move(body.ids, body.group, who)
        return schemas.Changed(items=tuple(dict.fromkeys(body.ids)))

    return await _answer(request, move)


@router.post("/merge", response_model=schemas.Merged, responses=_change_errors)
async def merge_groups(request: Request, body: schemas.MergeBody) -> Response:
    """Merge groups into the first of them."""
    return await _answer(request, lambda store, who: schemas.Merged(group=store.merge(body.groups, who)))


@router.delete("/items/{id}", response_model=schemas.Deleted, responses=_delete_errors)
async def delete_unknown(request: Request, id: ItemId) -> Response:
    """Delete an image and its file."""

    def delete(store: Store, who: str) -> schemas.Deleted:
        if not store.delete([id], who):
            raise UnknownIdError(f"no item {id}")
        return schemas.Deleted(deleted=1)

    return await _answer(request, delete)


@router.delete("/items", response_model=schemas.Deleted, responses=_delete_errors)
async def delete_all_unknowns(request: Request, query: Annotated[DeleteQuery, Query()]) -> Response:
    """Delete all images."""
    return await _answer(request, lambda store, who: schemas.Deleted(deleted=store.delete_all(who)))


async def _picture(request: Request, number: int, convert: Callable[[bytes], Picture]) -> Response:
    content, media_type = await _ask(request, lambda store, who: convert(store.image(number)))
    return Response(content, media_type=media_type, headers=CACHED)


async def _change(
    request: Request, body: schemas.ChosenBody, spared: tuple[str, ...], change: Callable[[Store, list[int], str], None]
) -> Response:
    """Apply a change to images; of a group, images in a `spared` state are left out, unless there are no others."""

    def work(store: Store, who: str) -> schemas.Changed:
        ids = list(dict.fromkeys(body.ids or ()))
        if body.group is not None:
            members = store.members(body.group)
            if not members:
                raise UnknownIdError(f"no group {body.group}")
            ids = [number for number, state in members.items() if state not in spared]
            ids = ids or [number for number, state in members.items() if state != "learned"] or list(members)
        change(store, ids, who)
        return schemas.Changed(items=tuple(ids))

    return await _answer(request, work)


async def _answer(request: Request, work: Callable[[Store, str], ApiModel]) -> Response:
    answer = await _ask(request, work)
    return Response(answer.model_dump_json(), media_type="application/json", headers=PRIVATE)


async def _ask(request: Request, work: Callable[[Store, str], T]) -> T:
    """Run work on the store, for the named user, in a thread; its errors become responses."""
    keeper: Keeper | None = request.app.state.engine().keeper
    who = RequestContext.of(request).user
    if keeper is None:
        raise errors.QuarantineOffError(
            "there is no quarantine",
            got="OPENWORLD_QUARANTINE_URL not set",
            allowed="a server with OPENWORLD_QUARANTINE_URL set, as in sqlite:////var/lib/openworld/quarantine.db",
        )
    with translated():
        return await asyncio.get_running_loop().run_in_executor(_threads, work, keeper.store, who)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Errors of the store become responses."""
    try:
        yield
    except ImageError as error:
        raise errors.refused_image(error) from None
    except UnknownIdError as error:
        allowed = "what /unknowns/groups and /unknowns/items list"
        raise errors.NoSuchItemError("not in the quarantine", got=str(error), allowed=allowed) from None
    except LabelError as error:
        got, _, allowed = str(error).partition("; allowed: ")
        raise errors.BadLabelError("cannot be used as it is", got=got, allowed=allowed) from None
    except LearnedError as error:
        raise errors.AlreadyLearnedError(
            "learned already", got=str(error), allowed="images that are not learned yet"
        ) from None
    except DamagedItemError as error:
        raise errors.BrokenImageError("damaged in the quarantine", got=str(error), allowed="an intact image") from None
    except UnavailableError as error:
        allowed = "the same request again, in a while"
        raise errors.QuarantineAwayError("the quarantine is unavailable", got=str(error), allowed=allowed) from None
    except StoreError as error:
        allowed = "an undamaged database; see the server log"
        raise errors.ServerError("the quarantine failed", got=str(error), allowed=allowed) from error


def _manifest(request: Request) -> Manifest:
    return cast(Engine, request.app.state.engine()).loaded.model.manifest
