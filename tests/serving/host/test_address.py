"""Where a server listens: without a key, only on this machine unless it is told otherwise."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from serving.host.address import default_host, is_loopback
from tests.helpers_serving import SOURCE, Server, serving

WARNING = "no API key (OPENWORLD_API_KEY): everyone who can reach 0.0.0.0 can request predictions"


def listening(server: Server) -> set[str]:
    """The addresses that a server's processes listen on, for requests."""
    parent = psutil.Process(server.process.pid)
    sockets = [found for process in (parent, *parent.children(recursive=True)) for found in process.net_connections()]
    return {found.laddr.ip for found in sockets if found.laddr and found.laddr.port == server.port and not found.raddr}


@pytest.mark.parametrize(
    ("host", "target", "expected"),
    [(None, None, "127.0.0.1"), (None, SOURCE, "127.0.0.1"), ("0.0.0.0", None, "0.0.0.0")],
    ids=["ours", "bentoml serve", "all interfaces"],
)
def test_without_a_key_a_server_is_private_unless_told_otherwise(
    bundle: Path, tmp_path: Path, host: str | None, target: str | None, expected: str
) -> None:
    with serving(tmp_path / "home", bundle, host=host, target=target) as server:
        assert listening(server) == {expected}
        logged = server.log.read_text()
    assert logged.count(WARNING) == (1 if host == "0.0.0.0" else 0)


def test_the_default_follows_the_variable_of_bentoml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENTOML_HOST", raising=False)
    assert (default_host(None), default_host("key")) == ("127.0.0.1", "0.0.0.0")
    monkeypatch.setenv("BENTOML_HOST", "10.0.0.7")
    assert (default_host(None), default_host("key")) == ("10.0.0.7", "10.0.0.7")


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("::", False)]
)
def test_loopback_addresses_are_recognised(host: str, local: bool) -> None:
    assert is_loopback(host) == local
