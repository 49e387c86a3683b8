"""The quarantine over HTTP: with the token check in front and a real store behind."""

from __future__ import annotations

import io
import socket
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi.routing import APIRoute
from PIL import Image
from starlette.responses import PlainTextResponse

from serving.bundle.errors import ImageError
from serving.bundle.model import BundleModel
from serving.http.app import make_app
from serving.http.middleware import MAX_JSON_BYTES
from serving.http.schemas import ErrorAnswer
from serving.quarantine.api.overview import LEARNED_FROM, commands
from serving.quarantine.api.pictures import SIDE, picture
from serving.quarantine.api.routes import router
from serving.quarantine.api.schemas import ItemList, Overview
from serving.quarantine.records import FoundGroup
from serving.quarantine.store import Store
from serving.settings import Settings
from tests.helpers_quarantine import arrival, arrivals, noise
from tests.helpers_serving import PATIENCE, saved
from training.data.quarantined import MIN_IMAGES

TOKEN = "f00dfacef00dface-token"
ADA = {"authorization": f"Bearer {TOKEN}", "x-openworld-user": "ada"}
NOWHERE = 999
ENGINE = SimpleNamespace()
"""The part of a worker's engine that these routes need."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/quarantine.db"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """Items 1 to 30 in group 1, 31 to 35 in group 2, 36 and 37 in none."""
    opened = Store.open(url)
    opened.add(arrivals(range(37)))
    opened.add([arrival(0)])
    near = FoundGroup(range(31, 36), 0.5, "red", True)
    opened.replace_groups([FoundGroup(range(1, 31), 0.9, None, False), near])
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def address(model: BundleModel) -> Iterator[str]:
    """The pages as a worker serves them, in a thread of this process."""
    ENGINE.loaded = SimpleNamespace(model=model)
    app = make_app(Settings(admin_token=TOKEN), lambda: ENGINE, PlainTextResponse(""))  # type: ignore[arg-type, return-value]
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(PATIENCE)


@pytest.fixture
def off(address: str) -> Iterator[httpx.Client]:
    """A client without a quarantine, logged in as ada with the token."""
    ENGINE.keeper = None
    with httpx.Client(base_url=address, headers=ADA, timeout=PATIENCE) as opened:
        yield opened


@pytest.fixture
def client(off: httpx.Client, store: Store) -> httpx.Client:
    keep(store)
    return off


def keep(store: Any) -> None:
    ENGINE.keeper = SimpleNamespace(store=store)


def refusal(response: httpx.Response) -> tuple[int, str]:
    error_answer = ErrorAnswer.model_validate(response.json())
    assert error_answer.error.got in error_answer.error.message
    assert error_answer.error.allowed in error_answer.error.message
    return response.status_code, error_answer.error.code


def overview(client: httpx.Client, query: str = "") -> Overview:
    return Overview.model_validate_json(client.get(f"/unknowns/groups{query}").content)


def post(client: httpx.Client, what: str, **body: Any) -> list[int]:
    response = client.post(f"/unknowns/{what}", json=body)
    assert response.status_code == 200, response.text
    return list(response.json()["items"])


# ---- what is shown


def test_the_overview_has_all_that_the_page_shows(client: httpx.Client, store: Store, model: BundleModel) -> None:
    store.name([1, 2, 3], "eight", "ben")
    response = client.get("/unknowns/groups")
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["cross-origin-resource-policy"] == "same-origin"
    shown = Overview.model_validate_json(response.content)
    assert (shown.user, shown.model.version, shown.known) == ("ada", model.manifest.version, model.manifest.labels)
    assert [(group.id, group.size, group.cohesion, group.near_class, group.shifted) for group in shown.groups] == [
        (1, 30, 0.9, None, False),
        (2, 5, 0.5, "red", True),
    ]
    assert [item.id for item in shown.groups[0].items] == list(range(1, 25))
    assert (shown.groups[0].states, shown.groups[0].labels) == ({"new": 27, "named": 3}, {"eight": 3})
    assert (shown.groups[1].state, shown.groups[1].label) == ("new", None)
    assert (shown.ungrouped.size, [item.id for item in shown.ungrouped.items]) == (2, [36, 37])
    assert shown.states == {"new": 34, "named": 3}
    assert [(entry.label, entry.images, entry.ready) for entry in shown.classes] == [("eight", 3, False)]
    assert [(change.who, change.what, change.items, change.detail) for change in shown.changes] == [
        ("ben", "name", 3, "eight")
    ]
    first, *_, last = shown.groups[0].items
    assert (first.copies, first.labelled_by, first.label, first.p_value) == (2, "ben", "eight", 0.001)
    assert (last.copies, last.labelled_by, last.label) == (1, None, None)
    assert str(first.labelled_at).endswith("Z")


def test_a_class_is_ready_when_training_would_take_it(client: httpx.Client, store: Store) -> None:
    assert LEARNED_FROM == MIN_IMAGES
    store.name(range(1, 1 + MIN_IMAGES), "eight", "ben")
    store.name(range(31, 33), "red", "ben")
    eight, red = overview(client).classes
    assert (eight.ready, eight.in_model) == (True, False)
    assert (red.ready, red.in_model) == (False, True)


def test_large_groups_come_in_parts(client: httpx.Client) -> None:
    assert [len(group.items) for group in overview(client, "?items=2").groups] == [2, 2]
    assert overview(client, "?items=0").groups[0].items == ()
    for group, expected in (("1", range(1, 31)), ("2", range(31, 36)), ("none", range(36, 38)), (NOWHERE, [])):
        found, after = [], 0
        while after is not None:
            response = client.get("/unknowns/items", params={"group": group, "after": after, "limit": 7})
            part = ItemList.model_validate_json(response.content)
            found += [item.id for item in part.items]
            after = part.next
        assert found == list(expected)


def test_commands_are_ready_to_be_typed_and_hold_no_password() -> None:
    place = Settings(quarantine_url="sqlite:////var/my data/q.db", bundle=Path("/b"))
    assert commands(place).discover == "openworld discover --quarantine 'sqlite:////var/my data/q.db' --bundle /b"
    shelf = Settings(
        quarantine_url="postgresql://u:secret@h/d", quarantine_images="s3://k:secret@b", bundles=Path("/s")
    )
    places = '--quarantine "$OPENWORLD_QUARANTINE_URL" --images "$OPENWORLD_QUARANTINE_IMAGES"'
    assert commands(shelf).learn == f"openworld learn-unknowns RUN {places} --publish /s"
    assert commands(shelf).discover == f"openworld discover {places} --bundle /s/current"


# ---- images


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "bmp"])
def test_an_image_comes_back_as_it_was_sent_and_as_nothing_else(client: httpx.Client, store: Store, kind: str) -> None:
    content = saved(noise(50), kind.upper())
    (number,) = store.add([arrival(content=content)]).kept
    for page in ("image", "thumbnail"):
        response = client.get(f"/unknowns/items/{number}/{page}")
        assert (response.content, response.headers["content-type"]) == (content, f"image/{kind}")
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cross-origin-resource-policy"] == "same-origin"
        assert "default-src 'none'" in response.headers["content-security-policy"]


@pytest.mark.parametrize("content", [b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"<!doctype html>", b"GIF89a", b""])
def test_what_is_no_image_is_never_shown(content: bytes) -> None:
    with pytest.raises(ImageError, match="not a supported image"):
        picture(content)


def test_a_large_image_has_a_small_and_upright_thumbnail(client: httpx.Client, store: Store) -> None:
    sideways = noise(51, 12).resize((1200, 600), Image.Resampling.BICUBIC)
    exif = sideways.getexif()
    exif[0x0112] = 6
    flat = saved(Image.new("RGB", (2000, 10)))
    numbers = store.add([arrival(content=saved(sideways, "JPEG", exif=exif)), arrival(content=flat)]).kept
    sizes = []
    for number in numbers:
        response = client.get(f"/unknowns/items/{number}/thumbnail")
        assert response.headers["content-type"] == "image/jpeg"
        sizes.append(Image.open(io.BytesIO(response.content)).size)
    assert sizes == [(SIDE // 2, SIDE), (SIDE, 1)]


def test_a_damaged_file_is_reported_as_damaged(client: httpx.Client, tmp_path: Path) -> None:
    for file in (tmp_path / "images").iterdir():
        file.write_bytes(b"<script>alert(1)</script>")
    response = client.get("/unknowns/items/1/image")
    assert refusal(response) == (422, "broken_image")
    assert "<script>" not in response.text


# ---- what people do


def test_labels_are_written_with_who(client: httpx.Client, store: Store) -> None:
    assert post(client, "label", ids=[36, 1, 36], label=" eight ") == [36, 1]
    assert post(client, "known", ids=[2], label="red") == [2]
    assert post(client, "junk", ids=[3]) == [3]
    assert [(item.state, item.label, item.labelled_by) for item in store.items(ids=[1, 2, 3, 36])] == [
        ("named", "eight", "ada"),
        ("known", "red", "ada"),
        ("junk", None, "ada"),
        ("named", "eight", "ada"),
    ]
    assert post(client, "clear", ids=[1, 2, 3]) == [1, 2, 3]
    assert {(item.state, item.label) for item in store.items(ids=[1, 2, 3])} == {("new", None)}
    assert [change.who for change in store.changes()] == ["ada"] * 4


def test_a_group_is_labelled_but_for_its_junk_and_what_is_learned(client: httpx.Client, store: Store) -> None:
    store.mark_junk([31], "ben")
    store.name([32], "nine", "ben")
    store.mark_learned({"nine": [32]}, "v2")
    assert post(client, "label", group=2, label="eight") == [33, 34, 35]
    assert post(client, "known", group=2, label="blue") == [33, 34, 35]
    assert post(client, "junk", group=2) == [31, 33, 34, 35]
    # In a group of junk only, the junk itself is labelled.
    assert post(client, "label", group=2, label="eight") == [31, 33, 34, 35]
    assert post(client, "clear", group=2) == [31, 33, 34, 35]
    assert store.items(ids=[32])[0].state == "learned"


def test_images_move_and_groups_merge(client: httpx.Client, store: Store) -> None:
    assert post(client, "move", ids=[1, 36], group=2) == [1, 36]
    assert post(client, "move", ids=[31], group=None) == [31]
    assert list(store.members(2)) == [1, 32, 33, 34, 35, 36]
    response = client.post("/unknowns/merge", json={"groups": [2, 1]})
    assert response.json() == {"group": 2}
    assert [(group.id, group.size) for group in store.groups()] == [(2, 35)]
    assert {change.who for change in store.changes()} == {"ada"}


def test_deletion_takes_the_files_along(client: httpx.Client, store: Store, tmp_path: Path) -> None:
    files = tmp_path / "images"
    assert client.delete("/unknowns/items/1").json() == {"deleted": 1}
    assert refusal(client.delete("/unknowns/items/1")) == (404, "no_such_item")
    assert len(list(files.iterdir())) == 36
    for query in ("", "?confirm=yes", "?confirm=", "?all=1"):
        assert refusal(client.delete(f"/unknowns/items{query}")) == (422, "bad_parameter")
    assert store.usage().items == 36
    assert client.delete("/unknowns/items?confirm=all").json() == {"deleted": 36}
    assert list(files.iterdir()) == []
    assert [(change.who, change.items) for change in store.changes(2)] == [("ada", 36), ("ada", 1)]


# ---- what is refused

REFUSED: dict[str, tuple[str, Any, int, str]] = {
    "no such item": ("label", {"ids": [1, NOWHERE], "label": "eight"}, 404, "no_such_item"),
    "no such group": ("label", {"group": NOWHERE, "label": "eight"}, 404, "no_such_item"),
    "no such group to move to": ("move", {"ids": [1], "group": NOWHERE}, 404, "no_such_item"),
    "no such group to merge": ("merge", {"groups": [1, NOWHERE]}, 404, "no_such_item"),
    "one group twice": ("merge", {"groups": [1, 1]}, 404, "no_such_item"),
    "empty label": ("label", {"ids": [1], "label": " "}, 422, "bad_label"),
    "reserved label": ("label", {"ids": [1], "label": "unknown"}, 422, "bad_label"),
    "label with a line break": ("label", {"ids": [1], "label": "a\nb"}, 422, "bad_label"),
    "label too long": ("label", {"ids": [1], "label": "x" * 101}, 422, "bad_label"),
    "known class as a new one": ("label", {"ids": [1], "label": "red"}, 422, "bad_label"),
    "new class as a known one": ("known", {"ids": [1], "label": "eight"}, 422, "bad_label"),
    "learned": ("label", {"ids": [1, 37], "label": "eight"}, 409, "already_learned"),
    "learned and cleared": ("clear", {"ids": [37]}, 409, "already_learned"),
    "ids and group": ("junk", {"ids": [1], "group": 1}, 400, "malformed_request"),
    "neither": ("junk", {}, 400, "malformed_request"),
    "no ids": ("junk", {"ids": []}, 400, "malformed_request"),
    "no label": ("label", {"ids": [1]}, 400, "malformed_request"),
    "no group": ("move", {"ids": [1]}, 400, "malformed_request"),
    "one group": ("merge", {"groups": [1]}, 400, "malformed_request"),
    "id as text": ("junk", {"ids": ["1"]}, 400, "malformed_request"),
    "id as truth": ("junk", {"ids": [True]}, 400, "malformed_request"),
    "id too large": ("junk", {"ids": [2**63]}, 400, "malformed_request"),
    "id below one": ("junk", {"ids": [0]}, 400, "malformed_request"),
    "more than is read": ("junk", {"ids": [1], "who": "ben"}, 400, "malformed_request"),
    "a list": ("junk", [1], 400, "malformed_request"),
    "too much": ("label", {"ids": [1], "label": "x" * MAX_JSON_BYTES}, 413, "too_many_bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused_whole(client: httpx.Client, store: Store, name: str) -> None:
    store.name([37], "nine", "ben")
    store.mark_learned({"nine": [37]}, "v2")
    before = [(item.id, item.state, item.label, item.group) for item in store.items()]
    what, body, status, code = REFUSED[name]
    assert refusal(client.post(f"/unknowns/{what}", json=body)) == (status, code)
    assert [(item.id, item.state, item.label, item.group) for item in store.items()] == before


def test_a_misspelled_class_gets_a_suggestion(client: httpx.Client) -> None:
    refused = client.post("/unknowns/known", json={"ids": [1], "label": "geren"})
    assert refused.json()["error"]["message"].endswith("yellow; did you mean 'green'?")


def test_classes_of_older_models_are_found_however_they_are_spelled(
    client: httpx.Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "x" * 150
    model = SimpleNamespace(manifest=SimpleNamespace(labels=(" cat", long)))
    monkeypatch.setattr(ENGINE, "loaded", SimpleNamespace(model=model))
    assert post(client, "known", ids=[1], label="cat") == [1]
    assert post(client, "known", ids=[2], label=long) == [2]
    assert [item.label for item in store.items(ids=[1, 2])] == [" cat", long]
    assert refusal(client.post("/unknowns/label", json={"ids": [3], "label": "cat"})) == (422, "bad_label")
    assert refusal(client.post("/unknowns/label", json={"ids": [3], "label": "y" * 150})) == (422, "bad_label")


@pytest.mark.parametrize(
    ("page", "status", "code"),
    [
        (f"items/{NOWHERE}/image", 404, "no_such_item"),
        ("items/0/image", 404, "no_such_item"),
        ("items/-1/image", 404, "no_such_item"),
        ("items/x/thumbnail", 404, "no_such_item"),
        (f"items/{'9' * 5000}/image", 404, "no_such_item"),
        ("items/\u0661/image", 404, "no_such_item"),
        ("items", 422, "bad_parameter"),
        ("items?group=", 422, "bad_parameter"),
        ("items?group=all", 422, "bad_parameter"),
        ("items?group=1&group=2", 422, "bad_parameter"),
        ("items?group=1&limit=0", 422, "bad_parameter"),
        ("items?group=1&limit=501", 422, "bad_parameter"),
        (f"items?group=1&after={2**63}", 422, "bad_parameter"),
        ("groups?items=-1", 422, "bad_parameter"),
        ("groups?first=1", 422, "bad_parameter"),
        ("label", 405, "method_not_allowed"),
        ("nothing", 404, "not_found"),
    ],
)
def test_what_cannot_be_read_is_refused(client: httpx.Client, page: str, status: int, code: str) -> None:
    assert refusal(client.get(f"/unknowns/{page}")) == (status, code)


def test_without_the_token_nothing_is_seen_or_done(client: httpx.Client, store: Store) -> None:
    wrong = {"authorization": "Bearer cafebabecafebabe-token"}
    before = store.items()
    for route in router.routes:
        assert isinstance(route, APIRoute)
        for method in route.methods:
            path = route.path.replace("{id}", "1")
            for headers in ({"authorization": ""}, wrong):
                response = client.request(method, path, params={"confirm": "all"}, headers=headers)
                assert response.status_code == 401, path
                assert response.headers["www-authenticate"] == 'Basic realm="openworld"'
                assert method == "HEAD" or refusal(response) == (401, "unauthorized")
    assert [(item.id, item.state) for item in store.items()] == [(item.id, item.state) for item in before]


def test_a_browser_names_who_by_its_password_dialog(client: httpx.Client, store: Store) -> None:
    assert client.post("/unknowns/junk", json={"ids": [1]}, auth=("Zoë", TOKEN)).status_code == 200
    assert store.items(ids=[1])[0].labelled_by == "Zoë"


def test_another_site_cannot_have_a_label_written(client: httpx.Client, store: Store) -> None:
    sent = {"sec-fetch-site": "cross-site"}
    assert refusal(client.post("/unknowns/junk", json={"ids": [1]}, headers=sent)) == (403, "cross_site")
    assert refusal(client.request("DELETE", "/unknowns/items/1", headers=sent)) == (403, "cross_site")
    assert refusal(client.post("/unknowns/junk", data={"ids": "1"})) == (415, "unsupported_media_type")
    assert store.items(ids=[1])[0].state == "new"


def test_without_a_quarantine_the_error_explains_how_to_enable_it(off: httpx.Client) -> None:
    assert off.get("/unknowns").status_code == 200
    for method, page in (("GET", "groups"), ("GET", "items/1/image"), ("DELETE", "items/1")):
        response = off.request(method, f"/unknowns/{page}")
        assert refusal(response) == (409, "quarantine_off")
        assert "OPENWORLD_QUARANTINE_URL" in response.json()["error"]["message"]
    assert refusal(off.post("/unknowns/junk", json={"ids": [1]})) == (409, "quarantine_off")


def test_a_quarantine_that_is_away_may_be_asked_again(off: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    keep(Store(f"sqlite:///{tmp_path}/file/quarantine.db"))
    response = off.get("/unknowns/groups")
    assert refusal(response) == (503, "quarantine_unavailable")
    assert int(response.headers["retry-after"]) > 0


def test_a_slow_database_does_not_delay_other_requests(off: httpx.Client) -> None:
    asked, answer = threading.Event(), threading.Event()

    class Slow:
        def image(self, number: int) -> bytes:
            asked.set()
            assert answer.wait(PATIENCE)
            return saved(noise(number))

    keep(Slow())
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(off.get, "/unknowns/items/1/image")
        assert asked.wait(PATIENCE)
        assert off.get("/unknowns").status_code == 200
        assert not slow.done()
        answer.set()
        assert slow.result().status_code == 200


@pytest.mark.parametrize(
    "change",
    [
        "answer = 'not json'",
        """answer = '{"best_guess": "\\ud800"}'""",
        "file = '../../victim'",
        "state = 'lost'",
        "width = 'wide'",
        "label = x'00ff'",
        "received_at = 9e999",
        "seen_at = 1e30",
        "labelled_at = -1e300",
    ],
)
def test_a_damaged_row_is_shown_as_damaged_beside_the_others(
    client: httpx.Client, store: Store, tmp_path: Path, change: str
) -> None:
    with closing(sqlite3.connect(tmp_path / "quarantine.db")) as connection, connection:
        connection.execute(f"UPDATE openworld_items SET {change} WHERE id = 1")
    shown = {item.id: item for group in overview(client).groups for item in group.items}
    shown |= {item.id: item for item in overview(client).ungrouped.items}
    assert shown[1].damage is not None
    assert all(item.damage is None for number, item in shown.items() if number != 1)
    assert client.get("/unknowns/items/1/image").status_code == (422 if "file" in change else 200)
    assert client.delete("/unknowns/items/1").status_code == 200


@pytest.mark.parametrize("change", ["at = 1e30", "at = 'x'", "detail = x'00ff'", "who = x'ff'"])
def test_a_damaged_entry_of_the_log_is_shown_beside_the_others(
    client: httpx.Client, store: Store, tmp_path: Path, change: str
) -> None:
    store.mark_junk([1], "ada")
    store.mark_junk([2], "bob")
    with closing(sqlite3.connect(tmp_path / "quarantine.db")) as connection, connection:
        connection.execute(f"UPDATE openworld_changes SET {change} WHERE who = 'ada'")
    whole, damaged = overview(client).changes
    assert (whole.who, whole.what) == ("bob", "junk")
    assert (damaged.what, damaged.items, damaged.detail) == ("damaged", 0, "")
