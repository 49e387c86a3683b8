"""The typed client, against a real server and against one that behaves badly on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from serving.bundle.model import BundleModel
from serving.client import UNREACHABLE, UNREADABLE, AsyncClient, Client, Retries, ServiceError, _file
from serving.errors import BusyError
from serving.http.schemas import Answer, error_answer
from serving.inference.answers import PredictionOptions, answer_image, describe
from tests.helpers_serving import COLOURS, GREY, ROOT, Server, free_port, image_bytes, saved

RED, BLUE, GREY_IMAGE = image_bytes(), image_bytes(COLOURS["blue"]), image_bytes(GREY)
MODES = ["1", "L", "LA", "I", "I;16", "I;16B", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"]
QUICK = Retries(attempts=4, first=0.01)


def expected(model: BundleModel, content: bytes, **question: Any) -> Answer:
    return answer_image(model, content, PredictionOptions.for_model(model, **question))


def test_an_image_may_be_bytes_a_path_or_an_image_in_memory(server: Server, model: BundleModel, tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(RED)
    with Client(server.url) as client:
        for image in (RED, path, str(path), Image.new("RGB", (8, 8), "red")):
            assert client.predict(image) == expected(model, RED)


@pytest.mark.parametrize("mode", MODES)
def test_an_image_in_memory_may_have_any_mode(server: Server, mode: str) -> None:
    with Client(server.url) as client:
        assert isinstance(client.predict(Image.new(mode, (8, 8))), Answer)


def test_deep_integers_are_clipped_as_the_server_would(server: Server) -> None:
    with Client(server.url) as client:
        for value, like in ((-5, 0), (70_000, 65_535)):
            deep, shallow = Image.new("I", (8, 8), value), Image.new("I;16", (8, 8), like)
            assert client.predict(deep) == client.predict(shallow)


def test_floats_have_no_known_range() -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(ValueError, match="mode F"):
        client.predict(Image.new("F", (8, 8)))


def test_a_photograph_that_lies_on_its_side_is_the_same_in_memory(server: Server, tmp_path: Path) -> None:
    pixels = np.zeros((8, 12, 3), dtype=np.uint8)
    pixels[:, :6, 0] = pixels[:, 6:, 2] = 255
    lying = Image.fromarray(pixels)
    exif = lying.getexif()
    exif[0x0112] = 6
    path = tmp_path / "photo.png"
    path.write_bytes(saved(lying, exif=exif))
    with Client(server.url) as client, Image.open(path) as opened:
        assert client.predict(opened) == client.predict(path)


def test_parameters_reach_the_server(server: Server, model: BundleModel) -> None:
    with Client(server.url) as client:
        question = {"task": 1, "alpha": 0.2, "top": 4}
        assert client.predict(RED, **question) == expected(model, RED, **question)
        many = client.predict_many([RED, BLUE], **question)
    assert many == [expected(model, RED, **question), expected(model, BLUE, **question)]


def test_a_refusal_is_a_typed_error(server: Server) -> None:
    with Client(server.url) as client, pytest.raises(ServiceError) as caught:
        client.predict(b"", request_id="mine-1")
    error = caught.value
    assert (error.code, error.status, error.request_id) == ("empty_image", 422, "mine-1")
    assert (error.got, error.allowed) == ("0 bytes", "1 to 33554432 bytes")
    assert str(error) == error.message


def test_an_invalid_image_is_an_error_in_its_own_slot_only(server: Server, model: BundleModel) -> None:
    with Client(server.url) as client:
        first, bad, last = client.predict_many([RED, b"junk", GREY_IMAGE], request_id="mine-2")
        assert client.predict_many([]) == []
    assert (first, last) == (expected(model, RED), expected(model, GREY_IMAGE))
    assert isinstance(bad, ServiceError)
    assert (bad.code, bad.status, bad.request_id) == ("unsupported_image", 415, "mine-2")


def test_model_and_readiness(server: Server, model: BundleModel) -> None:
    with Client(server.url) as client:
        description = client.model()
        assert client.ready()
    assert description == describe(model, max_batch=description.max_batch)


def test_the_same_for_asyncio(server: Server, model: BundleModel) -> None:
    async def ask() -> None:
        async with AsyncClient(server.url) as client:
            one, many, description, ready = await asyncio.gather(
                client.predict(RED, top=1), client.predict_many([BLUE, b""]), client.model(), client.ready()
            )
            assert await client.predict_many([]) == []
            with pytest.raises(ServiceError, match="no image"):
                await client.predict(b"")
        assert one == expected(model, RED, top=1)
        assert many[0] == expected(model, BLUE)
        assert isinstance(many[1], ServiceError)
        assert (description.name, ready) == ("tiny", True)

    asyncio.run(ask())


def test_files_and_pictures_are_read_beside_the_event_loop(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "red.png"
    path.write_bytes(RED)
    threads = set()

    def noted(image: Any) -> bytes:
        if not isinstance(image, bytes):
            threads.add(threading.current_thread())
        return _file(image)

    monkeypatch.setattr("serving.client._file", noted)

    async def ask() -> None:
        async with AsyncClient(server.url) as client:
            picture = Image.new("RGB", (8, 8), "red")
            answers = [await client.predict(path), *await client.predict_many([path, picture, RED])]
            assert [answer.label for answer in answers if isinstance(answer, Answer)] == ["red"] * 4

    asyncio.run(ask())
    assert threads
    assert threading.main_thread() not in threads


def test_a_client_needs_nothing_of_the_server() -> None:
    code = "import sys, serving.client; sys.exit(bool({'bentoml', 'onnxruntime', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


BUILD = "from setuptools import build_meta; print(build_meta.build_wheel({folder!r}))"
ASK = """
import asyncio, sys
from openworld_client import AsyncClient, Client, Retries, ServiceError

async def ask(url, image):
    async with AsyncClient(url) as client:
        return (await client.predict(image)).label

url, image = sys.argv[1:]
with Client(url, retries=Retries(attempts=1)) as client:
    print(client.predict(image).label, client.model().name, asyncio.run(ask(url, image)))
    try:
        client.predict(b"text")
    except ServiceError as error:
        print(error.code, error.status)
    client.teaching("token")
imported = {name.partition(".")[0] for name in sys.modules}
print(sorted(imported & {"serving", "numpy", "fastapi", "bentoml", "sqlalchemy"}))
"""


def test_the_distribution_of_the_client_works_without_openworld(server: Server, tmp_path: Path) -> None:
    """Its wheel is built without a network, and used by a process that does not find the packages of openworld."""
    checkout, site = tmp_path / "checkout", tmp_path / "site"
    ignored = shutil.ignore_patterns("__pycache__", "static", "build", "*.egg-info", "openworld_client")
    for name in ("client", "serving"):
        shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", checkout)
    command = [sys.executable, "-c", BUILD.format(folder=str(tmp_path))]
    built = subprocess.run(command, cwd=checkout / "client", capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    wheel = tmp_path / built.stdout.splitlines()[-1]
    assert wheel.name.startswith("openworld_client-")
    with zipfile.ZipFile(wheel) as stored:
        stored.extractall(site)
        (requirements,) = [stored.read(name).decode() for name in stored.namelist() if name.endswith("METADATA")]
    assert "Requires-Dist: httpx" in requirements
    picture = tmp_path / "red.png"
    picture.write_bytes(RED)
    done = subprocess.run(
        [sys.executable, "-c", ASK, server.url, picture],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["red tiny red", "unsupported_image 415", "[]"]
    # An import of more of the server would be noticed when it is built.
    (checkout / "serving/errors.py").write_text("from serving.settings import Settings\n")
    refused = subprocess.run(command, cwd=checkout / "client", capture_output=True, text=True, check=False)
    assert "imports serving.settings, which is not part of the client" in refused.stderr


@dataclass
class Scene:
    """Prepared responses in order, and the requests received; the last response is repeated."""

    answers: list[tuple[int, dict[str, str], bytes]]
    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list)

    def next(self, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        self.requests.append((headers, body))
        return self.answers[min(len(self.requests), len(self.answers)) - 1]


@contextlib.contextmanager
def acting(scene: Scene) -> Iterator[str]:
    """Run a server that plays a scene; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status, headers, answer = scene.next({name.lower(): value for name, value in self.headers.items()}, body)
            if status == HANG_UP:
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(answer))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as stage:
        thread = threading.Thread(target=stage.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{stage.server_address[1]}"
        finally:
            stage.shutdown()
            thread.join()


HANG_UP = 0
BUSY = error_answer(BusyError("too much to do", got="1 more", allowed="0", retry_after=0)).model_dump_json().encode()


@pytest.fixture(scope="module")
def good(model: BundleModel) -> bytes:
    return expected(model, RED).model_dump_json().encode()


def one_sync(url: str, **options: Any) -> Any:
    with Client(url, retries=QUICK, **options) as client:
        return client.predict(RED)


def one_async(url: str, **options: Any) -> Any:
    async def ask() -> Any:
        async with AsyncClient(url, retries=QUICK, **options) as client:
            return await client.predict(RED)

    return asyncio.run(ask())


FLAVOURS = pytest.mark.parametrize("ask", [one_sync, one_async], ids=["sync", "async"])
Ask = Callable[..., Any]


@FLAVOURS
@pytest.mark.parametrize("status", [503, 429])
def test_a_busy_response_is_retried_with_the_same_request(
    ask: Ask, status: int, model: BundleModel, good: bytes
) -> None:
    busy = (status, {"retry-after": "0"}, BUSY)
    scene = Scene([busy, busy, (200, {}, good)])
    with acting(scene) as url:
        assert ask(url, api_key="a-key-of-16-bytes") == expected(model, RED)
    assert [body for _, body in scene.requests] == [RED] * 3
    assert len({headers["x-request-id"] for headers, _ in scene.requests}) == 1
    assert {headers["authorization"] for headers, _ in scene.requests} == {"Bearer a-key-of-16-bytes"}


@FLAVOURS
def test_a_broken_connection_is_tried_again(ask: Ask, model: BundleModel, good: bytes) -> None:
    with acting(Scene([(HANG_UP, {}, b""), (200, {}, good)])) as url:
        assert ask(url) == expected(model, RED)


def test_several_images_are_sent_again_too(good: bytes, model: BundleModel) -> None:
    both = b'{"answers":[' + good + b"," + BUSY + b"]}"
    scene = Scene([(503, {"retry-after": "0"}, BUSY), (200, {}, both)])
    with acting(scene) as url, Client(url, retries=QUICK) as client:
        first, second = client.predict_many([RED, BLUE])
    assert first == expected(model, RED)
    assert isinstance(second, ServiceError)
    assert scene.requests[0][1] == scene.requests[1][1]
    assert BLUE in scene.requests[1][1]


@FLAVOURS
def test_retries_end(ask: Ask) -> None:
    scene = Scene([(503, {"retry-after": "0"}, BUSY)])
    with acting(scene) as url, pytest.raises(ServiceError) as caught:
        ask(url)
    assert (caught.value.code, caught.value.status) == ("busy", 503)
    assert len(scene.requests) == QUICK.attempts


@pytest.mark.parametrize("status", [400, 401, 413, 422, 500, 504])
def test_what_would_fail_again_is_not_sent_again(status: int) -> None:
    scene = Scene([(status, {}, BUSY)])
    with acting(scene) as url, pytest.raises(ServiceError) as caught:
        one_sync(url)
    assert caught.value.status == status
    assert len(scene.requests) == 1


@pytest.mark.parametrize(
    ("status", "answer"),
    [(200, b"<html>"), (200, b"{}"), (502, b"<html>"), (500, b'{"error": {"code": "x"}}'), (200, b"\xff")],
)
def test_an_unreadable_response_is_a_service_error(status: int, answer: bytes) -> None:
    with acting(Scene([(status, {}, answer)])) as url, pytest.raises(ServiceError) as caught:
        one_sync(url)
    assert (caught.value.code, caught.value.status) == (UNREADABLE, status)


def test_unknown_fields_of_a_newer_server_are_ignored(good: bytes, model: BundleModel) -> None:
    answer = json.loads(good)
    answer["more"] = answer["model"]["more"] = answer["tasks"][0]["more"] = 1
    with acting(Scene([(200, {}, json.dumps(answer).encode())])) as url:
        assert one_sync(url) == expected(model, RED)


@FLAVOURS
def test_an_unreachable_server_is_a_service_error(ask: Ask) -> None:
    with pytest.raises(ServiceError) as caught:
        ask(f"http://127.0.0.1:{free_port()}")
    error = caught.value
    assert (error.code, error.status) == (UNREACHABLE, None)
    assert error.request_id
    assert isinstance(error.__cause__, httpx.ConnectError)


def test_an_unreachable_server_is_not_ready() -> None:
    with Client(f"http://127.0.0.1:{free_port()}") as client:
        assert not client.ready()


def outcome(status: int = 503, **headers: str) -> httpx.Response:
    return httpx.Response(status, headers=headers)


def test_pauses_grow_and_never_undercut_what_the_server_asks() -> None:
    retries = Retries(attempts=4, first=1.0, longest=10.0)
    for attempt, most in ((1, 1.0), (2, 2.0), (3, 4.0)):
        for asked in (0, 7):
            pause = retries.pause(attempt, outcome(**{"retry-after": str(asked)}))
            assert pause is not None
            assert asked + most / 2 <= pause <= asked + most
    assert retries.pause(4, outcome()) is None
    assert retries.pause(1, outcome(**{"retry-after": "11"})) is None


def test_retry_after_may_be_a_date_or_nonsense() -> None:
    retries = Retries(first=0.0, longest=100.0)
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    pause = retries.pause(1, outcome(**{"retry-after": soon}))
    assert pause == pytest.approx(60, abs=30)
    assert retries.pause(1, outcome(**{"retry-after": "Mon, 01 Jan 2001 00:00:00 GMT"})) == 0
    assert retries.pause(1, outcome(**{"retry-after": "soon"})) == 0


def test_a_slow_answer_is_not_asked_for_twice() -> None:
    retries = Retries()
    assert retries.pause(1, httpx.ReadTimeout("slow")) is None
    assert retries.pause(1, httpx.ConnectTimeout("slow")) is not None


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"first": -1.0}, {"first": 20.0}])
def test_retries_refuse_nonsense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="allowed: attempts from 1"):
        Retries(**wrong)
