"""Hostile input over real HTTP: the server answers every request with a proper error and keeps running.

Images are made and damaged from a fixed seed; requests are drawn by schemathesis from the server's own description.
The number of requests and of each response is printed.
"""

from __future__ import annotations

import base64
import json
import random
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from PIL import Image

from serving.quarantine.records import FoundGroup
from serving.quarantine.store import Store
from tests.conftest import ReportLine
from tests.helpers_hostile import run_lengths, with_profiles, with_scans
from tests.helpers_quarantine import arrivals
from tests.helpers_serving import Server, bad_palettes, image_bytes, png, png_header, saved, serving, write_bundle
from tests.load import http_request, megabytes, send, workers

pytestmark = pytest.mark.long

MUTANTS = 2600
CLIENTS = 4
GROWTH = 48.0
"""Megabytes by which a worker may grow after its first thousand images: one large image may be in progress."""
SLOWEST = 30.0
"""Seconds that a small image may take, damaged or not, on a machine with other load; the server's deadline."""
EXAMPLES, QUARANTINE_EXAMPLES, FEW_EXAMPLES = 20, 4, 3
"""Requests that schemathesis draws for each operation and kind of body; few of those without a body, which differ only
in what the server ignores. `make fuzz` sends many more."""

Mutate = Callable[[bytes, random.Random], bytes]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    bundle = write_bundle(tmp_path_factory.mktemp("fuzz") / "bundle")
    with serving(tmp_path_factory.mktemp("home"), bundle) as running:
        yield running


@pytest.fixture(scope="module")
def worker(server: Server) -> psutil.Process:
    (only,) = workers(server, 1)
    return only


def originals() -> list[bytes]:
    """Small images of every supported format, mode and property, and some of unsupported formats."""
    noise = random.Random(0)
    picture = Image.frombytes("RGB", (9, 7), noise.randbytes(9 * 7 * 3))
    exif = picture.getexif()
    exif[0x0112] = 6
    frames = [picture.rotate(90 * turn) for turn in range(2)]
    made = [saved(picture.convert(mode)) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")]
    made += [saved(picture.convert(mode), "JPEG") for mode in ("L", "RGB", "CMYK")]
    made += [saved(picture.convert(mode), "BMP") for mode in ("1", "L", "P", "RGB", "RGBA")]
    made += [saved(picture.convert(mode), "WEBP", lossless=flat) for mode in ("RGB", "RGBA") for flat in (False, True)]
    made += [
        saved(picture, "JPEG", exif=exif, progressive=True, dpi=(72, 72)),
        saved(picture, "PNG", exif=exif),
        saved(picture.convert("P"), "PNG", transparency=3),
        saved(picture, "WEBP", exif=exif),
        saved(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        saved(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        saved(picture, "GIF"),
        saved(picture, "TIFF"),
        saved(picture, "ICO"),
        saved(picture, "PPM"),
        *bad_palettes(),
        with_scans(100, size=(100, 100)),
        with_profiles(20),
        run_lengths(200),
    ]
    return made


def unharmed(content: bytes, noise: random.Random) -> bytes:
    return content


def flip_bits(content: bytes, noise: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(noise.choice((1, 1, 2, 8, 64))):
        damaged[noise.randrange(len(damaged))] ^= 1 << noise.randrange(8)
    return bytes(damaged)


def flip_header(content: bytes, noise: random.Random) -> bytes:
    """Offsets of sizes, depths and lengths in the header."""
    damaged = bytearray(content)
    for _ in range(noise.choice((1, 2, 4))):
        damaged[noise.randrange(min(64, len(damaged)))] = noise.choice((0, 1, 0x7F, 0x80, 0xFF, noise.randrange(256)))
    return bytes(damaged)


def truncate(content: bytes, noise: random.Random) -> bytes:
    return content[: noise.randrange(len(content))]


def cut_out(content: bytes, noise: random.Random) -> bytes:
    start, end = sorted(noise.randrange(len(content) + 1) for _ in range(2))
    return content[:start] + content[end:]


def splice_in(content: bytes, noise: random.Random) -> bytes:
    place = noise.randrange(len(content) + 1)
    return content[:place] + noise.randbytes(noise.choice((1, 4, 40))) + content[place:]


def repeat(content: bytes, noise: random.Random) -> bytes:
    return content * noise.randrange(2, 5) + noise.randbytes(noise.randrange(20))


def keep_magic(content: bytes, noise: random.Random) -> bytes:
    """The correct magic bytes, and nothing else."""
    return content[: noise.choice((2, 4, 8, 12, 16, 30))] + noise.randbytes(noise.randrange(200))


def only_noise(content: bytes, noise: random.Random) -> bytes:
    return noise.randbytes(noise.randrange(300))


def bomb(content: bytes, noise: random.Random) -> bytes:
    """A few bytes that announce very many pixels, or sides of no sensible length."""
    sides = (0, 1, 3, 4000, 4001, 12_000, 65_535, 2**31 - 1, 2**31, 2**32 - 1)
    width, height = noise.choice(sides), noise.choice(sides)
    if noise.random() < 0.5:
        return png_header(width, height)
    header = struct.pack("<IiiHHIIiiII", 40, width & 0x7FFFFFFF, height & 0x7FFFFFFF, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 64, 0, 0, 54) + header + bytes(64)


def odd_png(content: bytes, noise: random.Random) -> bytes:
    """A PNG with valid checksums and inconsistent contents."""

    depth, colour, interlace = noise.choice((1, 2, 3, 8, 16, 32)), noise.randrange(8), noise.randrange(3)
    header = struct.pack(">IIBBBBB", noise.randrange(1, 40), noise.randrange(1, 40), depth, colour, 0, 0, interlace)
    kinds = {
        b"PLTE": lambda: noise.randbytes(3 * noise.randrange(4)),
        b"tRNS": lambda: noise.choice((b"\0\1", bytes(6), noise.randbytes(300))),
        b"eXIf": lambda: noise.randbytes(30),
        b"zTXt": lambda: b"k\0\0" + noise.randbytes(9),
    }
    extra = [(kind, body()) for kind, body in kinds.items() if noise.random() < 0.4]
    data = zlib.compress(noise.randbytes(noise.randrange(2000)))
    return png((b"IHDR", header), *extra, (b"IDAT", data))


MUTATIONS: tuple[Mutate, ...] = (
    unharmed,
    flip_bits,
    flip_bits,
    flip_header,
    flip_header,
    truncate,
    cut_out,
    splice_in,
    repeat,
    keep_magic,
    only_noise,
    bomb,
    odd_png,
)
CONTENT_TYPES = ("application/octet-stream", "image/png", "image/jpeg", "image/x-nonsense; q=0", "IMAGE/WEBP")


def mutants(count: int) -> list[bytes]:
    """Whole requests, each with one damaged image: most of them raw, some in a form and some in JSON."""
    noise = random.Random(20_240_101)
    sources = originals()
    return [wrapped(MUTATIONS[number % len(MUTATIONS)](noise.choice(sources), noise), noise) for number in range(count)]


def wrapped(image: bytes, noise: random.Random) -> bytes:
    """A request with the image, often with a wrong content type."""
    form = noise.random()
    if form < 0.1:
        head = b'--b0undary\r\nContent-Disposition: form-data; name="image"; filename="cat.jpg.exe"\r\n\r\n'
        body = head + image + b"\r\n--b0undary--\r\n"
        return http_request("/predict", body, "multipart/form-data; boundary=b0undary")
    if form < 0.2:
        text = base64.b64encode(image).decode()
        return http_request("/predict", json.dumps({"image": text}).encode(), "application/json")
    return http_request("/predict", image, noise.choice(CONTENT_TYPES))


def test_mutated_images_never_break_the_server(server: Server, worker: psutil.Process, report_line: ReportLine) -> None:
    requests = mutants(MUTANTS)
    replies = send(server.port, requests[: MUTANTS // 5], clients=CLIENTS)
    before = megabytes([worker])
    replies += send(server.port, requests[MUTANTS // 5 :], clients=CLIENTS)
    grown = megabytes([worker]) - before
    counts = Counter((reply.status, said_code(reply.json())) for reply in replies)
    shown = ", ".join(f"{count} x {status} {code}" for (status, code), count in sorted(counts.items()))
    slowest = max(reply.seconds for reply in replies)
    report_line(
        f"mutated images: {len(replies)} sent, {shown}; slowest {1000 * slowest:.0f} ms; "
        f"worker grew {grown:+.1f} MB (allowed {GROWTH:.0f})"
    )
    assert len(replies) == MUTANTS
    assert {status for status, _ in counts} <= {200, 413, 415, 422}
    assert len({code for _, code in counts}) >= 5
    assert grown <= GROWTH
    assert slowest <= SLOWEST
    assert_unharmed(server, worker)


def test_large_damaged_images_leave_nothing_behind(
    server: Server, worker: psutil.Process, report_line: ReportLine
) -> None:
    """Each takes 16 MB before the decoder detects that it is incomplete."""
    whole = saved(Image.new("RGBA", (2000, 2000), (1, 2, 3, 4)))
    request = http_request("/predict", whole[: len(whole) - 100])
    before = megabytes([worker])
    replies = send(server.port, [request] * 10, clients=2)
    grown = megabytes([worker]) - before
    report_line(f"large damaged images: {len(replies)} sent, worker grew {grown:+.1f} MB")
    assert {said_code(reply.json()) for reply in replies} == {"broken_image"}
    assert grown <= GROWTH


def said_code(body: dict[str, Any]) -> str:
    return str(body["error"]["code"]) if "error" in body else "answered"


def test_requests_drawn_from_the_description_never_break_it(
    server: Server, worker: psutil.Process, report_line: ReportLine
) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="no schemathesis; pip install -e '.[dev]'")
    # Routes that need the token are tested below.
    description = schemathesis.openapi.from_url(f"{server.url}/docs.json").exclude(path_regex="^/(unknowns|teach)")
    counts: Counter[tuple[str, int]] = Counter()
    for found in description.get_all_operations():
        operation = found.ok()
        for mode in schemathesis.GenerationMode:
            # A request without parameters cannot be invalid.
            if mode == schemathesis.GenerationMode.POSITIVE or operation.body or operation.query:
                examples = EXAMPLES if operation.body else FEW_EXAMPLES
                counts.update((operation.label, status) for status in drawn_statuses(operation, mode, examples))
    shown = ", ".join(f"{label} {count} x {status}" for (label, status), count in sorted(counts.items()))
    report_line(f"schemathesis: {counts.total()} requests, {shown}")
    assert {label for label, _ in counts} >= {"POST /predict", "POST /predict_many", "GET /model"}
    assert_unharmed(server, worker)


def test_requests_to_the_quarantine_never_break_it(tmp_path: Path, report_line: ReportLine) -> None:
    """With the token, and images to label."""
    schemathesis = pytest.importorskip("schemathesis", reason="no schemathesis; pip install -e '.[dev]'")
    url, token = f"sqlite:///{tmp_path}/quarantine.db", "f00dfacef00dface-token"
    store = Store.open(url)
    store.replace_groups([FoundGroup(store.add(arrivals(range(8))).kept, 0.5, None, False)])
    settings = {"OPENWORLD_QUARANTINE_URL": url, "OPENWORLD_ADMIN_TOKEN": token}
    counts: Counter[int] = Counter()
    with serving(tmp_path / "home", write_bundle(tmp_path / "bundle"), settings=settings) as server:
        (worker,) = workers(server, 1)
        description = schemathesis.openapi.from_url(f"{server.url}/docs.json").include(path_regex="^/unknowns")
        for found in description.get_all_operations():
            for mode in schemathesis.GenerationMode:
                counts.update(
                    drawn_statuses(found.ok(), mode, QUARANTINE_EXAMPLES, {"authorization": f"Bearer {token}"})
                )
        shown = ", ".join(f"{count} x {status}" for status, count in sorted(counts.items()))
        report_line(f"schemathesis on the quarantine: {counts.total()} requests, {shown}")
        assert set(counts) >= {200, 400, 404, 422}
        assert_unharmed(server, worker)
    store.close()


def drawn_statuses(operation: Any, mode: Any, examples: int, headers: Mapping[str, str] | None = None) -> list[int]:
    """Send valid and invalid requests by the API description; every response must be a documented one."""
    from schemathesis.specs.openapi import checks

    conformance = [
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    statuses = []

    @seed(0)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        response = case.call(session=session)
        statuses.append(response.status_code)
        assert response.status_code < 500, f"{response.status_code} {response.text}\n{case.as_curl_command()}"
        case.validate_response(response, checks=conformance)

    with pytest.importorskip("requests").Session() as session:
        session.headers.update(headers or {})
        ask()
    return statuses


def assert_unharmed(server: Server, worker: psutil.Process) -> None:
    """The process is the same, its log has no unexpected error, and it still recognises red."""
    assert workers(server, 1) == [worker]
    assert "Traceback" not in server.log.read_text()
    (reply,) = send(server.port, [http_request("/predict", image_bytes())], clients=1)
    assert reply.json()["label"] == "red"
