"""A gateway that kills its process at a named moment, for processes that call `serve`.

Without a moment it is the gateway as it is. A moment is named after what has happened last.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from functools import wraps
from pathlib import Path


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def serve(listener: socket.socket, folder: Path, moment: str) -> None:
    """What it changes in the gateway stays changed in this process."""
    from harnessed.gateway import lifecycle, recording

    # Before the modules that take them by name are imported.
    recording.record_answers = dying(recording.record_answers, moment, before="last token", after="answer written")
    lifecycle.end_attempt = dying(lifecycle.end_attempt, moment, before="end reported", after="end written")

    from harnessed.config import Gateway
    from harnessed.gateway import app

    class Server(app.Server):
        def __init__(self, application) -> None:
            super().__init__(Dying(application, moment))

    app.Server = Server
    app.serve(listener, folder, Gateway(generation_limit_s=30))


def dying(work: Callable, moment: str, *, before: str, after: str) -> Callable:
    """A transaction that dies when it begins, or when all is written and nothing committed."""

    @wraps(work)
    def transaction(*arguments, **named):
        if before == moment:
            die()
        result = work(*arguments, **named)
        if after == moment:
            die()
        return result

    return transaction


class Dying:
    """The application, which dies at the end of an answer to a model call."""

    def __init__(self, application, moment: str) -> None:
        self.application = application
        self.state = application.state
        self.moment = moment

    async def __call__(self, scope, receive, send) -> None:
        async def sending(message) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body")
            if last and self.moment == "committed":
                die()
            await send(message)
            if last and self.moment == "delivered":
                await asyncio.sleep(0.2)  # the event loop writes when it comes round
                die()

        of_model = scope["type"] == "http" and scope["path"].startswith("/v1")
        await self.application(scope, receive, sending if of_model else send)
