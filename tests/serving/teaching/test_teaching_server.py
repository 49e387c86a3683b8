"""A real server that is taught over HTTP, with two workers."""

from __future__ import annotations

import io
import json
import shutil
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.bundle.manifest import load_bundle
from serving.bundle.shelf import Shelf
from tests.helpers_serving import PATIENCE, Server, all_written, eventually, metric, serving
from tests.helpers_teaching import HOSTILE_ARCHIVES, RUN_IMAGES, picture, pictures, write_bundle

pytestmark = pytest.mark.long

TOKEN = "a-token-of-enough-length"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundle") / "bundle")


def make_shelf(folder: Path, bundle: Path) -> Shelf:
    version = load_bundle(bundle).manifest.version
    shutil.copytree(bundle, folder / version)
    shelf = Shelf(folder)
    shelf.point_at(version)
    return shelf


def settings_of(place: Path, **more: str) -> dict[str, str]:
    return {
        "OPENWORLD_BUNDLES": str(place / "shelf"),
        "OPENWORLD_ADMIN_TOKEN": TOKEN,
        "OPENWORLD_QUARANTINE_URL": f"sqlite:///{place}/quarantine.db",
        "OPENWORLD_WORKERS": "2",
        "OMP_NUM_THREADS": "1",
        **more,
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, bundle: Path) -> Path:
    folder = tmp_path_factory.mktemp("taught")
    make_shelf(folder / "shelf", bundle)
    return folder


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    with serving(place / "home", None, settings=settings_of(place)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=server.url,
        headers={"authorization": f"Bearer {TOKEN}", "x-openworld-user": "ada"},
        timeout=PATIENCE,
        limits=httpx.Limits(max_keepalive_connections=0),
    ) as made:
        yield made


def teach(client: httpx.Client, label: str, *contents: bytes) -> list[Any]:
    return [
        ok(client.post("/teach/examples", params={"label": label}, content=each, headers=FILE)) for each in contents
    ]


FILE = {"content-type": "image/png"}


def ok(response: httpx.Response, status: int = 200) -> Any:
    assert response.status_code == status, response.text
    return response.json()


def finished(client: httpx.Client, job: Any, *wanted: str) -> Any:
    wanted = wanted or ("done",)
    until = time.monotonic() + 240
    while (found := ok(client.get(f"/teach/jobs/{job['id']}")))["state"] not in wanted:
        assert found["state"] in ("running", "done"), found
        assert time.monotonic() < until, found
        time.sleep(0.1)
    return found


def learned(client: httpx.Client) -> Any:
    return finished(client, ok(client.post("/teach/learn", json={}), 202))


def predict(client: httpx.Client, content: bytes) -> Any:
    return ok(client.post("/predict", content=content, headers=FILE))


def test_teaches_what_was_unknown(client: httpx.Client) -> None:
    before = ok(client.get("/teach/status"))
    assert (before["enabled"], before["reason"], before["user"], before["waiting"]) == (True, None, "ada", 0)
    first = teach(client, "elk", *pictures("elk", 12))
    assert not any(each["duplicate"] for each in first)
    assert first[0]["answer"]["known"] is False
    again = teach(client, "elk", picture("elk", 3))[0]
    assert (again["duplicate"], again["label_before"], again["id"]) == (True, "elk", first[3]["id"])
    teach(client, "fox", *pictures("fox", 12))
    for number in range(5):
        predict(client, picture("elk", 100 + number))
    status = ok(client.get("/teach/status"))
    assert status["classes"] == {"elk": 12, "fox": 12}
    job = learned(client)
    result = job["learned"]
    assert {each["label"]: (each["new"], each["added"], each["of"]) for each in result["classes"]} == {
        "elk": (True, 12, 12),
        "fox": (True, 12, 12),
    }
    assert result["gate"] is True
    assert (result["accuracy_before"], result["accuracy_after"] > 0.8) == (0.0, True)
    assert result["old_classes"]["before"] > 0.9
    assert result["waiting_known"] >= 3
    # Nothing has changed yet.
    assert predict(client, picture("elk", 600))["model"]["version"] == before["model"]["version"]
    accepted = ok(client.post("/teach/accept", json={"job": job["id"]}))
    assert (accepted["version"], accepted["workers"], accepted["changed"]) == (job["candidate"], 2, True)
    answers = [predict(client, picture("elk", 600 + number)) for number in range(8)]
    assert {answer["model"]["version"] for answer in answers} == {job["candidate"]}
    assert sum(answer["label"] == "elk" for answer in answers) >= 6
    after = ok(client.get("/teach/status"))
    assert (after["waiting"], after["removed"], after["job"]["state"]) == (0, 0, "accepted")
    classes = {each["label"]: each for each in ok(client.get("/teach/classes"))["classes"]}
    assert classes["elk"]["origin"] == "taught"
    assert (classes["elk"]["learned"], classes["elk"]["taught_by"]) == (12, "ada")
    assert len(classes["elk"]["examples"]) == 6
    assert classes["ant"]["origin"] == "fit"
    assert (classes["elk"]["images"], classes["ant"]["images"]) == (12, RUN_IMAGES)


def test_nothing_to_learn(client: httpx.Client) -> None:
    refused = ok(client.post("/teach/learn", json={}), 409)
    assert refused["error"]["code"] == "nothing_to_learn"


def test_extends_a_class_of_the_run(client: httpx.Client) -> None:
    teach(client, "dog", *pictures("hen", 12))
    job = learned(client)
    (changed,) = job["learned"]["classes"]
    assert (changed["label"], changed["new"], changed["added"], changed["images"]) == ("dog", False, 12, 36)
    ok(client.post("/teach/accept", json={"job": job["id"]}))
    assert sum(predict(client, picture("hen", 600 + n))["label"] == "dog" for n in range(8)) >= 5


def test_discard_leaves_everything(client: httpx.Client, place: Path) -> None:
    version = ok(client.get("/teach/status"))["model"]["version"]
    ids = [each["id"] for each in teach(client, "gnu", *pictures("gnu", 6))]
    job = learned(client)
    assert (place / "shelf" / job["candidate"]).is_dir()
    assert ok(client.post("/teach/discard", json={"job": job["id"]}))["state"] == "discarded"
    assert not (place / "shelf" / job["candidate"]).exists()
    status = ok(client.get("/teach/status"))
    assert (status["model"]["version"], status["classes"]) == (version, {"gnu": 6})
    refused = ok(client.post("/teach/accept", json={"job": job["id"]}), 409)
    assert refused["error"]["code"] == "bad_state"
    ok(client.post("/teach/examples/remove", json={"ids": ids}))
    assert ok(client.get("/teach/status"))["waiting"] == 0


def test_a_new_lesson_removes_a_candidate_that_nobody_has_accepted(client: httpx.Client, place: Path) -> None:
    ids = [each["id"] for each in teach(client, "gnu", *pictures("gnu", 6))]
    first = learned(client)
    ids += [each["id"] for each in teach(client, "gnu", *pictures("gnu", 2, first=40))]
    second = learned(client)
    assert not (place / "shelf" / first["candidate"]).exists()
    listed = {each["version"] for each in ok(client.get("/teach/versions"))["versions"]}
    assert not {first["candidate"], second["candidate"]} & listed
    ok(client.post("/teach/discard", json={"job": second["id"]}))
    ok(client.post("/teach/examples/remove", json={"ids": ids}))


def test_removed_examples_are_taken_out(client: httpx.Client) -> None:
    items = ok(client.get("/teach/examples", params={"label": "fox"}))["items"]
    assert [each["state"] for each in items] == ["learned"] * 12
    ok(client.post("/teach/examples/remove", json={"ids": [items[0]["id"], items[1]["id"]]}))
    assert ok(client.get("/teach/status"))["removed"] == 2
    job = learned(client)
    (changed,) = job["learned"]["classes"]
    assert (changed["label"], changed["removed"], changed["images"]) == ("fox", 2, 10)
    ok(client.post("/teach/accept", json={"job": job["id"]}))
    # Undo: labelled again, they wait.
    ok(client.post("/teach/examples/label", json={"ids": [items[0]["id"]], "label": "fox"}))
    assert ok(client.get("/teach/status"))["classes"] == {"fox": 1}
    ok(client.post("/teach/examples/remove", json={"ids": [items[0]["id"]]}))


def test_rename_merge_delete_and_roll_back(client: httpx.Client) -> None:
    renamed = ok(client.post("/teach/classes/rename", json={"label": "elk", "to": "moose"}))
    finished(client, renamed["job"], "accepted")
    assert predict(client, picture("elk", 601))["label"] == "moose"
    assert ok(client.get("/teach/examples", params={"label": "moose"}))["items"]
    exists = ok(client.post("/teach/classes/rename", json={"label": "moose", "to": "fox"}), 409)
    assert exists["error"]["code"] == "class_exists"
    before = ok(client.get("/teach/status"))["model"]["version"]
    deleted = ok(client.post("/teach/classes/delete", json={"label": "moose"}))
    finished(client, deleted["job"], "accepted")
    assert "moose" not in {each["label"] for each in ok(client.get("/teach/classes"))["classes"]}
    assert predict(client, picture("elk", 601))["label"] != "moose"
    versions = ok(client.get("/teach/versions"))["versions"]
    assert versions[0]["current"]
    assert versions[0]["what"] == "deleted moose"
    back = ok(client.post("/teach/rollback", json={"version": before}))
    assert back["version"] == before
    assert predict(client, picture("elk", 601))["label"] == "moose"
    merged = ok(client.post("/teach/classes/merge", json={"labels": ["fox"], "into": "moose"}))
    finished(client, merged["job"], "accepted")
    assert predict(client, picture("fox", 601))["label"] == "moose"
    log = ok(client.get("/teach/log"))["changes"]
    assert {"teach", "publish", "rename", "learn"} <= {each["what"] for each in log}


def test_a_second_job_is_refused_with_the_name_of_the_first_user(client: httpx.Client) -> None:
    teach(client, "gnu", *pictures("gnu", 6))
    job = ok(client.post("/teach/learn", json={}), 202)
    other = client.post("/teach/learn", json={}, headers={"x-openworld-user": "bob"})
    if other.status_code == 409:
        assert other.json()["error"]["code"] == "teach_busy"
        assert "of ada" in other.json()["error"]["got"]
    finished(client, job, "done", "discarded")


def test_the_second_to_accept_sees_what_changed(client: httpx.Client, place: Path) -> None:
    job = learned(client)
    # Somebody publishes meanwhile.
    shelf = Shelf(place / "shelf")
    other = next(each["version"] for each in ok(client.get("/teach/versions"))["versions"] if not each["current"])
    shelf.point_at(other)
    refused = ok(client.post("/teach/accept", json={"job": job["id"]}), 409)
    assert refused["error"]["code"] == "teach_changed"
    assert other in refused["error"]["got"]
    again = learned(client)
    assert again["base"] == other
    assert ok(client.post("/teach/accept", json={"job": again["id"]}))["version"] == again["candidate"]


def test_groups_and_names(client: httpx.Client, server: Server) -> None:
    offered = metric(server, "openworld_quarantine_offered_total")
    sent = [content for label in ("bird", "fish") for content in pictures(label, 30, first=900)]
    unknown = [predict(client, content)["known"] for content in sent].count(False)
    eventually(lambda: all_written(server, int(offered) + unknown))
    job = finished(client, ok(client.post("/teach/group"), 202))
    assert job["grouped"]["groups"] >= 1
    overview = ok(client.get("/unknowns/groups"))
    group = overview["groups"][0]
    ok(client.post("/teach/examples/label", json={"group": group["id"], "label": "bird"}))
    assert ok(client.get("/teach/status"))["classes"]["bird"] == group["size"]
    loose = ok(client.get("/teach/loose"))
    assert all(each["looks_like"] is None or each["looks_like"]["group"] for each in loose["items"])


def test_export_and_import(client: httpx.Client) -> None:
    for kind in ("folders", "label-studio"):
        content = client.get("/teach/export", params={"format": kind}).content
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = archive.namelist()
            if kind == "label-studio":
                tasks = json.loads(archive.read("tasks.json"))
                assert len(tasks) == len(names) - 2
                choices = archive.read("config.xml").decode()
                assert all(f'<Choice value="{label}"/>' in choices for label in ("ant", "bee"))
        imported = ok(client.post("/teach/import", content=content, headers={"content-type": "application/zip"}))
        images = len(names) - 2 * (kind == "label-studio")
        assert (imported["added"], imported["duplicates"], imported["failed"]) == (0, images, [])
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w") as archive:
        archive.writestr("photos/yak/1.png", picture("yak", 1))
        archive.writestr("photos/yak/2.png", b"no image")
        archive.writestr("alone.png", picture("yak", 2))
    imported = ok(client.post("/teach/import", content=stored.getvalue(), headers={"content-type": "application/zip"}))
    assert imported["added"] == 1
    assert [each["name"] for each in imported["failed"]] == ["photos/yak/2.png", "alone.png"]


def test_an_export_comes_in_parts_that_can_be_imported(place: Path, bundle: Path, tmp_path: Path) -> None:
    """The whole of it is larger than an import may be."""
    make_shelf(tmp_path / "shelf", bundle)
    most = 100_000
    settings = settings_of(tmp_path, OPENWORLD_WORKERS="1", OPENWORLD_MAX_BODY=str(most))
    with (
        serving(tmp_path / "home", None, settings=settings) as running,
        httpx.Client(base_url=running.url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE) as client,
    ):
        for content in pictures("yak", 40):
            ok(client.post("/teach/examples", params={"label": "yak"}, content=content, headers=FILE))
        whole = client.get("/teach/export", params={"format": "folders"})
        assert len(whole.content) > most
        parts = int(whole.headers["x-openworld-parts"])
        assert parts >= 2
        assert ok(client.get("/teach/classes"))["export_parts"] == parts
        archive = {"content-type": "application/zip"}
        assert client.post("/teach/import", content=whole.content, headers=archive).status_code == 413
        for kind in ("folders", "label-studio"):
            duplicates = 0
            for number in range(1, parts + 1):
                part = client.get("/teach/export", params={"format": kind, "part": number})
                assert part.headers["content-disposition"].endswith(f'examples-{kind}-{number}-of-{parts}.zip"')
                imported = ok(client.post("/teach/import", content=part.content, headers=archive))
                assert (imported["added"], imported["failed"], imported["advice"]) == (0, [], None)
                duplicates += imported["duplicates"]
            assert duplicates == 40
        beyond = client.get("/teach/export", params={"format": "folders", "part": parts + 1})
        assert (beyond.status_code, beyond.json()["error"]["code"]) == (422, "bad_parameter")
        assert f"allowed: 1 to {parts}" in beyond.json()["error"]["message"]


def test_an_export_of_label_studio_without_its_images_is_answered_with_advice(client: httpx.Client) -> None:
    choice = {"type": "choices", "value": {"choices": ["yak"]}}
    image = "/data/upload/1/1a2b3c4d-yak_1.png"
    tasks = [
        {"id": 1, "data": {"image": image}, "annotations": [{"result": [choice]}]},
        {"id": 2, "image": image, "choice": "yak", "annotator": 1},
    ]
    imported = ok(client.post("/teach/import", json=tasks))
    assert (imported["added"], len(imported["failed"])) == (0, 2)
    assert "1 image is not in the JSON file: 1a2b3c4d-yak_1.png." in imported["advice"]
    assert "one zip archive" in imported["advice"]
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w") as archive:
        archive.writestr("project-1.json", json.dumps(tasks))
        archive.writestr("upload/yak 1.png", picture("yak", 300))
    imported = ok(client.post("/teach/import", content=stored.getvalue(), headers={"content-type": "application/zip"}))
    assert (imported["added"], imported["duplicates"], imported["failed"]) == (1, 1, [])
    assert imported["advice"] is None


def archived(name: str, content: bytes) -> bytes:
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return stored.getvalue()


@pytest.mark.parametrize(
    "task",
    [
        "text",
        {"data": "text"},
        {"data": ["text"], "annotations": [{"result": []}]},
        {"data": {"image": "x.png"}, "annotations": "text"},
        {"data": {"image": "x.png"}, "annotations": [{"result": ["text"]}]},
        {
            "data": {"image": "x.png"},
            "annotations": [{"result": [{"type": "choices", "value": {"choices": {"a": 1}}}]}],
        },
        {"data": {"image": "data:,!"}, "annotations": [{"result": [{"type": "choices", "value": {"choices": "ab"}}]}]},
    ],
    ids=range(7),
)
def test_an_import_of_any_shape_is_answered(client: httpx.Client, task: Any) -> None:
    imported = ok(client.post("/teach/import", json=[task]))
    assert (imported["added"], len(imported["failed"])) == (0, 1)


def test_a_damaged_archive_is_answered(client: httpx.Client) -> None:
    """Its directory is whole, and a file in it cannot be unpacked; that file is named."""
    for name in ("yak/1.png", "tasks.json"):
        content = bytearray(archived(name, picture("yak", 1) * 2))
        start = 30 + len(name)
        content[start : start + 40] = b"\xff" * 40
        response = client.post("/teach/import", content=bytes(content), headers={"content-type": "application/zip"})
        if name == "tasks.json":
            assert (response.status_code, response.json()["error"]["code"]) == (400, "malformed_request")
        else:
            assert [each["name"] for each in ok(response)["failed"]] == [name]


@pytest.mark.parametrize("name", HOSTILE_ARCHIVES)
def test_a_hostile_archive_is_answered(client: httpx.Client, name: str) -> None:
    content, reason = HOSTILE_ARCHIVES[name]
    response = client.post("/teach/import", content=content, headers={"content-type": "application/zip"})
    if response.status_code == 400:
        assert reason in response.json()["error"]["message"]
    else:
        ((failed,), added) = (ok(response)["failed"], ok(response)["added"])
        assert (failed["name"], added) == ("yak/1.png", 0)
        assert reason in failed["reason"]


def test_an_upload_counts_in_the_budget_until_it_is_stored(place: Path) -> None:
    """While an archive is imported, another one has to wait: its bytes are still held."""
    with zipfile.ZipFile(stored := io.BytesIO(), "w") as archive:
        for number in range(60):
            archive.writestr(f"yak/{number}.png", picture("yak", number))
    content = stored.getvalue()
    settings = settings_of(place, OPENWORLD_WORKERS="1", OPENWORLD_MAX_HELD=str(len(content) + 1000))
    settings["OPENWORLD_QUARANTINE_URL"] = f"sqlite:///{place}/held.db"
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/zip"}
    with serving(place / "held", None, settings=settings) as running, ThreadPoolExecutor(1) as other:
        first = other.submit(httpx.post, f"{running.url}/teach/import", content=content, headers=headers, timeout=60)
        responses = []
        while not first.done():
            responses.append(httpx.post(f"{running.url}/teach/import", content=content, headers=headers, timeout=60))
        # Whichever of two that are sent at the same time comes first holds the bytes.
        responses.append(first.result())
        assert {response.status_code for response in responses} == {200, 503}
        assert [ok(each)["added"] for each in responses if each.status_code == 200].count(60) == 1
        assert ok(httpx.post(f"{running.url}/teach/import", content=content, headers=headers, timeout=60))["added"] == 0


def test_refuses_forms_and_strangers(client: httpx.Client, server: Server) -> None:
    form = client.post("/teach/examples", files={"image": picture("elk", 1)})
    assert (form.status_code, form.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert httpx.get(f"{server.url}/teach/status").status_code == 401
    page = client.post("/teach/learn", json={}, headers={"sec-fetch-site": "cross-site"})
    assert page.status_code == 403
    broken = client.post("/teach/examples", params={"label": "elk"}, content=b"no image", headers=FILE)
    assert broken.json()["error"]["code"] == "unsupported_image"
    bad = client.post("/teach/examples", params={"label": "unknown"}, content=picture("elk", 1), headers=FILE)
    assert (bad.status_code, bad.json()["error"]["code"]) == (422, "bad_label")


def test_learns_by_itself(place: Path, bundle: Path, tmp_path: Path) -> None:
    """Unknown images of one kind become a class without a person, who names it later."""
    make_shelf(tmp_path / "shelf", bundle)
    settings = settings_of(tmp_path, OPENWORLD_TEACH="auto", OPENWORLD_TEACH_AUTO_IMAGES="12", OPENWORLD_WORKERS="1")
    with (
        serving(tmp_path / "home", None, settings=settings) as running,
        httpx.Client(base_url=running.url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE) as client,
    ):
        for content in pictures("fox", 30, first=700):
            predict(client, content)
        until = time.monotonic() + PATIENCE
        while not (status := ok(client.get("/teach/status")))["unnamed"]:
            assert time.monotonic() < until, status
            time.sleep(0.3)
        assert status["unnamed"] == ["new-1"]
        assert sum(predict(client, picture("fox", 800 + n))["label"] == "new-1" for n in range(8)) >= 4
        log = ok(client.get("/teach/log"))["changes"]
        assert {each["what"] for each in log if each["who"] == "auto"} >= {"teach", "auto", "publish"}
        renamed = ok(client.post("/teach/classes/rename", json={"label": "new-1", "to": "fox"}))
        finished(client, renamed["job"], "accepted")
        assert predict(client, picture("fox", 801))["label"] == "fox"
        first = ok(client.get("/teach/versions"))["versions"][-1]["version"]
        assert ok(client.post("/teach/rollback", json={"version": first}))["version"] == first
