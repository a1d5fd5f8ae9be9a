"""Waits and work of libraries that hundreds of tests would pay for, and that none of them looks at."""

import asyncio
import functools
from types import SimpleNamespace

import httpx
import uvicorn.server

SOONER = 5

# uvicorn looks ten times a second whether it has to end, and then whether its connections are closed.
uvicorn.server.asyncio = SimpleNamespace(**vars(asyncio) | {"sleep": lambda seconds: asyncio.sleep(seconds / SOONER)})

# Each client reads the certificates of all authorities, which takes 20 ms, though tests speak plain HTTP.
httpx._transports.default.create_ssl_context = functools.cache(httpx._transports.default.create_ssl_context)

LONG = (
    "test_closed",
    "test_survival",
    "test_engines",
    "test_train",
    "test_two_gateways",
    "test_your_agent",
    "test_attacks_on_durability",
    "test_smollm2",
    "test_killed",
    "test_attacks_on_surroundings",
    "test_random_harness",
    "test_status",
)
"""Files that take longest, those that compute and those that wait in turn."""


def pytest_collection_modifyitems(items):
    """The long ones come first, or a worker would be left with one of them when the others have ended."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))
