"""Make docs/dashboard.webp, the picture of docs/grafana-dashboard.json with real data, in about six minutes:

    python docs/make_dashboard_picture.py

A server of drawn photos gets known, unknown and invalid images, is taught a class and swaps its bundle, and then all
images become darker. Prometheus scrapes it and answers the queries of every panel, and the panels are drawn at their
places. Grafana is not needed, and did not draw it. It needs Debian's prometheus and what docs/drawn_server.py needs.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import yaml
from dashboard_panels import HEADER, WIDTH, Series, Span, draw_page
from drawn_server import PATIENCE, USER, Drawn, browser, drawn_server, jpeg, wait
from PIL import Image, ImageEnhance

from export.demo.teach import KNOWN
from serving.client import Client

DOCS = Path(__file__).resolve().parent
PICTURE, DASHBOARD = DOCS / "dashboard.webp", DOCS / "grafana-dashboard.json"
SCRAPE, POINTS = 4, 75
PER_SECOND, BURST = 6.0, 16
"""The mean rate of images, and how many are sent at once twice a minute."""
NEW, OTHER = "ring", "dots"
TAUGHT, DARKER = 0.4, 0.7
"""When the server is taught a class, and when the images become darker, as shares of the time."""
MOST_BYTES = 500_000


def image(chance: random.Random, share: float) -> bytes:
    """What a client sends next: one image in nine is of a class that the server has not learned at first."""
    draw = chance.random()
    if draw < 0.015:
        return b"not an image"
    label = chance.choice((NEW, OTHER)) if draw < 0.125 else chance.choice(KNOWN)
    content = jpeg(label, chance.randrange(3000, 3400))
    if share < DARKER:
        return content
    stored = io.BytesIO()
    ImageEnhance.Brightness(Image.open(io.BytesIO(content))).enhance(0.4).save(stored, "JPEG", quality=92)
    return stored.getvalue()


def send(server: Drawn, seconds: float) -> None:
    """Traffic that rises and falls, at most as many requests at a time as there are threads."""
    chance, began, taught = random.Random(7), time.monotonic(), False
    with (
        ThreadPoolExecutor(BURST) as pool,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
        Client(server.url, timeout=PATIENCE) as ours,
    ):

        def one(content: bytes) -> None:
            with suppress(httpx.TransportError):
                client.post("/predict", content=content)

        next_burst = 20.0
        while (passed := time.monotonic() - began) < seconds:
            share = passed / seconds
            if share >= TAUGHT and not taught:
                taught = True
                pool.submit(teach, ours, server)
            if passed >= next_burst:
                next_burst += 30
                for _ in range(BURST):
                    pool.submit(one, image(chance, share))
            pool.submit(one, image(chance, share))
            rate = PER_SECOND * (1 + 0.5 * math.sin(2 * math.pi * passed / 150))
            time.sleep(chance.expovariate(rate))


def teach(client: Client, server: Drawn) -> None:
    """Photos of a new class are sent with their name, learned and accepted: the server swaps its bundle."""
    teaching = client.teaching(server.token, USER)
    for number in range(12):
        teaching.add(NEW, jpeg(NEW, number))
    teaching.wait(teaching.learn(accept=True))


@contextmanager
def prometheus(folder: Path, server: Drawn, port: int) -> Iterator[str]:
    """Prometheus with the configuration of the compose file, but for the address of the server and the intervals."""
    configuration = yaml.safe_load((DOCS / "compose/prometheus.yaml").read_text())
    configuration["global"] = {"scrape_interval": f"{SCRAPE}s", "evaluation_interval": f"{SCRAPE}s"}
    configuration["rule_files"] = [str(DOCS / "prometheus-rules.yaml")]
    configuration["scrape_configs"][0]["static_configs"][0]["targets"] = [server.url.removeprefix("http://")]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    url = f"http://127.0.0.1:{port}"
    command = ["prometheus", "--config.file=prometheus.yaml", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)

    def ready() -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/-/ready", timeout=PATIENCE).status_code == 200
        return False

    try:
        wait(ready)
        yield url
    finally:
        process.terminate()
        process.wait()


def ask(url: str, dashboard: dict[str, Any], span: Span) -> dict[int, list[Series]]:
    """What Prometheus answers to the queries of each panel, by the panel's id."""
    step = (span.end - span.start) / POINTS
    answers: dict[int, list[Series]] = {}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            # As Grafana does: "All" for the variables, and four scrapes at least for a rate.
            expression = re.sub(r"\$(namespace|pod)\b", ".*", target["expr"])
            expression = expression.replace("$__rate_interval", f"{max(4 * SCRAPE, math.ceil(step + SCRAPE))}s")
            asked = {"query": expression, "start": span.start, "end": span.end, "step": step}
            found = httpx.get(f"{url}/api/v1/query_range", params=asked, timeout=PATIENCE).raise_for_status().json()
            answers.setdefault(panel["id"], []).extend(
                series(each, target) for each in found["data"]["result"] if not target.get("instant") or current(each)
            )
    return answers


def series(found: dict[str, Any], target: dict[str, Any]) -> Series:
    labels = {name: value for name, value in found["metric"].items() if name != "__name__"}
    name = re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), target["legendFormat"])
    points = {float(moment): float(value) for moment, value in found["values"]}
    return Series(labels, name, {moment: value for moment, value in points.items() if math.isfinite(value)})


def current(found: dict[str, Any]) -> bool:
    """Whether a series still exists at the end, which is what an instant query shows."""
    return bool(time.time() - float(found["values"][-1][0]) < 10 * SCRAPE)


def measure(folder: Path, port: int, seconds: float) -> tuple[dict[int, list[Series]], Span]:
    dashboard = json.loads(DASHBOARD.read_text())
    with (
        drawn_server(folder, port, OPENWORLD_QUEUE="64") as server,
        prometheus(folder, server, port + 1) as url,
    ):
        began = time.time()
        send(server, seconds)
        # The first scrapes have no rates yet.
        span = Span(began + 4 * SCRAPE, time.time())
        return ask(url, dashboard, span), span


def picture(page: str) -> Image.Image:
    with browser() as chromium:
        opened = chromium.new_page(viewport={"width": WIDTH, "height": HEADER}, device_scale_factor=1.25)
        opened.set_content(page)
        content = opened.locator("#page").screenshot()
    return Image.open(io.BytesIO(content)).convert("RGB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=3977, help="of the server; Prometheus gets the next one")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=PICTURE)
    chosen = parser.parse_args()
    if shutil.which("prometheus") is None:
        raise SystemExit("no prometheus; apt-get install prometheus")
    with tempfile.TemporaryDirectory() as folder:
        answers, span = measure(Path(folder), chosen.port, 60 * chosen.minutes)
    picture(draw_page(json.loads(DASHBOARD.read_text()), answers, span)).save(chosen.out, quality=80, method=6)
    size = chosen.out.stat().st_size
    filled = sum(any(each.points for each in found) for found in answers.values())
    print(f"{chosen.out}: {filled} of {len(answers)} panels with data, {size / 1e3:.0f} kB")
    return 0 if size <= MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
