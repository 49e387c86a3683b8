from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from serving.inference import disconnect
from serving.inference.disconnect import DisconnectWatcher
from tests.helpers_serving import PATIENCE


def test_a_client_that_hangs_up_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disconnect, "LISTEN_AFTER", 0.001)

    async def main() -> None:
        messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])

        async def receive() -> Message:
            return next(messages)

        waiting = [asyncio.get_running_loop().create_future() for _ in range(2)]
        with DisconnectWatcher(receive, waiting) as watcher:
            await asyncio.wait(waiting)
        assert watcher.disconnected
        assert all(future.cancelled() for future in waiting)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_a_quick_answer_is_not_listened_for() -> None:
    async def main() -> None:
        async def receive() -> Message:
            raise AssertionError("listened")

        waiting = asyncio.get_running_loop().create_future()
        waiting.set_result(1)
        with DisconnectWatcher(receive, [waiting]) as watcher:
            assert await waiting == 1
        await asyncio.sleep(2 * disconnect.LISTEN_AFTER)
        assert not watcher.disconnected

    asyncio.run(main())


def test_nobody_listens_after_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disconnect, "LISTEN_AFTER", 0.001)

    async def main() -> None:
        listening = asyncio.Event()

        async def receive() -> Message:
            listening.set()
            return await asyncio.get_running_loop().create_future()

        with DisconnectWatcher(receive, []) as watcher:
            await listening.wait()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not watcher.disconnected

    asyncio.run(main())
