"""How long it takes from the click on Learn until all workers answer by what was learned:

    python -m tests.benchmarks.teach_seconds FOLDER --out OUT --learned 60 --images 50 --lessons 3

FOLDER has train/ and test/ with a folder per class, as `openworld fit --data` reads it. The first --learned classes are
learned by `openworld fit --quick` and served. Then two further classes at a time are taught from --images photos each
(of both folders, if there are so many), while 30 to 40 requests per second go on. One row per lesson: seconds by step
as the job reports them, seconds from the click until the version is accepted and served, requests that were answered
and that failed meanwhile, and the memory of the largest worker afterwards.
"""

from __future__ import annotations

import argparse
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from export.demo.steps import command
from export.demo.traffic import Traffic
from serving import demo
from serving.client import Client
from serving.teaching.client import Teaching
from training.run import RunError

STEPS = ("examples", "learning", "comparison", "writing")


def photos_of(folder: Path, label: str, most: int) -> list[bytes]:
    files = [path for part in ("train", "test") for path in sorted((folder / part / label).glob("*"))]
    return [path.read_bytes() for path in files[:most]]


def prepare(folder: Path, out: Path, learned: Sequence[str]) -> Path:
    """A shelf with a run of some classes."""
    shutil.rmtree(out, ignore_errors=True)
    for part in ("train", "test"):
        for label in learned:
            shutil.copytree(folder / part / label, out / "photos" / part / label)
    command("fit", "--data", out / "photos", "--classes-per-task", 10, "--quick", "--out", out / "run")
    command("publish", out / "run", out / "shelf")
    return out / "shelf"


def largest_worker(url: str, token: str) -> int:
    """Megabytes."""
    found = httpx.get(f"{url}/admin/status", headers={"authorization": f"Bearer {token}"}, timeout=20).json()
    sizes = [Path(f"/proc/{worker['pid']}/status").read_text() for worker in found["workers"]]
    return max(int(found[1]) // 1024 for text in sizes if (found := re.search(r"VmRSS:\s+([0-9]+)", text)))


def teach(teaching: Teaching, shown: dict[str, list[bytes]], traffic: Traffic) -> list[str]:
    for label, contents in shown.items():
        for content in contents:
            teaching.add(label, content)
    answered, failed = len(traffic.answers), len(traffic.failures)
    clicked = time.monotonic()
    job = teaching.wait(teaching.learn())
    if job.learned is None:
        raise RunError(f"learning ended {job.state}: {job.error}")
    learned = time.monotonic() - clicked
    teaching.accept(job.id, force=True)
    whole = time.monotonic() - clicked
    steps = [f"{job.learned.seconds.get(name, 0.0):.2f}" for name in STEPS]
    requests = f"{(len(traffic.answers) - answered) / whole:.0f}/s, {len(traffic.failures) - failed} failed"
    return [", ".join(shown), *steps, f"{learned:.2f}", f"{whole:.2f}", requests]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="deleted first")
    parser.add_argument("--learned", type=int, default=60)
    parser.add_argument("--images", type=int, default=50)
    parser.add_argument("--lessons", type=int, default=3)
    parser.add_argument("--port", type=int, default=3200)
    options = parser.parse_args()
    labels = sorted(path.name for path in (options.folder / "train").iterdir())
    learned, rest = labels[: options.learned], labels[options.learned :]
    shelf = prepare(options.folder, options.out, learned)
    token, url = secrets.token_urlsafe(24), f"http://127.0.0.1:{options.port}"
    settings = {
        "OPENWORLD_BUNDLES": str(shelf.resolve()),
        "OPENWORLD_QUARANTINE_URL": f"sqlite:///{(options.out / 'quarantine.db').resolve()}",
        "OPENWORLD_ADMIN_TOKEN": token,
        "OPENWORLD_ACCESS_LOG": "off",
    }
    table = Table(
        "taught", *STEPS, "job", "click to served", "requests", "MB", title=f"seconds, {len(learned)} classes"
    )
    server = demo.start(options.out / "bentoml", options.port, settings)
    try:
        if not demo.wait_until_ready(server, options.port):
            raise SystemExit("the server did not become ready")
        steady = [content for label in learned[:8] for content in photos_of(options.folder, label, 4)]
        with Client(url) as client, Traffic(url, steady) as traffic:
            teaching = client.teaching(token, "bench")
            for first in range(0, 2 * options.lessons, 2):
                shown = {label: photos_of(options.folder, label, options.images) for label in rest[first : first + 2]}
                table.add_row(*teach(teaching, shown, traffic), str(largest_worker(url, token)))
    finally:
        demo.stop(server)
        Console(width=160).print(table)


if __name__ == "__main__":
    main()
