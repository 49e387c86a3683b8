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


def reddish(random: np.random.Generator, factor: float) -> bytes:
    """A red image, with its brightness multiplied by a factor."""
    colour = np.array([235 + random.integers(20), *random.integers(20, size=2)]) * factor
    return saved(Image.new("RGB", (8, 8), tuple(colour.astype(int).tolist())))


def test_the_page_names_task_time_and_examples(browser: Browser, tmp_path: Path) -> None:
    bundle, random = write_bundle(tmp_path / "bundle"), np.random.default_rng(0)
    settings = {"OPENWORLD_WORKERS": "1", "OPENWORLD_DRIFT_EVERY": "1000"}
    with (
        serving(tmp_path / "home", bundle, settings=settings) as server,
        Client(server.url, timeout=PATIENCE) as client,
    ):
        for name, factor in (("before-1", 1.0), ("before-2", 1.0), ("after", 2 / 3)):
            client.predict_many([reddish(random, factor) for _ in range(IMAGES)], request_id=name)
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
            assert "For example requests after" in notice
            assert "(red, brightness 5" in notice
            since = page.evaluate("text => new Date(text).toLocaleString([], { timeStyle: 'short' })", alarm.since)
            assert since in notice
            assert page.locator("#drift-alarms li").count() == len(client.drift().alarms)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            page.screenshot(path=tmp_path / f"drift-{look}.png", full_page=True)
            page.close()
