"""The open-world loop on the embedded default: unknown images are labelled in a browser, learned and served."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from export.demo.loop import DemoFolder, Labeller, run_loop
from export.demo.result import ENOUGH_REQUESTS
from tests.conftest import ReportLine
from tests.e2e.default import Line
from tests.helpers_serving import PATIENCE, free_port
from training.store.checkpoint import RunError

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.long


def test_unknowns_are_named_in_the_browser_learned_and_served(
    line: Line, browser: Browser, tmp_path: Path, report_line: ReportLine
) -> None:
    class Ada(Labeller):
        """Names the first group with the mouse, and the second with the keyboard alone."""

        named = 0

        def name(self, group: int, label: str) -> None:
            page = self._open()
            field = page.get_by_test_id(f"name-{group}")
            if self.named == 0:
                field.fill(label)
                page.get_by_test_id(f"save-{group}").click()
            else:
                field.focus()
                page.keyboard.type(label)
                page.keyboard.press("Enter")
            # A group has more images than the page shows, so it asks; the first button agrees.
            agree, notice = (
                page.get_by_test_id("sure-yes"),
                page.get_by_test_id("notice").filter(has_text=f"“{label}”"),
            )
            agree.or_(notice).first.wait_for()
            if agree.is_visible():
                agree.click()
            notice.wait_for()
            page.context.close()
            self.named += 1

        def learned(self) -> int:
            page = self._open()
            page.wait_for_selector('[data-testid^="group-"][data-state="learned"]')
            page.screenshot(path=tmp_path / "learned.png", full_page=True)
            page.context.close()
            return super().learned()

        def _open(self) -> Page:
            context = browser.new_context(http_credentials={"username": "ada", "password": self.token})
            page = context.new_page()
            page.set_default_timeout(1000 * PATIENCE)
            page.goto(f"{self.url}/unknowns")
            return page

    result = run_loop(line.folder, DemoFolder(tmp_path / "loop"), free_port(), labeller=Ada)
    report_line("\n".join(" | ".join(row) for row in result.rows))
    # The rate depends on what else the processors do; that all requests were answered does not.
    unmet = [requirement for requirement, met in result.checks.items() if not met and requirement != ENOUGH_REQUESTS]
    assert not unmet


def test_a_run_that_knows_them_is_refused(line: Line, tmp_path: Path) -> None:
    config = (line.folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"7"', '"8"'))
    with pytest.raises(RunError, match="already knows 8"):
        DemoFolder(tmp_path / "loop").prepare(tmp_path)
