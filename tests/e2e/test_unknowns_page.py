"""The labelling page in a real browser, against the real server; screenshots are left in pytest's temporary folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from serving.quarantine.records import FoundGroup
from serving.quarantine.store import Store
from tests.e2e import controls
from tests.helpers_quarantine import arrivals
from tests.helpers_serving import PATIENCE, Server, serving, write_bundle

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = pytest.mark.long

TOKEN = "f00dfacef00dface-token"
PHONE = {"width": 375, "height": 740}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('quarantine')}/quarantine.db"


@pytest.fixture(scope="module")
def server(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    bundle = write_bundle(tmp_path_factory.mktemp("served") / "bundle")
    settings = {"OPENWORLD_QUARANTINE_URL": url, "OPENWORLD_ADMIN_TOKEN": TOKEN}
    with serving(tmp_path_factory.mktemp("home"), bundle, settings=settings) as started:
        yield started


class Filled:
    """The contents of the quarantine: groups of 30, 22 and 4 images, and 3 images in no group."""

    def __init__(self, store: Store) -> None:
        self.store = store
        ids = [item.id for item in store.items()]
        if len(ids) == 59:
            store.clear(ids, "tester")
        else:
            store.delete_all()
            ids = store.add(arrivals(range(59))).kept
        self.first, self.second, self.third, self.loose = ids[:30], ids[30:52], ids[52:56], ids[56:]
        members = (self.first, self.second, self.third)
        found = zip(members, (0.9, 0.8, 0.5), (None, None, "red"), strict=True)
        store.replace_groups([FoundGroup(some, alike, near, near is not None) for some, alike, near in found])
        self.groups = [group.id for group in store.groups()]


@pytest.fixture
def filled(url: str) -> Iterator[Filled]:
    store = Store.open(url)
    yield Filled(store)
    store.close()


@pytest.fixture
def page(browser: Browser, server: Server, filled: Filled) -> Iterator[Page]:
    """The page, opened by ada; any error in the browser fails the test."""
    page = open_page(browser, server)
    messages: list[str] = []
    page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.wait_for_selector(f"#group-{filled.groups[0]}")
    yield page
    page.context.close()
    assert [line for line in messages if "Failed to load resource" not in line] == []


def open_page(browser: Browser, server: Server, token: str = TOKEN, **options: object) -> Page:
    context = browser.new_context(
        http_credentials={"username": "ada", "password": token},
        **{"viewport": {"width": 1280, "height": 900}, **options},  # type: ignore[arg-type]
    )
    page = context.new_page()
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(f"{server.url}/unknowns")
    return page


def noticed(page: Page, text: str) -> None:
    """Wait until the page shows a notice with this text."""
    page.get_by_test_id("notice").filter(has_text=text).wait_for()


def thumb(page: Page, number: int) -> str:
    return f"#thumb-{number}"


def states(filled: Filled, ids: list[int]) -> set[tuple[str, str | None, str | None]]:
    return {(item.state, item.label, item.labelled_by) for item in filled.store.items(ids=ids)}


def test_groups_are_labelled_with_mouse_and_keyboard_and_it_lasts(page: Page, filled: Filled, tmp_path: Path) -> None:
    one, two, three = filled.groups
    # With the mouse: a group is named; two of its images are junk, one belongs elsewhere.
    page.get_by_test_id(f"name-{one}").fill("eight")
    assert page.get_by_test_id(f"hint-{one}").inner_text() == "“eight” is a new class"
    page.get_by_test_id(f"save-{one}").click()
    # Six of its images are not shown.
    assert "Only 24 of them are shown." in page.get_by_test_id("sure").inner_text()
    page.get_by_test_id("sure-yes").click()
    noticed(page, "Named 30 images “eight”.")
    page.click(thumb(page, filled.first[1]))
    page.click(thumb(page, filled.first[2]), modifiers=["Shift"])
    assert page.get_by_test_id("selected-count").inner_text() == "2 images selected"
    page.get_by_test_id("selected-junk").click()
    noticed(page, "Marked 2 images as junk.")
    page.click(thumb(page, filled.first[0]))
    page.get_by_test_id("selected-target").select_option(str(two))
    page.get_by_test_id("selected-move").click()
    noticed(page, f"Moved 1 image to group {two}.")
    # With the keyboard alone: the next group is named, and one of its images taken out.
    page.evaluate("document.activeElement.blur()")
    for key in ("j", "j", "n"):
        page.keyboard.press(key)
    page.keyboard.type("nine")
    page.keyboard.press("Enter")
    noticed(page, "Named 23 images “nine”.")
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == f"thumb-{filled.second[0]}"
    page.keyboard.press("m")
    page.keyboard.press("End")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    noticed(page, "Removed 1 image from the group.")
    # A class that the model already knows.
    page.get_by_test_id(f"near-{three}").click()
    noticed(page, "Marked 4 images as “red”, which the model already knows.")

    expected = {
        "first": (filled.first[3:], {("named", "eight", "ada")}),
        "junk": (filled.first[1:3], {("junk", None, "ada")}),
        "second": ([filled.first[0], *filled.second], {("named", "nine", "ada")}),
        "third": (filled.third, {("known", "red", "ada")}),
        "loose": (filled.loose, {("new", None, None)}),
    }
    assert {name: states(filled, ids) for name, (ids, _) in expected.items()} == {
        name: found for name, (_, found) in expected.items()
    }
    assert list(filled.store.members(two)) == [filled.first[0], *filled.second[1:]]
    page.reload()
    page.wait_for_selector(f"#group-{one}[data-state=mixed]")
    assert page.get_by_test_id(f"title-{one}").inner_text() == f"“eight” (group {one})"
    assert "labelled by ada" in page.get_by_test_id(f"who-{one}").inner_text()
    assert page.locator(f"#group-{one} .thumb[data-state=junk]").count() == 2
    assert page.locator(f"#group-none {thumb(page, filled.second[0])}").count() == 1
    named = page.get_by_test_id("named-class")
    assert [entry.get_attribute("data-label") for entry in named.all()] == ["eight", "nine"]
    assert [entry.get_attribute("data-ready") for entry in named.all()] == ["true", "true"]
    command = page.get_by_test_id("learn-command").inner_text()
    assert command.startswith("openworld learn-unknowns RUN --quarantine sqlite:///")
    page.get_by_text("Who did what").click()
    changes = page.get_by_test_id("changes").inner_text()
    assert "ada named 30 images “eight”" in changes
    assert "ada marked 2 images as junk" in changes
    page.screenshot(path=tmp_path / "labelled.png", full_page=True)


def test_a_mistake_is_taken_back(page: Page, filled: Filled) -> None:
    one, two, _ = filled.groups
    page.get_by_test_id(f"junk-{one}").click()
    noticed(page, "Marked 30 images as junk.")
    page.get_by_test_id("undo").click()
    noticed(page, "Undone.")
    assert states(filled, filled.first) == {("new", None, None)}
    page.click(thumb(page, filled.second[0]))
    page.keyboard.press("x")
    noticed(page, "Marked 1 image as junk.")
    # Press two keys before the service has answered the first.
    page.keyboard.press("ArrowRight")
    page.keyboard.press("x")
    page.keyboard.press("u")
    noticed(page, "Removed the label of 1 image.")
    page.keyboard.press("Control+z")
    noticed(page, "Undone.")
    assert states(filled, filled.second[:2]) == {("junk", None, "ada")}
    page.get_by_test_id(f"clear-{two}").click()
    noticed(page, "Removed the label of 22 images.")
    assert states(filled, filled.second) == {("new", None, None)}


def test_groups_are_merged_and_all_of_a_large_one_is_shown(page: Page, filled: Filled) -> None:
    one, two, _ = filled.groups
    page.get_by_test_id(f"target-{two}").select_option(str(one))
    page.get_by_test_id(f"merge-{two}").click()
    noticed(page, f"Merged group {two} into group {one}.")
    assert page.locator(f"#group-{two}").count() == 0
    assert page.locator(f"#group-{one} .thumb").count() == 24
    page.get_by_test_id(f"more-{one}").click()
    page.wait_for_selector(f"#group-{one} {thumb(page, filled.second[-1])}")
    assert page.locator(f"#group-{one} .thumb").count() == 52
    page.locator(f"#group-{one} .thumb").first.focus()
    page.keyboard.press("Control+a")
    assert page.get_by_test_id("selected-count").inner_text() == "52 images selected"
    page.keyboard.press("Escape")
    assert not page.get_by_test_id("bar").is_visible()


def test_unseen_images_are_not_named_by_mistake(page: Page, filled: Filled) -> None:
    one = filled.groups[0]
    page.get_by_test_id(f"name-{one}").fill("eight")
    page.keyboard.press("Enter")
    page.get_by_test_id("sure-cancel").click()
    assert states(filled, filled.first) == {("new", None, None)}
    page.get_by_test_id(f"save-{one}").click()
    page.get_by_test_id("sure-shown").click()
    noticed(page, "Named 24 images “eight”.")
    assert states(filled, filled.first[:24]) == {("named", "eight", "ada")}
    assert states(filled, filled.first[24:]) == {("new", None, None)}


def test_an_image_is_shown_large_with_its_neighbours(page: Page, filled: Filled) -> None:
    page.dblclick(thumb(page, filled.first[1]))
    large = page.get_by_test_id("zoom")
    assert page.get_by_test_id("zoom-place").inner_text() == "2 of 24"
    page.keyboard.press("ArrowRight")
    assert page.get_by_test_id("zoom-place").inner_text() == "3 of 24"
    assert large.locator("img").get_attribute("src") == f"unknowns/items/{filled.first[2]}/image"
    assert large.locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)") == 24
    page.keyboard.press("Escape")
    large.wait_for(state="detached")
    assert page.evaluate("document.activeElement.id") == f"thumb-{filled.first[1]}"


def test_deletion_is_asked_about(page: Page, filled: Filled) -> None:
    page.click(thumb(page, filled.loose[0]))
    page.get_by_test_id("selected-delete").click()
    page.get_by_role("button", name="Cancel").click()
    assert filled.store.usage().items == 59
    page.get_by_test_id("selected-delete").click()
    page.get_by_test_id("sure-yes").click()
    noticed(page, "Deleted 1 image.")
    assert filled.store.items(ids=filled.loose[:1]) == []
    page.get_by_test_id("delete-all").click()
    assert page.get_by_test_id("sure-yes").is_disabled()
    page.get_by_test_id("sure-count").fill("58")
    page.get_by_test_id("sure-yes").click()
    noticed(page, "Deleted 58 images.")
    assert filled.store.usage().items == 0
    assert "No unknown images yet" in page.get_by_test_id("empty").inner_text()


def test_what_has_no_group_yet_is_shown_with_the_way_to_groups(page: Page, filled: Filled) -> None:
    filled.store.replace_groups([])
    page.get_by_test_id("refresh").click()
    page.get_by_text("No groups yet").wait_for()
    assert page.get_by_test_id("title-none").inner_text() == "Not grouped yet"
    assert "openworld discover --quarantine" in page.get_by_test_id("discover-command").inner_text()
    page.click(thumb(page, filled.first[0]))
    page.get_by_test_id("selected-name").fill("RED")
    page.keyboard.press("Enter")
    noticed(page, "Marked 1 image as “red”, which the model already knows.")


def test_names_are_text_and_never_markup(page: Page, filled: Filled) -> None:
    one = filled.groups[0]
    hostile = "<img src=x onerror=alert(1)>"
    page.get_by_test_id(f"name-{one}").fill(hostile)
    page.keyboard.press("Enter")
    page.get_by_test_id("sure-yes").click()
    noticed(page, hostile)
    assert page.get_by_test_id(f"title-{one}").inner_text() == f"“{hostile}” (group {one})"
    assert page.locator("img[src=x]").count() == 0


def test_a_refusal_is_shown_and_nothing_is_lost(page: Page, filled: Filled) -> None:
    one = filled.groups[0]
    page.get_by_test_id(f"name-{one}").fill("unknown")
    page.keyboard.press("Enter")
    page.get_by_test_id("sure-yes").click()
    page.get_by_text("This name cannot be used.").wait_for()
    assert "1 to 100 printable characters" in page.inner_text("#problem-more")
    assert page.get_by_test_id(f"name-{one}").input_value() == "unknown"

    def away(route: Route) -> None:
        detail = {"code": "quarantine_unavailable", "message": "database is locked"}
        route.fulfill(status=503, json={"error": detail})

    page.route(re.compile("/unknowns/junk"), away)
    page.get_by_test_id(f"junk-{one}").click()
    page.get_by_text("The quarantine cannot be reached right now.").wait_for()
    assert states(filled, filled.first) == {("new", None, None)}


def test_every_control_has_a_name_and_every_image_has_a_state(page: Page, filled: Filled) -> None:
    assert page.evaluate(controls.UNNAMED) == []
    first = page.locator(thumb(page, filled.first[0]))
    assert (first.get_attribute("aria-selected"), first.get_attribute("tabindex")) == ("false", "0")
    first.focus()
    page.keyboard.press("Space")
    assert first.get_attribute("aria-selected") == "true"
    assert "not reviewed" in (first.get_attribute("aria-label") or "")
    assert first.evaluate("node => getComputedStyle(node).outlineStyle") == "solid", "the focus must be seen"
    page.keyboard.press("?")
    assert page.locator("#keys[open]").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_never_scrolls_sideways(
    browser: Browser, server: Server, filled: Filled, tmp_path: Path, scheme: str
) -> None:
    filled.store.name(
        filled.second, "a class with a name that is much longer than any phone is wide " + "x" * 36, "ada"
    )
    page = open_page(browser, server, viewport=PHONE, has_touch=True, is_mobile=True, color_scheme=scheme)
    page.locator(thumb(page, filled.first[5])).tap()
    page.get_by_test_id("bar").wait_for()
    page.screenshot(path=tmp_path / f"phone-{scheme}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_wide_screen_has_enough_contrast_and_room_for_the_bar_only_when_it_is_there(
    browser: Browser, server: Server, filled: Filled, tmp_path: Path, scheme: str
) -> None:
    page = open_page(browser, server, color_scheme=scheme)
    below = "parseFloat(getComputedStyle(document.querySelector('.labelling')).paddingBottom)"
    page.wait_for_selector(thumb(page, filled.first[5]))
    empty = page.evaluate(below)
    page.screenshot(path=tmp_path / f"wide-{scheme}.png", full_page=True)
    assert page.evaluate(controls.FAINT) == []
    page.locator(thumb(page, filled.first[5])).click()
    page.get_by_test_id("bar").wait_for()
    assert page.evaluate(controls.FAINT) == []
    assert empty < 60 <= page.evaluate(below)
    page.context.close()


def test_a_wrong_token_sees_nothing(browser: Browser, server: Server, filled: Filled) -> None:
    page = open_page(browser, server, token="cafebabecafebabe-token")
    assert "the admin token is needed" in page.inner_text("body")
    assert page.locator(".thumb").count() == 0
    page.context.close()


def test_no_other_host_is_contacted_and_the_server_logs_no_error(
    browser: Browser, server: Server, filled: Filled
) -> None:
    page = open_page(browser, server)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    page.wait_for_selector(f"#group-{filled.groups[0]} img")
    assert [address for address in asked if not address.startswith(f"{server.url}/")] == []
    page.context.close()
    assert "Traceback" not in server.log.read_text()
    assert TOKEN not in server.log.read_text()
