"""A real server, over real HTTP."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from serving.__main__ import main as serve
from serving.layout import RULE
from serving.predict import main
from serving.runtime import Model
from tests.helpers_serving import (
    COLOURS,
    GREY,
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
def test_every_body_form_says_what_the_command_says(
    client: httpx.Client, bundle: Path, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "image"
    path.write_bytes(content)
    assert main([str(bundle), str(path)]) == 0
    said = json.loads(capsys.readouterr().out)
    del said["file"]
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
        assert response.json() == said


def test_query_parameters(client: httpx.Client) -> None:
    said = client.post("/predict", params={"task": 1, "alpha": 0.2, "top": 4}, **as_raw(RED)).json()
    assert (said["task"], said["p_task"], said["alpha"], len(said["top"])) == (1, 1.0, 0.2, 4)
    assert (said["label"], said["known"], said["best_guess"]) == ("unknown", False, "yellow")


BAD: dict[str, tuple[Body, int, str]] = {
    "empty raw": (as_raw(b""), 422, "empty_image"),
    "empty form file": (as_form(b""), 422, "empty_image"),
    "empty json": (as_json(b""), 422, "empty_image"),
    "not an image": (as_raw(b"hello"), 415, "unsupported_image"),
    "gif called png": (as_raw(image_bytes(kind="GIF"), "image/png"), 415, "unsupported_image"),
    "truncated": (as_raw(NOISE[: len(NOISE) // 2]), 422, "broken_image"),
    "truncated in form": (as_form(NOISE[: len(NOISE) // 2]), 422, "broken_image"),
    "bomb": (as_raw(png_header(12_000, 12_000)), 413, "too_many_pixels"),
    "11 MiB raw": (as_raw(bytes(11 * MEBIBYTE)), 413, "too_many_bytes"),
    "11 MiB form": (as_form(bytes(11 * MEBIBYTE)), 413, "too_many_bytes"),
    "11 MiB json": (as_json(bytes(11 * MEBIBYTE)), 413, "too_many_bytes"),
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
    for _ in range(11):
        connection.sendall(b"100000\r\n" + bytes(MEBIBYTE) + b"\r\n")


@pytest.mark.parametrize("send", [_announced, _chunked])
def test_a_50_mb_body_is_refused_before_it_is_sent(
    server: Server, client: httpx.Client, send: Callable[[socket.socket], None]
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
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


def test_a_client_that_hangs_up_harms_nobody(server: Server, client: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nhalf")
    assert client.post("/predict", **as_raw(RED)).json()["label"] == "red"


def test_many_at_once_each_get_their_own_answer(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as client, ThreadPoolExecutor(16) as threads:

        def ask(number: int) -> bool:
            label = list(COLOURS)[number % 4]
            if number % 10 == 9:
                return client.post("/predict", **as_raw(b"junk")).status_code == 415
            return bool(client.post("/predict", **as_raw(image_bytes(COLOURS[label]))).json()["label"] == label)

        assert all(threads.map(ask, range(200)))


def test_model_says_what_is_served(client: httpx.Client, model: Model) -> None:
    said = client.get("/model").json()
    assert (said["name"], said["version"]) == ("tiny", model.manifest.version)
    assert [task["labels"] for task in said["tasks"]] == [["red", "green"], ["blue", "yellow"]]
    assert said["image"] == {"height": 8, "width": 8, "mode": "RGB"}
    assert said["provider"] == model.provider
    assert said["metrics"] == {"accuracy": 1.0}
    assert said["threshold"] == pytest.approx(1.30103, abs=1e-5)
    assert said["schema"] == 1


def test_other_pages_still_work(client: httpx.Client) -> None:
    assert client.get("/").headers["content-type"].startswith("text/html")
    assert client.get("/schema.json").json()["name"] == "openworld"
    assert client.get("/healthz").status_code == 200


def test_nothing_above_surprised_the_server(server: Server) -> None:
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(
    ("damage", "target"), [("missing", None), ("corrupt", None), ("wrong golden", None), ("wrong golden", SOURCE)]
)
def test_a_bad_bundle_refuses_to_start(tmp_path: Path, damage: str, target: str | None, model: Model) -> None:
    folder = tmp_path / "bundle"
    if damage == "corrupt":
        write_bundle(folder)
        (folder / RULE).write_bytes(b"{}")
    if damage == "wrong golden":
        golden = golden_of(model)
        write_bundle(folder, golden={**golden, "logits": golden["logits"] + np.float32(1)})
    (line,) = refused(serve_command(free_port(), target=target), tmp_path, folder)
    expected = {"missing": "no such bundle directory", "corrupt": "corrupt: sha256", "wrong golden": "logits of the"}
    assert line.startswith(str(folder))
    assert expected[damage] in line


@pytest.mark.parametrize("target", [None, SOURCE], ids=["serving", "bentoml"])
@pytest.mark.parametrize(
    ("name", "value"), [("OPENWORLD_QUEUE", "none"), ("OPENWORLD_PROVIDER", "cuda")], ids=["setting", "provider"]
)
def test_what_cannot_be_had_refuses_to_start(
    tmp_path: Path, bundle: Path, name: str, value: str, target: str | None
) -> None:
    settings = {name: value, "CUDA_VISIBLE_DEVICES": ""}
    said = refused(serve_command(free_port(), target=target), tmp_path, bundle, settings)
    expected = {"OPENWORLD_QUEUE": "OPENWORLD_QUEUE is 'none'", "OPENWORLD_PROVIDER": "CUDA does not work here"}
    assert said[-1].startswith(expected[name])


def test_bentomls_own_command_starts_the_same_server(tmp_path: Path, bundle: Path, client: httpx.Client) -> None:
    with serving(tmp_path, bundle, target=SOURCE) as server, httpx.Client(base_url=server.url) as other:
        assert other.get("/model").json() == client.get("/model").json()
        sent = {"content": image_bytes(), "headers": {"content-type": "image/png"}}
        answers = [asked.post("/predict", **sent).json() for asked in (other, client)]
        assert answers[0]["tasks"] == answers[1]["tasks"]


def test_a_bundle_may_be_named_on_the_command_line(tmp_path: Path, bundle: Path) -> None:
    """It goes before the one that the environment names; a shelf beside it is refused."""
    missing = tmp_path / "missing"
    command = [*serve_command(free_port()), str(missing)]
    (line,) = refused(command, tmp_path, bundle)
    assert line.startswith(f"{missing}: no such bundle directory")
    (line,) = refused(command, tmp_path, None, {"OPENWORLD_BUNDLES": str(tmp_path)})
    assert "OPENWORLD_BUNDLES" in line


@pytest.mark.parametrize("option", [("--host", "somewhere"), ("--port", "70000"), ("--port", "0"), ("--port", "x")])
def test_an_address_that_is_none_is_refused(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        serve(list(option))
    assert stopped.value.code == 2
    assert f"got '{option[1]}'; allowed: " in capsys.readouterr().err


def test_a_port_that_is_taken_is_told_in_one_line(tmp_path: Path, bundle: Path, server: Server) -> None:
    (line,) = refused(serve_command(server.port), tmp_path, bundle)
    assert line == (
        f"127.0.0.1:{server.port}: cannot listen there: Address already in use; "
        "allowed: an address of this machine and a free port (--host, --port)"
    )
