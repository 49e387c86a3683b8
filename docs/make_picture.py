"""Make the picture at the top of the README from the real page in a real browser:

    python docs/make_picture.py

A server of drawn photos answers a ring with "unknown". It and twenty others are grouped and named on /teach, the server
learns them, and another ring, which it has not seen, is answered "ring". Each step is one frame of docs/picture.webp.
It needs what docs/drawn_server.py needs. The third frame shows how long the server learned: run it on a machine that
has nothing else to do.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

from drawn_server import PATIENCE, USER, browser, drawn_server, jpeg, wait
from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import Page

from serving.client import Client

PICTURE = Path(__file__).resolve().parent / "picture.webp"
NEW, NEW_IMAGES = "ring", 20
SIZE, CAPTION, WIDTH = {"width": 1120, "height": 700}, 44, 900
SECONDS = (2.5, 2.5, 2.5, 3.5)
INK, PAPER = "#ffffff", "#4338ca"
MOST_BYTES = 600_000


def frames(page: Page, url: str) -> dict[str, bytes]:
    """Caption -> screenshot of each step."""
    shown: dict[str, bytes] = {}
    ask(page, url, 500, "unknown")
    shown[f"1. A {NEW}: the model has never learned any, and says so"] = page.screenshot()
    page.goto(f"{url}/teach")
    page.get_by_test_id("group").click()
    name = page.locator("input[data-testid^=name-]").first
    name.fill(NEW)
    page.locator("#groups").scroll_into_view_if_needed()
    shown["2. Such images wait: group them, and name the group"] = page.screenshot()
    name.press("Enter")
    page.get_by_test_id("notice").filter(has_text=NEW).first.wait_for()
    page.get_by_test_id("tab-learn").click()
    page.get_by_test_id("learn-now").click()
    page.get_by_test_id("accept").wait_for()
    shown["3. The server learns them, and shows what changes before you accept it"] = page.screenshot()
    page.get_by_test_id("accept").click()
    page.get_by_test_id("notice").filter(has_text="is served now.").wait_for()
    ask(page, url, 501, "known")
    shown[f"4. Another {NEW}, which it has not seen before, is known now"] = page.screenshot()
    return shown


def ask(page: Page, url: str, number: int, state: str) -> None:
    """Show the page one new photo of the class, and wait for the answer."""
    page.goto(url)
    page.set_input_files("#file", {"name": f"{NEW}.jpg", "mimeType": "image/jpeg", "buffer": jpeg(NEW, number)})
    page.wait_for_selector(f"#answer[data-state={state}]")
    page.wait_for_function("document.querySelector('#class-detail').hidden === false")


def captioned(text: str, screenshot: bytes) -> Image.Image:
    """A frame: the caption above the page."""
    page = Image.open(io.BytesIO(screenshot)).convert("RGB")
    page = page.resize((WIDTH, round(page.height * WIDTH / page.width)), Image.Resampling.LANCZOS)
    frame = Image.new("RGB", (WIDTH, page.height + CAPTION), PAPER)
    frame.paste(page, (0, CAPTION))
    ImageDraw.Draw(frame).text((16, CAPTION // 2), text, fill=INK, anchor="lm", font=ImageFont.load_default(size=21))
    return frame


def record(folder: Path, port: int) -> dict[str, bytes]:
    """Learn the model, serve it, and go through all steps in the browser."""
    with drawn_server(folder, port) as server, browser() as chromium:
        with Client(server.url, timeout=PATIENCE) as client:
            client.predict_many([jpeg(NEW, number) for number in range(NEW_IMAGES)])
            teaching = client.teaching(server.token, USER)
            wait(lambda: teaching.status().unknown >= NEW_IMAGES // 2)
        login: Any = {"username": USER, "password": server.token}
        page = chromium.new_context(viewport=SIZE, http_credentials=login, color_scheme="light").new_page()
        page.set_default_timeout(1000 * PATIENCE)
        return frames(page, server.url)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=3977)
    parser.add_argument("--out", type=Path, default=PICTURE)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shown = record(Path(folder), chosen.port)
    first, *rest = [captioned(text, screenshot) for text, screenshot in shown.items()]
    durations = [round(1000 * seconds) for seconds in SECONDS]
    first.save(chosen.out, save_all=True, append_images=rest, duration=durations, loop=0, quality=70, method=6)
    size = chosen.out.stat().st_size
    print(f"{chosen.out}: {len(shown)} frames, {size / 1e3:.0f} kB")
    return 0 if size <= MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
