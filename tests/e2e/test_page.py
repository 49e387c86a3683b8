"""The web page in a real browser, against the real server.

Screenshots are left in pytest's temporary folder.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import numpy as np
import pytest
from PIL import Image

from serving.http import page as served_page
from serving.http.openapi import TAGS
from serving.settings import Settings
from tests.e2e import controls
from tests.helpers_serving import (
    FAILS,
    GREY,
    PATIENCE,
    WORKS,
    Server,
    http_get,
    image_bytes,
    saved,
    serving,
    write_bundle,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Route

BARELY_RED = (175, 0, 0)
"""A colour with a p-value of 0.02: unknown at the default alpha of 0.05, known at 0.01."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    run = tmp_path_factory.mktemp("run")
    write_bundle(run / "bundle")
    samples = run / "samples"
    samples.mkdir()
    for name, colour in {"red": (255, 0, 0), "barely_red": BARELY_RED, "grey": GREY}.items():
        (samples / f"{name}.png").write_bytes(image_bytes(colour))
    with serving(tmp_path_factory.mktemp("home"), run / "bundle") as started:
        yield started


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    opened = browser.new_context(viewport={"width": 1280, "height": 900}, permissions=["clipboard-write"])
    yield opened
    opened.close()


@pytest.fixture
def page(context: BrowserContext, server: Server) -> Iterator[Page]:
    """The page, loaded."""
    opened = open_page(context.new_page(), server)
    opened.wait_for_selector(".sample")
    yield opened
    opened.close()


def open_page(page: Page, server: Server) -> Page:
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(server.url)
    return page


def click_sample(page: Page, name: str) -> None:
    page.get_by_role("button", name=f"Sample {name}", exact=True).click()


def wait_for(page: Page, state: str) -> str:
    """Wait for a known, unknown or empty answer, or a problem; returns the text in large letters."""
    page.wait_for_selector(f"#answer[data-state={state}]")
    return page.inner_text("#problem-text" if state == "problem" else "#label")


def draw(page: Page, *points: tuple[float, float]) -> None:
    box = page.locator("#pad").bounding_box()
    assert box is not None
    placed = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(*placed[0])
    page.mouse.down()
    for point in placed[1:]:
        page.mouse.move(*point, steps=4)
    page.mouse.up()


def as_file(page: Page, content: bytes, name: str = "image.png", kind: str = "image/png") -> Any:
    """A DataTransfer in the browser that holds one file."""
    return page.evaluate_handle(
        """([text, name, type]) => {
            const held = new DataTransfer();
            const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
            held.items.add(new File([bytes], name, { type }));
            return held;
        }""",
        [base64.b64encode(content).decode(), name, kind],
    )


def test_loads_without_an_error_and_asks_no_other_host(context: BrowserContext, server: Server, tmp_path: Path) -> None:
    page = context.new_page()
    messages: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    open_page(page, server).wait_for_selector(".sample")
    click_sample(page, "red")
    wait_for(page, "known")
    page.screenshot(path=tmp_path / "known.png", full_page=True)
    assert messages == []
    assert asked
    assert [url for url in asked if not url.startswith(f"{server.url}/")] == []
    chip = page.inner_text("#model-chip").split()
    model = http_get(f"{server.url}/model").json()
    assert chip == [model["name"], model["version"], "CPU"]
    page.close()


def test_the_api_reader_works_without_another_host(context: BrowserContext, server: Server) -> None:
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{server.url}/docs")
    page.wait_for_selector("text=/predict")
    assert [url for url in asked if not url.startswith((f"{server.url}/", "data:"))] == []
    # It looks like the other pages, and groups what it lists.
    assert page.inner_text(".brand h1") == "openworld"
    assert page.locator(".opblock-tag").first.get_attribute("data-tag") == "Predictions"
    assert page.locator(".opblock-tag").count() == len(TAGS)
    page.close()


def test_a_sample_is_answered_with_everything_in_the_response(page: Page) -> None:
    click_sample(page, "red")
    assert wait_for(page, "known") == "red"
    assert "% confident" in page.inner_text("#badge")
    assert page.inner_text("#task-badge") == "Task 0: red, green"
    names = page.locator("#task-bars .name").all_inner_texts()
    assert names == ["Task 0: red, green", "Task 1: blue, yellow"]
    assert page.locator("#task-bars .inside .name").all_inner_texts() == ["Task 0: red, green"]
    assert page.locator("#class-bars .name").first.inner_text() == "red"
    facts = page.locator("#about-list").text_content() or ""
    for part in WORKS.parts.values():
        assert f"{part.grade} ({part.numbers})" in facts
    assert re.fullmatch(r"[\d.]+ ms", page.inner_text("#fact-latency"))
    line, bar = page.locator("#line-label"), page.locator("#task-bars .fill")
    at = line.evaluate("node => parseFloat(getComputedStyle(node, '::before').left)")
    widths = [bar.nth(row).evaluate("node => node.getBoundingClientRect().width") for row in range(2)]
    assert widths[0] < at < widths[1]


@pytest.mark.long
def test_a_model_that_does_not_work_is_announced_with_every_answer(
    context: BrowserContext, server: Server, page: Page, tmp_path: Path
) -> None:
    # WORKS is weak in one part, so that the notice is there without a warning.
    assert "weak in parts" in page.inner_text("#verdict")
    click_sample(page, "red")
    wait_for(page, "known")
    assert not page.locator("#warning").is_visible()
    bundle = write_bundle(tmp_path / "bundle", verdict=FAILS)
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "red.png").write_bytes(image_bytes((255, 0, 0)))
    with serving(tmp_path / "home", bundle) as failing:
        opened = open_page(context.new_page(), failing)
        opened.wait_for_selector(".sample")
        assert "Do not rely on this model. Task prediction: not working (TP 51.5 %" in opened.inner_text("#verdict")
        click_sample(opened, "red")
        wait_for(opened, "known")
        warning = httpx.post(f"{failing.url}/predict", content=image_bytes((255, 0, 0))).json()["warning"]
        assert opened.inner_text("#warning") == warning == FAILS.warning
        assert httpx.get(f"{failing.url}/model").json()["verdict"] == FAILS.model_dump()
        image = base64.b64encode(image_bytes((255, 0, 0))).decode()
        asked = {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [image]}]}
        protocol = httpx.post(f"{failing.url}/v2/models/tiny/infer", json=asked).json()
        assert protocol["parameters"] == {"warning": FAILS.warning}
        opened.close()


def test_what_was_never_taught_is_shown_as_unknown(page: Page, tmp_path: Path) -> None:
    click_sample(page, "grey")
    assert wait_for(page, "unknown") == "unknown"
    assert "Best guess" in page.inner_text("#sentence")
    assert page.locator("#task-bars .inside").count() == 0
    page.screenshot(path=tmp_path / "unknown.png", full_page=True)


def test_a_drawing_is_answered_and_can_be_taken_back(page: Page) -> None:
    assert page.locator("#hint").is_visible()
    draw(page, (0.2, 0.3), (0.5, 0.7), (0.8, 0.3))
    page.wait_for_selector("#task-detail:not([hidden])")
    assert not page.locator("#hint").is_visible()
    assert page.locator("#sees").is_visible()
    page.click("#eraser")
    draw(page, (0.2, 0.3), (0.8, 0.3))
    page.click("#undo")
    page.click("#undo")
    assert wait_for(page, "empty") == "?"
    assert page.locator("#undo").is_disabled()


def test_the_answer_waits_for_the_end_of_the_stroke(page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for height in (0.2, 0.4, 0.6):
        draw(page, (0.2, height), (0.8, height))
    page.wait_for_selector("#task-detail:not([hidden])")
    assert len([url for url in asked if "/predict" in url]) <= 2


def test_a_grey_model_gets_the_drawing_large_centred_and_at_its_own_size(page: Page) -> None:
    """A short stroke in a corner, as the model would get it."""
    pixels = page.evaluate(
        """async () => {
            const { Pad } = await import("./page/pad.js");
            const pad = new Pad(document.createElement("canvas"), { onBegin() {}, onStroke() {} });
            pad.setUp({ height: 16, width: 16, mode: "L" });
            pad.strokes = [{ tool: "pen", colour: "#ffffff", points: [[20, 20], [20, 120]] }];
            const picture = pad.picture();
            const { data } = picture.getContext("2d").getImageData(0, 0, picture.width, picture.height);
            return { width: picture.width, height: picture.height, red: [...data].filter((_, at) => at % 4 === 0) };
        }"""
    )
    assert (pixels["width"], pixels["height"]) == (16, 16)
    rows = [pixels["red"][16 * row : 16 * row + 16] for row in range(16)]
    assert all(max(row) > 50 for row in rows), "it fills the height"
    assert all(max(row[:4] + row[12:]) == 0 for row in rows), "it stands in the middle"
    assert all(abs(row[left] - row[15 - left]) <= 2 for row in rows for left in range(8)), "it is symmetric"


def test_an_image_can_be_pasted(page: Page) -> None:
    page.evaluate(
        """async (held) => {
            const blob = new Blob([await held.files[0].arrayBuffer()], { type: "image/png" });
            await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
        }""",
        as_file(page, image_bytes((0, 0, 255))),
    )
    page.keyboard.press("Control+V")
    assert wait_for(page, "known") == "blue"


def test_an_image_can_be_dropped_and_a_link_cannot(page: Page) -> None:
    held = as_file(page, image_bytes((0, 255, 0)))
    page.dispatch_event("#answer", "dragenter", {"dataTransfer": held})
    assert "dropping" in (page.get_attribute("#stage", "class") or "")
    page.dispatch_event("#answer", "drop", {"dataTransfer": held})
    assert wait_for(page, "known") == "green"
    assert "dropping" not in (page.get_attribute("#stage", "class") or "")
    page.dispatch_event("#answer", "drop", {"dataTransfer": page.evaluate_handle("() => new DataTransfer()")})
    assert "Only image files" in wait_for(page, "problem")


def test_an_image_can_be_chosen(page: Page) -> None:
    with page.expect_file_chooser() as chooser:
        page.click("#choose")
    chooser.value.set_files({"name": "x.png", "mimeType": "image/png", "buffer": image_bytes((255, 255, 0))})
    assert wait_for(page, "known") == "yellow"


def sent_image(page: Page, content: bytes, kind: str) -> bytes:
    """What the page sends for a chosen file, seen by the page's own `fetch`: the browser does not show it to a test."""
    page.evaluate(
        """() => {
            const send = window.fetch;
            window.sent = new Promise((resolve) => {
                window.fetch = (path, options) => {
                    if (String(path).startsWith("predict")) resolve(options.body);
                    return send(path, options);
                };
            });
        }"""
    )
    page.set_input_files("#file", {"name": "photo", "mimeType": kind, "buffer": content})
    text = page.evaluate(
        """async () => {
            const bytes = new Uint8Array(await (await window.sent).arrayBuffer());
            const parts = [];
            for (let at = 0; at < bytes.length; at += 8192) {
                parts.push(String.fromCharCode(...bytes.subarray(at, at + 8192)));
            }
            return btoa(parts.join(""));
        }"""
    )
    return base64.b64decode(text)


def test_a_large_photo_is_shrunk_upright_before_it_is_sent(page: Page, tmp_path: Path) -> None:
    """It is stored lying on its side, as phones do; the blue band is at the top of the upright photo."""
    upright = np.random.default_rng(0).integers(0, 60, (2400, 1600, 3), dtype=np.uint8)
    upright[..., 0] += 195
    upright[:100] = (0, 0, 255)
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = Image.fromarray(upright).transpose(Image.Transpose.ROTATE_90)
    content = saved(stored, "JPEG", quality=95, exif=exif)
    body = sent_image(page, content, "image/jpeg")
    assert wait_for(page, "known") == "red"
    assert len(body) < len(content) / 4
    received = Image.open(io.BytesIO(body))
    assert (received.format, received.size) == ("JPEG", (512, 768))
    assert received.getexif().get(0x0112, 1) == 1
    band, below = (np.asarray(received.convert("RGB"))[row].mean(axis=0) for row in (10, 400))
    assert band[2] > 200 > 100 > band[0]
    assert below[0] > 200 > 100 > below[2]
    assert page.inner_text("#sent").startswith("Sent as 512 \u00d7 768 pixels, ")
    assert re.fullmatch(r"red\n[\d.]+\s%, if known", page.inner_text("#on-photo"))
    page.screenshot(path=tmp_path / "photo.png", full_page=True)


def test_a_transparent_photo_is_shrunk_onto_white(page: Page) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (1200, 1200, 4), dtype=np.uint8)
    noise[:600, :, 3] = 0
    body = sent_image(page, saved(Image.fromarray(noise)), "image/png")
    received = np.asarray(Image.open(io.BytesIO(body)).convert("RGB"))
    assert received.shape == (512, 512, 3)
    assert received[:200].min() > 240


def test_a_small_image_is_sent_as_it_is_and_answered_on_the_photo(page: Page) -> None:
    content = image_bytes(GREY, size=(900, 900), kind="BMP")
    assert sent_image(page, content, "image/bmp") == content
    wait_for(page, "unknown")
    assert page.inner_text("#on-photo").startswith("unknown")
    assert page.locator("#sent").is_hidden()
    page.click("#clear")
    assert page.locator("#on-photo").is_hidden()
    draw(page, (0.2, 0.3), (0.8, 0.3))
    page.wait_for_selector("#task-detail:not([hidden])")
    assert page.locator("#on-photo").is_hidden(), "a drawing is not a photo"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no image at all", "cannot read this file: “broken.png” is not an image that it knows"),
        (image_bytes()[:40], "“broken.png” is damaged or incomplete"),
        (b"", "“broken.png” is empty"),
    ],
    ids=["text", "truncated", "empty"],
)
def test_a_broken_file_is_refused_with_a_clear_message(page: Page, content: bytes, words: str) -> None:
    page.set_input_files("#file", {"name": "broken.png", "mimeType": "image/png", "buffer": content})
    assert words in wait_for(page, "problem")
    assert page.locator("#headline").is_hidden()
    assert page.inner_text("#hint") == "No preview"
    click_sample(page, "red")
    assert wait_for(page, "known") == "red"


def test_a_file_that_is_too_large_is_explained(page: Page) -> None:
    """A service that refuses a file may answer or close the connection; both are explained."""
    content = b"x" * (Settings().max_bytes + 1)
    page.set_input_files("#file", {"name": "scan.tiff", "mimeType": "image/tiff", "buffer": content})
    said = wait_for(page, "problem")
    assert "“scan.tiff”" in said
    assert "33.6 MB" in said


def test_nothing_is_cut_and_the_tools_are_in_one_row(page: Page) -> None:
    more = "more than 99.9\u00a0%"
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 900})
        click_sample(page, "red")
        wait_for(page, "known")
        page.evaluate("(text) => { document.querySelector('#class-bars .value').textContent = text; }", more)
        names = {"#class-bars": "black-and-tan coonhound", "#task-bars": "Task 1: coonhound, golden retriever"}
        for bars, name in names.items():
            page.evaluate("([at, name]) => { document.querySelector(at).textContent = name; }", [f"{bars} .name", name])
            assert page.locator(f"{bars} .name").first.inner_text() == name
        cut = """[...document.querySelectorAll('#class-bars .value, #class-bars .name, #task-bars .name')]
            .filter(e => e.scrollWidth > e.clientWidth || e.scrollHeight > e.clientHeight).map(e => e.textContent)"""
        assert page.evaluate(cut) == []
        inside = "document.querySelector('#class-bars').getBoundingClientRect().right"
        assert page.evaluate(f"document.querySelector('#class-bars .value').getBoundingClientRect().right <= {inside}")
        tops = page.evaluate("[...document.querySelectorAll('.tools button')].map(e => e.getBoundingClientRect().top)")
        assert len(set(tops)) == 1


def test_the_slider_changes_the_verdict(page: Page) -> None:
    slider = page.locator("#strictness")
    assert "Accepts about 95\u00a0%" in page.inner_text("#strictness-text")
    click_sample(page, "barely red")
    assert wait_for(page, "unknown") == "unknown"
    slider.focus()
    for _ in range(2):
        page.keyboard.press("ArrowLeft")
    assert wait_for(page, "known") == "red"
    assert "Accepts about 99\u00a0%" in page.inner_text("#strictness-text")
    assert slider.get_attribute("aria-valuetext") == "Accepts about 99\u00a0% of images of known classes"


def test_an_answer_can_be_asked_within_a_task(page: Page) -> None:
    click_sample(page, "red")
    wait_for(page, "known")
    page.select_option("#task", "1")
    wait_for(page, "unknown")
    assert page.locator("#task-bars .aside .name").all_inner_texts() == ["Task 0: red, green"]


def test_a_keyboard_is_enough(page: Page) -> None:
    visited = []
    for _ in range(20):
        page.keyboard.press("Tab")
        visited.append(page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.id"))
        if visited[-1] == "Sample red":
            break
    assert visited[-1] == "Sample red", visited
    assert [name for name in visited if name in ("pen", "eraser", "choose")] == ["pen", "eraser", "choose"]
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus must be seen"
    page.keyboard.press("Enter")
    assert wait_for(page, "known") == "red"


def test_every_control_has_a_name_and_the_answer_is_announced(page: Page) -> None:
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select")].filter((control) => {
            const label = control.labels?.[0]?.textContent ?? "";
            return !(control.getAttribute("aria-label") || label.trim() || control.textContent.trim());
        }).map((control) => control.outerHTML)"""
    )
    assert unnamed == []
    assert page.get_attribute("#headline", "aria-live") == "polite"
    assert page.get_attribute("#problem", "role") == "alert"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_never_scrolls_sideways(browser: Browser, server: Server, tmp_path: Path, scheme: str) -> None:
    context = browser.new_context(
        viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True, color_scheme=scheme
    )
    page = open_page(context.new_page(), server)
    page.wait_for_selector(".sample")
    for sample, state in (("red", "known"), ("grey", "unknown")):
        page.get_by_role("button", name=f"Sample {sample}", exact=True).tap()
        wait_for(page, state)
        page.screenshot(path=tmp_path / f"phone-{scheme}-{state}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_wide_screen_shows_every_text_with_enough_contrast(
    browser: Browser, server: Server, tmp_path: Path, scheme: Literal["light", "dark"]
) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    page = open_page(context.new_page(), server)
    page.wait_for_selector(".sample")
    for sample, state in (("red", "known"), ("grey", "unknown")):
        click_sample(page, sample)
        wait_for(page, state)
        page.screenshot(path=tmp_path / f"wide-{scheme}-{state}.png", full_page=True)
        assert page.evaluate(controls.FAINT) == []
        assert page.evaluate("document.documentElement.scrollWidth") == 1280
    context.close()


def test_beside_an_image_that_is_no_square_there_is_no_paper(page: Page) -> None:
    """In the dark, white paper would look like a part of the image."""
    page.emulate_media(color_scheme="dark")
    wide = {"name": "wide.png", "mimeType": "image/png", "buffer": image_bytes((255, 0, 0), size=(80, 20))}
    page.set_input_files("#file", wide)  # type: ignore[arg-type]
    wait_for(page, "known")
    corner = "[...document.querySelector('#pad').getContext('2d').getImageData(2, 2, 1, 1).data]"
    assert page.evaluate(corner)[3] == 0
    assert page.evaluate("getComputedStyle(document.querySelector('#pad')).backgroundColor") == "rgb(39, 42, 53)"
    page.get_by_role("button", name="Clear").click()
    assert page.evaluate(corner)[3] == 255


def test_on_a_phone_the_button_for_a_file_is_one_line(page: Page) -> None:
    click_sample(page, "red")
    wait_for(page, "known")
    high = page.evaluate("document.querySelector('#choose').offsetHeight")
    for width in (375, 360):
        page.set_viewport_size({"width": width, "height": 740})
        assert page.evaluate("document.querySelector('#choose').offsetHeight") <= high + 4, width
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_a_key_is_asked_for_and_kept(page: Page, server: Server) -> None:
    """The browser simulates a service that requires a key: this tests the page only."""

    def guarded(route: Route) -> None:
        if route.request.headers.get("x-api-key") == "right":
            route.continue_()
        else:
            detail = {"code": "unauthorized", "message": "no valid key", "got": "none", "allowed": "x-api-key"}
            route.fulfill(status=401, json={"error": detail})

    page.route(re.compile(r"/(model|predict|samples)\b"), guarded)
    page.reload()
    page.wait_for_selector("#key-dialog[open]")
    # A header cannot contain this key: sending it would look like an unreachable service until the tab is closed.
    page.fill("#key", "schl\u00fcssel-\u4e16")
    page.keyboard.press("Enter")
    assert page.locator("#key:invalid").is_visible()
    for key in ("wrong", " right\t"):
        page.wait_for_selector("#key-dialog[open]")
        assert page.locator("#key-refused").is_visible() == (key != "wrong")
        page.fill("#key", key)
        page.keyboard.press("Enter")
    page.wait_for_selector(".sample")
    click_sample(page, "red")
    assert wait_for(page, "known") == "red"
    page.reload()
    page.wait_for_selector(".sample")
    assert not page.locator("#key-dialog").is_visible()


def test_a_busy_service_is_asked_again_by_a_button(page: Page) -> None:
    answers = iter([503])

    def busy(route: Route) -> None:
        if status := next(answers, None):
            route.fulfill(status=status, headers={"retry-after": "2"}, json={"error": {"code": "busy"}})
        else:
            route.continue_()

    page.route("**/predict*", busy)
    click_sample(page, "red")
    assert wait_for(page, "problem") == "The service is busy right now."
    assert "2 seconds" in page.inner_text("#problem-more")
    page.click("#again")
    assert wait_for(page, "known") == "red"


def test_an_unreachable_service_is_reported(page: Page) -> None:
    page.route("**/predict*", lambda route: route.abort())
    click_sample(page, "red")
    assert wait_for(page, "problem") == "The service cannot be reached."


def test_labels_are_text_and_never_markup(page: Page) -> None:
    def hostile(route: Route) -> None:
        answer = route.fetch().json()
        route.fulfill(json={**answer, "label": "<img src=x onerror=alert(1)>"})

    page.route("**/predict*", hostile)
    click_sample(page, "red")
    assert wait_for(page, "known") == "<img src=x onerror=alert(1)>"
    assert page.locator("#label img").count() == 0


def test_only_small_images_of_the_folder_are_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()
    secret = tmp_path / "secret.png"
    secret.write_bytes(image_bytes())
    (folder / "a.png").write_bytes(image_bytes())
    (folder / "b.JPG").write_bytes(image_bytes(kind="JPEG"))
    (folder / "notes.txt").write_text("not an image")
    (folder / ".hidden.png").write_bytes(image_bytes())
    (folder / "empty.png").touch()
    (folder / "huge.png").write_bytes(bytes(served_page.MAX_SAMPLE_BYTES + 1))
    (folder / "folder.png").mkdir()
    (folder / "link.png").symlink_to(secret)
    monkeypatch.setenv("OPENWORLD_SAMPLES", str(folder))
    assert list(served_page.samples()) == ["a.png", "b.JPG"]
    monkeypatch.setenv("OPENWORLD_SAMPLES", str(tmp_path / "absent"))
    assert served_page.samples() == {}


@pytest.mark.parametrize("name", ["..%2fbundle%2fmanifest.json", "%2e%2e", "notes.txt", "..", "red.png%00", "x" * 300])
def test_no_other_file_is_served_as_a_sample(server: Server, name: str) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        assert client.get("/samples/red.png").headers["content-type"] == "image/png"
        # Sent unchanged: a client that normalises URLs would hide the attempt.
        request = client.build_request("GET", f"{server.url}/samples/x")
        request.url = request.url.copy_with(raw_path=f"/samples/{name}".encode())
        assert client.send(request).status_code == 404 or name == ".."


def test_the_browser_asks_about_its_copies(server: Server) -> None:
    first = http_get(f"{server.url}/page/app.js")
    assert first.headers["cache-control"] == "no-cache"
    again = http_get(f"{server.url}/page/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_page_shows_whether_the_images_are_still_the_same(
    context: BrowserContext, server: Server, tmp_path: Path
) -> None:
    page = open_page(context.new_page(), server)
    page.locator("#drift summary").click()
    assert "no sign of a change" in page.inner_text("#drift-list")
    assert page.locator("#drift-list dt").all_inner_texts()[:2] == ["Unknown answers", "All tasks"]
    assert page.locator("#drift-notice").is_hidden()
    example = {
        "request_id": "abc",
        "label": "red",
        "unknown_score": 2.0,
        "brightness": 9.0,
        "at": "2024-01-01T00:00:00.000Z",
    }
    alarm = {"task": 1, "at": "2024-01-01T00:05:00.000Z", "since": "2024-01-01T00:00:00.000Z", "images": 84}
    report = http_get(f"{server.url}/drift").json()
    report["alarms"] = [{**alarm, "before": 5000, "change": "darker", "examples": [example]}]
    page.route("**/drift", lambda route: route.fulfill(json=report))
    page.reload()
    page.wait_for_selector("#drift-notice:not([hidden])")
    notice = page.inner_text("#drift-notice")
    assert "The images have changed. Task 1: blue, yellow: darker since" in notice
    assert "84 images, compared with 5,000 before" in notice
    assert "requests abc" in notice
    page.screenshot(path=tmp_path / "drift.png", full_page=True)
    page.close()
