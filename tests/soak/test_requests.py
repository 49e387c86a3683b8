"""Very many damaged requests to every endpoint: no 5xx but 503, no hang, and memory stays flat."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import random
import re
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import psutil

from serving.bundle.shelf import Shelf
from tests.conftest import ReportLine
from tests.e2e.test_fuzz import MUTATIONS, originals, wrapped
from tests.helpers_hostile import hostile
from tests.helpers_serving import http_get, serving
from tests.helpers_teaching import HOSTILE_ARCHIVES, picture, write_bundle
from tests.load import http_request, megabytes, send, workers

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "100000"))
MINUTES = float(os.environ.get("FUZZ_MINUTES", "inf"))
"""The campaign ends earlier after so many minutes, and counts what it has sent until then."""
BATCH, RESTS = 500, 10
"""Requests that are made before they are sent, and how often memory is measured, which takes ten seconds."""
GROWTH = 50.0
"""Megabytes that a worker may grow from its start to the end."""
DEADLINE = 30.0
"""Seconds: the server's deadline. A request that takes longer hangs."""
CLIENTS = 8
HOSTILE = 100
"""One request in so many has a file of several megabytes with a hostile structure."""
TOKEN = "f00dfacef00dface-token"

# What the description of the server does not list.
PATHS = (
    "/", "/docs", "/docs.json", "/schema.json", "/livez", "/readyz", "/healthz", "/page/view.js", "/page/../service.py",
    "/samples/x.png", "/static_content/x", "/features", "/unknowns", "/teach", "/nothing", "//", "/predict/",
)  # fmt: skip
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW")
WORDS = (
    b"1", b"-1", b"0", b"999999999999999999999", b"1e400", b"nan", b"null", b"true", b'"x"', b'"\\ud800"', b"[]", b"{}",
    b"[1]", b'["x","elk"]', b'"red"', b'"elk"', b"\xff", b'""', b'"' + b"x" * 300 + b'"', b"0.5",
    b'"<script>"', b"[[1,2]]",
)  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One method of one path, as the server describes it."""

    method: str
    path: str
    queries: tuple[str, ...]
    fields: tuple[str, ...]
    takes_file: bool


def operations(described: dict[str, Any]) -> list[Operation]:
    """All that /docs.json lists."""
    found = []
    schemas = described["components"]["schemas"]
    for path, methods in described["paths"].items():
        for method, details in methods.items():
            queries = [each["name"] for each in details.get("parameters", ()) if each["in"] == "query"]
            kinds = details.get("requestBody", {}).get("content", {})
            schema = kinds.get("application/json", {}).get("schema", {})
            schema = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
            takes_file = any(kind.startswith(("image/", "application/octet", "application/zip")) for kind in kinds)
            found.append(
                Operation(method.upper(), path, tuple(queries), tuple(schema.get("properties", ())), takes_file)
            )
    return found


def requests(count: int, known: list[Operation], noise: random.Random) -> Iterator[bytes]:
    """One in a hundred is a hostile file; of the others, a third goes to any operation, the rest are damaged images."""
    sources = originals()
    for number in range(count):
        if number % HOSTILE == 0:
            yield http_request("/predict", hostile(noise)[1])
        elif number % 3:
            yield wrapped(MUTATIONS[number % len(MUTATIONS)](noise.choice(sources), noise), noise)
        else:
            yield _odd_request(noise.choice(known), sources, noise)


def _odd_request(operation: Operation, sources: list[bytes], noise: random.Random) -> bytes:
    """A request with odd parameters and an odd body; half of them with the token, and most with the right method."""
    method, path = operation.method, re.sub(r"\{[^}]*\}", lambda _: _quoted(noise.choice(WORDS)), operation.path)
    if noise.random() < 0.1:
        path = noise.choice(PATHS)
    if noise.random() < 0.2:
        method = noise.choice(METHODS)
    queries = [(name, noise.choice(WORDS)) for name in (*operation.queries, "nonsense") if noise.random() < 0.4]
    if queries:
        path += "?" + "&".join(f"{name}={_quoted(value)}" for name, value in queries)
    fields = [(name, noise.choice(WORDS)) for name in (*operation.fields, "nonsense") if noise.random() < 0.7]
    body = b"{" + b",".join(f'"{name}":'.encode() + value for name, value in fields) + b"}"
    kind = "application/json"
    if operation.path == "/teach/import" and noise.random() < 0.9:
        body, kind = _labels(sources, noise)
    elif operation.takes_file and noise.random() < 0.8:
        body, kind = noise.choice(sources), "image/png"
    if noise.random() < 0.2:
        body = MUTATIONS[noise.randrange(len(MUTATIONS))](body, noise)
    token = f"Authorization: Bearer {TOKEN}\r\n" if noise.random() < 0.5 else ""
    return http_request(path, body, kind, token).replace(b"POST", method.encode(), 1)


def _labels(sources: list[bytes], noise: random.Random) -> tuple[bytes, str]:
    """What /teach/import takes, with any content: an archive of folders or of tasks, or tasks alone."""
    kind = noise.choice(("hostile", "folders", "tasks", "JSON"))
    if kind == "hostile":
        return HOSTILE_ARCHIVES[noise.choice(sorted(HOSTILE_ARCHIVES))][0], "application/zip"
    images = {f"{noise.choice(('elk', 'x/fox', '', '..'))}/{number}.png": noise.choice(sources) for number in range(4)}
    names = [
        *images,
        *(f"data:image/png;base64,{base64.b64encode(each).decode()}" for each in images.values()),
        7,
        None,
    ]
    tasks = [_task(noise.choice(names), noise) for _ in range(noise.randrange(6))]
    if kind == "JSON":
        return json.dumps(tasks).encode(), "application/json"
    files = {**images, "tasks.json": json.dumps(tasks).encode()} if kind == "tasks" else images
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w", noise.choice((0, 8, 8, 12, 14))) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stored.getvalue(), "application/zip"


def _task(image: object, noise: random.Random) -> object:
    """A task of Label Studio, of which a part may be something else."""

    def odd(usual: object) -> object:
        return noise.choice((None, 7, "x", [], {}, [1])) if noise.random() < 0.1 else usual

    result = odd({"type": "choices", "value": odd({"choices": odd([noise.choice(("elk", "", "x" * 300))])})})
    return odd({"id": odd(7), "data": odd({"image": image}), "annotations": odd([odd({"result": odd([result])})])})


def _quoted(value: bytes) -> str:
    return "".join(f"%{byte:02x}" for byte in value)


def test_no_request_breaks_the_server(tmp_path: Path, report_line: ReportLine) -> None:
    """The server has everything switched on: a shelf, a quarantine, and teaching."""
    write_bundle(tmp_path / "shelf" / "first")
    Shelf(tmp_path / "shelf").point_at("first")
    settings = {
        "OPENWORLD_BUNDLES": str(tmp_path / "shelf"),
        "OPENWORLD_ADMIN_TOKEN": TOKEN,
        "OPENWORLD_QUARANTINE_URL": f"sqlite:///{tmp_path}/quarantine.db",
        "OPENWORLD_WORKERS": "2",
        "OPENWORLD_ACCESS_LOG": "off",
        "OMP_NUM_THREADS": "1",
    }
    noise, counts, slowest, until = (
        random.Random(20_260_202),
        Counter[tuple[int, str]](),
        0.0,
        monotonic() + 60 * MINUTES,
    )
    with serving(tmp_path / "home", None, settings=settings) as server:
        running = workers(server, 2)
        known = operations(http_get(f"{server.url}/docs.json").json())
        drawn = requests(REQUESTS, known, noise)
        sizes = [at_rest(running)]
        while (some := list(itertools.islice(drawn, BATCH))) and monotonic() < until:
            for reply in send(server.port, some, clients=CLIENTS):
                counts[reply.status, _code(reply.body)] += 1
                slowest = max(slowest, reply.seconds)
            if counts.total() >= len(sizes) * REQUESTS / RESTS:
                sizes.append(at_rest(running))
            # A campaign that is stopped has counted until here.
            print(
                f"{counted(counts, slowest)}; workers {', '.join(f'{size:.0f}' for size in sizes[-1])} MB", flush=True
            )
        sizes.append(at_rest(running))
        assert workers(server, 2) == running
        before, found, after = server.log.read_text().partition("Traceback")
        assert not found, before[-500:] + found + after[:5000]
        (reply,) = send(server.port, [http_request("/predict", picture("ant", 1))], clients=1)
        assert reply.json()["label"] == "ant"
    shown = ", ".join(f"{count} x {status} {code}" for (status, code), count in sorted(counts.items()))
    # The first tenth warms up: pools of memory, threads, and what is only imported when it is needed.
    since_start, grown = (max(b - a for a, b in zip(sizes[i], sizes[-1], strict=True)) for i in (0, 1))
    report_line(
        f"fuzz: {counted(counts, slowest)}; {len(known)} operations; workers were "
        f"{max(sizes[0]):.0f} MB, after a tenth {max(sizes[1]):.0f} MB, at the end {max(sizes[-1]):.0f} MB "
        f"({since_start:+.1f} MB since the start, {grown:+.1f} MB since the first tenth): {shown}"
    )
    assert {status for status, _ in counts if status >= 500} <= {503}
    assert slowest < DEADLINE
    assert since_start <= GROWTH


def counted(counts: Counter[tuple[int, str]], slowest: float) -> str:
    statuses = Counter[int]()
    for (status, _), count in counts.items():
        statuses[status] += count
    return f"{counts.total()} of {REQUESTS} requests, {dict(sorted(statuses.items()))}, slowest {slowest:.2f} s"


def at_rest(running: list[psutil.Process]) -> list[float]:
    """Megabytes of each worker, once it has stored what it answered last: the quarantine looks at images later."""
    samples = []
    for _ in range(10):
        samples.append([megabytes([worker]) for worker in running])
        time.sleep(1)
    return [min(each) for each in zip(*samples, strict=True)]


def _code(body: bytes) -> str:
    try:
        parsed = json.loads(body)
    except ValueError:
        return "page"
    if not isinstance(parsed, dict):
        return "page"
    error = parsed.get("error")
    # The Open Inference Protocol has no codes; a job that did not fail has the error null.
    return str(error["code"]) if isinstance(error, dict) else "error" if error else "answered"
