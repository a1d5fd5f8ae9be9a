"""What machines ask: is it alive (`/healthz`), can it serve (`/readyz`), what does it do (`/metrics`).

`app.py` mounts them. The first two need no key and tell nothing but a reason. `/metrics` names runs and engines, so it
wants the admin key or, for a scraper that should not have that one, a key of scope `metrics`.
"""

import orjson
import prometheus_client as prometheus
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from harnessed.gateway.instruments import Instruments, Readings
from harnessed.gateway.keys import ADMIN, METRICS, Keyring, bearer_key
from harnessed.gateway.status import Board


def probe_routes(board: Board, instruments: Instruments, readings: Readings, keyring: Keyring) -> list[Route]:
    async def healthz(_: Request) -> Response:
        return _json({"alive": True})

    async def readyz(_: Request) -> Response:
        trouble = await board.trouble()
        return _json({"error": {"message": trouble}}, 503) if trouble else _json({"ready": True})

    async def metrics(request: Request) -> Response:
        key = keyring.read(bearer_key(request.headers.get("authorization", "")))
        if key not in (ADMIN, METRICS):
            why = "send the admin key or the metrics key as `Authorization: Bearer KEY`"
            return _json({"error": {"message": why}}, 401 if key is None else 403)
        await readings.look()
        return Response(prometheus.generate_latest(instruments.registry), media_type=prometheus.CONTENT_TYPE_LATEST)

    return [Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)]


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
