from __future__ import annotations

from collections.abc import Callable

import pytest

Say = Callable[[str], None]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Print past pytest's capture."""

    def aloud(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}", end="", flush=True)

    return aloud
