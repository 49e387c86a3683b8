"""A real server of two workers that keeps unknown images, and answers even if they cannot be stored."""

from __future__ import annotations

import base64
import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers_quarantine import Place, Postgres, noise
from tests.helpers_serving import COLOURS, Server, eventually, http_post, image_bytes, metric, saved, serving

pytestmark = pytest.mark.long


def settings(place: Place, workers: int = 2, **more: str) -> dict[str, str]:
    chosen = {"URL": place.url, "IMAGES": place.images, **more}
    variables = {f"OPENWORLD_QUARANTINE_{name}": value for name, value in chosen.items()}
    return {"OPENWORLD_WORKERS": str(workers), **variables}


def ask(server: Server, content: bytes, form: str = "raw") -> dict[str, object]:
    """Send over a new connection, so that either worker may answer."""
    text = base64.b64encode(content).decode()
    body = {"raw": {"content": content}, "form": {"files": {"image": content}}, "json": {"json": {"image": text}}}
    answered = http_post(f"{server.url}/predict", **body[form])
    assert answered.status_code == 200
    return dict(answered.json())


def kept(server: Server, count: int) -> bool:
    return metric(server, "openworld_quarantine_kept_total") == count


def test_what_is_unknown_is_kept_by_all_workers(place: Place, bundle: Path, tmp_path: Path) -> None:
    """As they were sent, in every form of upload; what was accepted right before the end is written, too.

    While a database server is away, answers go on, and what is unknown waits.
    """
    kinds = ("PNG", "JPEG", "BMP")
    unknown = [saved(noise(number), kinds[number % 3]) for number in range(21)]
    with serving(tmp_path / "home", bundle, settings=settings(place)) as server:
        forms = ("raw", "form", "json")
        answers = [ask(server, content, forms[number // 3 % 3]) for number, content in enumerate(unknown[:20])]
        ask(server, unknown[0])
        assert ask(server, image_bytes(COLOURS["red"]))["known"]
        assert http_post(f"{server.url}/predict", content=b"junk").status_code == 415
        unwanted = http_post(f"{server.url}/predict?store=false", content=saved(noise(99)))
        assert unwanted.json()["known"] is False
        eventually(lambda: kept(server, 20) and metric(server, "openworld_quarantine_copies_total") == 1)
        # Each worker measures the quarantine after it has written.
        eventually(lambda: metric(server, "openworld_quarantine_items") == 20)
        if place.server is not None:
            more = [saved(noise(number)) for number in range(100, 110)]
            unknown, answers = [*more, *unknown], [*answer_without(place.server, server, more), *answers]
            eventually(lambda: kept(server, 30))
        assert metric(server, "openworld_quarantine_dropped_total") == 0
        answers.append(ask(server, unknown[-1]))
    assert not any(answer["known"] for answer in answers)
    logged = server.log.read_text()
    assert "secret" not in logged
    assert "Traceback" not in logged
    store = place.open()
    items = store.items()
    assert {store.image(item.id) for item in items} == set(unknown)
    by_content = dict(zip(unknown, answers, strict=True))
    for item in items:
        assert item.answer == by_content[store.image(item.id)]
        assert item.model_version == item.answer["model"]["version"]
        assert (item.kind, item.state) == ("unknown", "new")
        assert item.features.ndim == 1
        assert len(item.features) > 0


def answer_without(database: Postgres, server: Server, images: list[bytes]) -> list[dict[str, object]]:
    """The answers of a server whose database is stopped meanwhile."""
    database.stop()
    try:
        answers = [ask(server, content) for content in images]
        eventually(lambda: metric(server, "openworld_quarantine_failures_total", part="database") >= 2)
    finally:
        database.start()
    return answers


def test_without_a_place_for_images_answers_go_on(bundle: Path, tmp_path: Path) -> None:
    """A share of what is known is kept, too, for an audit."""
    place = Place(f"sqlite:///{tmp_path}/quarantine.db", str(tmp_path / "images"))
    Path(place.images).write_text("in the way")
    with serving(tmp_path / "home", bundle, settings=settings(place, workers=1, QUEUE="4", AUDIT_SHARE="1")) as server:
        for number in range(20):
            assert not ask(server, saved(noise(number)))["known"]
        eventually(lambda: metric(server, "openworld_quarantine_failures_total", part="images") >= 2)
        eventually(lambda: metric(server, "openworld_quarantine_dropped_total", reason="queue_full") >= 1)
        Path(place.images).unlink()
        eventually(lambda: metric(server, "openworld_quarantine_kept_total") >= 5)
        ask(server, image_bytes(COLOURS["red"]))
    audited = [item.answer["label"] for item in place.open().items() if item.kind == "audit"]
    assert audited == ["red"]


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        ({"URL": "mysql://ann:secret@host/db"}, "OPENWORLD_QUARANTINE_URL is a URL of 'mysql'; allowed: sqlite"),
        ({"URL": "sqlite:///q.db", "IMAGES": "nowhere://x"}, "images cannot be kept at nowhere://x"),
    ],
)
def test_what_cannot_be_used_stops_the_server_at_the_start(
    chosen: dict[str, str], problem: str, bundle: Path, tmp_path: Path
) -> None:
    variables = {f"OPENWORLD_QUARANTINE_{name}": value for name, value in chosen.items()}
    refusing = pytest.raises(RuntimeError, match=f"exit code 2:\nerror: {problem}")
    with refusing as refused, serving(tmp_path / "home", bundle, settings=variables):
        pass
    assert "secret" not in str(refused.value)


def test_kill_9_loses_no_unknown_image_that_was_answered(bundle: Path, tmp_path: Path) -> None:
    """With the durable quarantine: the server is killed while four clients send it unknown images."""
    place = Place(f"sqlite:///{tmp_path}/quarantine.db", str(tmp_path / "images"))
    answered: list[bytes] = []

    def send(numbers: range) -> None:
        with contextlib.suppress(httpx.TransportError), httpx.Client(timeout=30) as client:
            for number in numbers:
                content = saved(noise(number))
                response = client.post(f"{server.url}/predict", content=content)
                assert response.json()["label"] == "unknown"
                answered.append(content)

    with serving(tmp_path / "home", bundle, settings=settings(place, workers=1, DURABLE="1")) as server:
        with ThreadPoolExecutor(4) as clients:
            sending = [clients.submit(send, range(start, 4000, 4)) for start in range(4)]
            eventually(lambda: len(answered) > 20 or any(one.done() for one in sending))
            for process in (*psutil.Process(server.process.pid).children(recursive=True), server.process):
                process.kill()
        for one in sending:
            one.result()
    store = place.open()
    assert set(answered) <= {store.image(item.id) for item in store.items()}
