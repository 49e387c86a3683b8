"""What it costs to answer an unknown image only after it was stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.conftest import Report, table
from tests.helpers_quarantine import noise
from tests.helpers_serving import saved, serving, write_bundle
from tests.load import http_request, send

IMAGES = 400


@pytest.mark.parametrize("clients", [1, 16])
def test_price_of_a_durable_quarantine(tmp_path: Path, report: Report, clients: int) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    requests = [http_request("/predict", saved(noise(number))) for number in range(IMAGES)]
    rows, medians = [], {}
    for durable in ("off", "on"):
        settings = {
            "OPENWORLD_QUARANTINE_URL": f"sqlite:///{tmp_path}/{durable}/quarantine.db",
            "OPENWORLD_QUARANTINE_DURABLE": durable,
            # Also without the promise none is dropped, so that both write the same.
            "OPENWORLD_QUARANTINE_QUEUE": str(IMAGES),
        }
        with serving(tmp_path / f"home-{durable}", bundle, settings=settings) as server:
            replies = send(server.port, requests, clients=clients)
        assert {reply.status for reply in replies} == {200}
        seconds = np.array([reply.seconds for reply in replies])
        span = max(reply.sent + reply.seconds for reply in replies) - min(reply.sent for reply in replies)
        medians[durable] = float(np.median(seconds))
        late = float(np.quantile(seconds, 0.99))
        rows.append((durable, f"{1000 * medians[durable]:.1f}", f"{1000 * late:.1f}", f"{len(replies) / span:.0f}"))
    report.add(f"durable quarantine, {clients} clients", medians["on"], "s", medians["off"])
    print(f"\n{clients} clients\n{table(('durable', 'median ms', '99 % ms', 'unknown images per second'), rows)}")
