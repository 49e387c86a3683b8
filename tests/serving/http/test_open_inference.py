"""The Open Inference Protocol: its own documents, and a real client library, against a real server."""

from __future__ import annotations

import base64
import struct
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from serving.bundle.manifest import load_bundle
from serving.http.open_inference import OUTPUTS, read_request, respond
from tests.helpers_serving import COLOURS, FAILS, GREY, image_bytes

IMAGES = [image_bytes(COLOURS["red"]), image_bytes(COLOURS["blue"]), image_bytes(GREY)]
TEXTS = [base64.b64encode(image).decode() for image in IMAGES]


def request(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "image", "datatype": "BYTES", "shape": [3], "data": TEXTS}
    return {"id": "42", "inputs": [{**tensor, **changes}]}


def tensors(answer: dict[str, Any]) -> dict[str, list[Any]]:
    return {output["name"]: output["data"] for output in answer["outputs"]}


def test_health_and_metadata(client: httpx.Client) -> None:
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    version = client.get("/v2").json()["version"]
    for path in ("/v2/models/tiny", f"/v2/models/tiny/versions/{version}"):
        assert client.get(f"{path}/ready").json() == {"ready": True}
        described = client.get(path).json()
        assert (described["name"], described["versions"]) == ("tiny", [version])
        assert described["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [-1]}]
        assert {output["name"]: output["datatype"] for output in described["outputs"]} == OUTPUTS


def test_images_get_the_answers_of_predict(client: httpx.Client) -> None:
    answer = client.post("/v2/models/tiny/infer", json=request()).json()
    assert (answer["model_name"], answer["id"]) == ("tiny", "42")
    assert "parameters" not in answer, "this model works"
    found = tensors(answer)
    assert found["label"] == ["red", "blue", "unknown"]
    for number, image in enumerate(IMAGES):
        alone = client.post("/predict", content=image).json()
        assert {name: values[number] for name, values in found.items()} == {name: alone[name] for name in OUTPUTS}


def test_a_response_has_the_warning_of_its_answers(bundle: Path) -> None:
    body = b'{"inputs":[{"name":"image","datatype":"BYTES","shape":[1],"data":["QQ=="]}],"outputs":[{"name":"label"}]}'
    (parsed, _), manifest = read_request(body, None, 1), load_bundle(bundle).manifest
    warned = respond(parsed, [{"label": "cat", "warning": FAILS.warning}], manifest)
    assert warned.parameters == {"warning": FAILS.warning}
    assert respond(parsed, [{"label": "cat", "warning": None}], manifest).parameters is None


def test_outputs_and_parameters_are_chosen_by_the_request(client: httpx.Client) -> None:
    asked = request() | {"outputs": [{"name": "label"}], "parameters": {"alpha": 1e-300, "other": 1}}
    assert tensors(client.post("/v2/models/tiny/infer", json=asked).json()) == {"label": ["red", "blue", "yellow"]}
    within = request() | {"parameters": {"task": 1}}
    assert tensors(client.post("/v2/models/tiny/infer", json=within).json())["task"] == [1, 1, 1]


@pytest.mark.parametrize(
    ("path", "body", "status", "problem"),
    [
        ("other", request(), 404, "no such page: got /v2/models/other/infer; allowed: /v2/models/tiny/versions/"),
        ("tiny/versions/9", request(), 404, "no such page"),
        (
            "tiny",
            request(name="pixels"),
            400,
            "inputs cannot be used: got pixels of type BYTES; allowed: one input image",
        ),
        ("tiny", request(datatype="FP32"), 400, "inputs cannot be used"),
        ("tiny", request(shape=[2]), 400, "shape does not fit the data: got [2]; allowed: [3]"),
        ("tiny", request(data=["%"], shape=[1]), 400, "image is not base64"),
        ("tiny", request(data=[TEXTS[0], "AAAA"], shape=[2]), 415, "not a supported image"),
        ("tiny", request() | {"outputs": [{"name": "x"}]}, 422, "no such output: got x; allowed: label, known"),
        ("tiny", request() | {"parameters": {"alpha": 2}}, 422, "parameter cannot be used"),
        ("tiny", {"inputs": []}, 400, "inputs cannot be used: got no input"),
        ("tiny", [], 400, "JSON body cannot be read"),
    ],
)
def test_what_cannot_be_used_is_an_error_of_the_protocol(
    path: str, body: Any, status: int, problem: str, client: httpx.Client
) -> None:
    response = client.post(f"/v2/models/{path}/infer", json=body)
    assert response.status_code == status
    assert {*response.json()} == {"error"}
    assert response.json()["error"].startswith(problem)


def test_binary_data_that_lies_about_its_size_is_refused(client: httpx.Client) -> None:
    head = b'{"inputs":[{"name":"image","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":%d}}]}'
    for content, size in ((b"\xff\xff\xff\xff", 4), (b"ab", 2), (b"", 0), (struct.pack("<I", 3) + b"abc", 99)):
        document = head % size
        headers = {"inference-header-content-length": str(len(document))}
        response = client.post("/v2/models/tiny/infer", content=document + content, headers=headers)
        assert response.status_code in (400, 413, 415), response.text
    for length in ("-1", "x", "99999999"):
        response = client.post(
            "/v2/models/tiny/infer", content=head % 0, headers={"inference-header-content-length": length}
        )
        assert response.status_code == 400


def test_a_request_holds_at_most_the_allowed_images() -> None:
    from serving.errors import TooManyImagesError

    body = b'{"inputs":[{"name":"image","datatype":"BYTES","shape":[3],"data":["QQ==","QQ==","QQ=="]}]}'
    assert read_request(body, None, 3)[1] == [b"A", b"A", b"A"]
    with pytest.raises(TooManyImagesError, match="got 3; allowed: 1 to 2"):
        read_request(body, None, 2)


@pytest.mark.parametrize("binary", [False, True])
def test_the_client_of_triton_gets_answers(binary: bool, client: httpx.Client) -> None:
    http = pytest.importorskip(
        "tritonclient.http", reason="tritonclient is not installed: pip install 'tritonclient[http]'"
    )
    triton = http.InferenceServerClient(f"{client.base_url.host}:{client.base_url.port}")
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready("tiny")
    tensor = http.InferInput("image", [3], "BYTES")
    content = IMAGES if binary else TEXTS
    tensor.set_data_from_numpy(np.array(content, dtype=object), binary_data=binary)
    result = triton.infer("tiny", [tensor])
    assert [label if isinstance(label, str) else label.decode() for label in result.as_numpy("label")] == [
        "red",
        "blue",
        "unknown",
    ]
    assert result.as_numpy("known").tolist() == [True, True, False]
    triton.close()
