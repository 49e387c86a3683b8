"""Very many damaged requests to every endpoint: no 5xx but 503, no hang, and memory stays flat."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ReportLine
from tests.e2e.test_fuzz import MUTATIONS, originals, said_code, wrapped
from tests.helpers_hostile import hostile
from tests.helpers_serving import image_bytes, serving, write_bundle
from tests.load import http_request, megabytes, send, workers

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "100000"))
GROWTH = 50.0
"""Megabytes that a worker may grow after the first tenth of the requests."""
CLIENTS = 8
HOSTILE = 100
"""One request in so many has a file of several megabytes with a hostile structure."""
TOKEN = "f00dfacef00dface-token"

PATHS = (
    "/predict", "/predict_many", "/model", "/metrics", "/livez", "/docs.json", "/", "/page/view.js", "/samples",
    "/samples/x.png", "/admin/status", "/admin/reload", "/admin/rollback", "/unknowns", "/unknowns/groups",
    "/unknowns/items", "/unknowns/items/1", "/unknowns/items/1/image", "/unknowns/items/1/thumbnail", "/unknowns/label",
    "/unknowns/known", "/unknowns/junk", "/unknowns/clear", "/unknowns/move", "/unknowns/merge", "/nothing",
)  # fmt: skip
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW")
WORDS = (
    b"1", b"-1", b"0", b"999999999999999999999", b"1e400", b"nan", b"null", b"true", b'"x"', b'"\\ud800"', b"[]", b"{}",
    b"[1]", b'"red"', b"\xff", b'""', b'"' + b"x" * 300 + b'"', b"0.5",
)  # fmt: skip
FIELDS = (b"ids", b"group", b"label", b"groups", b"image", b"images", b"limit", b"after", b"items", b"task", b"alpha")


def requests(count: int) -> Iterator[bytes]:
    noise = random.Random(20_260_202)
    sources = originals()
    for number in range(count):
        if number % HOSTILE == 0:
            yield http_request("/predict", hostile(noise)[1])
        elif number % 3:
            yield wrapped(MUTATIONS[number % len(MUTATIONS)](noise.choice(sources), noise), noise)
        else:
            yield _odd_request(noise)


def _odd_request(noise: random.Random) -> bytes:
    """A request to any path, with any method, odd parameters and an odd JSON body; half of them with the token."""
    pairs = [(noise.choice(FIELDS), noise.choice(WORDS)) for _ in range(noise.randrange(4))]
    query = "&".join(f"{name.decode()}={value.hex() if b' ' in value else _quoted(value)}" for name, value in pairs)
    body = b"{" + b",".join(b'"' + name + b'":' + value for name, value in pairs) + b"}"
    if noise.random() < 0.2:
        body = MUTATIONS[noise.randrange(len(MUTATIONS))](body, noise)
    path = noise.choice(PATHS) + (f"?{query}" if noise.random() < 0.5 else "")
    token = f"Authorization: Bearer {TOKEN}\r\n" if noise.random() < 0.5 else ""
    method = noise.choice(METHODS)
    request = http_request(path, body, "application/json", token)
    # A response to HEAD has a length and no body, which the load generator does not know.
    return request.replace(b"POST", method.encode(), 1) if method != "HEAD" else request


def _quoted(value: bytes) -> str:
    return "".join(f"%{byte:02x}" for byte in value)


def test_no_request_breaks_the_server(tmp_path: Path, report_line: ReportLine) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    settings = {
        "OPENWORLD_ADMIN_TOKEN": TOKEN,
        "OPENWORLD_QUARANTINE_URL": f"sqlite:///{tmp_path}/quarantine.db",
        "OPENWORLD_WORKERS": "2",
        "OPENWORLD_ACCESS_LOG": "off",
    }
    with serving(tmp_path / "home", bundle, settings=settings) as server:
        running = workers(server, 2)
        drawn = requests(REQUESTS)
        counts: Counter[tuple[int, str]] = Counter()
        before, slowest = 0.0, 0.0
        for part in range(10):
            some = [next(drawn) for _ in range(REQUESTS // 10)]
            for reply in send(server.port, some, clients=CLIENTS):
                counts[reply.status, _code(reply.body)] += 1
                slowest = max(slowest, reply.seconds)
            before = before or max(megabytes([worker]) for worker in running)
            grown = max(megabytes([worker]) for worker in running) - before
            print(f"part {part + 1} of 10: worker {before + grown:.0f} MB", flush=True)
        assert workers(server, 2) == running
        assert "Traceback" not in server.log.read_text()
        (reply,) = send(server.port, [http_request("/predict", image_bytes())], clients=1)
        assert reply.json()["label"] == "red"
    shown = ", ".join(f"{count} x {status} {code}" for (status, code), count in sorted(counts.items()))
    report_line(
        f"fuzz: {counts.total()} requests, slowest {slowest:.2f} s, largest worker grew {grown:+.1f} MB: {shown}"
    )
    assert {status for status, _ in counts if status >= 500} <= {503}
    assert grown <= GROWTH


def _code(body: bytes) -> str:
    import json

    try:
        parsed = json.loads(body)
    except ValueError:
        return "page"
    return said_code(parsed) if isinstance(parsed, dict) else "page"
