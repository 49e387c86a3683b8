"""Names that are scripts, in every field that a page or a report shows, in a real browser: none of them runs."""

from __future__ import annotations

import io
import sqlite3
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import numpy as np
import pytest
from PIL import Image

from serving.bundle.embedding import Embedding
from serving.bundle.layout import EMBEDDING
from serving.bundle.shelf import Shelf
from serving.quarantine.records import FoundGroup
from serving.quarantine.store import Store
from tests import helpers_serving, helpers_teaching
from tests.e2e.test_map import box, on_canvas
from tests.helpers_quarantine import FEATURES, arrival, arrivals
from tests.helpers_serving import PATIENCE, Server, eventually, image_bytes, serving, write_bundle
from training import fit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.long

TOKEN = "f00dfacef00dface-token"
RUN = "window.attacked=1"
SCRIPTS = (
    f"<script>{RUN}</script>",
    f'"><img src=x onerror="{RUN}">',
    f"'><svg onload='{RUN}'>",
    f"${{{RUN}}}{{{{{RUN}}}}}",
)
"""As an element, out of an attribute with either quote, and as a template."""
FOLDERS = (f'"><img src=x onerror="{RUN}">', f"'><svg onload='{RUN}'>")
"""The same without a slash, which no name of a folder or file can contain."""
NEW = (f"first {SCRIPTS[0]}", f"second {SCRIPTS[1]}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Every label of the bundle, label of an image, name of a group's neighbour and user is a script."""
    place = tmp_path_factory.mktemp("attacked")
    url = f"sqlite:///{place}/quarantine.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helpers_serving, "LABELS", (SCRIPTS[:2], SCRIPTS[2:]))
        patch.setattr(helpers_serving, "COLOURS", dict(zip(SCRIPTS, helpers_serving.COLOURS.values(), strict=True)))
        bundle = write_bundle(place / "bundle")
    # The map of /unknowns has places of the learned classes.
    learned = np.random.default_rng(0).normal(0, 1, (40, FEATURES))
    stored = io.BytesIO()
    np.savez(stored, **Embedding.fit(learned, np.repeat(np.arange(4), 10)).to_arrays())
    helpers_serving.reseal(bundle, EMBEDDING, stored.getvalue())
    (place / "samples").mkdir()
    (place / "samples" / f"{FOLDERS[0]}.png").write_bytes(image_bytes())
    store = Store.open(url)
    ids = store.add(
        [*arrivals(range(6)), arrival(7, answer={"label": SCRIPTS[0], "best_guess": SCRIPTS[1], "p_value": 0.1})]
    ).kept
    store.replace_groups([FoundGroup(ids[:3], 0.9, SCRIPTS[1], True), FoundGroup(ids[3:5], 0.8, None, False)])
    store.name(ids[:2], SCRIPTS[0], who=SCRIPTS[2])
    store.name(ids[3:5], SCRIPTS[1], who=SCRIPTS[2])
    store.close()
    with closing(sqlite3.connect(place / "quarantine.db")) as connection, connection:
        connection.execute("UPDATE openworld_items SET model_version = ?", (SCRIPTS[0],))
    settings = {
        "OPENWORLD_QUARANTINE_URL": url,
        "OPENWORLD_ADMIN_TOKEN": TOKEN,
        "OPENWORLD_SAMPLES": str(place / "samples"),
    }
    with serving(place / "home", bundle, settings=settings) as started:
        headers = {"authorization": f"Bearer {TOKEN}", "x-openworld-user": "<script>"}
        answer = httpx.post(
            f"{started.url}/unknowns/label",
            json={"ids": [ids[2]], "label": f"<b>{SCRIPTS[3]}"},
            headers=headers,
            timeout=PATIENCE,
        )
        assert answer.status_code == 200, answer.text
        yield started


def opened(browser: Browser, address: str, until: Literal["networkidle", "load"] = "networkidle") -> Page:
    context = browser.new_context(http_credentials={"username": SCRIPTS[0].replace(":", ""), "password": TOKEN})
    page = context.new_page()
    page.on("dialog", lambda dialog: dialog.dismiss())
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(address, wait_until=until)
    return page


def assert_not_attacked(page: Page) -> None:
    assert page.evaluate("window.attacked") is None
    injected = page.evaluate(
        "[...document.querySelectorAll('[onerror],[onload]'), "
        "...[...document.scripts].filter(each => each.textContent.includes('attacked'))].length"
    )
    assert injected == 0


@pytest.mark.parametrize("path", ["/", "/unknowns", "/docs"])
def test_no_name_on_a_page_is_run(path: str, browser: Browser, server: Server) -> None:
    page = opened(browser, f"{server.url}{path}")
    assert_not_attacked(page)
    if path == "/":
        page.set_input_files("input[type=file]", {"name": FOLDERS[1], "mimeType": "image/png", "buffer": image_bytes()})
        page.get_by_text("onerror").first.wait_for()
        assert_not_attacked(page)
    if path == "/unknowns":
        page.get_by_text(SCRIPTS[0]).first.wait_for()
        assert_not_attacked(page)
        page.get_by_test_id("map").locator("summary").click()
        page.get_by_test_id("map-legend").get_by_text("attacked").first.wait_for()
        page.get_by_test_id("map-canvas").scroll_into_view_if_needed()
        x, y, width, height = box(page)
        across, down = on_canvas(page, server)[1]
        page.mouse.move(x + across * width, y + down * height)
        page.get_by_test_id("map-tip").get_by_text("attacked").wait_for()
        assert_not_attacked(page)
    page.context.close()


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose classes are scripts, with scripts in every field of teaching, and a lesson that was accepted."""
    place = tmp_path_factory.mktemp("taught")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helpers_teaching, "_NAMES", (*SCRIPTS, *helpers_teaching.STRANGERS))
        helpers_teaching.write_bundle(place / "shelf" / "first", (SCRIPTS[:2], SCRIPTS[2:]))
    Shelf(place / "shelf").point_at("first")
    settings = {
        "OPENWORLD_BUNDLES": str(place / "shelf"),
        "OPENWORLD_QUARANTINE_URL": f"sqlite:///{place}/quarantine.db",
        "OPENWORLD_ADMIN_TOKEN": TOKEN,
    }
    headers = {"authorization": f"Bearer {TOKEN}", "x-openworld-user": SCRIPTS[1]}
    with (
        serving(place / "home", None, settings=settings) as started,
        httpx.Client(base_url=started.url, headers=headers, timeout=PATIENCE) as client,
    ):

        def ask(path: str, **options: Any) -> Any:
            answer = client.post(path, **options)
            assert answer.status_code in (200, 202), answer.text
            return answer.json()

        def learned() -> None:
            job = ask("/teach/learn", json={})["id"]
            eventually(lambda: client.get(f"/teach/jobs/{job}").json()["state"] == "done")
            ask("/teach/accept", json={"job": job, "force": True})

        for label, stranger in zip(NEW, helpers_teaching.STRANGERS, strict=False):
            for content in helpers_teaching.pictures(stranger, 4):
                ask("/teach/examples", params={"label": label}, content=content, headers={"content-type": "image/png"})
        learned()
        # What waits: another name, a class without an example, an archive, a correction and groups.
        ask("/teach/classes/rename", json={"label": NEW[0], "to": f"renamed {SCRIPTS[0]}"})
        ask("/teach/classes", json={"label": f"begun {SCRIPTS[1]}"})
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as written:
            written.writestr(f"{FOLDERS[0]}/{FOLDERS[1]}.png", helpers_teaching.picture("hen", 90))
        ask("/teach/import", content=archive.getvalue(), headers={"content-type": "application/zip"})
        with closing(Store.open(settings["OPENWORLD_QUARANTINE_URL"])) as store:
            ids = store.add(arrivals(range(6))).kept
            store.replace_groups([FoundGroup(ids[:3], 0.9, SCRIPTS[1], True), FoundGroup(ids[3:5], 0.8, None, False)])
        ask("/teach/feedback", json={"id": ids[5], "right": False, "label": f"corrected {SCRIPTS[3]}"})
        yield started


@pytest.mark.parametrize("tab", ["unknown", "examples", "learn", "classes", "versions"])
def test_no_name_that_was_taught_is_run(tab: str, browser: Browser, taught: Server) -> None:
    # The page asks for its status again and again.
    page = opened(browser, f"{taught.url}/teach", "load")
    page.wait_for_selector("#main[aria-busy=false]")
    page.get_by_test_id(f"tab-{tab}").click()
    if tab == "examples":
        page.get_by_test_id("bring-label").fill(f"third {SCRIPTS[2]}")
        upload = {"name": FOLDERS[1], "mimeType": "image/png", "buffer": b"no image"}
        page.set_input_files("#bring-file", upload)
    page.locator(f"#panel-{tab}").get_by_text("attacked").first.wait_for()
    assert_not_attacked(page)
    page.context.close()


def test_no_name_in_a_report_is_run(browser: Browser, tmp_path: Path) -> None:
    """Classes and files whose names are scripts, learned for a moment; their report is opened as a file."""
    random = np.random.default_rng(0)
    for number, label in enumerate(FOLDERS):
        folder = tmp_path / "images" / label
        folder.mkdir(parents=True)
        for place in range(12):
            pixels = (random.integers(0, 60, (12, 12, 3)) + 120 * number).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{place}{FOLDERS[1 - number]}.png")
    options = ["--data", str(tmp_path / "images"), "--trunk", "none", "--size", "8", "--width", "4", "--epochs", "1"]
    assert fit.main([*options, "--classes-per-task", "1", "--out", str(tmp_path / "run")]) == 0
    page = opened(browser, (tmp_path / "run/report.html").as_uri())
    page.locator("td.words", has_text="onerror").first.wait_for()
    assert_not_attacked(page)
    page.context.close()
