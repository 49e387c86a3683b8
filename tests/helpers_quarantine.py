"""Images for the quarantine, and a PostgreSQL server for tests."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from prometheus_client import REGISTRY

from serving.quarantine.records import Arrival, ItemKind
from serving.quarantine.store import Store
from tests.helpers_serving import PATIENCE, ROOT, free_port, saved

FEATURES = 6


def noise(number: int, side: int = 24) -> Image.Image:
    """An image that resembles no other."""
    cells = np.random.default_rng(number).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize((side, side), Image.Resampling.NEAREST)


def arrival(number: int = 0, *, content: bytes | None = None, kind: ItemKind = "unknown", **changes: Any) -> Arrival:
    """The unknown image with this number; its answer and features contain the number too."""
    return Arrival(
        content=saved(noise(number)) if content is None else content,
        kind=kind,
        received_at=time.time(),
        model_version="abc",
        answer={"label": "unknown", "number": number, "p_value": 0.001},
        features=np.arange(number, number + FEATURES, dtype=np.float32) / 7,
    )._replace(**changes)


def arrivals(numbers: range) -> list[Arrival]:
    return [arrival(number) for number in numbers]


@dataclass(frozen=True)
class Place:
    """The location of a quarantine."""

    url: str
    images: str
    server: Postgres | None = None

    def open(self) -> Store:
        return Store.open(self.url, self.images)

    def files(self) -> list[Path]:
        folder = Path(self.images)
        return sorted(folder.iterdir()) if folder.exists() else []


class Counters:
    """How much the metrics have increased since this was created."""

    def __init__(self) -> None:
        self._before = self._now()

    def __call__(self, name: str, **labels: str) -> float:
        key = (f"openworld_quarantine_{name}_total", tuple(sorted(labels.items())))
        return self._now().get(key, 0.0) - self._before.get(key, 0.0)

    @staticmethod
    def _now() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name.startswith("openworld_quarantine")
        }


def run_python(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Another process, in which `code` runs with `sys.argv[1:]` as given."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, **options
    )


def postgres_binaries() -> Path | None:
    """The newest of Debian's folders, or the folder that the shell finds."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: path.parent.name.zfill(4))
    if found := shutil.which("initdb"):
        folders.insert(0, Path(found).resolve().parent)
    return next((folder for folder in reversed(folders) if (folder / "initdb").exists()), None)


class Postgres:
    """A server that can be stopped and restarted; it does not flush its data, for speed."""

    def __init__(self, binaries: Path, folder: Path, user: str | None) -> None:
        self.port = free_port()
        self._binaries, self._folder, self._user = binaries, folder, user
        self._databases = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._run("initdb", "--pgdata", str(folder / "data"), "--auth=trust", "--username=tester", "--no-sync")

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://tester:secret@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        options = {"port": self.port, "listen_addresses": "127.0.0.1", "fsync": "off", "max_connections": "50"}
        settings = [f"--{name}={value}" for name, value in options.items()]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._binaries / "postgres"), "-D", f"{self._folder}/data", "-k", str(self._folder), *settings],
                stdout=log,
                stderr=log,
                user=self._user,
                cwd=self._folder,
            )
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(Exception):
                self.execute("SELECT 1")
                return
            time.sleep(0.02)
        raise RuntimeError(f"PostgreSQL did not start:\n{(self._folder / 'log').read_text()}")

    def stop(self) -> None:
        """Stop immediately, as in a power failure: connections break."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(timeout=PATIENCE)
            self._process = None

    def execute(self, statement: str) -> None:
        import psycopg

        with psycopg.connect(self.url(), autocommit=True, connect_timeout=int(PATIENCE)) as connection:
            connection.execute(statement.encode())

    def new_database(self) -> str:
        self._databases += 1
        name = f"test{self._databases}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self._binaries / program), *arguments],
            check=True,
            capture_output=True,
            user=self._user,
            cwd=self._folder,
        )


@contextlib.contextmanager
def postgres(binaries: Path) -> Iterator[Postgres]:
    """A running server; as another user if this process is root, which PostgreSQL refuses."""
    folder = Path(tempfile.mkdtemp(prefix="openworld-postgres-"))
    user = None
    if os.geteuid() == 0:
        user = next(name for name in ("postgres", "nobody") if name in {entry.pw_name for entry in pwd.getpwall()})
        shutil.chown(folder, user)
    try:
        server = Postgres(binaries, folder, user)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
