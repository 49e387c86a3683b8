"""The map of the quarantine in a real browser, against the real server; screenshots are left in pytest's folder."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from serving.bundle.embedding import Embedding
from serving.bundle.layout import EMBEDDING
from serving.bundle.umap_places import installed
from serving.quarantine.records import FoundGroup
from serving.quarantine.store import Store
from tests.helpers_quarantine import FEATURES, arrival
from tests.helpers_serving import PATIENCE, Server, reseal, serving, write_bundle

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.long

TOKEN = "f00dfacef00dface-token"
MANY = 20_000
LEFT, RIGHT, BELOW = range(1, 13), range(13, 25), range(27, 57)
"""Items of three groups, far from each other, of which the board shows 24 at first; two more are in no group."""


def features(number: int) -> np.ndarray:
    values = np.random.default_rng(number).normal(0, 0.1, FEATURES)
    values[0] += 2.0 if number in RIGHT else -2.0 if number in LEFT else 0.0
    values[1] += 4.0 if number in BELOW else 0.0
    return values.astype(np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("map")
    bundle = write_bundle(folder / "bundle")
    random = np.random.default_rng(0)
    learned = random.normal(0, 1, (40, FEATURES)) * [3, 2, 0.1, 0.1, 0.1, 0.1]
    stored = io.BytesIO()
    np.savez(stored, **Embedding.fit(learned, np.repeat(np.arange(4), 10)).to_arrays())
    reseal(bundle, EMBEDDING, stored.getvalue())
    url = f"sqlite:///{folder}/quarantine.db"
    store = Store.open(url)
    store.add([arrival(number, features=features(number)) for number in range(1, 57)])
    store.add([arrival(99, features=np.zeros(2, np.float32))])
    store.replace_groups([FoundGroup(some, 0.9, None, False) for some in (LEFT, RIGHT, BELOW)])
    # For these few points, compiling UMAP would take a hundred times as long as running it.
    settings = {"OPENWORLD_QUARANTINE_URL": url, "OPENWORLD_ADMIN_TOKEN": TOKEN, "NUMBA_DISABLE_JIT": "1"}
    with serving(tmp_path_factory.mktemp("home"), bundle, settings=settings) as started:
        yield started
    store.close()


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    """Opened by ada; any error in the browser fails the test."""
    credentials = {"username": "ada", "password": TOKEN}
    context = browser.new_context(http_credentials=credentials, viewport={"width": 1280, "height": 1000})  # type: ignore[arg-type]
    page = context.new_page()
    page.set_default_timeout(1000 * PATIENCE)
    messages: list[str] = []
    page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: messages.append(str(error)))
    yield page
    context.close()
    assert [line for line in messages if "Failed to load resource" not in line] == []


def open_map(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/unknowns")
    page.get_by_test_id("map").locator("summary").click()
    page.get_by_test_id("map-canvas").scroll_into_view_if_needed()


def box(page: Page) -> tuple[float, float, float, float]:
    found = page.get_by_test_id("map-canvas").bounding_box()
    assert found is not None
    return found["x"], found["y"], found["width"], found["height"]


def draw_around(page: Page, left: float, right: float, top: float = 0.02, bottom: float = 0.98) -> None:
    """A lasso between two shares of the width, and of the height."""
    x, y, width, height = box(page)
    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    page.mouse.move(x + left * width, y + top * height)
    page.mouse.down()
    for across, down in corners:
        page.mouse.move(x + across * width, y + down * height, steps=3)
    page.mouse.up()


Share = tuple[float, float]


def on_canvas(page: Page, server: Server) -> dict[int, Share]:
    """Where each image is while the whole map is seen, as shares of the width and of the height."""
    found = page.request.get(f"{server.url}/unknowns/map").json()
    every = np.array([place[:2] for place in found["learned"]] + [[item["x"], item["y"]] for item in found["items"]])
    low, high = every.min(axis=0), every.max(axis=0)
    size = np.array(box(page)[2:])
    scale = 0.9 * (size / (high - low)).min()
    across = {
        item["id"]: (np.array([item["x"], item["y"]]) - (low + high) / 2) * scale / size for item in found["items"]
    }
    return {number: (float(0.5 + place[0]), float(0.5 - place[1])) for number, place in across.items()}


def around(places: dict[int, Share], group: Iterable[int]) -> tuple[float, float, float, float]:
    """Left, right, top and bottom of a line around the images of a group."""
    some = np.array([places[number] for number in group])
    (left, top), (right, bottom) = some.min(axis=0) - 0.02, some.max(axis=0) + 0.02
    return float(left), float(right), float(top), float(bottom)


def state(page: Page, server: Server) -> dict[int, tuple[int | None, str | None]]:
    """Group and label of every image."""
    items = page.request.get(f"{server.url}/unknowns/map").json()["items"]
    return {item["id"]: (item["group"], item["label"]) for item in items}


def test_a_lasso_selects_images_and_names_them(page: Page, server: Server, tmp_path: Path) -> None:
    open_map(page, server)
    places = page.request.get(f"{server.url}/unknowns/map").json()
    assert (len(places["items"]), len(places["learned"]), places["left_out"]) == (56, 40, 1)
    assert page.get_by_test_id("map-legend").locator("li").count() == 4
    page.screenshot(path=tmp_path / "map.png", full_page=True)
    draw_around(page, *around(on_canvas(page, server), LEFT))
    assert page.get_by_test_id("selected-count").inner_text() == "12 images selected"
    page.screenshot(path=tmp_path / "map-selected.png", full_page=True)
    page.get_by_test_id("selected-name").fill("lamp")
    page.get_by_test_id("selected-save").click()
    page.get_by_test_id("notice").filter(has_text="Named 12 images “lamp”.").wait_for()
    assert {number for number, (_, label) in state(page, server).items() if label == "lamp"} == {*LEFT}
    # All of them are shown below, so the page knows what they were before.
    page.get_by_test_id("undo").click()
    page.get_by_test_id("notice").filter(has_text="Undone.").wait_for()
    assert {label for _, label in state(page, server).values()} == {None}


def test_images_that_only_the_map_shows_are_selected_and_moved_without_an_undo(page: Page, server: Server) -> None:
    """What they were before is not known to the page: an undo would take them all out of their group."""
    open_map(page, server)
    before = state(page, server)
    groups = {number: before[number][0] for number in (BELOW[0], LEFT[0])}
    draw_around(page, *around(on_canvas(page, server), BELOW))
    count = page.get_by_test_id("selected-count")
    assert count.inner_text() == "30 images selected"
    # The board is shown again whenever somebody comes back to the page.
    with page.expect_response("**/unknowns/groups"):
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_timeout(500)
    assert count.inner_text() == "30 images selected"
    page.locator("#bar-target").select_option(str(groups[LEFT[0]]))
    page.locator("#bar-move").click()
    page.get_by_test_id("notice").filter(has_text="Moved 30 images to group").wait_for()
    assert {state(page, server)[number][0] for number in BELOW} == {groups[LEFT[0]]}
    assert page.get_by_test_id("undo").is_hidden()
    page.keyboard.press("Control+z")
    draw_around(page, *around(on_canvas(page, server), BELOW))
    page.get_by_test_id("selected-name").fill("box")
    page.get_by_test_id("selected-save").click()
    page.get_by_test_id("notice").filter(has_text="Named 30 images “box”.").wait_for()
    assert page.get_by_test_id("undo").is_hidden()
    assert {state(page, server)[number] for number in BELOW} == {(groups[LEFT[0]], "box")}


def test_a_change_keeps_what_a_person_has_zoomed_into(page: Page, server: Server) -> None:
    open_map(page, server)
    x, y, width, height = box(page)
    across, down = on_canvas(page, server)[RIGHT[0]]
    at = (x + across * width, y + down * height)
    page.mouse.move(*at)
    page.mouse.wheel(0, -1500)
    page.wait_for_timeout(400)
    # What is under the pointer stays there; everything else is further away now.
    page.mouse.move(at[0] + 1, at[1])
    picture = page.get_by_test_id("map-tip").locator("img").get_attribute("src")
    assert picture is not None
    page.mouse.click(*at)
    assert page.get_by_test_id("selected-count").inner_text() == "1 image selected"
    page.get_by_test_id("selected-name").fill("cup")
    with page.expect_response("**/unknowns/map"):
        page.get_by_test_id("selected-save").click()
    page.get_by_test_id("notice").filter(has_text="Named 1 image “cup”.").wait_for()
    page.wait_for_timeout(300)
    page.mouse.move(*at)
    assert page.get_by_test_id("map-tip").locator("img").get_attribute("src") == picture
    assert page.get_by_test_id("map-tip").locator("figcaption").inner_text() == "cup"


def test_hovering_shows_the_image(page: Page, server: Server) -> None:
    open_map(page, server)
    x, y, width, height = box(page)
    places = on_canvas(page, server)
    tip = page.get_by_test_id("map-tip")
    for number in (LEFT[0], RIGHT[0], BELOW[0]):
        across, down = places[number]
        page.mouse.move(x + across * width, y + down * height)
        assert f"/{number}/thumbnail" in (tip.locator("img").get_attribute("src") or "")
        assert tip.is_visible()
        assert tip.locator("figcaption").inner_text()
    page.mouse.move(x - 5, y - 5)
    assert tip.is_hidden()


def test_umap_brings_groups_together(page: Page, server: Server, tmp_path: Path) -> None:
    if not installed():
        pytest.skip("the extra `umap` is not installed")
    open_map(page, server)
    page.get_by_test_id("map-method").select_option("umap")
    page.get_by_test_id("map-note").filter(has_text="UMAP computes").wait_for()
    page.get_by_test_id("map-note").filter(has_text="no place").wait_for()
    found = page.request.get(f"{server.url}/unknowns/map?method=umap").json()
    assert (found["methods"], found["computing"]) == (["pca", "umap"], False)
    assert (found["method"], len(found["items"]), len(found["learned"]), found["left_out"]) == ("umap", 56, 40, 1)
    places = {item["id"]: np.array([item["x"], item["y"]]) for item in found["items"]}
    left, right = (np.array([places[number] for number in group]) for group in (LEFT, RIGHT))
    apart = np.linalg.norm(left.mean(axis=0) - right.mean(axis=0))
    assert apart > 2 * max(left.std(axis=0).max(), right.std(axis=0).max())
    page.screenshot(path=tmp_path / "umap.png", full_page=True)
    assert page.request.get(f"{server.url}/unknowns/map?method=tsne").status == 422


def test_on_a_phone_a_finger_shows_selects_and_names(browser: Browser, server: Server, tmp_path: Path) -> None:
    context = browser.new_context(
        http_credentials={"username": "ada", "password": TOKEN},
        viewport={"width": 375, "height": 740},
        has_touch=True,
        is_mobile=True,
    )
    page = context.new_page()
    page.set_default_timeout(1000 * PATIENCE)
    open_map(page, server)
    page.screenshot(path=tmp_path / "map-phone.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    # Not under the bar, which appears below.
    page.evaluate("document.getElementById('map-canvas').scrollIntoView({ block: 'start' })")
    x, y, width, height = box(page)
    assert width < 375
    places = on_canvas(page, server)
    across, down = places[RIGHT[3]]
    page.touchscreen.tap(x + across * width, y + down * height)
    # A finger cannot point without touching: a tap shows the image, and selects it.
    tip = page.get_by_test_id("map-tip")
    tip.wait_for()
    assert "/thumbnail" in (tip.locator("img").get_attribute("src") or "")
    assert page.get_by_test_id("selected-count").inner_text() == "1 image selected"
    left, right, top, bottom = around(places, RIGHT)
    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    fingers = context.new_cdp_session(page)
    for turn, (across, down) in enumerate(corners):
        kind = "touchMove" if turn else "touchStart"
        finger = {"x": x + across * width, "y": y + down * height}
        fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [finger]})
    fingers.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    page.get_by_test_id("selected-count").filter(has_text="12 images selected").wait_for()
    page.screenshot(path=tmp_path / "map-phone-selected.png")
    page.get_by_test_id("selected-name").fill("fork")
    page.get_by_test_id("selected-save").click()
    page.get_by_test_id("notice").filter(has_text="Named 12 images “fork”.").wait_for()
    assert {number for number, (_, label) in state(page, server).items() if label == "fork"} == {*RIGHT}
    context.close()


def open_many(page: Page, server: Server) -> None:
    """The map with so many points, which the browser gets instead of those of the server."""
    random = np.random.default_rng(0)
    centers = random.normal(0, 4, (40, 2))
    groups = random.integers(0, 40, MANY)
    xy = (centers[groups] + random.normal(0, 0.6, (MANY, 2))).round(4)
    items = [
        {"id": n + 1, "x": x, "y": y, "group": int(group), "state": "new", "label": None}
        for n, ((x, y), group) in enumerate(zip(xy.tolist(), groups, strict=True))
    ]
    learned = [[x, y, n % 4] for n, (x, y) in enumerate(random.normal(0, 5, (2000, 2)).tolist())]
    labels = ["red", "green", "blue", "yellow"]
    body = json.dumps({"version": "x", "labels": labels, "learned": learned, "items": items, "left_out": 0})
    page.route("**/unknowns/map", lambda route: route.fulfill(body=body, content_type="application/json"))
    open_map(page, server)
    page.wait_for_function("document.getElementById('map-legend').children.length > 10")


def test_twenty_thousand_points_stay_smooth(page: Page, server: Server, report_line: Callable[[str], None]) -> None:
    open_many(page, server)
    # Processor time of the page's own code, which other work on the machine does not change much.
    milliseconds = page.evaluate(
        """async () => {
            const canvas = document.getElementById("map-canvas");
            const { width, height } = canvas.getBoundingClientRect();
            const send = (type, at) => canvas.dispatchEvent(new PointerEvent(type, {
                offsetX: 0, clientX: canvas.getBoundingClientRect().x + at * width, pointerId: 1,
                clientY: canvas.getBoundingClientRect().y + 0.5 * height, bubbles: true }));
            const timed = (times, work) => {
                const taken = [];
                for (let turn = 0; turn < times; turn++) {
                    const started = performance.now();
                    work(turn / times);
                    taken.push(performance.now() - started);
                }
                return taken.sort((one, other) => one - other)[Math.floor(times / 2)];
            };
            const hover = timed(60, (at) => send("pointermove", at));
            const draw = timed(9, () => canvas.dispatchEvent(new MouseEvent("dblclick")));
            const frame = () => new Promise(requestAnimationFrame);
            const taken = [];
            for (let turn = 0; turn < 9; turn++) {
                const started = performance.now();
                canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: turn % 2 ? 9 : -9, cancelable: true }));
                await frame();
                taken.push(performance.now() - started);
            }
            return { hover, draw, zoom: taken.sort((one, other) => one - other)[4] };
        }"""
    )
    hover, draw, zoom = (milliseconds[name] for name in ("hover", "draw", "zoom"))
    report_line(f"{MANY} points: hover {hover:.2f} ms, drawing all {draw:.0f} ms, a frame of zooming {zoom:.1f} ms")
    # Medians; on a machine with ten times as much work as processors, hovering took 0.2 ms and zooming 17 ms. Drawing
    # all points depends too much on other work for a limit here: tests/benchmarks/test_map_frames.py has one.
    assert hover < 5
    assert zoom < 250
    page.wait_for_timeout(400)
    draw_around(page, 0.01, 0.99)
    assert page.get_by_test_id("selected-count").inner_text() == "20,000 images selected"
