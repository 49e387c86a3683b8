"""What explanations cost a request that does not ask for one: `python -m tests.benchmarks.explain_cost BUNDLE PHOTO`.

"Before" is a bundle without the graph of feature maps, as `openworld export` wrote it before there were explanations:
a server of it refuses `explain`. Four servers with one worker each answer the same photo in rounds of one request to
each, in random order, so that all see the same machine: two of such a bundle, which shows how much equal servers
differ; one that could explain but is never asked; and one that has explained answers before. Prints the medians, and
the median difference of requests of the same round with its 95 % interval (bootstrap). Exits with 1 if a server that
can explain is slower than "before" by more than equal servers differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
from numpy.typing import NDArray

from serving.bundle.layout import MANIFEST, MAPS
from tests.helpers_serving import PATIENCE, edit_manifest, serving

SERVERS = ("no feature maps", "no feature maps, again", "feature maps, never asked", "feature maps, asked before")
WARM = 20
"""Requests to each server before the first one that counts."""


def without_maps(bundle: Path, folder: Path) -> Path:
    """A copy of the bundle as it was before there were explanations."""
    shutil.copytree(bundle, folder)
    (folder / MAPS).unlink()
    files = json.loads((folder / MANIFEST).read_text())["files"]
    edit_manifest(folder, files={name: about for name, about in files.items() if name != MAPS})
    return folder


def ask(client: httpx.Client, photo: bytes, query: str = "") -> float:
    """Milliseconds of one request."""
    started = time.perf_counter()
    response = client.post(f"/predict{query}", content=photo, headers={"content-type": "application/octet-stream"})
    taken = 1000 * (time.perf_counter() - started)
    response.raise_for_status()
    return taken


def interval(differences: NDArray[np.float64]) -> tuple[float, float, float]:
    """The median, and its 95 % interval by the bootstrap."""
    drawn = np.random.default_rng(0).choice(differences, (2000, len(differences)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(np.median(differences)), float(low), float(high)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path, help="a bundle with a trunk")
    parser.add_argument("photo", type=Path)
    parser.add_argument("--requests", type=int, default=300, help="to each server")
    chosen = parser.parse_args()
    photo = chosen.photo.read_bytes()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        bare = without_maps(chosen.bundle, folder / "bare")
        bundles = (bare, bare, chosen.bundle, chosen.bundle)
        settings = {"OPENWORLD_WORKERS": "1"}
        servers = [
            stack.enter_context(serving(folder / f"home{number}", bundle, settings=settings))
            for number, bundle in enumerate(bundles)
        ]
        clients = [stack.enter_context(httpx.Client(base_url=server.url, timeout=PATIENCE)) for server in servers]
        for client in clients * WARM:
            ask(client, photo)
        explained = [ask(clients[-1], photo, "?explain=true") for _ in range(WARM)]
        taken = np.zeros((chosen.requests, len(clients)))
        order = np.random.default_rng(0)
        for row in taken:
            for place in order.permutation(len(clients)):
                row[place] = ask(clients[place], photo)
    return report(taken, explained)


def report(taken: NDArray[np.float64], explained: list[float]) -> int:
    """Print the times [rounds, servers]; returns 1 if a server that can explain is slower."""
    differences = [interval(column - taken[:, 0]) for column in taken.T]
    for title, column, (median, low, high) in zip(SERVERS, taken.T, differences, strict=True):
        against = f"; against the first {median:+.2f} ms ({low:+.2f} to {high:+.2f})" if title != SERVERS[0] else ""
        print(f"{title}: median {np.median(column):.2f} ms{against}")
    print(f"with explain=true: median {np.median(explained):.2f} ms of {len(explained)} requests")
    noise = max(map(abs, differences[1]))
    slower = [title for title, found in zip(SERVERS[2:], differences[2:], strict=True) if found[1] > noise]
    print(f"equal servers differ by up to {noise:.2f} ms; slower than that: {', '.join(slower) or 'none'}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
