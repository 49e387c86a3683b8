"""Where a server listens: without a key, only on this machine unless another address is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.host.address import LOOPBACK, is_loopback
from serving.settings import BentoMLSettings
from tests.helpers_serving import Server, serving
from tests.load import listening

WARNING = "no API key (OPENWORLD_API_KEY): everyone who can reach"


def test_without_a_key_a_server_is_private(server: Server) -> None:
    """`openworld serve`, started without an address; test_service.py has the same for `bentoml serve`."""
    assert listening(server) == {LOOPBACK}
    assert WARNING not in server.log.read_text()


@pytest.mark.long
def test_all_addresses_are_used_if_they_are_asked_for(bundle: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "home", bundle, host="0.0.0.0") as server:
        assert listening(server) == {"0.0.0.0"}
        assert server.log.read_text().count(f"{WARNING} 0.0.0.0 can request predictions") == 1


def test_the_default_follows_the_variable_of_bentoml(monkeypatch: pytest.MonkeyPatch) -> None:
    def addresses() -> list[str]:
        return list(map(BentoMLSettings.from_environment().address, (None, "key")))

    for unset in ("", None):
        monkeypatch.delenv("BENTOML_HOST", raising=False)
        if unset is not None:
            monkeypatch.setenv("BENTOML_HOST", unset)
        assert addresses() == ["127.0.0.1", "0.0.0.0"]
    monkeypatch.setenv("BENTOML_HOST", "10.0.0.7")
    assert addresses() == ["10.0.0.7", "10.0.0.7"]


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("::", False)]
)
def test_loopback_addresses_are_recognised(host: str, local: bool) -> None:
    assert is_loopback(host) == local
