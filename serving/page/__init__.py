"""The web page: its files, the API reader, and sample images to click.

    GET /                the page
    GET /docs            the API reader, over /docs.json
    GET /page/...        what the two are made of
    GET /samples         names of the sample images
    GET /samples/{name}  one of them

Samples are the small PNG and JPEG files in the folder that OPENWORLD_SAMPLES names, by default `samples` beside the
bundle. They are read at every request, so that a folder may be filled while the server runs; without one the page
shows none.
"""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISREG

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(__file__).parent / "static"
SAMPLES_VARIABLE, BUNDLE_VARIABLE, SHELF_VARIABLE = "OPENWORLD_SAMPLES", "OPENWORLD_BUNDLE", "OPENWORLD_BUNDLES"
DEFAULT_SAMPLES = Path(__file__).resolve().parents[2] / "runs/demo/samples"
MEDIA_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}
MOST_SAMPLES, LARGEST_SAMPLE = 24, 512 * 1024

# Asked for again at every visit and answered with 304 while unchanged: an upgrade never meets yesterday's script.
FRESH = {"Cache-Control": "no-cache"}


class _Static(StaticFiles):
    """Files that a browser keeps but asks about."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(FRESH)
        return response


def samples() -> dict[str, Path]:
    """The sample images by file name: what is not listed here is never opened."""
    folder = _samples_folder()
    try:
        files = sorted(folder.iterdir())
    except OSError:
        return {}
    return {file.name: file for file in [file for file in files if _is_sample(file)][:MOST_SAMPLES]}


def _samples_folder() -> Path:
    if chosen := os.environ.get(SAMPLES_VARIABLE):
        return Path(chosen)
    if shelf := os.environ.get(SHELF_VARIABLE):
        return Path(shelf) / "samples"
    if bundle := os.environ.get(BUNDLE_VARIABLE):
        return Path(bundle).resolve().parent / "samples"
    return DEFAULT_SAMPLES


def _is_sample(file: Path) -> bool:
    """A small image file of the folder's own; a link could lead out of it."""
    if file.suffix.lower() not in MEDIA_TYPES or file.name.startswith("."):
        return False
    try:
        found = file.lstat()
    except OSError:
        return False
    return S_ISREG(found.st_mode) and 0 < found.st_size <= LARGEST_SAMPLE


def _index(request: Request) -> Response:
    return FileResponse(STATIC / "index.html", headers=FRESH)


def _docs(request: Request) -> Response:
    return FileResponse(STATIC / "docs.html", headers=FRESH)


def _samples(request: Request) -> Response:
    return JSONResponse({"samples": list(samples())}, headers=FRESH)


def _sample(request: Request) -> Response:
    file = samples().get(request.path_params["name"])
    if file is None:
        raise HTTPException(404)
    return FileResponse(file, media_type=MEDIA_TYPES[file.suffix.lower()], headers=FRESH)


routes: list[BaseRoute] = [
    Route("/", _index),
    Route("/docs", _docs),
    Route("/samples", _samples),
    Route("/samples/{name}", _sample),
    Mount("/page", _Static(directory=STATIC)),
]
