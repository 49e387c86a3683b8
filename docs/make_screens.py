"""Make the screens that a person should look at before a release, as PNG files, in a few minutes:

    python docs/make_screens.py --out FOLDER

The page with a known and an unknown answer, /unknowns, /teach, the report of the run and the tutorial, each wide (1280
pixels) and as on a phone (375), light and dark. Nothing is compared: look for cut labels, text that is hard to read,
rows that wrap and empty space. It needs what docs/drawn_server.py needs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drawn_server import PATIENCE, USER, Drawn, browser, drawn_server, jpeg, wait
from markdown_it import MarkdownIt
from playwright.sync_api import Browser, Page

from serving.client import Client
from training.show.page import PAGE

DOCS = Path(__file__).resolve().parent
NEW, OTHER = "ring", "dots"
NEW_IMAGES, OTHER_IMAGES = 20, 12
LOOKS = [
    (f"{name}-{scheme}", width, scheme)
    for (name, width), scheme in itertools.product((("wide", 1280), ("phone", 375)), ("light", "dark"))
]
LIKE_GITHUB = """
:root { color-scheme: light dark; }
body { max-width: 860px; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; }
pre { overflow-x: auto; padding: 1rem; background: light-dark(#f6f8fa, #151b23); border-radius: 6px; font-size: 85%; }
img { max-width: 100%; background: #fff; } table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { border: 1px solid light-dark(#d1d9e0, #3d444d); padding: 6px 13px; }
body { background: light-dark(#fff, #0d1117); color: light-dark(#1f2328, #f0f6fc); }
a { color: light-dark(#0969da, #4493f8); }
"""


class Screens:
    """Writes one file per screen and look."""

    def __init__(self, chromium: Browser, folder: Path, login: Any) -> None:
        self._chromium, self._folder, self._login = chromium, folder, login
        self.written: list[Path] = []

    @contextmanager
    def page(self, width: int = 1280, scheme: Any = "light") -> Iterator[Page]:
        context = self._chromium.new_context(
            viewport={"width": width, "height": 900 if width > 600 else 740},
            http_credentials=self._login,
            color_scheme=scheme,
            reduced_motion="reduce",
        )
        opened = context.new_page()
        opened.set_default_timeout(1000 * PATIENCE)
        yield opened
        context.close()

    def take(self, page: Page, name: str) -> None:
        path = self._folder / f"{name}.png"
        page.screenshot(path=path, full_page=True)
        self.written.append(path)


def show_answers(screens: Screens, url: str) -> None:
    for look, width, scheme in LOOKS:
        with screens.page(width, scheme) as page:
            for label, state in (("stripes", "known"), (NEW, "unknown")):
                page.goto(url)
                page.set_input_files(
                    "#file", {"name": f"{label}.jpg", "mimeType": "image/jpeg", "buffer": jpeg(label, 500)}
                )
                page.wait_for_selector(f"#answer[data-state={state}]")
                page.wait_for_function("document.querySelector('#class-detail').hidden === false")
                screens.take(page, f"page-{state}-{look}")


def show_groups(screens: Screens, url: str) -> None:
    for look, width, scheme in LOOKS:
        with screens.page(width, scheme) as page:
            for path in ("unknowns", "teach"):
                page.goto(f"{url}/{path}")
                page.locator("input[data-testid^=name-]").first.wait_for()
                page.wait_for_load_state("networkidle")
                screens.take(page, f"{path}-{look}")


def learn(screens: Screens, url: str) -> None:
    """Name the largest group, and let the server learn it."""
    with screens.page() as page:
        page.goto(f"{url}/teach")
        name = page.locator("input[data-testid^=name-]").first
        name.fill(NEW)
        name.press("Enter")
        page.get_by_test_id("notice").filter(has_text=NEW).first.wait_for()
        page.get_by_test_id("tab-learn").click()
        page.get_by_test_id("learn-now").click()
        page.get_by_test_id("accept").wait_for()


def show_lesson(screens: Screens, url: str) -> None:
    for look, width, scheme in LOOKS:
        with screens.page(width, scheme) as page:
            page.goto(f"{url}/teach#learn")
            page.get_by_test_id("accept").wait_for()
            screens.take(page, f"teach-learn-{look}")
            for tab in ("examples", "classes", "versions"):
                page.get_by_test_id(f"tab-{tab}").click()
                page.wait_for_selector("#main[aria-busy=false]")
                page.wait_for_load_state("networkidle")
                screens.take(page, f"teach-{tab}-{look}")


def show_documents(screens: Screens, report: Path, tutorial: Path) -> None:
    for look, width, scheme in LOOKS:
        for name, path in (("report", report), ("tutorial", tutorial)):
            with screens.page(width, scheme) as page:
                page.goto(path.as_uri())
                screens.take(page, f"{name}-{look}")


def rendered_tutorial(folder: Path) -> Path:
    """The tutorial as a page, about as GitHub shows it."""
    text = MarkdownIt("gfm-like", {"linkify": False}).render((DOCS / "tutorial.md").read_text(encoding="utf-8"))
    page = folder / "tutorial.html"
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    page.write_text(f'{head}<base href="{DOCS.as_uri()}/"><style>{LIKE_GITHUB}</style>{text}', encoding="utf-8")
    return page


def fill(server: Drawn) -> None:
    """Unknown images of two classes, in groups."""
    with Client(server.url, timeout=PATIENCE) as client:
        client.predict_many([jpeg(NEW, number) for number in range(NEW_IMAGES)])
        client.predict_many([jpeg(OTHER, number) for number in range(OTHER_IMAGES)])
        teaching = client.teaching(server.token, USER)
        wait(lambda: teaching.status().unknown >= (NEW_IMAGES + OTHER_IMAGES) // 2)
        teaching.wait(teaching.group())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--port", type=int, default=3977)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        drawn_server(Path(folder), chosen.port) as server,
        browser() as chromium,
    ):
        screens = Screens(chromium, chosen.out, {"username": USER, "password": server.token})
        fill(server)
        show_answers(screens, server.url)
        show_groups(screens, server.url)
        learn(screens, server.url)
        show_lesson(screens, server.url)
        show_documents(screens, server.run / PAGE, rendered_tutorial(Path(folder)))
    print(f"{chosen.out}: {len(screens.written)} screens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
