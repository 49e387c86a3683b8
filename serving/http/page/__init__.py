"""The web page, the API reader (/docs), the files of both (/page), and sample images.

Samples are the small PNG and JPEG files in the folder OPENWORLD_SAMPLES, by default `samples` next to the bundle. The
folder is read at every request, so it may be filled while the server runs; without it the page shows no samples.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from stat import S_ISREG

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from serving.settings import Settings

STATIC = Path(__file__).parent / "static"
PART = re.compile(r" *<!-- (part-[a-z]+\.html) -->\n")
"""A line of a page where a part belongs."""
MEDIA_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}
MAX_SAMPLES, MAX_SAMPLE_BYTES = 24, 512 * 1024

# Browsers revalidate at every visit (304 while unchanged), so that no old script runs after an upgrade.
FRESH = {"Cache-Control": "no-cache"}


class PageFiles(StaticFiles):
    """Files that a browser caches but revalidates."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(FRESH)
        return response


def samples() -> dict[str, Path]:
    """The sample images by file name; no other file is ever opened."""
    folder = Settings.from_environment().samples_folder
    try:
        files = sorted(folder.iterdir())
    except OSError:
        return {}
    return {file.name: file for file in [file for file in files if _is_sample(file)][:MAX_SAMPLES]}


def _is_sample(file: Path) -> bool:
    """Whether it is a small regular image file; a link could lead out of the folder."""
    if file.suffix.lower() not in MEDIA_TYPES or file.name.startswith("."):
        return False
    try:
        found = file.lstat()
    except OSError:
        return False
    return S_ISREG(found.st_mode) and 0 < found.st_size <= MAX_SAMPLE_BYTES


@cache
def _page_text(name: str) -> str:
    parts = {part.name: part.read_text(encoding="utf-8") for part in STATIC.glob("part-*.html")}
    text = (STATIC / name).read_text(encoding="utf-8")
    return PART.sub(lambda found: parts[found[1]], text)


def page_response(name: str) -> Response:
    """A page of the folder `static`, with the parts that it shares with other pages."""
    return HTMLResponse(_page_text(name), headers=FRESH)


router = APIRouter(include_in_schema=False)


@router.get("/")
async def index() -> Response:
    return page_response("index.html")


@router.get("/docs")
async def docs() -> Response:
    return page_response("docs.html")


@router.get("/features")
def features() -> Response:
    """The features that the page may offer. Whether teaching works is in /teach/status, which needs the token."""
    return JSONResponse({"teach": Settings.from_environment().may_teach}, headers=FRESH)


@router.get("/samples")
def sample_names() -> Response:
    return JSONResponse({"samples": list(samples())}, headers=FRESH)


@router.get("/samples/{name}")
def sample(name: str) -> Response:
    file = samples().get(name)
    if file is None:
        raise HTTPException(404)
    return FileResponse(file, media_type=MEDIA_TYPES[file.suffix.lower()], headers=FRESH)
