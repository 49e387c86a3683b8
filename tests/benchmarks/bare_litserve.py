"""The least that answers in LitServe, which takes no raw body: the image comes as base64."""

from __future__ import annotations

import base64
import sys
from typing import Any

import litserve

from tests.benchmarks.bare import Answering


class Api(litserve.LitAPI):  # type: ignore[misc]
    def setup(self, device: str) -> None:
        self.answering = Answering()

    # Without annotations: it would take one for the type of the request.
    def decode_request(self, request):  # type: ignore[no-untyped-def]
        return base64.b64decode(request["image"])

    def predict(self, content: bytes) -> dict[str, Any]:
        return self.answering.answer(content)

    def encode_response(self, said: dict[str, Any]) -> dict[str, Any]:
        return said


if __name__ == "__main__":
    litserve.LitServer(Api(), accelerator="cpu", devices=1, workers_per_device=1, healthcheck_path="/readyz").run(
        host="127.0.0.1",
        port=int(sys.argv[1]),
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
        loop="uvloop",
        http="httptools",
    )
