"""A change of the images, as the page of a server shows it that has answered them over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from serving.client import Client
from tests.helpers_serving import PATIENCE, eventually, saved, serving, write_bundle

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.long

IMAGES = 60
"""Of one request."""


def reddish(random: np.random.Generator, *, dark: bool) -> bytes:
    """A red image whose distance from the class, and so its unknown score, does not depend on whether it is dark."""
    away = int(random.integers(30, 45))
    return saved(Image.new("RGB", (8, 8), (255 - away, 0, 0) if dark else (255, away, 0)))


def test_the_page_names_task_time_and_examples(browser: Browser, tmp_path: Path) -> None:
    bundle, random = write_bundle(tmp_path / "bundle"), np.random.default_rng(0)
    settings = {"OPENWORLD_WORKERS": "1", "OPENWORLD_DRIFT_EVERY": "100000"}
    with (
        serving(tmp_path / "home", bundle, settings=settings) as server,
        Client(server.url, timeout=PATIENCE) as client,
    ):
        for name in ("before-1", "before-2", "after"):
            client.predict_many([reddish(random, dark=name == "after") for _ in range(IMAGES)], request_id=name)
        eventually(lambda: client.drift().alarms)
        alarm = client.drift().alarms[0]
        for look, width, scheme in (("wide", 1280, "light"), ("phone", 375, "dark")):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
            page.set_default_timeout(1000 * PATIENCE)
            page.goto(server.url)
            page.wait_for_selector("#drift-notice:not([hidden])")
            page.locator("#drift summary").click()
            notice = page.inner_text("#drift-notice")
            who = "All tasks" if alarm.task is None else f"Task {alarm.task}: red, green"
            assert f"The images have changed. {who}: darker since" in notice
            assert f"compared with {alarm.before} before" in notice
            # An image of before may be the first example, if the change seems to have begun with it.
            assert "after (red, brightness 7" in notice.split("For example requests ")[1]
            since = page.evaluate("text => new Date(text).toLocaleString([], { timeStyle: 'short' })", alarm.since)
            assert since in notice
            assert page.locator("#drift-alarms li").count() == len(client.drift().alarms)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            page.screenshot(path=tmp_path / f"drift-{look}.png", full_page=True)
            page.close()
