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
