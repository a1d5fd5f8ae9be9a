"""A client with patience, against servers that are away, in trouble, or refuse."""

import asyncio
import json
import logging
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from harnessed.client import ApiError, AsyncClient, Call, Client, Unreachable

ASK = Call("GET", "/thing", json.loads, timeout_s=5)


@contextmanager
def server(*answers):
    """Answers with these one after the other, the last one for ever: a status, or None to hang up. Its URL."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = left.pop(0) if len(left) > 1 else left[0]
            if status is None:
                return
            body = b"1" if status == 200 else b'{"error": {"message": "because"}}'
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=[0.02])
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()


def ask(url: str, asynchronous: bool, patience_s: float):
    async def wait():
        async with AsyncClient(url, patience_s=patience_s) as client:
            return await client(ASK)

    if asynchronous:
        return asyncio.run(wait())
    with Client(url, patience_s=patience_s) as client:
        return client(ASK)


BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])


@BOTH
def test_it_asks_again_until_the_server_answers_and_says_so_once(asynchronous, caplog):
    with server(None, None, 503, 502, 429, 500, 200) as url, caplog.at_level(logging.WARNING, "harnessed.client"):
        assert ask(url, asynchronous, 30) == 1
    began, ended = [record.getMessage() for record in caplog.records]
    assert began.startswith(f"{url} did not answer GET /thing: ") and began.endswith("; asking again for up to 30 s")
    assert ended == f"{url} answers again"


@BOTH
def test_what_the_server_refuses_is_not_asked_again(asynchronous):
    with server(404, 200) as url, pytest.raises(ApiError, match="because"):
        ask(url, asynchronous, 30)


@BOTH
def test_its_patience_has_an_end(asynchronous):
    with server(503) as url, pytest.raises(ApiError, match=r"because \(status 503\)"):
        ask(url, asynchronous, 0.3)
    with pytest.raises(Unreachable, match="GET /thing"):
        ask(url, asynchronous, 0.3)


def test_without_patience_the_first_problem_is_told():
    with server(503, 200) as url, pytest.raises(ApiError):
        ask(url, False, 0)


def test_what_happens_meanwhile_can_end_the_wait():
    def give_up() -> None:
        raise RuntimeError("it will not come back")

    with (
        server(503) as url,
        Client(url, patience_s=30, meanwhile=give_up) as client,
        pytest.raises(RuntimeError, match="not come back"),
    ):
        client(ASK)
