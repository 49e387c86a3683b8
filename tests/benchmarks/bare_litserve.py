"""A minimal server in LitServe, which accepts no raw body: the image is sent as base64."""

from __future__ import annotations

import base64
import sys
from typing import Any

import litserve

from tests.benchmarks.bare import Answering


class Api(litserve.LitAPI):  # type: ignore[misc]
    def setup(self, device: str) -> None:
        self.answering = Answering()

    # Without annotations: LitServe would use one as the type of the request.
    def decode_request(self, request):  # type: ignore[no-untyped-def]
        return base64.b64decode(request["image"])

    def predict(self, content: bytes) -> dict[str, Any]:
        return self.answering.answer(content)

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output


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
