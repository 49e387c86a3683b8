"""A stand-in for a module, until something in it is used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.late import import_late
from tests.helpers_serving import Server
from tests.load import workers


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that can be imported, and is not."""
    (tmp_path / "seldom").mkdir()
    (tmp_path / "seldom/__init__.py").write_text(
        "answer = 42\n\ndef plus(number, more=0):\n    return answer + number + more\n"
    )
    (tmp_path / "seldom/part.py").write_text("half = 21\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield "seldom"
    for name in ("seldom", "seldom.part"):
        sys.modules.pop(name, None)


def test_a_module_is_loaded_when_it_is_used(late: str) -> None:
    import_late(late)
    module = importlib.import_module(late)
    assert "answer" not in vars(module)
    assert module.answer == 42
    assert "answer" in vars(sys.modules[late])
    # Who holds the stand-in still finds everything.
    assert module.answer == 42


def test_a_part_of_it_can_be_imported(late: str) -> None:
    import_late(late)
    part = importlib.import_module(f"{late}.part")
    assert part.half == 21
    assert "answer" not in vars(sys.modules[late])
    # The whole has it too, when it comes.
    assert sys.modules[late].answer == 42
    assert sys.modules[late].part is part


def test_what_is_not_there_is_not_there(late: str) -> None:
    import_late(late)
    module = importlib.import_module(late)
    with pytest.raises(AttributeError, match="question"):
        _ = module.question


def test_what_is_loaded_stays(late: str) -> None:
    before = importlib.import_module(late)
    import_late(late)
    assert importlib.import_module(late) is before


def test_a_function_may_be_taken_before_it_is_called(late: str) -> None:
    import_late(late, "plus")
    space: dict[str, Any] = {}
    exec(f"from {late} import plus", space)  # As a module does it that was not written for this.
    plus = space["plus"]
    assert "answer" not in vars(sys.modules[late])
    assert plus(1, more=2) == 45
    assert "answer" in vars(sys.modules[late])


def test_no_worker_imports_an_http_client_or_what_supervises_it(server: Server) -> None:
    """It has come all the way to its answers without."""
    (worker,) = workers(server, 1)
    assert "serving.worker" in worker.cmdline()
    mapped = {part for file in worker.memory_maps() for part in Path(file.path).parts}
    assert "onnxruntime" in mapped
    assert not {"aiohttp", "zmq"} & mapped


def test_a_module_may_be_left_out_that_its_own_package_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "whole"
    package.mkdir()
    (package / "__init__.py").write_text("from .part import plus")
    (package / "part.py").write_text("def plus(one): return one + 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        import_late("whole.part", "plus")
        assert "whole" not in sys.modules
        assert importlib.import_module("whole").plus(1) == 2
    finally:
        for name in ("whole", "whole.part"):
            sys.modules.pop(name, None)
