"""A gateway as a process that kills itself at a named moment: `python gateway_main.py <socket> <folder> <moment>`.

Without a moment it is the gateway as it is. A moment is named after what has happened last.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path

from harnessed.gateway import lifecycle, recording

MOMENT = sys.argv[3]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(work: Callable, *, before: str, after: str) -> Callable:
    """A transaction that dies when it begins, or when all is written and nothing committed."""

    @wraps(work)
    def transaction(*arguments, **named):
        if before == MOMENT:
            die()
        result = work(*arguments, **named)
        if after == MOMENT:
            die()
        return result

    return transaction


# Before the modules that take them by name are imported.
recording.record_answers = dying(recording.record_answers, before="last token", after="answer written")
lifecycle.end_attempt = dying(lifecycle.end_attempt, before="end reported", after="end written")

from harnessed.config import Gateway  # noqa: E402
from harnessed.gateway import app  # noqa: E402


class Dying:
    """The application, which dies at the end of an answer to a model call."""

    def __init__(self, application) -> None:
        self.application = application
        self.state = application.state

    async def __call__(self, scope, receive, send) -> None:
        async def sending(message) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body")
            if last and MOMENT == "committed":
                die()
            await send(message)
            if last and MOMENT == "delivered":
                await asyncio.sleep(0.2)  # the event loop writes when it comes round
                die()

        of_model = scope["type"] == "http" and scope["path"].startswith("/v1")
        await self.application(scope, receive, sending if of_model else send)


class Server(app.Server):
    def __init__(self, application) -> None:
        super().__init__(Dying(application))


app.Server = Server
app.serve(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), Gateway(generation_limit_s=30))
