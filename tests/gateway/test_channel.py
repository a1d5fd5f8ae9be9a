"""The client of generations against a server that says bytes: whatever HTTP may do between a gateway and an engine."""

import asyncio
import contextlib
import datetime
import socket
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from harnessed.gateway import channel
from harnessed.gateway.channel import Channels, Lost
from harnessed.gateway.dialects import Generated, Generation, NoAnswer
from harnessed.gateway.engines import EngineFailed, Engines
from harnessed.gateway.preview import Preview
from harnessed.records import Dialect, EngineSpec

LIMIT_S = 20
TEXT = b'{"tokens": [1, 2, 3]}'
SIZED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 21\r\n\r\n" + TEXT
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'1\r\n{\r\n00A;name=value\r\n"tokens": \r\na\r\n[1, 2, 3]}\r\n0\r\nTrailer: 1\r\n\r\n'
)
TO_THE_END = b"HTTP/1.1 200 OK\r\nServer: old\r\n\r\n" + TEXT
OF_1_0 = b"HTTP/1.0 200 OK\r\nContent-Length: 21\r\n\r\n" + TEXT
CLOSING = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 21\r\n\r\n" + TEXT
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: application/X-ndjson; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


class Peer:
    """Reads requests, and lets `answer` say something to each."""

    def __init__(self):
        self.requests = []
        self.connections = []
        self.left = asyncio.Event()
        """A client has closed its connection."""
        self.answer = says(SIZED)
        self.url = ""

    async def serve(self, reader, writer):
        self.connections.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET /health"):
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                    continue
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                self.requests.append((head.decode(), await reader.readexactly(length)))
                await self.answer(writer)
                if writer.is_closing():
                    return
        writer.close()
        self.left.set()


def says(*pieces, then=None):
    """An answer in these pieces; `then` is done to its connection."""

    async def answer(writer):
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)  # the client reads it by itself
        if then:
            await writer.drain()
            then(writer)

    return answer


def close(writer):
    writer.close()


def reset(writer):
    linger = b"\1\0\0\0\0\0\0\0"
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()


@pytest.fixture
async def peer():
    peer = Peer()
    server = await asyncio.start_server(peer.serve, "127.0.0.1")
    peer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield peer
    server.close()
    for writer in peer.connections:
        writer.close()


class Limited(Channels):
    """What hangs, fails."""

    async def post(self, url, body, follow=None):
        async with asyncio.timeout(LIMIT_S):
            return await super().post(url, body, follow)


@pytest.fixture
async def channels():
    channels = Limited()
    yield channels
    channels.close()


async def until(condition):
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.002)


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


# Whole answers


async def test_a_request_is_what_it_should_be_and_its_answer_comes_whole(peer, channels):
    assert await channels.post(f"{peer.url}/base/generate", b"{}") == (200, TEXT)
    host = peer.url.removeprefix("http://")
    head = (
        f"POST /base/generate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n"
    )
    assert peer.requests == [(head, b"{}")]


@pytest.mark.parametrize(
    "said",
    [SIZED, CHUNKED, INTERIM + SIZED, OF_1_0, CLOSING, TO_THE_END],
    ids="sized chunked interim http-1.0 closing to-the-end".split(),
)
async def test_an_answer_may_be_cut_anywhere(peer, channels, said):
    ends = said in (OF_1_0, CLOSING, TO_THE_END)
    for cut in range(1, len(said)):
        peer.answer = says(said[:cut], said[cut:], then=close if ends else None)
        assert await channels.post(peer.url, b"{}") == (200, TEXT), said[:cut]
    peer.answer = says(*(said[at : at + 1] for at in range(len(said))), then=close if ends else None)
    assert await channels.post(peer.url, b"{}") == (200, TEXT)
    assert len(peer.connections) == (len(peer.requests) if ends else 1)


async def test_answers_of_any_status_are_given(peer, channels):
    for status, body in ((204, b""), (307, b"elsewhere"), (400, b"no"), (503, b"not now")):
        length = b"" if status == 204 else b"Content-Length: %d\r\n" % len(body)
        peer.answer = says(b"HTTP/1.1 %d Some\r\nLocation: /x\r\n%b\r\n%b" % (status, length, body))
        assert await channels.post(peer.url, b"{}") == (status, body)
    assert len(peer.connections) == 1


async def test_a_giant_body_costs_no_more_than_its_size(peer, channels):
    """Joined to what is there already with every piece, it would be copied for minutes."""
    body = bytes(range(256)) * 4
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    peer.answer = says(head, chunk(body) * 50_000, b"0\r\n\r\n")
    status, got = await channels.post(peer.url, b"{}")
    assert status == 200 and got == body * 50_000


async def test_a_giant_request_is_sent_whole(peer, channels):
    body = b"x" * 30_000_000
    assert await channels.post(peer.url, body) == (200, TEXT)
    assert peer.requests[0][1] == body


# Connections


async def test_requests_at_once_have_connections_of_their_own_and_the_next_ones_use_them_again(peer, channels):
    for _ in range(3):
        assert await asyncio.gather(*(channels.post(peer.url, b"{}") for _ in range(20))) == [(200, TEXT)] * 20
    assert len(peer.requests) == 60 and len(peer.connections) == 20


async def test_a_connection_that_was_closed_meanwhile_is_not_used_again(peer, channels):
    await channels.post(peer.url, b"{}")
    peer.connections[0].close()
    await until(lambda: not channels._open)
    assert await channels.post(peer.url, b"{}") == (200, TEXT)
    assert len(peer.connections) == 2


async def test_a_connection_that_was_unused_for_long_is_closed(peer, channels, monkeypatch):
    await asyncio.gather(*(channels.post(peer.url, b"{}") for _ in range(3)))
    monkeypatch.setattr(channel, "IDLE_LIMIT_S", 0.0)
    await channels.post(peer.url, b"{}")
    assert len(peer.connections) == 4
    await until(lambda: len(channels._open) == 1)


async def test_connections_that_a_burst_leaves_are_closed_by_what_comes_later(peer, channels):
    await asyncio.gather(*(channels.post(peer.url, b"{}") for _ in range(3)))
    for connection in list(channels._addresses[peer.url]._idle)[:2]:
        connection.idle_since -= 2 * channel.IDLE_LIMIT_S
    await channels.post(peer.url, b"{}")
    assert len(peer.connections) == 3
    await until(lambda: len(channels._open) == 1)


@pytest.mark.parametrize("more", [SIZED, b"HTTP", b"?"])
async def test_what_nobody_asked_for_ends_a_connection(peer, channels, more):
    peer.answer = says(SIZED + more)
    assert await channels.post(peer.url, b"{}") == (200, TEXT)
    assert await channels.post(peer.url, b"{}") == (200, TEXT)
    assert len(peer.connections) == 2
    peer.connections[-1].write(SIZED)
    await until(lambda: not channels._open)


async def test_an_answer_before_its_request_was_taken_ends_the_connection(channels):
    async def refuse(reader, writer):
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await over.wait()
        writer.close()

    over = asyncio.Event()
    async with asyncio.timeout(LIMIT_S):
        server = await asyncio.start_server(refuse, "127.0.0.1")
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await channels.post(url, b"x" * 50_000_000) == (413, b"no")
        await until(lambda: not channels._open)
        over.set()
        server.close()


async def test_whoever_is_cancelled_closes_the_connection(peer, channels):
    peer.answer = says(SIZED[:-5])
    asking = asyncio.create_task(channels.post(peer.url, b"{}"))
    await until(lambda: peer.requests)
    asking.cancel()
    await until(peer.left.is_set)
    assert (await asyncio.gather(asking, return_exceptions=True)) != [(200, TEXT)]
    peer.answer = says(SIZED)
    assert await channels.post(peer.url, b"{}") == (200, TEXT)


async def test_who_is_cancelled_after_the_answer_leaves_the_connection_to_others(peer, channels):
    def follow(piece):
        asyncio.get_running_loop().call_soon(asking.cancel)
        return piece

    peer.answer = says(STREAM + chunk(b"whole") + b"0\r\n\r\n")
    asking = asyncio.create_task(channels.post(peer.url, b"{}", follow))
    with pytest.raises(asyncio.CancelledError):
        await asking
    peer.answer = says(SIZED)
    assert await channels.post(peer.url, b"{}") == (200, TEXT)
    assert len(peer.connections) == 1


async def test_what_is_on_its_way_at_the_end_is_lost(peer, channels):
    peer.answer = says(SIZED[:-5])
    asking = asyncio.create_task(channels.post(peer.url, b"{}"))
    await until(lambda: peer.requests)
    channels.close()
    with pytest.raises(Lost):
        await asking


# What breaks


@pytest.mark.parametrize("then", [close, reset])
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize(
    "said", [b"", SIZED[:20], SIZED[:-1], CHUNKED[:-5], CHUNKED[:60], CHUNKED[:-30], INTERIM, INTERIM + SIZED[:40]]
)
async def test_an_answer_that_breaks_off_is_lost(peer, channels, said, used, then):
    if used:
        await channels.post(peer.url, b"{}")
    peer.answer = says(said, then=then)
    began = b"200 OK" in said and b"\r\n\r\n" in said.removeprefix(INTERIM)
    with pytest.raises(Lost, match="ConnectionReset|closed within the answer" if began else "Reset|closed before an"):
        await channels.post(peer.url, b"{}")
    assert len(peer.connections) == 1
    peer.answer = says(SIZED)
    assert await channels.post(peer.url, b"{}") == (200, TEXT)


async def test_an_answer_up_to_the_end_of_a_connection_that_is_reset_is_lost(peer, channels):
    async def answer(writer):
        writer.write(TO_THE_END)
        await shown.wait()
        reset(writer)

    def follow(piece):
        shown.set()

    shown, peer.answer = asyncio.Event(), answer
    asking = asyncio.create_task(channels.post(peer.url, b"{}", follow))
    await until(lambda: any(each._status for each in channels._open))
    shown.set()
    with pytest.raises(Lost, match="ConnectionResetError"):
        await asking


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_no_answer(peer, channels, said):
    peer.answer = says(said)
    with pytest.raises(NoAnswer, match="does not answer in HTTP"):
        await channels.post(peer.url, b"{}")
    await until(peer.left.is_set)


async def test_nobody_listens(peer, channels):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Lost, match="ConnectionRefusedError"):
        await channels.post(f"http://127.0.0.1:{port}", b"{}")
    with pytest.raises(Lost, match="gaierror"):
        await channels.post("http://nowhere.invalid", b"{}")


async def test_a_connection_that_is_not_made_in_time_is_lost(channels, monkeypatch):
    monkeypatch.setattr(channel, "CONNECT_LIMIT_S", 0.2)
    made_late = pytest.raises(Lost, match=r"TimeoutError no connection within 0\.2 s")
    with socket.create_server(("127.0.0.1", 0)) as silent, made_late:  # it never shakes hands
        await channels.post(f"https://127.0.0.1:{silent.getsockname()[1]}", b"{}")


async def test_a_limit_of_the_caller_is_the_callers(peer, channels):
    peer.answer = says(SIZED[:-1])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await channels.post(peer.url, b"{}")
    await until(peer.left.is_set)


# Streams


async def test_a_stream_is_followed_piece_by_piece(peer, channels):
    """The server says the next only when the one before it was seen."""
    seen, taken = [], asyncio.Event()

    def follow(piece):
        seen.append(piece)
        taken.set()
        return b"all" if piece == b"end" else None

    async def answer(writer):
        writer.write(STREAM)
        for piece in (b"one", b"two", b"end"):
            taken.clear()
            writer.write(chunk(piece))
            await taken.wait()
        await asked.wait()
        writer.write(chunk(b"after") + b"0\r\n\r\n")

    asked, peer.answer = asyncio.Event(), answer
    assert await channels.post(peer.url, b"{}", follow) == (200, b"all"), "it waits for the end of the connection"
    assert seen == [b"one", b"two", b"end"]
    asked.set()
    await until(lambda: all(each._answer is None for each in channels._open))
    peer.answer = says(SIZED)
    assert await channels.post(peer.url, b"{}", follow) == (200, TEXT)
    assert seen == [b"one", b"two", b"end"] and len(peer.connections) == 1


async def test_a_stream_that_ends_without_an_answer_is_none(peer, channels):
    peer.answer = says(STREAM + chunk(b"one") + b"0\r\n\r\n")
    with pytest.raises(NoAnswer, match="ended its stream without an answer"):
        await channels.post(peer.url, b"{}", lambda piece: None)
    peer.answer = says(STREAM + chunk(b"one"), then=close)
    with pytest.raises(Lost):
        await channels.post(peer.url, b"{}", lambda piece: None)


async def test_what_a_follower_raises_is_raised_and_the_connection_closed(peer, channels):
    def follow(piece):
        raise KeyError(piece)

    peer.answer = says(STREAM + chunk(b"one") + chunk(b"two"))
    with pytest.raises(KeyError, match="one"):
        await channels.post(peer.url, b"{}", follow)
    await until(peer.left.is_set)


# Addresses


@pytest.mark.parametrize(
    ("url", "host", "port", "target", "named"),
    [
        ("http://engine", "engine", 80, "/", "engine"),
        ("HTTPS://Engine/base/generate", "engine", 443, "/base/generate", "engine"),
        ("http://10.0.0.1:8000/generate", "10.0.0.1", 8000, "/generate", "10.0.0.1:8000"),
        ("http://[fd00::1]:8000/generate", "fd00::1", 8000, "/generate", "[fd00::1]:8000"),
        ("http://me:pass%3Aword@engine:8000/generate", "engine", 8000, "/generate", "engine:8000"),
        ("http://engine/a b/ü/%20?x=1&y=ü#z", "engine", 80, "/a%20b/%C3%BC/%20?x=1&y=%C3%BC", "engine"),
        ("http://bücher/generate", "xn--bcher-kva", 80, "/generate", "xn--bcher-kva"),
    ],
)
def test_an_address(url, host, port, target, named):
    address = channel._Address(url)
    assert (address.host, address.port, address.tls) == (host, port, url.lower().startswith("https"))
    assert address.head.decode().startswith(f"POST {target} HTTP/1.1\r\nHost: {named}\r\nContent-Type")
    assert ("\r\nAuthorization: Basic bWU6cGFzczp3b3Jk\r\n" in address.head.decode()) == ("@" in url)


@pytest.mark.parametrize("url", ["engine:8000/generate", "ftp://engine", "http://", "http://e:port/", "http://[::1/"])
async def test_a_url_that_leads_nowhere(channels, url):
    with pytest.raises(NoAnswer, match="has a URL that"):
        await channels.post(url, b"{}")


async def test_ipv6(channels):
    peer = Peer()
    try:
        server = await asyncio.start_server(peer.serve, "::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    url = f"http://[::1]:{server.sockets[0].getsockname()[1]}"
    assert await channels.post(url, b"{}") == (200, TEXT)
    assert peer.requests[0][0].splitlines()[1] == f"Host: {url.removeprefix('http://')}"
    server.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Of localhost, signed by itself: a file with its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name, public = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "engine")]), key.public_key()
    day = datetime.timedelta(days=1)
    made = x509.CertificateBuilder(name, name, public, x509.random_serial_number(), now - day, now + day)
    for extension, critical in (
        (x509.SubjectAlternativeName([x509.DNSName("localhost")]), False),
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (x509.SubjectKeyIdentifier.from_public_key(public), False),
    ):
        made = made.add_extension(extension, critical)
    file = tmp_path_factory.mktemp("tls") / "engine.pem"
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    secret = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain)
    file.write_bytes(secret + made.sign(key, hashes.SHA256()).public_bytes(encoding))
    return file


async def test_a_certificate_is_checked(channels, certificate, monkeypatch):
    peer, tls = Peer(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    async with asyncio.timeout(LIMIT_S):
        server = await asyncio.start_server(peer.serve, "127.0.0.1", ssl=tls)
        url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(Lost, match="CERTIFICATE_VERIFY_FAILED"):
            await channels.post(url, b"{}")
        assert not peer.requests
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        trusting = Channels()
        peer.answer = says(SIZED[:50], SIZED[50:])
        for _ in range(2):
            assert await trusting.post(url, b"{}" * 500_000) == (200, TEXT)
        assert len(peer.requests) == 2 and len(peer.connections) == 1
        trusting.close()
        server.close()


# What becomes of it in `engines.py`


@pytest.fixture
async def engines(peer):
    engines = Engines(limit_s=1)
    engines.register(EngineSpec(id="e", url=peer.url, run="r", speaks=Dialect.CHAT))
    yield engines
    await engines.close()


def generate(engines, preview=None):
    generation = Generation(b"", max_tokens=9, temperature=1.0, seed=0, stop=[], id="g")
    return engines.generate("r", "o", generation, preview=preview)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (b"SSH-2.0\r\n", "engine e does not answer in HTTP"),
        (b"HTTP/1.1 307 T\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", "engine e: status 307: redirects are not fol"),
        (b"HTTP/1.1 404 N\r\nContent-Length: 4\r\n\r\nnone", "engine e: status 404 none"),
        (SIZED, "engine e gave no answer of the protocol"),
        (STREAM + chunk(b'{"tokens": [1]}\n') + b"0\r\n\r\n", "engine e ended its stream without an answer"),
        (STREAM + chunk(b'{"tokens": [-1]}\n'), "engine e broke its stream off"),
    ],
)
async def test_an_engine_that_gives_no_answer_has_failed(peer, engines, said, text):
    peer.answer = says(said)
    with pytest.raises(EngineFailed, match=text):
        await generate(engines, Preview())


@pytest.mark.parametrize("said", [SIZED[:-1], b"", b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 4\r\n\r\nnone"])
async def test_an_engine_whose_connection_breaks_is_lost(peer, engines, said):
    peer.answer = says(said, then=close)
    with pytest.raises(EngineFailed, match=r"no (whole answer|engine was healthy) within 1 s"):
        await generate(engines)


async def test_the_lines_of_a_stream_may_be_cut_anywhere(peer, engines):
    logprobs = ", ".join(['{"logprob": -0.5}'] * 2)
    choice = f'{{"token_ids": [5, 6], "logprobs": {{"content": [{logprobs}]}}, "message": {{"content": "x"}}'
    whole = f'{{"prompt_token_ids": [1], "finish": 1, "choices": [{choice}, "finish_reason": "stop"}}]}}\n'.encode()
    said = b'{"tokens": [5]}\n{"tokens": [6]}\n' + whole
    for size in (1, 7, 16, 40, len(said)):
        cut = [chunk(said[at : at + size]) for at in range(0, len(said), size)]
        preview, peer.answer = Preview(), says(STREAM, *cut, b"0\r\n\r\n")
        answer = await generate(engines, preview)
        assert isinstance(answer, Generated) and (answer.tokens, answer.logprobs) == ([5, 6], [-0.5, -0.5])
        assert preview.tokens == [5, 6]
