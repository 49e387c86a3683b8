"""The map of the quarantine in a real browser, against the real server; screenshots are left in pytest's folder."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
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
LEFT, RIGHT = range(1, 13), range(13, 25)
"""Items of two groups, far from each other; two more are in no group."""


def features(number: int) -> np.ndarray:
    values = np.random.default_rng(number).normal(0, 0.1, FEATURES)
    values[0] += 2.0 if number in RIGHT else -2.0 if number in LEFT else 0.0
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
    store.add([arrival(number, features=features(number)) for number in range(1, 27)])
    store.add([arrival(99, features=np.zeros(2, np.float32))])
    store.replace_groups([FoundGroup(LEFT, 0.9, None, False), FoundGroup(RIGHT, 0.8, None, False)])
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


def draw_around(page: Page, left: float, right: float) -> None:
    """A lasso from top to bottom between two shares of the width."""
    x, y, width, height = box(page)
    corners = [(left, 0.02), (right, 0.02), (right, 0.98), (left, 0.98)]
    page.mouse.move(x + left * width, y + 0.02 * height)
    page.mouse.down()
    for across, down in corners:
        page.mouse.move(x + across * width, y + down * height, steps=3)
    page.mouse.up()


def test_a_lasso_selects_images_and_names_them(page: Page, server: Server, tmp_path: Path) -> None:
    open_map(page, server)
    places = page.request.get(f"{server.url}/unknowns/map").json()
    assert (len(places["items"]), len(places["learned"]), places["left_out"]) == (26, 40, 1)
    left = {item["id"] for item in places["items"] if item["group"] == places["items"][0]["group"]}
    sides = {np.sign(item["x"]) for item in places["items"] if item["id"] in left}
    assert len(sides) == 1
    assert page.get_by_test_id("map-legend").locator("li").count() == 3
    page.screenshot(path=tmp_path / "map.png", full_page=True)
    # The groups are on the two sides of the middle.
    half = (0.01, 0.45) if sides == {-1.0} else (0.55, 0.99)
    draw_around(page, *half)
    assert page.get_by_test_id("selected-count").inner_text() == "12 images selected"
    page.screenshot(path=tmp_path / "map-selected.png", full_page=True)
    page.get_by_test_id("selected-name").fill("lamp")
    page.get_by_test_id("selected-save").click()
    page.get_by_test_id("notice").filter(has_text="Named 12 images “lamp”.").wait_for()
    named = page.request.get(f"{server.url}/unknowns/map").json()["items"]
    assert {item["id"] for item in named if item["label"] == "lamp"} == left


def test_hovering_shows_the_image(page: Page, server: Server) -> None:
    open_map(page, server)
    x, y, width, height = box(page)
    tip = page.get_by_test_id("map-tip")
    # Points are within a tenth of the middle row; a few places are tried.
    for across in np.linspace(0.05, 0.95, 60):
        for down in np.linspace(0.4, 0.6, 9):
            page.mouse.move(x + across * width, y + down * height)
            if tip.is_visible():
                assert "/thumbnail" in (tip.locator("img").get_attribute("src") or "")
                assert tip.locator("figcaption").inner_text()
                return
    raise AssertionError("no point was found")


def test_umap_brings_groups_together(page: Page, server: Server, tmp_path: Path) -> None:
    if not installed():
        pytest.skip("the extra `umap` is not installed")
    open_map(page, server)
    page.get_by_test_id("map-method").select_option("umap")
    page.get_by_test_id("map-note").filter(has_text="UMAP computes").wait_for()
    page.get_by_test_id("map-note").filter(has_text="no place").wait_for()
    found = page.request.get(f"{server.url}/unknowns/map?method=umap").json()
    assert (found["methods"], found["computing"]) == (["pca", "umap"], False)
    assert (found["method"], len(found["items"]), len(found["learned"]), found["left_out"]) == ("umap", 26, 40, 1)
    places = {item["id"]: np.array([item["x"], item["y"]]) for item in found["items"]}
    left, right = (np.array([places[number] for number in group]) for group in (LEFT, RIGHT))
    apart = np.linalg.norm(left.mean(axis=0) - right.mean(axis=0))
    assert apart > 2 * max(left.std(axis=0).max(), right.std(axis=0).max())
    page.screenshot(path=tmp_path / "umap.png", full_page=True)
    assert page.request.get(f"{server.url}/unknowns/map?method=tsne").status == 422


def test_the_map_fits_a_phone(page: Page, server: Server, tmp_path: Path) -> None:
    page.set_viewport_size({"width": 375, "height": 740})
    open_map(page, server)
    page.screenshot(path=tmp_path / "map-phone.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert box(page)[2] < 375


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
            const frame = () => new Promise(requestAnimationFrame);
            const taken = [];
            for (let turn = 0; turn < 9; turn++) {
                const started = performance.now();
                canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: turn % 2 ? 9 : -9, cancelable: true }));
                await frame();
                taken.push(performance.now() - started);
            }
            return { hover, zoom: taken.sort((one, other) => one - other)[4] };
        }"""
    )
    report_line(
        f"{MANY} points: hover {milliseconds['hover']:.2f} ms, a frame of zooming {milliseconds['zoom']:.1f} ms"
    )
    # Far more than on a machine that does nothing else: four test processes and their browsers share two processors.
    assert milliseconds["hover"] < 50
    assert milliseconds["zoom"] < 2500
    page.wait_for_timeout(400)
    draw_around(page, 0.01, 0.99)
    assert page.get_by_test_id("selected-count").inner_text() == "20,000 images selected"
