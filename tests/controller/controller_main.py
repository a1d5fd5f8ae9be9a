"""A controller as a process: `python controller_main.py <configuration as JSON> <gateway> <folder>`."""

import asyncio
import json
import math
import sys
from pathlib import Path

from controller_runs import make_config

from harnessed.client import AsyncClient
from harnessed.controller import reconciler


async def main() -> None:
    sections, gateway, folder = json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    reconciler.RENEW_S = 0.2
    async with AsyncClient(gateway, "admin", patience_s=math.inf) as client:
        await reconciler.run_controller(make_config(**sections), client, folder, "r")


asyncio.run(main())
