"""The report page of a run in a real browser: on a screen, on a phone and printed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from tests.e2e import controls
from tests.helpers import use_tiny_preset
from training.report_page import main
from training.show.page import PAGE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.long

PAPER = {"width": 680, "height": 1000}
"""A4 within the margins that the page asks for, in CSS pixels."""
TOO_WIDE = """[...document.querySelectorAll('.scroll, pre, .card, table')]
    .filter(e => e.getClientRects().length && (e.scrollWidth > e.clientWidth + 1
        || e.getBoundingClientRect().right > document.documentElement.clientWidth + 1))
    .map(e => e.tagName + ' ' + e.textContent.trim().slice(0, 40))"""


@pytest.fixture(scope="module")
def report(tiny_hat: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "run"
    shutil.copytree(tiny_hat, folder)
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_preset(patch)
        assert main([str(folder)]) == 0
    return folder / PAGE


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Page]:
    opened = browser.new_page(color_scheme="dark")
    opened.goto(report.as_uri())
    yield opened
    opened.close()


def test_on_paper_folds_are_left_out_and_nothing_is_cut(page: Page, tmp_path: Path) -> None:
    folds, contents = page.locator("details.fold"), page.locator(".contents")
    assert folds.count() == 5
    assert folds.first.is_visible()
    assert contents.is_visible()
    page.set_viewport_size(PAPER)
    page.emulate_media(media="print")
    assert [fold.is_visible() for fold in folds.all()] == [False] * 5
    assert not contents.is_visible()
    assert page.locator(".verdict").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(TOO_WIDE) == []
    # Ink is dark on white paper, also for somebody whose screen is dark.
    colour = page.evaluate("getComputedStyle(document.body).color")
    assert colour == "rgb(29, 37, 48)"
    page.screenshot(path=tmp_path / "printed.png", full_page=True)
    page.pdf(path=tmp_path / "printed.pdf", prefer_css_page_size=True)
    assert (tmp_path / "printed.pdf").read_bytes().startswith(b"%PDF")


def test_a_fold_that_the_reader_opened_is_printed(page: Page) -> None:
    page.locator("#theory > summary").click()
    page.set_viewport_size(PAPER)
    page.emulate_media(media="print")
    assert page.locator("#theory").is_visible()
    assert not page.locator("#network").is_visible()


def test_a_phone_never_scrolls_sideways(page: Page, tmp_path: Path) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.screenshot(path=tmp_path / "phone.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 360


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_every_text_has_enough_contrast_and_no_row_is_half_empty(
    browser: Browser, report: Path, tmp_path: Path, scheme: Literal["light", "dark"], width: int
) -> None:
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    page.goto(report.as_uri())
    page.screenshot(path=tmp_path / f"{width}-{scheme}.png", full_page=True)
    assert page.evaluate(controls.FAINT) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    # The figures at the top use the whole width, and the command can be read without scrolling.
    right = "Math.max(...[...document.querySelectorAll('{0}')].map(e => e.getBoundingClientRect().right))"
    edges = [page.evaluate(right.format(each)) for each in (".tiles div", ".contents")]
    assert abs(edges[0] - edges[1]) < 2
    assert page.evaluate("(e => e.scrollWidth <= e.clientWidth)(document.querySelector('.command'))")
    page.close()
