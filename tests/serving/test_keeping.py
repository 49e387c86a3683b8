"""A server that keeps unknown images, over real HTTP."""

from __future__ import annotations

import base64
import signal
from pathlib import Path

from serving.quarantine.store import Store
from tests.helpers_serving import COLOURS, GREY, PATIENCE, eventually, http_post, image_bytes, serving, write_bundle

UNKNOWN = [image_bytes(GREY), image_bytes((120, 130, 40), kind="JPEG"), image_bytes((90, 90, 90), kind="BMP")]


def test_unknowns_are_kept_as_they_were_sent_in_every_form(tmp_path: Path) -> None:
    """Two workers that stop right after the answers: accepted images are written first."""
    url = f"sqlite:///{tmp_path}/quarantine.db"
    settings = {"OPENWORLD_WORKERS": "2", "OPENWORLD_QUARANTINE_URL": url}
    with serving(tmp_path / "home", write_bundle(tmp_path / "bundle"), settings=settings) as server:
        known = http_post(f"{server.url}/predict", content=image_bytes(COLOURS["red"]))
        answers = [
            http_post(f"{server.url}/predict", content=UNKNOWN[0]).json(),
            http_post(f"{server.url}/predict", files={"image": UNKNOWN[1]}).json(),
            http_post(f"{server.url}/predict", json={"image": base64.b64encode(UNKNOWN[2]).decode()}).json(),
        ]
        assert http_post(f"{server.url}/predict", content=b"junk").status_code == 415
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(timeout=PATIENCE)
        assert "Traceback" not in server.log.read_text()
    assert known.json()["known"]
    store = Store.open(url)
    items = eventually(store.items)
    assert sorted(store.image(item.id) for item in items) == sorted(UNKNOWN)
    assert sorted(item.answer["p_value"] for item in items) == sorted(answer["p_value"] for answer in answers)
    for item in items:
        assert (item.kind, item.state, item.copies) == ("unknown", "new", 1)
        assert item.model_version == answers[0]["model"]["version"]
        assert item.features.ndim == 1
        assert len(item.features) > 0
    store.close()
