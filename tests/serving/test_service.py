"""A real server, over real HTTP."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bentoml
import httpx
import numpy as np
import pytest
from PIL import Image

from serving.__main__ import main as serve
from serving.bundle.layout import RULE
from serving.bundle.model import BundleModel
from serving.errors import (
    BusyError,
    DeadlineError,
    ImageFormatError,
    MalformedRequestError,
    TooManyBytesError,
    TooManyImagesError,
)
from serving.host.address import LOOPBACK
from serving.http.schemas import Answer, Answers
from serving.predict import main
from serving.service import OpenWorld
from tests.helpers_serving import (
    COLOURS,
    GREY,
    PATIENCE,
    SOURCE,
    Server,
    free_port,
    golden_of,
    image_bytes,
    png_header,
    refused,
    saved,
    serve_command,
    serving,
    write_bundle,
)
from tests.load import listening

Body = dict[str, Any]
MEBIBYTE = 1024 * 1024


def as_form(content: bytes, field: str = "image") -> Body:
    return {"files": {field: ("photo.png", content, "image/png")}}


def as_raw(content: bytes, media_type: str = "application/octet-stream") -> Body:
    return {"content": content, "headers": {"content-type": media_type}}


def as_json(content: bytes, prefix: str = "") -> Body:
    return {"json": {"image": prefix + base64.b64encode(content).decode()}}


def post_json(text: str | bytes) -> Body:
    return {"content": text, "headers": {"content-type": "application/json"}}


RED = image_bytes()
NOISE = saved(Image.fromarray(np.random.default_rng(5).integers(0, 256, (37, 53, 3), dtype=np.uint8)))


def test_ready_only_with_a_tested_model(client: httpx.Client) -> None:
    assert client.get("/readyz").status_code == 200
    assert client.get("/livez").status_code == 200


@pytest.mark.parametrize("content", [RED, NOISE, image_bytes(GREY, kind="JPEG")], ids=["red", "noise", "grey"])
def test_every_body_form_gets_the_answer_of_the_command(
    client: httpx.Client, bundle: Path, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "image"
    path.write_bytes(content)
    assert main([str(bundle), str(path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    del answer["file"]
    for body in (
        as_form(content),
        as_form(content, field="anything"),
        as_raw(content),
        as_raw(content, "image/png"),
        as_raw(content, "image/jpeg; charset=nonsense"),
        {"content": content},
        as_json(content),
        as_json(content, "data:image/png;base64,"),
    ):
        response = client.post("/predict", **body)
        assert response.status_code == 200, response.text
        assert response.json() == answer


def test_query_parameters(client: httpx.Client) -> None:
    answer = client.post("/predict", params={"task": 1, "alpha": 0.2, "top": 4}, **as_raw(RED)).json()
    assert (answer["task"], answer["p_task"], answer["alpha"], len(answer["top"])) == (1, 1.0, 0.2, 4)
    assert (answer["label"], answer["known"], answer["best_guess"]) == ("unknown", False, "yellow")


BAD: dict[str, tuple[Body, int, str]] = {
    "empty raw": (as_raw(b""), 422, "empty_image"),
    "empty form file": (as_form(b""), 422, "empty_image"),
    "empty json": (as_json(b""), 422, "empty_image"),
    "not an image": (as_raw(b"hello"), 415, "unsupported_image"),
    "gif called png": (as_raw(image_bytes(kind="GIF"), "image/png"), 415, "unsupported_image"),
    "truncated": (as_raw(NOISE[: len(NOISE) // 2]), 422, "broken_image"),
    "truncated in form": (as_form(NOISE[: len(NOISE) // 2]), 422, "broken_image"),
    "bomb": (as_raw(png_header(12_000, 12_000)), 413, "too_many_pixels"),
    "33 MiB raw": (as_raw(bytes(33 * MEBIBYTE)), 413, "too_many_bytes"),
    "33 MiB form": (as_form(bytes(33 * MEBIBYTE)), 413, "too_many_bytes"),
    "33 MiB json": (as_json(bytes(33 * MEBIBYTE)), 413, "too_many_bytes"),
    "two files": ({"files": [("a", ("a", RED)), ("b", ("b", RED))]}, 400, "malformed_request"),
    "url in the file field": (
        {"files": {"image": (None, "http://127.0.0.1:9/x.png")}},
        400,
        "malformed_request",
    ),
    "text beside the file": ({**as_form(RED), "data": {"task": "1"}}, 400, "malformed_request"),
    "form without boundary": (as_raw(b"x", "multipart/form-data"), 400, "malformed_request"),
    "long boundary": (as_raw(b"x", f"multipart/form-data; boundary={'b' * 257}"), 400, "malformed_request"),
    "broken form": (as_raw(b"nonsense", "multipart/form-data; boundary=b"), 400, "malformed_request"),
    "form that ends early": (
        as_raw(
            b'--b\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n' + RED,
            "multipart/form-data; boundary=b",
        ),
        400,
        "malformed_request",
    ),
    "broken json": (post_json("{"), 400, "malformed_request"),
    "deep json": (post_json("[" * 100_000), 400, "malformed_request"),
    "json list": (post_json("[1]"), 400, "malformed_request"),
    "json that is not text": (post_json(b"\xff\xfe"), 400, "malformed_request"),
    "json without image": (post_json("{}"), 400, "malformed_request"),
    "json with more": (post_json('{"image": "", "task": 1}'), 400, "malformed_request"),
    "json number": (post_json('{"image": 1}'), 400, "malformed_request"),
    "bad base64": (post_json('{"image": "????"}'), 400, "malformed_request"),
    "url in json": (post_json('{"image": "http://127.0.0.1:9/x.png"}'), 400, "malformed_request"),
    "data url without base64": (post_json('{"image": "data:image/png,abc"}'), 400, "malformed_request"),
    "urlencoded": ({"data": {"image": "x"}}, 415, "unsupported_media_type"),
    "text": (as_raw(RED, "text/plain"), 415, "unsupported_media_type"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_and_the_server_goes_on(client: httpx.Client, name: str) -> None:
    body, status, code = BAD[name]
    response = client.post("/predict", **body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == code
    assert error["got"] in error["message"]
    assert error["allowed"] in error["message"]
    assert client.post("/predict", **as_raw(RED)).json()["label"] == "red"


@pytest.mark.parametrize(
    "query",
    [
        "task=2",
        "task=-1",
        "task=red",
        "task=",
        "task=0.5",
        "task=%201",
        "task=0%0A",
        "task=0_1",
        "task=%EF%BC%91",
        "task=%D9%A1",
        "task=+1",
        "top=%E2%91%A0",
        "alpha=%EF%BC%90.1",
        "alpha=0.1%20",
        "alpha=0_0.1",
        "alpha=.1",
        "task=0&task=1",
        "alpha=0",
        "alpha=1",
        "alpha=nan",
        "alpha=much",
        "top=0",
        "top=5",
        "apha=0.1",
        f"task={'9' * 5000}",
    ],
)
def test_bad_parameters_are_refused(client: httpx.Client, query: str) -> None:
    response = client.post(f"/predict?{query}", **as_raw(RED))
    assert response.status_code == 422, response.text
    assert response.json()["error"]["code"] == "bad_parameter"
    assert len(response.text) < 1000


def _announced(connection: socket.socket) -> None:
    """50 MB are announced, and one kilobyte sent."""
    connection.sendall(b"Content-Length: 50000000\r\n\r\n" + bytes(1024))


def _chunked(connection: socket.socket) -> None:
    """The size is not announced: the server can only count, up to its limit."""
    connection.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(33):
        connection.sendall(b"100000\r\n" + bytes(MEBIBYTE) + b"\r\n")


@pytest.mark.parametrize("send", [_announced, _chunked])
def test_a_50_mb_body_is_refused_before_it_is_sent(
    server: Server, client: httpx.Client, send: Callable[[socket.socket], None]
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n")
        send(connection)
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
    assert client.post("/predict", **as_raw(RED)).json()["label"] == "red"


def test_a_50_mb_upload_gets_its_answer_too(client: httpx.Client) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(50):
            yield bytes(1_000_000)

    for content in (bytes(50_000_000), parts()):
        assert client.post("/predict", content=content).status_code == 413
    assert client.post("/predict", **as_raw(RED)).json()["label"] == "red"


def test_a_client_that_disconnects_does_not_affect_others(server: Server, client: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nhalf")
    assert client.post("/predict", **as_raw(RED)).json()["label"] == "red"


def test_many_at_once_each_get_their_own_answer(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client, ThreadPoolExecutor(16) as threads:

        def ask(number: int) -> bool:
            label = list(COLOURS)[number % 4]
            if number % 10 == 9:
                return client.post("/predict", **as_raw(b"junk")).status_code == 415
            return bool(client.post("/predict", **as_raw(image_bytes(COLOURS[label]))).json()["label"] == label)

        assert all(threads.map(ask, range(200)))


def test_model_describes_the_served_bundle(client: httpx.Client, model: BundleModel) -> None:
    described = client.get("/model").json()
    assert (described["name"], described["version"]) == ("tiny", model.manifest.version)
    assert [task["labels"] for task in described["tasks"]] == [["red", "green"], ["blue", "yellow"]]
    assert described["image"] == {"height": 8, "width": 8, "mode": "RGB"}
    assert described["provider"] == model.provider
    assert described["metrics"] == {"accuracy": 1.0}
    assert described["threshold"] == pytest.approx(1.30103, abs=1e-5)
    assert described["schema"] == 1


def test_other_pages_still_work(client: httpx.Client) -> None:
    assert client.get("/").headers["content-type"].startswith("text/html")
    assert client.get("/schema.json").json()["name"] == "openworld"
    assert client.get("/healthz").status_code == 200


def test_the_log_has_no_unexpected_error(server: Server) -> None:
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(("damage", "target"), [("corrupt", None), ("wrong golden", SOURCE)])
def test_a_bad_bundle_refuses_to_start(tmp_path: Path, damage: str, target: str | None, model: BundleModel) -> None:
    folder = tmp_path / "bundle"
    if damage == "corrupt":
        write_bundle(folder)
        (folder / RULE).write_bytes(b"{}")
    if damage == "wrong golden":
        golden = golden_of(model)
        write_bundle(folder, golden={**golden, "logits": golden["logits"] + np.float32(1)})
    (line,) = refused(serve_command(free_port(), target=target), tmp_path, folder)
    expected = {"corrupt": "corrupt: sha256", "wrong golden": "logits of the"}
    assert line.startswith(f"error: {folder}")
    assert expected[damage] in line


@pytest.mark.parametrize(
    ("name", "value", "target"),
    [
        ("OPENWORLD_QUEUE", "none", None),
        ("OPENWORLD_QUEUE", "none", SOURCE),
        # Both commands check the bundle in the same way.
        ("OPENWORLD_PROVIDER", "cuda", None),
    ],
)
def test_an_unusable_setting_stops_the_start(
    tmp_path: Path, bundle: Path, name: str, value: str, target: str | None
) -> None:
    settings = {name: value, "CUDA_VISIBLE_DEVICES": ""}
    errors = refused(serve_command(free_port(), target=target), tmp_path, bundle, settings)
    expected = {"OPENWORLD_QUEUE": "OPENWORLD_QUEUE is 'none'", "OPENWORLD_PROVIDER": "CUDA does not work here"}
    assert errors[-1].startswith(f"error: {expected[name]}")


@pytest.mark.long
def test_bentomls_own_command_starts_the_same_server(tmp_path: Path, bundle: Path, client: httpx.Client) -> None:
    files = coloured_files(tmp_path)
    with (
        serving(tmp_path / "home", bundle, target=SOURCE, host=None) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as other,
    ):
        assert listening(server) == {LOOPBACK}
        assert other.get("/model").json() == client.get("/model").json()
        wanted = [client.post("/predict", **as_raw(file.read_bytes())).json() for file in files]
        assert [other.post("/predict", **as_raw(file.read_bytes())).json() for file in files] == wanted
        assert_bentomls_client_gets(wanted, server, files, tmp_path)


def test_bentomls_own_client_gets_the_same_answers(tmp_path: Path, server: Server, client: httpx.Client) -> None:
    files = coloured_files(tmp_path)
    wanted = [client.post("/predict", **as_raw(file.read_bytes())).json() for file in files]
    assert_bentomls_client_gets(wanted, server, files, tmp_path)


def coloured_files(folder: Path) -> list[Path]:
    files = [folder / f"{label}.png" for label in ("red", "blue")]
    for file in files:
        file.write_bytes(image_bytes(COLOURS[file.stem]))
    return files


def assert_bentomls_client_gets(wanted: list[Any], server: Server, files: list[Path], tmp_path: Path) -> None:
    with bentoml.SyncHTTPClient(server.url) as own:
        assert [own.predict(image=file) for file in files] == wanted
        many = own.predict_many(images=files)["answers"]
        assert [answer["label"] for answer in many] == ["red", "blue"]
        (tmp_path / "junk.png").write_bytes(b"junk")
        with pytest.raises(bentoml.exceptions.BentoMLException, match="not a supported image"):
            own.predict(image=tmp_path / "junk.png")


def test_the_service_answers_in_this_process_as_over_http(
    tmp_path: Path, bundle: Path, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENWORLD_BUNDLE", str(bundle))
    red, junk = tmp_path / "red.png", tmp_path / "junk.png"
    red.write_bytes(RED)
    junk.write_bytes(b"junk")
    service = OpenWorld()

    async def ask() -> tuple[Answer, Answers]:
        with pytest.raises(ImageFormatError):
            await service.predict(image=junk)
        return await service.predict(image=red), await service.predict_many(images=[red, junk])

    try:
        one, many = asyncio.run(ask())
    finally:
        service.close()
        # A server's engine changes the garbage collector's settings of this process.
        gc.unfreeze()
        gc.set_threshold(700, 10, 10)
    assert one.model_dump(mode="json") == client.post("/predict", **as_raw(RED)).json()
    files = {"files": [("images", ("red", RED)), ("images", ("junk", b"junk"))]}
    over_http = Answers.model_validate(client.post("/predict_many", **files).json())
    assert many.model_dump(mode="json") == over_http.model_dump(mode="json")


def test_limits_and_deadline_hold_in_this_process(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over HTTP."""
    for name, value in {"BUNDLE": bundle, "DEADLINE": 0.2, "QUEUE": 1, "MAX_BYTES": 1000, "MAX_IMAGES": 2}.items():
        monkeypatch.setenv(f"OPENWORLD_{name}", str(value))
    red, large = tmp_path / "red.png", tmp_path / "large.png"
    red.write_bytes(RED)
    large.write_bytes(bytes(1001))
    service = OpenWorld()

    async def ask() -> None:
        with pytest.raises(TooManyBytesError, match="got 1001 bytes; allowed: up to 1000 bytes"):
            await service.predict(image=large)
        for files, kind in (([red] * 3, TooManyImagesError), ([], MalformedRequestError)):
            with pytest.raises(kind, match=f"got {len(files)}; allowed: 1 to 2"):
                await service.predict_many(images=files)
        with service.engine.queue.admitted(), pytest.raises(BusyError):
            await service.predict(image=red)
        release = threading.Event()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda _: RED if release.wait(PATIENCE) else b"")
            for call in (service.predict(image=red), service.predict_many(images=[red])):
                with pytest.raises(DeadlineError, match=r"allowed: 0.2 seconds"):
                    await asyncio.wait_for(call, PATIENCE)
            release.set()

    try:
        asyncio.run(ask())
    finally:
        service.close()
        gc.unfreeze()
        gc.set_threshold(700, 10, 10)


def test_bentomls_own_parser_gets_no_body(client: httpx.Client, tmp_path: Path) -> None:
    """BentoML's own parser would run the code in a pickled body, and fetch a URL in a form."""
    proof = tmp_path / "proof"
    bomb = b"cos\nsystem\n(S'touch " + str(proof).encode() + b"'\ntR."
    for path in ("/predict", "/predict_many"):
        response = client.post(path, **as_raw(bomb, "application/vnd.bentoml+pickle"))
        assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")
        with socket.create_server(("127.0.0.1", 0)) as bait:
            url = f"http://127.0.0.1:{bait.getsockname()[1]}/x.png"
            for field in ("image", "images"):
                response = client.post(path, files={field: (None, url)})
                assert (response.status_code, response.json()["error"]["code"]) == (400, "malformed_request")
            bait.settimeout(0.2)
            with pytest.raises(TimeoutError):
                bait.accept()
    assert not proof.exists()
    for path in ("/livez", "/schema.json", "/static_content/swagger-ui.css", "/static_content/../predict"):
        assert client.post(path, **as_raw(bomb, "application/vnd.bentoml+pickle")).status_code in (404, 405, 415)


def test_a_bundle_may_be_named_on_the_command_line(tmp_path: Path, bundle: Path) -> None:
    """The argument takes precedence over the environment; a shelf with it is refused."""
    missing = tmp_path / "missing"
    command = [*serve_command(free_port()), str(missing)]
    (line,) = refused(command, tmp_path, bundle)
    assert line.startswith(f"error: {missing}: no such bundle directory")
    (line,) = refused(command, tmp_path, None, {"OPENWORLD_BUNDLES": str(tmp_path)})
    assert "OPENWORLD_BUNDLES" in line


@pytest.mark.parametrize("place", [0, 2, 4])
def test_the_bundle_may_stand_before_or_after_options(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENWORLD_BUNDLE", "BENTOML_HOST", "BENTOML_DO_NOT_TRACK"):
        monkeypatch.setenv(name, "")
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append(words))
    words = ["--host", LOOPBACK, "--port", str(free_port())]
    serve([*words[:place], "mine", *words[place:]])
    assert os.environ["OPENWORLD_BUNDLE"] == "mine"
    assert f"--port={words[-1]}" in started[0]


@pytest.mark.parametrize("option", [("--host", "somewhere"), ("--port", "70000"), ("--port", "0"), ("--port", "x")])
def test_an_invalid_address_is_refused(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        serve(list(option))
    assert stopped.value.code == 2
    assert f"got '{option[1]}'; allowed: " in capsys.readouterr().err


def test_a_port_in_use_prints_a_one_line_error(tmp_path: Path, bundle: Path, server: Server) -> None:
    (line,) = refused(serve_command(server.port), tmp_path, bundle)
    assert line == (
        f"error: 127.0.0.1:{server.port}: cannot listen there: Address already in use; "
        "allowed: an address of this machine and a free port (--host, --port)"
    )
