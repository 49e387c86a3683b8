"""What explanations cost a request that does not ask for one: `python -m tests.benchmarks.explain_cost BUNDLE PHOTO`.

Three servers with one worker each answer the same photo in turn, so that all see the same machine: one whose bundle has
no feature maps and therefore no explanations, one that could explain but is never asked, and one that has explained an
answer before. A second server without feature maps shows how much equal servers differ. Prints the medians, and the
differences of requests that follow each other with their 95 % interval (bootstrap).
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
    for place, title in enumerate(SERVERS):
        median, low, high = interval(taken[:, place] - taken[:, 0])
        against = "" if place == 0 else f"; against the first {median:+.2f} ms ({low:+.2f} to {high:+.2f})"
        print(f"{title}: median {np.median(taken[:, place]):.2f} ms{against}")
    print(f"with explain=true: median {np.median(explained):.2f} ms of {len(explained)} requests")
    return 0


if __name__ == "__main__":
    sys.exit(main())
