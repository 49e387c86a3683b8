"""Several images in one request, over real HTTP."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.helpers_serving import COLOURS, GREY, image_bytes, png_header

IMAGES = [image_bytes(colour) for colour in (*COLOURS.values(), GREY)]
LABELS = [*COLOURS, "unknown"]


def as_form(contents: Sequence[bytes]) -> dict[str, Any]:
    return {"files": [("images", (f"{number}.png", content)) for number, content in enumerate(contents)]}


def as_json(contents: Sequence[bytes]) -> dict[str, Any]:
    return {"json": {"images": [base64.b64encode(content).decode() for content in contents]}}


FORMS = pytest.mark.parametrize("form", [as_form, as_json])


@FORMS
def test_answers_come_in_order_and_are_those_of_single_images(client: httpx.Client, form: Any) -> None:
    response = client.post("/predict_many", **form(IMAGES * 6))
    assert response.status_code == 200, response.text
    answers = response.json()["answers"]
    assert [answer["label"] for answer in answers] == LABELS * 6
    alone = [client.post("/predict", content=content).json() for content in IMAGES]
    for answer, single in zip(answers, alone * 6, strict=True):
        assert answer["unknown_score"] == pytest.approx(single["unknown_score"], abs=1e-5)
        assert answer.keys() == single.keys()


@FORMS
def test_an_invalid_image_yields_an_error_in_its_own_slot_only(client: httpx.Client, form: Any) -> None:
    contents = [IMAGES[0], b"junk", b"", png_header(12_000, 12_000), IMAGES[1][:45], IMAGES[1]]
    answers = client.post("/predict_many", **form(contents)).json()["answers"]
    codes = [answer.get("error", {}).get("code") for answer in answers]
    assert codes == [None, "unsupported_image", "empty_image", "too_many_pixels", "broken_image", None]
    assert [answer.get("label") for answer in answers] == ["red", None, None, None, None, "green"]


def test_invalid_base64_yields_an_error_in_its_own_slot_only(client: httpx.Client) -> None:
    body = {"images": ["????", base64.b64encode(IMAGES[2]).decode(), "http://127.0.0.1:9/x.png"]}
    answers = client.post("/predict_many", json=body).json()["answers"]
    assert [answer.get("label") for answer in answers] == [None, "blue", None]
    assert {answer["error"]["code"] for answer in answers if "error" in answer} == {"malformed_request"}


def test_the_question_is_asked_of_every_image(client: httpx.Client) -> None:
    answers = client.post("/predict_many?task=1&top=1", **as_form(IMAGES)).json()["answers"]
    assert {(answer["task"], answer["p_task"], len(answer["top"])) for answer in answers} == {(1, 1.0, 1)}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (as_form([IMAGES[0]] * 65), 413, "too_many_images"),
        (as_json([IMAGES[0]] * 65), 413, "too_many_images"),
        (as_json([]), 400, "malformed_request"),
        ({"json": {"images": [1]}}, 400, "malformed_request"),
        ({"json": {"image": "x"}}, 400, "malformed_request"),
        ({"content": "{", "headers": {"content-type": "application/json"}}, 400, "malformed_request"),
        ({**as_form([IMAGES[0]]), "data": {"task": "1"}}, 400, "malformed_request"),
        ({"content": b"--b--\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}}, 400, None),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, "malformed_request"),
        ({"content": IMAGES[0], "headers": {"content-type": "image/png"}}, 415, "unsupported_media_type"),
        ({"content": IMAGES[0]}, 415, "unsupported_media_type"),
        ({"content": bytes(65 * 2**20), "headers": {"content-type": "application/json"}}, 413, "too_many_bytes"),
    ],
    ids=lambda value: None,
)
def test_bad_requests_are_refused(client: httpx.Client, body: dict[str, Any], status: int, code: str | None) -> None:
    response = client.post("/predict_many", **body)
    assert response.status_code == status, response.text
    assert code in (None, response.json()["error"]["code"])


def test_an_image_in_many_may_be_no_larger_than_alone(client: httpx.Client) -> None:
    answers = client.post("/predict_many", **as_form([IMAGES[0], bytes(33 * 2**20)])).json()["answers"]
    assert answers[0]["label"] == "red"
    assert answers[1]["error"]["code"] == "too_many_bytes"


def test_answers_are_plain_json(client: httpx.Client) -> None:
    response = client.post("/predict_many", **as_form(IMAGES[:1]))
    assert response.headers["content-type"] == "application/json"
    assert list(json.loads(response.content)) == ["answers"]
