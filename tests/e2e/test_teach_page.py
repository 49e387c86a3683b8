"""The page for teaching in a real browser, against the real server; screenshots are left in pytest's temporary folder.

The server has a tiny bundle of photos. The tests share it, and run in the order of the file: the first one teaches two
classes, which the later ones rename, delete and bring back.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from PIL import Image

from serving.bundle.shelf import Shelf
from serving.quarantine.records import FoundGroup
from serving.quarantine.store import Store
from tests.e2e import controls
from tests.helpers_serving import (
    PATIENCE,
    Server,
    all_written,
    eventually,
    http_get,
    http_post,
    metric,
    saved,
    serving,
)
from tests.helpers_teaching import RUN_IMAGES, one_image, picture, pictures, write_bundle

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = pytest.mark.long

TOKEN = "f00dfacef00dface-token"
PHONE = {"width": 375, "height": 740}
HOSTILE = "<img src=x onerror=alert(1)>"
RATE = 30.0
"""Requests per second that go on while a person teaches."""
SERVED_WITHIN = 20.0
"""Seconds from the click on Learn to the new version, on a machine that may be busy; about 3 on an idle one."""
EACH = 24
"""Unknown images of each of the two new classes."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('quarantine')}/quarantine.db"


@pytest.fixture(scope="module")
def server(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    shelf = tmp_path_factory.mktemp("shelf")
    write_bundle(shelf / "first")
    Shelf(shelf).point_at("first")
    settings = {"OPENWORLD_BUNDLES": str(shelf), "OPENWORLD_QUARANTINE_URL": url, "OPENWORLD_ADMIN_TOKEN": TOKEN}
    with serving(tmp_path_factory.mktemp("home"), None, settings=settings) as started:
        yield started
    assert "Traceback" not in started.log.read_text()
    assert TOKEN not in started.log.read_text()


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = Store.open(url)
    yield opened
    opened.close()


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    """The page, opened by ada; any error in the browser fails the test."""
    page = open_page(browser, server)
    yield page
    close(page)


MESSAGES: dict[Page, list[str]] = {}


def open_page(browser: Browser, server: Server, *, path: str = "/teach", **options: Any) -> Page:
    signed_in = {"username": "ada", "password": TOKEN}
    defaults = {"viewport": {"width": 1280, "height": 900}, "permissions": ["camera"], "http_credentials": signed_in}
    context = browser.new_context(**{**defaults, **options})
    page = context.new_page()
    said = MESSAGES[page] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(f"{server.url}{path}")
    if path == "/teach":
        page.wait_for_selector("#main[aria-busy=false]")
    return page


def close(page: Page) -> None:
    page.unroute_all(behavior="ignoreErrors")
    page.context.close()
    assert [line for line in MESSAGES.pop(page) if "Failed to load resource" not in line] == []


def noticed(page: Page, text: str) -> None:
    """Wait until the page shows a notice with this text."""
    page.get_by_test_id("notice").filter(has_text=text).wait_for()


def undo(page: Page) -> None:
    page.get_by_test_id("undo").click()
    noticed(page, "Undone.")


def tab(page: Page, name: str) -> None:
    page.get_by_test_id(f"tab-{name}").click()


def of_class(page: Page, label: str) -> Any:
    return page.locator(f'[data-testid=class][data-label="{label}"]')


def status(server: Server) -> Any:
    headers = {"authorization": f"Bearer {TOKEN}"}
    return httpx.get(f"{server.url}/teach/status", headers=headers, timeout=PATIENCE).json()


def left_to_learn(server: Server) -> tuple[dict[str, int], int]:
    """What the next lesson would add, by class, and how many examples it would take out."""
    found = status(server)
    return found["classes"], found["removed"]


NOTHING: tuple[dict[str, int], int] = ({}, 0)


def change(page: Page, label: str, what: str, value: str) -> None:
    """Rename or merge a class, with the name of another one."""
    of_class(page, label).get_by_test_id(f"class-{what}").click()
    page.get_by_test_id("sure-count").fill(value)
    page.get_by_test_id("sure-yes").click()


def labels(server: Server) -> list[str]:
    return [label for task in http_get(f"{server.url}/model").json()["tasks"] for label in task["labels"]]


def answers(server: Server, label: str, numbers: range) -> list[str]:
    """What the server answers for pictures of a class, which it does not store."""
    contents = [picture(label, number) for number in numbers]
    return [http_post(f"{server.url}/predict?store=false", content=content).json()["label"] for content in contents]


def learn_and_accept(page: Page) -> None:
    """From what waits to the new version in service."""
    tab(page, "learn")
    page.get_by_test_id("learn-now").click()
    page.get_by_test_id("accept").click()
    noticed(page, "is served now.")


@contextlib.contextmanager
def traffic(server: Server) -> Iterator[list[int]]:
    """Requests that go on meanwhile, more than RATE per second; yields the status of each."""
    stop, found = threading.Event(), []
    content, clients = picture("ant", 500), 8
    started = time.monotonic()

    def send(number: int) -> None:
        with httpx.Client(timeout=PATIENCE) as client:
            due = started + number / 50
            while not stop.wait(max(0.0, due - time.monotonic())):
                due += clients / 50
                try:
                    found.append(client.post(f"{server.url}/predict?store=false", content=content).status_code)
                except httpx.TransportError:
                    found.append(0)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        seconds = time.monotonic() - started
        stop.set()
        for thread in threads:
            thread.join()
    assert len(found) >= RATE * seconds


def files(**pictures_of: range) -> list[dict[str, Any]]:
    return [
        {"name": f"{label}-{number}.png", "mimeType": "image/png", "buffer": picture(label, number)}
        for label, numbers in pictures_of.items()
        for number in numbers
    ]


def test_an_empty_page_shows_what_to_do(page: Page) -> None:
    page.get_by_text("No unknown images wait").wait_for()
    assert page.get_by_role("link", name="Bring examples").is_visible()
    assert not page.get_by_test_id("group").is_visible()
    page.keyboard.press("3")
    page.get_by_text("Nothing waits to be learned").wait_for()
    page.get_by_test_id("lesson").get_by_role("link", name="Bring examples").click()
    page.get_by_test_id("bring-label").wait_for()
    page.go_back()
    page.get_by_text("Nothing waits to be learned").wait_for()


def test_unknown_images_are_grouped_named_learned_and_known_while_requests_go_on(
    page: Page, server: Server, store: Store, tmp_path: Path
) -> None:
    sent = {content: label for label in ("elk", "fox") for content in pictures(label, EACH)}
    unknown = [http_post(f"{server.url}/predict", content=content).json()["known"] for content in sent].count(False)
    assert unknown >= 0.8 * len(sent)
    eventually(lambda: store.usage().items == unknown)
    before = {label: answers(server, label, range(100, 110)) for label in ("elk", "fox", "ant")}
    with traffic(server) as statuses:
        page.reload()
        page.get_by_test_id("group").click()
        noticed(page, "Found ")
        groups = page.locator("#groups > [data-group]:not([data-group=none])")
        assert groups.count() >= 2
        numbers = [int(group.get_attribute("data-group") or "") for group in groups.all()]
        for number in numbers:
            shown = Counter(sent[store.image(item)] for item in store.members(number))
            (name, _), *_ = shown.most_common()
            page.get_by_test_id(f"name-{number}").fill(name)
            page.get_by_test_id(f"save-{number}").click()
            # It asks only if the group has images that are not shown.
            yes = page.get_by_test_id("sure-yes")
            page.locator("[data-testid=sure-yes], #notice-text:has-text('Named')").first.wait_for()
            if yes.count():
                yes.click()
            noticed(page, f"“{name}”.")
            page.evaluate("document.getElementById('notice').hidden = true")
        assert page.get_by_test_id("strip").is_visible()
        page.screenshot(path=tmp_path / "named.png", full_page=True)
        clicked = time.monotonic()
        page.get_by_test_id("strip-go").click()
        page.get_by_test_id("accept").wait_for()
        learned = time.monotonic() - clicked
        page.screenshot(path=tmp_path / "before-and-after.png", full_page=True)
        rows = {row.get_attribute("data-label"): row.inner_text() for row in page.locator(".results tbody tr").all()}
        assert {*rows} == {"elk", "fox"}
        assert "elk" not in labels(server), "nothing is served before it is accepted"
        clicked = time.monotonic()
        page.get_by_test_id("accept").click()
        noticed(page, "is served now.")
        assert learned + time.monotonic() - clicked < SERVED_WITHIN
        # Right afterwards, while the requests still go on.
        assert {"elk", "fox"} <= set(labels(server))
        after = {label: answers(server, label, range(100, 110)) for label in ("elk", "fox", "ant")}
    assert set(statuses) == {200}
    for label in ("elk", "fox"):
        assert before[label].count(label) == 0
        assert after[label].count(label) >= 8
    assert after["ant"].count("ant") >= before["ant"].count("ant") - 1


def test_a_new_class_is_made_and_taken_back(page: Page) -> None:
    tab(page, "classes")
    ant = of_class(page, "ant").inner_text()
    assert f"learned from {RUN_IMAGES} images" in ant
    assert "no pictures, because training photos are not stored" in ant
    assert "Cannot be merged" in ant
    page.get_by_test_id("class-new").click()
    page.get_by_test_id("sure-count").fill("yeti")
    page.get_by_test_id("sure-yes").click()
    noticed(page, "Made the class “yeti”.")
    tab(page, "classes")
    of_class(page, "yeti").wait_for()
    undo(page)
    of_class(page, "yeti").wait_for(state="detached")


def test_changes_of_a_class_without_examples_are_undone(page: Page) -> None:
    tab(page, "classes")
    page.get_by_test_id("class-new").click()
    page.get_by_test_id("sure-count").fill("yeti")
    page.get_by_test_id("sure-yes").click()
    noticed(page, "Made the class “yeti”.")
    tab(page, "classes")
    yeti = of_class(page, "yeti")
    yeti.wait_for()
    assert "no examples yet" in yeti.inner_text()
    assert "waits to be learned" not in yeti.inner_text()
    change(page, "yeti", "rename", "bigfoot")
    noticed(page, "Renamed “yeti” to “bigfoot”.")
    assert (yeti.count(), of_class(page, "bigfoot").count()) == (0, 1)
    undo(page)
    assert (yeti.count(), of_class(page, "bigfoot").count()) == (1, 0)
    change(page, "yeti", "merge", "elk")
    noticed(page, "Merged “yeti” into “elk”.")
    assert yeti.count() == 0
    undo(page)
    assert yeti.count() == 1
    yeti.get_by_test_id("class-delete").click()
    page.get_by_test_id("sure-yes").click()
    noticed(page, "Deleted “yeti”.")
    assert yeti.count() == 0
    undo(page)
    assert yeti.count() == 1
    yeti.get_by_test_id("class-delete").click()
    page.get_by_test_id("sure-yes").click()
    noticed(page, "Deleted “yeti”.")


def test_a_class_is_renamed_deleted_and_brought_back(page: Page, server: Server) -> None:
    tab(page, "classes")
    elk = of_class(page, "elk")
    assert "taught by ada" in elk.inner_text()
    assert elk.get_by_test_id("example").count() > 0
    elk.get_by_test_id("class-rename").click()
    page.get_by_test_id("sure-count").fill("fox")
    page.get_by_text("Merge the two instead.").wait_for()
    assert page.get_by_test_id("sure-yes").is_disabled()
    page.get_by_test_id("sure-count").fill("moose")
    page.get_by_test_id("sure-yes").click()
    noticed(page, "Renamed “elk” to “moose”.")
    assert {"moose"} == {"elk", "moose"} & set(labels(server))
    assert left_to_learn(server) == NOTHING
    undo(page)
    assert {"elk"} == {"elk", "moose"} & set(labels(server))
    assert left_to_learn(server) == NOTHING, "the next lesson must not do it again"
    assert not page.get_by_test_id("strip").is_visible()

    of_class(page, "fox").get_by_test_id("class-delete").click()
    page.get_by_test_id("sure-yes").click()
    noticed(page, "Deleted “fox”.")
    assert "fox" not in labels(server)
    assert of_class(page, "fox").count() == 0
    assert answers(server, "fox", range(100, 105)).count("fox") == 0
    # Not by the notice this time, but from the list of versions.
    tab(page, "versions")
    page.get_by_test_id("version").filter(has_text="fox").filter(has_text="learned").get_by_test_id("rollback").click()
    noticed(page, "is served now.")
    assert {"elk", "fox"} <= set(labels(server))
    assert left_to_learn(server) == NOTHING
    # One click goes back, and one takes that back.
    undo(page)
    assert "fox" not in labels(server)
    assert left_to_learn(server) == NOTHING
    page.get_by_test_id("version").filter(has_text="fox").filter(has_text="learned").get_by_test_id("rollback").click()
    noticed(page, "is served now.")
    assert answers(server, "fox", range(100, 110)).count("fox") >= 8
    assert page.locator("[data-testid=version][data-current=true]").count() == 1
    assert "ada" in page.get_by_test_id("log").inner_text()
    assert left_to_learn(server) == NOTHING

    tab(page, "classes")
    change(page, "fox", "merge", "elk")
    noticed(page, "Merged “fox” into “elk”.")
    assert "fox" not in labels(server)
    undo(page)
    assert {"elk", "fox"} <= set(labels(server))
    assert left_to_learn(server) == NOTHING


def test_waiting_examples_follow_a_change_of_their_class_and_its_undo(page: Page, server: Server) -> None:
    tab(page, "examples")
    page.get_by_test_id("bring-label").fill("fox")
    page.set_input_files("#bring-file", files(fox=range(300, 303)))
    noticed(page, "Added 3 examples of “fox”.")
    tab(page, "classes")
    change(page, "fox", "rename", "vixen")
    noticed(page, "Renamed “fox” to “vixen”.")
    assert left_to_learn(server) == ({"vixen": 3}, 0)
    undo(page)
    assert left_to_learn(server) == ({"fox": 3}, 0)
    page.reload()
    of_class(page, "fox").get_by_test_id("class-open").click()
    page.locator("[data-testid=example][data-state=waiting]").nth(2).wait_for()
    for _ in range(3):
        page.locator("[data-testid=example][data-state=waiting]").first.click()
        page.get_by_test_id("class-remove").click()
        noticed(page, "1 image no longer an example of “fox”.")
        page.evaluate("document.getElementById('notice').hidden = true")
    assert left_to_learn(server) == NOTHING


def test_examples_come_from_files_and_folders_and_copies_are_recognised(
    page: Page, store: Store, tmp_path: Path
) -> None:
    tab(page, "examples")
    # Files without a class wait for its name.
    page.set_input_files("#bring-file", files(gnu=range(4)))
    page.get_by_text("4 images ready.").wait_for()
    page.keyboard.type(HOSTILE)
    assert "is a new class" in page.get_by_test_id("bring-hint").inner_text()
    page.keyboard.press("Enter")
    noticed(page, f"Added 4 examples of “{HOSTILE}”.")
    assert {item.label for item in store.items() if item.state == "named"} >= {HOSTILE}
    # The same again, with a file that is none.
    junk = {"name": f"{HOSTILE}.png", "mimeType": "image/png", "buffer": b"junk"}
    page.set_input_files("#bring-file", [*files(gnu=range(5)), junk])
    noticed(page, "4 images were here already: not added twice.")
    problems = page.get_by_test_id("brought-problems").inner_text()
    assert f"{HOSTILE}.png: The service cannot read this file." in problems
    assert page.get_by_test_id("brought-thumb").count() == 5
    undo(page)
    assert page.get_by_test_id("brought-thumb").count() == 0

    folder = tmp_path / "animals"
    for label in ("gnu", "hen"):
        (folder / label).mkdir(parents=True)
        for number in range(10, 13):
            (folder / label / f"{number}.png").write_bytes(picture(label, number))
    (folder / "Thumbs.db").write_bytes(b"not an image")
    page.get_by_test_id("bring-label").fill("")
    page.set_input_files("#bring-directory", folder)
    assert "gnu: 3 images" in page.get_by_test_id("sure").inner_text()
    page.get_by_test_id("sure-yes").click()
    noticed(page, "Added 6 examples of “gnu” and “hen”.")
    counted = Counter(item.label for item in store.items() if item.state == "named")
    assert (counted["gnu"], counted["hen"]) == (3, 3)
    assert page.locator("img[src=x]").count() == 0


def test_a_dropped_folder_becomes_classes(page: Page, store: Store, tmp_path: Path) -> None:
    """As a file manager drops it: folders are read by the page, in parts of a hundred files."""
    folder = tmp_path / "animals"
    for label, count in (("yak", 3), ("fish", 2)):
        (folder / "more" / label).mkdir(parents=True)
        for number in range(70, 70 + count):
            (folder / "more" / label / f"{number}.png").write_bytes(picture(label, number))
    (folder / "more" / "yak" / ".hidden.png").write_bytes(b"not an image")
    tab(page, "examples")
    place = page.get_by_test_id("drop").bounding_box()
    assert place is not None
    where = {"x": place["x"] + place["width"] / 2, "y": place["y"] + place["height"] / 2}
    browser = page.context.new_cdp_session(page)
    for kind in ("dragEnter", "dragOver", "drop"):
        data = {"items": [], "files": [str(folder)], "dragOperationsMask": 1}
        browser.send("Input.dispatchDragEvent", {"type": kind, **where, "data": data})
    page.get_by_test_id("sure").wait_for()
    asked = page.get_by_test_id("sure").inner_text()
    assert "yak: 3 images" in asked
    assert "fish: 2 images" in asked
    page.get_by_test_id("sure-yes").click()
    noticed(page, "Added 5 examples of “fish” and “yak”.")
    assert Counter(item.label for item in store.items() if item.label in ("yak", "fish")) == {"yak": 3, "fish": 2}
    undo(page)
    assert not any(item.label in ("yak", "fish") for item in store.items())


def test_a_large_photo_is_shrunk_before_it_is_sent(page: Page, store: Store) -> None:
    noise = np.random.default_rng(1).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    large = saved(Image.fromarray(noise).resize((3000, 2000)), "JPEG")
    tab(page, "examples")
    page.get_by_test_id("bring-label").fill("hen")
    page.set_input_files("#bring-file", {"name": "large.jpg", "mimeType": "image/jpeg", "buffer": large})
    noticed(page, "Added 1 example of “hen”.")
    newest = store.items()[-1]
    assert (newest.width, newest.height) == (768, 512)
    undo(page)
    assert newest.id not in {item.id for item in store.items()}


def test_groups_are_split_and_loose_images_join_the_group_that_they_look_like(
    page: Page, server: Server, store: Store
) -> None:
    before = {item.id for item in store.items()}
    offered = int(metric(server, "openworld_quarantine_offered_total"))
    sent = [http_post(f"{server.url}/predict", content=content).json() for content in pictures("gnu", 10, first=60)]
    unknown = [answer["known"] for answer in sent].count(False)
    assert unknown >= 8
    eventually(lambda: all_written(server, offered + unknown))
    ids = [item.id for item in store.items() if item.id not in before]
    store.replace_groups([FoundGroup(ids[:6], 0.9, "ant", False)])
    (number,) = [group.id for group in store.groups() if group.size == 6]

    def resemble(route: Route) -> None:
        found = route.fetch().json()
        like = {"group": number, "similarity": 0.8}
        alike = [{**item, "looks_like": like if item["id"] in ids else None} for item in found["items"]]
        route.fulfill(json={**found, "items": alike})

    page.route(re.compile("/teach/loose"), resemble)
    page.reload()
    group = page.get_by_test_id(f"group-{number}")
    assert "nearest class: “ant”" in group.inner_text()
    page.get_by_test_id(f"alike-{number}").click()
    noticed(page, f"Moved {len(ids) - 6} images to group {number}.")
    assert [*store.members(number)] == ids
    page.click(f"#thumb-{ids[0]}")
    page.click(f"#thumb-{ids[1]}", modifiers=["Shift"])
    page.get_by_test_id("selected-target").select_option("a new group")
    page.get_by_test_id("selected-move").click()
    noticed(page, "of 2 images.")
    assert [*store.members(number)] == ids[2:]
    undo(page)
    assert [*store.members(number)] == ids
    page.get_by_test_id(f"junk-{number}").click()
    noticed(page, f"Marked {len(ids)} images as junk.")


def test_a_dropped_and_a_pasted_image_become_examples(page: Page, store: Store) -> None:
    for kind, number in (("paste", 50), ("drop", 51)):
        page.evaluate(
            """([kind, text]) => {
                const held = new DataTransfer();
                const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
                held.items.add(new File([bytes], "image.png", { type: "image/png" }));
                const options = { bubbles: true, cancelable: true, dataTransfer: held, clipboardData: held };
                const event = kind === "paste" ? new ClipboardEvent(kind, options) : new DragEvent(kind, options);
                document.body.dispatchEvent(event);
            }""",
            [kind, base64.b64encode(picture("hen", number)).decode()],
        )
        if kind == "paste":
            page.get_by_text("1 image ready.").wait_for()
            page.keyboard.type("HEN")
            page.get_by_test_id("pending-add").click()
        noticed(page, "Added 1 example of “hen”.")
        page.evaluate("document.getElementById('notice').hidden = true")
    assert sum(item.label == "hen" for item in store.items()) == 5


def test_the_camera_takes_examples_and_shows_live_answers_that_are_not_stored(page: Page, store: Store) -> None:
    tab(page, "examples")
    before = store.usage().items
    page.get_by_test_id("camera-open").click()
    page.get_by_test_id("camera-live").filter(has_text=re.compile("^unknown$|%, if known$")).wait_for()
    page.keyboard.type("hen")
    page.get_by_test_id("camera-take").click()
    noticed(page, "Added 1 example of “hen”.")
    assert store.usage().items == before + 1
    undo(page)
    assert store.usage().items == before
    page.get_by_test_id("camera-close").click()
    assert page.evaluate("document.getElementById('camera-video').srcObject") is None


def test_it_is_taught_with_the_keyboard_alone(page: Page, server: Server, store: Store) -> None:
    page.keyboard.press("?")
    page.get_by_text("Keyboard shortcuts", exact=True).last.wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("3")
    assert page.get_by_test_id("waiting-classes").inner_text().count("images") >= 2
    page.keyboard.press("l")
    page.get_by_test_id("accept").wait_for()
    page.keyboard.press("d")
    noticed(page, "Discarded.")
    page.keyboard.press("l")
    page.get_by_test_id("accept").wait_for()
    assert page.evaluate("document.activeElement.id") == "lesson-title", "the result is read out"
    page.keyboard.press("a")
    if page.get_by_test_id("objection").count():
        assert page.evaluate("document.activeElement.id") == "accept"
        page.keyboard.press("Enter")
    noticed(page, "is served now.")
    assert {"gnu", "hen", HOSTILE} <= set(labels(server))
    page.keyboard.press("Control+z")
    noticed(page, "Undone.")
    assert "hen" not in labels(server)


def test_an_answer_is_confirmed_or_corrected_on_the_main_page(browser: Browser, server: Server, store: Store) -> None:
    stranger = open_page(browser, server, path="/", http_credentials=None)
    stranger.set_input_files("#file", files(ant=range(200, 201)))
    stranger.get_by_role("link", name="Sign in to teach").wait_for()
    close(stranger)

    page = open_page(browser, server)
    page.goto(server.url)
    page.set_input_files("#file", files(ant=range(200, 201)))
    page.get_by_test_id("feedback-right").filter(has_text="Yes, it is “ant”").click()
    page.get_by_test_id("feedback-text").filter(has_text="Kept as an example of “ant”.").wait_for()
    assert [(item.label, item.state) for item in store.items() if item.label == "ant"] == [("ant", "known")]
    page.get_by_test_id("feedback-undo").click()
    page.get_by_test_id("feedback-right").wait_for()
    assert not any(item.label == "ant" for item in store.items())
    page.get_by_test_id("feedback-label").fill("Bee")
    page.keyboard.press("Enter")
    page.get_by_test_id("feedback-text").filter(has_text="Kept as an example of “bee”.").wait_for()
    page.get_by_role("link", name="Go on to learn").click()
    page.get_by_test_id("waiting-classes").filter(has_text="bee").wait_for()
    tab(page, "classes")
    of_class(page, "bee").get_by_test_id("example").click()
    page.get_by_test_id("zoom").get_by_role("button", name="Not an example").click()
    noticed(page, "1 image no longer an example of “bee”.")
    close(page)


def test_a_stray_image_does_not_block_a_lesson(page: Page, server: Server) -> None:
    served = status(server)["model"]["version"]
    tab(page, "examples")
    page.get_by_test_id("bring-label").fill("yak")
    page.set_input_files("#bring-file", files(yak=range(1)))
    noticed(page, "Added 1 example of “yak”.")
    tab(page, "learn")
    page.get_by_test_id("waiting-classes").filter(has_text="1 more needed").wait_for()
    page.get_by_test_id("learn-now").click()
    page.get_by_test_id("too-few").filter(has_text="“yak” waits: it needs 1 more example.").wait_for()
    assert "yak" not in page.get_by_test_id("class-table").inner_text()
    page.keyboard.press("l")
    noticed(page, "Accept or discard it first.")

    # A change of a class of the model would discard the lesson.
    tab(page, "classes")
    of_class(page, "ant").get_by_test_id("class-rename").click()
    page.get_by_test_id("discards").wait_for()
    page.get_by_test_id("sure-cancel").click()
    of_class(page, "yak").get_by_test_id("class-rename").click()
    assert not page.get_by_test_id("discards").is_visible()
    page.get_by_test_id("sure-cancel").click()

    # Another version, and the lesson must be learned again.
    tab(page, "versions")
    page.get_by_test_id("rollback").last.click()
    noticed(page, "learn it again.")
    tab(page, "learn")
    page.get_by_test_id("outdated").wait_for()
    assert not page.get_by_test_id("accept").is_visible()
    page.keyboard.press("l")
    page.get_by_test_id("accept").wait_for()
    page.get_by_test_id("discard").click()
    noticed(page, "Discarded.")
    tab(page, "versions")
    page.get_by_test_id("log").get_by_text("discarded a lesson: replaced by a later job").first.wait_for()
    page.locator(f'[data-version="{served}"]').get_by_test_id("rollback").click()
    noticed(page, f"Version {served} is served now.")


def test_images_that_are_deleted_with_their_class_do_not_come_back(page: Page, server: Server, store: Store) -> None:
    tab(page, "examples")
    page.get_by_test_id("bring-label").fill("owl")
    page.set_input_files("#bring-file", files(bird=range(40, 42)))
    noticed(page, "Added 2 examples of “owl”.")
    tab(page, "classes")
    of_class(page, "owl").get_by_test_id("class-delete").click()
    assert "Deleted images cannot be brought back." in page.get_by_test_id("sure").inner_text()
    page.get_by_test_id("sure-delete").click()
    noticed(page, "This cannot be undone.")
    assert not page.get_by_test_id("undo").is_visible()

    of_class(page, "elk").get_by_test_id("class-delete").click()
    assert "Images that are deleted do not come back with it." in page.get_by_test_id("sure").inner_text()
    page.get_by_test_id("sure-delete").click()
    noticed(page, "Undo brings the class back without them.")
    page.get_by_test_id("undo").click()
    noticed(page, "Undone. “elk” is back without its images.")
    assert "elk" in labels(server)
    assert not any(item.label == "elk" for item in store.items())
    assert status(server)["removed"] == 0


def test_an_import_is_asked_for_because_it_has_no_undo(page: Page, store: Store) -> None:
    before = store.usage().items
    tab(page, "classes")
    archive = {"name": "owls.zip", "mimeType": "application/zip", "buffer": one_image(name="owl/1.png")}
    page.set_input_files("#import-file", archive)
    assert "An import cannot be undone." in page.get_by_test_id("sure").inner_text()
    page.get_by_test_id("sure-cancel").click()
    assert store.usage().items == before
    page.set_input_files("#import-file", archive)
    page.get_by_test_id("sure-yes").click()
    noticed(page, "Imported")
    assert "owl" in {item.label for item in store.items()}


@pytest.mark.parametrize("phone", [True, False], ids=["phone", "wide"])
def test_the_class_stays_in_view_beside_the_camera(browser: Browser, server: Server, phone: bool) -> None:
    options: dict[str, Any] = {"viewport": PHONE, "has_touch": True, "is_mobile": True} if phone else {}
    page = open_page(browser, server, **options)
    tab(page, "examples")
    page.get_by_test_id("bring-label").fill("hen")
    page.get_by_test_id("camera-open").click()
    page.get_by_test_id("camera-live").filter(has_text=re.compile("^unknown$|%, if known$")).wait_for()
    height = page.evaluate("innerHeight")
    tabs = page.evaluate("document.getElementById('tabs').getBoundingClientRect().bottom")
    for name in ("bring-label", "camera-take"):
        box = page.get_by_test_id(name).bounding_box()
        assert box is not None
        assert tabs <= box["y"], name
        assert box["y"] + box["height"] <= height, name
    assert page.get_by_test_id("camera-take").get_by_text("Space").is_visible() != phone
    page.get_by_test_id("camera-close").click()
    assert page.get_by_test_id("drop").is_visible()
    close(page)


JOB: dict[str, Any] = {
    "id": 77, "kind": "learn", "state": "done", "progress": 1.0, "step": "", "who": "bob", "seconds": 2.0, "base": "a",
    "started_at": "2024-01-01T12:00:00.000Z", "candidate": "b", "error": None, "accepts": False, "grouped": None,
}  # fmt: skip
LEARNED: dict[str, Any] = {
    "classes": [{
        "label": HOSTILE, "new": True, "added": 3, "removed": 0, "images": 3, "of": 3, "right_before": 0,
        "right_after": 2, "known_after": 3, "grade": "few examples", "advice": "More images help.",
    }],
    "accuracy_before": 0.0, "accuracy_after": 0.667, "deleted": [], "renamed": {}, "merged": {}, "gate": False,
    "max_loss": 1.5, "waiting_unknown": 7, "waiting_known": 5, "waiting_by_class": {HOSTILE: 5},
    "rejects_unknown": False, "seconds": {"learning": 1.5},
    "old_classes": {
        "images": 100, "before": 0.98, "after": 0.91, "missing": ["cat"],
        "worse": [{"label": "ant", "images": 50, "before": 49, "after": 42, "taken_for": [[HOSTILE, 7]]}],
        "changed": [{"label": "ant", "images": 50, "before": 49, "after": 42, "taken_for": [[HOSTILE, 7]]}],
    },
}  # fmt: skip


def with_status(page: Page, **changes: Any) -> None:
    """Let the service tell another status than its own."""

    def tell(route: Route) -> None:
        route.fulfill(json={**route.fetch().json(), **changes})

    page.route(re.compile("/teach/status"), tell)


def test_the_gate_names_known_images_that_would_become_unknown(page: Page) -> None:
    known = {"images": 200, "known": 190, "lost": 40, "alpha": 0.05, "too_many": True}
    old = {**LEARNED["old_classes"], "worse": []}
    with_status(page, job={**JOB, "learned": {**LEARNED, "old_classes": old, "known_images": known}})
    tab(page, "learn")
    page.reload()
    objection = page.get_by_test_id("objection")
    objection.wait_for()
    text = objection.inner_text().replace("\u00a0", " ")
    assert "The lesson would make 40 of 190 known images unknown." in text
    assert "At most 5 % of the known images may become unknown." in text
    assert "worse" not in text
    page.get_by_role("button", name="Accept anyway").wait_for()


def test_the_gate_objects_in_plain_words_and_can_be_overruled(page: Page, tmp_path: Path) -> None:
    with_status(page, job={**JOB, "learned": LEARNED})
    asked: list[Any] = []

    def refuse(route: Route) -> None:
        asked.append(route.request.post_data_json)
        detail = {"code": "teach_changed", "message": "another version is served by now: got v9, published by bob"}
        route.fulfill(status=409, json={"error": detail})

    page.route(re.compile("/teach/accept"), refuse)
    tab(page, "learn")
    page.reload()
    objection = page.get_by_test_id("objection")
    objection.wait_for()
    assert "The lesson would make “ant” worse." in objection.inner_text()
    assert f"taken for “{HOSTILE}” (7)" in objection.inner_text()
    assert "5 of 7" in page.get_by_test_id("figures").inner_text()
    assert "no image can be called unknown" in page.get_by_test_id("lesson").inner_text()
    page.screenshot(path=tmp_path / "objection.png", full_page=True)
    page.keyboard.press("a")
    assert asked == [], "a key does not overrule the gate"
    page.get_by_role("button", name="Accept anyway").click()
    page.locator("#problem-text").filter(has_text="Another version was put into service").wait_for()
    assert "published by bob" in page.inner_text("#problem-more")
    assert asked == [{"job": 77, "force": True}]
    assert page.locator("img[src=x]").count() == 0
    # It can never be accepted, so the way on is shown.
    page.get_by_role("button", name="Learn again").wait_for()
    assert page.get_by_test_id("discard").is_visible()
    assert not page.get_by_test_id("accept").is_visible()


def test_a_failed_lesson_shows_what_waits_until_that_changes(page: Page) -> None:
    failed = {**JOB, "state": "failed", "error": "the disk is full", "learned": None}
    wait = {"waiting": 5, "removed": 0, "classes": {"elk": 4, "zebra": 1}, "ready": True}
    short = {"too_few": [{"label": "zebra", "images": 1, "missing": 1, "learned": False}]}
    with_status(page, job=failed, **wait, **short)
    page.reload()
    page.get_by_test_id("strip").filter(has_text="“elk” 4. “zebra” waits: it needs 1 more example.").wait_for()
    tab(page, "learn")
    page.get_by_test_id("lesson-failed").filter(has_text="The disk is full").wait_for()
    shown = page.get_by_test_id("waiting-classes").inner_text()
    assert "elk" in shown
    assert "1 more needed" in shown
    page.unroute(re.compile("/teach/status"))
    with_status(page, job=failed, **{**wait, "waiting": 1, "classes": {"zebra": 1}, "ready": False}, **short)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.get_by_text("More examples are needed").wait_for()
    assert not page.get_by_test_id("lesson-failed").is_visible()
    assert "The last lesson failed (bob" in page.get_by_test_id("last-lesson").inner_text()
    assert not page.get_by_test_id("learn-now").is_visible()
    assert page.get_by_test_id("lesson").get_by_role("link", name="Bring examples").is_visible()


def test_a_lost_connection_and_another_persons_lesson_are_shown(page: Page) -> None:
    running = {**JOB, "state": "running", "progress": 0.4, "step": "learning 2 classes", "learned": None}
    with_status(page, job=running)
    page.route(re.compile("/teach/jobs/77"), lambda route: route.abort())
    page.reload()
    page.get_by_test_id("strip").filter(has_text="bob teaches the model right now.").wait_for()
    tab(page, "learn")
    page.get_by_text("The connection is lost. Trying again").wait_for()
    page.unroute(re.compile("/teach/status"))
    page.unroute(re.compile("/teach/jobs/77"))
    page.route(
        re.compile("/teach/jobs/77"),
        lambda route: route.fulfill(json={**running, "state": "failed", "error": "killed"}),
    )
    page.get_by_test_id("lesson-progress").wait_for(state="detached")


def test_a_server_that_cannot_be_taught_shows_why(page: Page) -> None:
    with_status(page, enabled=False, reason="the bundle has no trunk", job=None)
    page.reload()
    page.get_by_test_id("off").filter(has_text="the bundle has no trunk").wait_for()
    assert page.get_by_test_id("off").get_by_role("link").get_attribute("href") == "unknowns"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_never_scrolls_sideways(browser: Browser, server: Server, tmp_path: Path, scheme: str) -> None:
    page = open_page(browser, server, viewport=PHONE, has_touch=True, is_mobile=True, color_scheme=scheme)
    for part in ("unknown", "examples", "learn", "classes", "versions"):
        page.get_by_test_id(f"tab-{part}").tap()
        page.wait_for_selector("#main[aria-busy=false]")
        page.screenshot(path=tmp_path / f"{part}-{scheme}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"], part
        ends = page.evaluate(
            "[...document.querySelectorAll('.tabs a')].map((tab) => tab.getBoundingClientRect().right)"
        )
        assert max(ends) <= PHONE["width"], "all tabs are in view"
    close(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_wide_screen_shows_every_text_with_enough_contrast(
    browser: Browser, server: Server, tmp_path: Path, scheme: str
) -> None:
    page = open_page(browser, server, color_scheme=scheme)
    for part in ("unknown", "examples", "learn", "classes", "versions"):
        tab(page, part)
        page.wait_for_selector("#main[aria-busy=false]")
        page.screenshot(path=tmp_path / f"wide-{part}-{scheme}.png", full_page=True)
        assert page.evaluate(controls.FAINT) == [], part
        assert page.evaluate("document.documentElement.scrollWidth") == 1280
    close(page)


def test_every_control_has_a_name(page: Page) -> None:
    for part in ("unknown", "examples", "learn", "classes", "versions"):
        tab(page, part)
        page.wait_for_selector("#main[aria-busy=false]")
        assert page.evaluate(controls.UNNAMED) == []


def zipped(contents: Mapping[str, bytes | str]) -> bytes:
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return stored.getvalue()


def bring_archives(page: Page, **archives: bytes) -> None:
    """Choose archives, or JSON, in the dialog that the button opens."""
    with page.expect_file_chooser() as chooser:
        page.get_by_test_id("import").click()
    given = [
        {
            "name": name.replace("_", "."),
            "mimeType": "application/json" if name.endswith("json") else "application/zip",
            "buffer": content,
        }
        for name, content in archives.items()
    ]
    chooser.value.set_files(given)  # type: ignore[arg-type]
    page.get_by_test_id("sure-yes").click()


def downloaded(page: Page, test_id: str) -> bytes:
    with page.expect_download() as download:
        page.get_by_test_id(test_id).click()
    return Path(download.value.path()).read_bytes()


def test_labels_are_imported_and_exported_on_the_page(page: Page, store: Store, tmp_path: Path) -> None:
    tab(page, "classes")
    folders = zipped({f"animals/kiwi/{number}.png": picture("yak", 300 + number) for number in range(3)})
    more = zipped({"fish/1.png": picture("fish", 300), f"fish/{HOSTILE.replace('/', '')}.png": b"junk"})
    bring_archives(page, folders_zip=folders, more_zip=more)
    noticed(page, "Imported 4 images, 1 could not be imported.")
    assert "not a supported image" in page.get_by_test_id("import-problems").inner_text()
    of_class(page, "kiwi").filter(has_text="3").wait_for()
    assert Counter(item.label for item in store.items() if item.label in ("kiwi", "fish")) == {"kiwi": 3, "fish": 1}

    # A plain export of Label Studio has no images: the page tells what to do, and doing it works.
    choice = {"type": "choices", "value": {"choices": ["gnat"]}}
    names = [f"/data/upload/1/1a2b3c4d-{number}.png" for number in range(2)]
    tasks = [{"id": 1, "data": {"image": names[0]}, "annotations": [{"result": [choice]}]}]
    tasks += [{"id": 2, "image": names[1], "choice": "gnat", "annotator": 1}]
    bring_archives(page, project_json=json.dumps(tasks).encode())
    noticed(page, "Imported 0 images, 2 could not be imported.")
    problems = page.get_by_test_id("import-problems").inner_text()
    assert "2 images are not in the JSON file: 1a2b3c4d-0.png, 1a2b3c4d-1.png." in problems
    assert "pack the JSON file and the images into one zip archive" in problems
    page.screenshot(path=tmp_path / "missing-images.png", full_page=True)
    beside = {f"upload/{number}.png": picture("bird", 300 + number) for number in range(2)}
    bring_archives(page, project_zip=zipped({"project.json": json.dumps(tasks), **beside}))
    noticed(page, "Imported 2 images.")
    assert not page.get_by_test_id("import-problems").is_visible()
    assert sum(item.label == "gnat" for item in store.items()) == 2

    count = len(store.examples())
    for kind in ("folders", "label-studio"):
        content = downloaded(page, f"export-{kind}")
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            images = [name for name in archive.namelist() if name.endswith(".png")]
            assert len(images) == count
            if kind == "label-studio":
                assert len(json.loads(archive.read("tasks.json"))) == count
                assert '<Choice value="gnat"/>' in archive.read("config.xml").decode()
        bring_archives(page, again_zip=content)
        noticed(page, f"Imported 0 images, {count} were here already.")
        page.evaluate("document.getElementById('notice').hidden = true")
    assert page.locator("img[src=x]").count() == 0


def test_a_large_export_has_a_link_for_each_part(page: Page) -> None:
    def three(route: Route) -> None:
        route.fulfill(json={**route.fetch().json(), "export_parts": 3})

    page.route(re.compile("/teach/classes"), three)
    tab(page, "classes")
    page.reload()
    page.get_by_test_id("export-folders").filter(has_text="Export as class folders, part 1 of 3").wait_for()
    links = page.locator("#exchange a").all()
    assert len(links) == 6
    found = [str(link.get_attribute("href")) for link in links]
    for kind in ("folders", "label-studio"):
        assert [f"teach/export?format={kind}&part={number}" for number in (1, 2, 3)] == [
            href for href in found if f"format={kind}&" in href
        ]
    assert page.get_by_role("link", name="Export for Label Studio, part 3 of 3").is_visible()
    assert page.evaluate(controls.UNNAMED) == []
