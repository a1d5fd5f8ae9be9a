"""Attacks on what is around the hot path. Each test fails as long as the defect that its docstring names is there."""

import asyncio
import contextlib
import http.server
import itertools
import json
import logging
import os
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest
from command import HARNESSED, environment, make_config, wait_for
from house import house  # noqa: F401  # a fixture
from scripted_engine import Scripted

import harnessed
from harnessed import logs
from harnessed.client import (
    ApiError,
    AsyncClient,
    Call,
    Client,
    Unreachable,
    close_turnstile,
    create_groups,
    end_attempt,
    get_rollout,
    get_turnstile,
    list_engines,
)
from harnessed.config import ConfigError
from harnessed.controller.predecessor import Predecessor
from harnessed.gateway import app, retention
from harnessed.gateway.keys import ADMIN
from harnessed.records import CloseMode, Ending, GroupSpec, Outcome, RunSpec, State, TurnstileState
from harnessed.services import ServiceDied
from harnessed.training import closing
from harnessed.training.failures import Stalled
from harnessed.training.tasks import stream
from harnessed.training.watch import Watch
from harnessed.training.watchdog import Watchdog

SECRET = "hunter2-the-password"


def surroundings(**more: str) -> dict[str, str]:
    """As a user's shell, with the code that is tested."""
    return environment(PYTHONPATH=str(Path(harnessed.__file__).parents[1]), **more)


def run(*arguments: object, cwd: Path | None = None, limit_s: float = 60, **variables: str):
    return subprocess.run(
        [*HARNESSED, *map(str, arguments)],
        env=surroundings(**variables),
        capture_output=True,
        text=True,
        timeout=limit_s,
        cwd=cwd,
    )


@contextlib.contextmanager
def started(said: Path, *arguments: object, **variables: str):
    """A command that runs, with its output in a file; ended afterwards."""
    with said.open("w") as file:
        process = subprocess.Popen(
            [*HARNESSED, *map(str, arguments)], stdout=file, stderr=file, env=surroundings(**variables)
        )
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()
            process.wait()


def files_with(folder: Path, text: str) -> list[str]:
    return [str(each) for each in folder.rglob("*") if each.is_file() and text.encode() in each.read_bytes()]


# One folder, one gateway


def test_a_second_gateway_on_the_same_folder_is_refused(tmp_path):
    """Nothing keeps a second gateway from a folder's SQLite file. It takes the first for dead, declares all calls that
    it has admitted lost, and from then on the two serve half of the truth each."""
    config, folder = make_config(tmp_path), tmp_path / "house"
    with started(tmp_path / "first", "gateway", config, f"run.folder={folder}") as first:
        wait_for(lambda: (folder / "gateway.db").exists() and (folder / "gateway.url").exists(), "the first gateway")
        url = (folder / "gateway.url").read_text()
        httpx.get(f"{url}/healthz", timeout=30)
        with started(tmp_path / "second", "gateway", config, f"run.folder={folder}") as second:
            with contextlib.suppress(subprocess.TimeoutExpired):
                second.wait(12)
            assert second.poll() == 2, (tmp_path / "first").read_text() + (tmp_path / "second").read_text()
        assert first.poll() is None


# Passwords and keys


def test_a_password_of_the_database_is_not_printed(tmp_path):
    """A `gateway.database` of the wrong form (postgres:// is what most hosters hand out) is echoed in the complaint,
    password included: it is in the terminal, and in the log of whatever started the gateway."""
    result = run("gateway", make_config(tmp_path), f"gateway.database=postgres://user:{SECRET}@host/name")
    assert result.returncode == 2
    assert SECRET not in result.stdout + result.stderr


def test_a_password_of_the_database_is_not_written_into_the_folder_of_a_run(tmp_path):
    """`harnessed eval` and `train` write all settings into config.yaml of the run's folder, readable by everybody, and
    with them the password of `gateway.database`."""
    folder, database = tmp_path / "run", f"postgresql://user:{SECRET}@127.0.0.1:1/name"
    result = run("eval", make_config(tmp_path), f"run.folder={folder}", f"gateway.database={database}", limit_s=120)
    assert result.returncode == 1
    assert files_with(folder, SECRET) == [] and SECRET not in result.stdout + result.stderr


@pytest.mark.parametrize("database", ["postgresql://user@host:port/name", "postgresql://user@[::1/name"])
def test_a_wrong_address_of_the_database_is_one_line(tmp_path, database):
    """What SQLAlchemy cannot read as an URL ends in a traceback, and the setting is not named."""
    folder = tmp_path / "house"
    result = run("gateway", make_config(tmp_path), f"run.folder={folder}", f"gateway.database={database}")
    assert "Traceback" not in result.stderr and "gateway.database" in result.stderr
    assert result.returncode == 2


def test_a_database_without_its_driver_is_one_line(tmp_path):
    """Without psycopg (it is an extra) `gateway.database` ends in a traceback in place of `pip install ...`."""
    (tmp_path / "psycopg.py").write_text("raise ModuleNotFoundError(\"No module named 'psycopg'\", name='psycopg')\n")
    config = make_config(tmp_path)
    database = "gateway.database=postgresql://user@127.0.0.1:1/name"
    result = run("gateway", config, f"run.folder={tmp_path / 'house'}", database, cwd=tmp_path)
    assert "Traceback" not in result.stderr and "pip install" in result.stderr
    assert result.returncode == 2


async def test_an_admin_key_with_a_line_feed_is_not_printed(house):  # noqa: F811
    """A key file of somebody's own ends in a line feed (so do secrets of Kubernetes). HTTP refuses such a header, with
    the header in its message: the SDK's error holds the whole admin key, the command line prints it, and a client with
    patience asks again for minutes what can never be sent."""
    key = house.keys.sign(ADMIN)
    result = await asyncio.to_thread(run, "status", "--url", house.url, HARNESSED_ADMIN_KEY=f"{key}\n")
    assert key not in result.stdout + result.stderr


def test_what_rollouts_said_is_for_the_owner_alone(tmp_path):
    """The secret and the keys have mode 0600, but the database beside them, with all prompts, answers and hidden
    fields of tasks, is readable by every user of the machine, as the folder is."""
    folder = tmp_path / "house"
    with started(tmp_path / "said", "gateway", make_config(tmp_path), f"run.folder={folder}"):
        wait_for(lambda: (folder / "gateway.db-wal").exists(), "the database")
        assert [f"{each.name} {each.stat().st_mode & 0o077:o}" for each in folder.glob("gateway.db*")
                if each.stat().st_mode & 0o077 and folder.stat().st_mode & 0o077] == []  # fmt: skip


def test_a_folder_with_a_question_mark_holds_its_database(tmp_path):
    """The path becomes an URL without being escaped: what follows `?` is taken for options. The records of run.folder
    `what?` lie in a file `what` beside it, those of `what?x` in the same file: two gateways share it unknowingly."""
    folder = tmp_path / "what?"
    with started(tmp_path / "said", "gateway", make_config(tmp_path), f"run.folder={folder}"):
        wait_for(lambda: (folder / "gateway.url").exists(), "the address")
        httpx.get((folder / "gateway.url").read_text() + "/healthz", timeout=30)
        assert (folder / "gateway.db").exists(), sorted(each.name for each in tmp_path.iterdir())


# The store was in trouble


async def test_leases_end_after_the_store_was_in_trouble(house, monkeypatch):  # noqa: F811
    """The task that takes attempts from dead controllers dies with the first error of the store (PostgreSQL away for a
    moment, a lock) and is never seen again: no lease of this gateway ever ends, and rollouts of a dead controller run
    for ever. The same is true of retention. (The error is made by taking a table away for a moment.)"""
    monkeypatch.setattr(app, "_EXPIRY_S", 0.05)
    await house.restart()
    (attempt,) = await house.attempts()
    database = sqlite3.connect(house.folder / "gateway.db", isolation_level=None)
    database.execute("ALTER TABLE attempts RENAME TO away")
    await asyncio.sleep(1)
    database.execute("ALTER TABLE away RENAME TO attempts")
    database.execute("UPDATE attempts SET lease_until = 0")
    deadline = time.monotonic() + 10
    while (await house.admin(get_rollout(attempt.rollout))).state != State.QUEUED:
        assert time.monotonic() < deadline, "the lease ended, and nobody took the attempt"
        await asyncio.sleep(0.05)


async def test_retention_leaves_alone_what_runs(house):  # noqa: F811
    """`the run's last sign of life` is the last creation, start or end of a rollout: a run whose attempt has been
    calling all along counts as idle, and the answers of the attempt that runs are deleted under it."""
    (attempt,) = await house.attempts()
    client = house.openai(attempt.key)
    days = 0.5 / retention.DAY_S
    await asyncio.sleep(1)
    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert len(await house.nodes()) == 1
    keeping = asyncio.create_task(retention.keep_small(house.store, days))
    await asyncio.sleep(0.5)
    keeping.cancel()
    assert len(await house.nodes()) == 1, "it called half a second ago, and is not finished"


# The trainer's closing


async def test_the_lease_of_a_closing_outlives_its_drain(house, monkeypatch):  # noqa: F811
    """The trainer renews only after its first request has returned, which takes up to drain_s = 120 s, with a lease of
    60 s: meanwhile status says that it is gone, another owner may take the turnstile, and the trainer then ends with
    `closed by another`. (Here with a hundredth of the times.)"""
    assert closing.LEASE_S == 60, "this test scales what trainer.py uses: a lease of 60 s, a drain of 120 s"
    monkeypatch.setattr(closing, "LEASE_S", 0.6)
    (attempt,) = await house.attempts()
    gate = threading.Event()
    house.engine.script = lambda prompt, call: Scripted([72, 105, 258], stall_at=1, stall_until=gate.is_set)
    asking = asyncio.create_task(
        house.openai(attempt.key).chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    )
    deadline = time.monotonic() + 10
    while not (await house.admin(get_turnstile("r"))).in_flight:
        assert time.monotonic() < deadline, "the call never reached the engine"
        await asyncio.sleep(0.02)

    def close():
        with Client(house.url, house.keys.sign(ADMIN)) as gateway, closing.closed(gateway, "r", CloseMode.FINISH, 1.2):
            pass

    closing_it = asyncio.create_task(asyncio.to_thread(close))
    await asyncio.sleep(0.9)
    found = await house.admin(get_turnstile("r"))
    gate.set()
    with contextlib.suppress(Exception):
        await closing_it
    asking.cancel()
    assert found.owner and found.lease_until > time.time() - 0.3, "its owner lives, and its lease has ended"


async def test_a_close_that_is_interrupted_opens(house):  # noqa: F811
    """Ctrl-C (or a gateway that does not answer in time) during the first request of `closed`, which lasts as long as
    the drain, leaves the turnstile closed: the `try` begins after it. All calls of the run hang for a minute of lease
    and ten of grace."""
    holding = threading.Event()

    class Interrupted(Client):
        def __call__(self, call):
            answer = super().__call__(call)
            if call.path.endswith("/close"):
                holding.set()
                raise KeyboardInterrupt  # as it is raised while the answer is waited for
            return answer

    def close():
        with (
            contextlib.suppress(KeyboardInterrupt),
            Interrupted(house.url, house.keys.sign(ADMIN)) as gateway,
            closing.closed(gateway, "r", CloseMode.FINISH, 1),
        ):
            pass

    await asyncio.to_thread(close)
    assert holding.is_set()
    assert (await house.admin(get_turnstile("r"))).state == TurnstileState.OPEN


async def test_a_run_whose_calls_are_held_does_not_stall(house):  # noqa: F811
    """Held time is added to the time limit of attempts, but not to the trainer's own patience: a turnstile that
    somebody else closes for longer than time_limit_s + a minute ends the run as `Stalled`, although all is well and
    the gateway says who holds its calls. (Here with a limit of a second.)"""
    await house.attempts()
    await house.admin(close_turnstile("r", "somebody", CloseMode.FINISH, lease_s=60, drain_s=5))
    ticks, said = [], []

    def tick():
        ticks.append(time.monotonic())
        if ticks[-1] - ticks[0] > 5:
            raise TimeoutError  # it has been patient for long enough

    def watch():
        with Client(house.url, house.keys.sign(ADMIN)) as gateway:
            try:
                watchdog = Watchdog(gateway, "r", 0.5, said.append)
                Watch(gateway, "r", watchdog, stall_limit_s=1).until_complete(["g"], tick)
            except Stalled as error:
                return str(error)
            except TimeoutError:
                return ""

    assert await asyncio.to_thread(watch) == ""
    assert "somebody" in said[0]  # who holds them is said


# The SDK


class Answers(http.server.BaseHTTPRequestHandler):
    """`/bad` is in trouble, `/page` is somebody's web page, all else is well."""

    def do_GET(self):
        bad = self.path.startswith("/bad")
        body = b"<html>hello</html>" if not bad else b'{"error": {"message": "in trouble"}}'
        self.send_response(500 if bad else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def web_server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


async def test_one_call_in_trouble_among_others_is_told_once(caplog):
    """Whether people know that a client waits is kept for the client, not for its calls: while one call is asked again
    and others are answered, every try is a pair of lines, `asking again` and `answers again`. A controller with a
    report that the gateway cannot take writes them for ever."""
    with web_server() as url:
        async with AsyncClient(url, patience_s=2) as client:

            async def others():
                while True:
                    await client(Call("GET", "/good", lambda body: None))
                    await asyncio.sleep(0.02)

            beside = asyncio.create_task(others())
            with pytest.raises(ApiError):
                await client(Call("GET", "/bad", lambda body: None))
            beside.cancel()
    asked_again = [record for record in caplog.records if "asking again" in record.getMessage()]
    assert len(asked_again) == 1, f"{len(caplog.records)} lines"


def test_status_of_what_is_no_gateway_is_one_line():
    """Whatever answers with 200 at that address (a proxy's login page, another service on the port of a gateway that
    has ended) makes `harnessed status` end in a traceback."""
    with web_server() as url:
        result = run("status", "--url", url, HARNESSED_ADMIN_KEY="sk-hd.admin.x.y")
    assert "Traceback" not in result.stderr, result.stderr[-300:]
    assert result.returncode == 1


def test_an_address_that_is_none_is_one_line():
    """`--url` is not looked at: an address that httpx cannot read is a traceback, as is a wrong `--watch`."""
    for arguments in (["--url", "http://[gateway"], ["--url", "http://gateway:port"]):
        result = run("status", *arguments, HARNESSED_ADMIN_KEY="x")
        assert "Traceback" not in result.stderr, (arguments, result.stderr[-300:])
    with web_server() as url:
        result = run("status", "--url", f"{url}/bad", "--watch", "-1", HARNESSED_ADMIN_KEY="x")
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr[-300:]


# The control routes


@pytest.mark.parametrize("id", ["", "..", "a/b", "a?b", "x\0", "x" * 10_000])
async def test_a_run_that_no_address_can_name_is_refused(house, id):  # noqa: F811
    """Groups have ids of a known form, runs have not: the gateway takes one whose own routes cannot be called. Its
    turnstile, totals and page are out of reach, and nobody can cancel it."""
    body = RunSpec(id=id, policy=str(house.policy)).model_dump(mode="json")
    headers = {"authorization": f"Bearer {house.keys.sign(ADMIN)}"}
    response = await house.http.post(f"{house.url}/api/runs", json=body, headers=headers)
    assert response.status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", f"/api/changes?run=r&wait_s=0&after={2**70}", None),
        ("GET", f"/api/runs/r/metrics?after={2**70}", None),
        ("GET", f"/api/rollouts/g.0/attempts/{2**70}/held", None),
        ("GET", f"/ui/data/rollouts/g.0/{2**70}/1", None),
        ("POST", "/api/groups", [{"id": "h", "run": "r", "task": {"answer": 2**70}, "n": 1}]),
        ("POST", "/api/groups", [{"id": "h", "run": "r", "task": {}, "n": 1, "seed": 2**70}]),
        ("POST", "/api/runs/r/metrics", {"step": 2**70, "values": {}}),
        ("POST", "/api/attempts/claim", {"run": "r", "owner": "o", "most": -1, "attempts": 1, "wait_s": 0}),
    ],
    ids=["after", "metrics", "held", "tokens", "task", "seed", "step", "most"],
)
async def test_numbers_out_of_range_are_refused(house, method, path, body):  # noqa: F811
    """Integers of more than 64 bits are status 500 in place of 400, and the SDK with patience asks again for 5 minutes;
    a claim of -1 rollouts takes all."""
    await house.admin(create_groups([GroupSpec(id="g", run="r", task={}, n=2)]))
    headers = {"authorization": f"Bearer {house.keys.sign(ADMIN)}"}
    content = None if body is None else json.dumps(body)
    response = await house.http.request(method, house.url + path, content=content, headers=headers)
    assert response.status_code in (400, 404), response.text


def test_a_task_keeps_its_numbers(tmp_path):
    """An integer of more than 64 bits in a task file (an answer in mathematics, an id) becomes a float of 16 digits
    without a word, and the evaluator compares with a wrong answer. The same from a function ends the run by
    a TypeError of the SDK once all services have started."""
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "2**70 + 1 is?", "answer": 2**70 + 1}) + "\n")
    (task,) = itertools.islice(stream("tasks.jsonl", tmp_path, 0, shuffle=False), 1)
    assert task["answer"] == 2**70 + 1


# Services


def test_with_json_each_line_of_a_services_log_is_an_object(tmp_path):
    """`gateway.log: json` promises an object in each line; that a service was started again is written into its log as
    plain text."""
    config, folder = make_config(tmp_path, gateway={"log": "json"}), tmp_path / "house"
    more = ["controller.external=true"]
    with started(tmp_path / "said", "up", config, f"run.folder={folder}", *more):
        said = tmp_path / "said"
        wait_for(lambda: "Ctrl-C ends all" in said.read_text(), "the house")
        os.kill(_pid(f"harnessed\0gateway\0{config}"), signal.SIGKILL)
        wait_for(lambda: "started again" in said.read_text(), "its restart")
    for line in (folder / "logs" / "gateway.log").read_text().splitlines():
        json.loads(line)
    for line in said.read_text().splitlines():
        json.loads(line)


def test_a_second_sigterm_leaves_nothing_behind(tmp_path):
    """While services are ended only Ctrl-C is deaf; SIGTERM still raises KeyboardInterrupt (run.py makes it do so), in
    the middle of ending them. Whoever asks twice (an impatient supervisor, say) gets status 130, and a service
    that hangs is never killed: it is left behind. (It hangs here because it is stopped.)"""
    config, folder, said = make_config(tmp_path), tmp_path / "house", tmp_path / "said"
    with started(said, "up", config, f"run.folder={folder}", "controller.external=true") as up:
        wait_for(lambda: "Ctrl-C ends all" in said.read_text(), "the house")
        gateway = _pid(f"harnessed\0gateway\0{config}")
        os.kill(gateway, signal.SIGSTOP)
        try:
            up.terminate()
            wait_for(lambda: "ending" in said.read_text(), "the first to be heard")
            time.sleep(1)
            up.terminate()
            up.wait(20)
            left = Path(f"/proc/{gateway}").exists()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(gateway, signal.SIGKILL)
    assert not left, "the gateway is still there"
    assert up.returncode == 0


async def test_a_gateway_is_ready_though_a_trainer_was_killed(house):  # noqa: F811
    """`harnessed up` is for trainers that come and go, and each brings an engine of its own. One that is killed leaves
    unfinished rollouts and an engine that is gone: from then on the gateway is not ready, for all that it serves well,
    and whatever looks at /readyz takes it out of service or starts it again, for ever."""
    headers = {"authorization": f"Bearer {house.keys.sign(ADMIN)}"}
    await house.attempts()
    policy = str(house.policy)
    for run_ in ("dead",):
        body = RunSpec(id=run_, policy=policy).model_dump(mode="json")
        await house.http.post(f"{house.url}/api/runs", json=body, headers=headers)
        engine = {"id": "dead-engine", "url": "http://127.0.0.1:1", "run": run_}
        await house.http.post(f"{house.url}/api/engines", json=engine, headers=headers)
    await house.admin(create_groups([GroupSpec(id="of-the-dead", run="dead", task={}, n=1)]))
    await asyncio.sleep(4)
    ready = await house.http.get(f"{house.url}/readyz")
    assert ready.status_code == 200, ready.text


def _pid(command: str) -> int:
    processes = Path("/proc").glob("[0-9]*/cmdline")
    (found,) = [int(each.parent.name) for each in processes if command.encode() in _bytes(each)]
    return found


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_an_engine_leaves_with_the_run_that_brought_it(tmp_path):
    """A run at a gateway of its own registers its engine and never removes it. At a `harnessed up` one is left by every
    run: the gateway asks each of them for its health, for ever, /metrics has labels for all, and `harnessed status` is
    a list of the dead. (Their ports are free again: another program gets the questions.)"""
    config, folder, said = make_config(tmp_path), tmp_path / "house", tmp_path / "said"
    with started(said, "up", config, f"run.folder={folder}"):
        wait_for(lambda: "Ctrl-C ends all" in said.read_text(), "the house")
        url, key = (folder / "gateway.url").read_text(), (folder / "admin.key").read_text()
        more = [f"run.folder={tmp_path / 'run'}", f"gateway.url={url}", "controller.external=true"]
        done = run("eval", config, *more, limit_s=120, HARNESSED_ADMIN_KEY=key)
        assert done.returncode == 0, done.stdout + done.stderr
        with Client(url, key) as gateway:
            assert gateway(list_engines()) == []


# What agents write


FORGED = "\n2026-01-01 00:00:00 ERROR harnessed.gateway.store: all records are lost"


async def ask_responses(house, id: str):  # noqa: F811
    (attempt,) = await house.attempts()
    body = {"model": "m", "input": "hi", "previous_response_id": id}
    headers = {"authorization": f"Bearer {attempt.key}"}
    return await house.http.post(f"{house.url}/v1/responses", json=body, headers=headers)


async def test_an_agent_writes_no_lines_of_its_own_into_the_log(house, caplog):  # noqa: F811
    """A refusal repeats what the agent sent, and in the form `text` a line feed in it begins a new line: an agent can
    put any line into the gateway's log."""
    caplog.set_level(logging.INFO, "harnessed")
    assert (await ask_responses(house, FORGED)).status_code == 400
    lines = [logs.Text().format(record) for record in caplog.records if record.name == "harnessed.gateway.calls"]
    assert len(lines) == 1 and "\n" not in lines[0]


async def test_a_refusal_is_a_short_line(house, caplog):  # noqa: F811
    """What is repeated has no limit but that of the request: each refused request of 64 MB is a line of 64 MB in the
    log. Refusals count against no limit of the attempt, so a looping agent fills the disk and stops all runs."""
    caplog.set_level(logging.INFO, "harnessed")
    response = await ask_responses(house, "x" * 2**20)
    (record,) = (record for record in caplog.records if record.name == "harnessed.gateway.calls")
    assert response.status_code == 400 and len(record.getMessage()) < 2000


async def test_what_an_agent_printed_does_not_command_the_terminal(house):  # noqa: F811
    """The reason of an outcome is the last line that the agent printed. `harnessed rollouts list` (and the trainer's
    own lines, `show`, `logs`) hand its escape sequences to the terminal: an agent, or a page that it has read, can
    rewrite what was shown before, set the title, or write to the clipboard of whoever looks."""
    (attempt,) = await house.attempts()
    reason = "exit status 1: \x1b]52;c;cm0gLXJmIH4K\x07\x1b[2J\x1b[31mall is well"
    await house.admin(end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.AGENT_EXIT, reason=reason, reward=0), 3))
    listed = await asyncio.to_thread(run, "rollouts", "list", house.folder)
    assert "all is well" in listed.stdout and "\x1b" not in listed.stdout


@pytest.mark.parametrize("sent", ["bearer {key}", "BEARER {key}"])
async def test_the_scheme_of_a_key_may_be_written_in_any_case(house, sent):  # noqa: F811
    """HTTP's names of schemes are case-insensitive (RFC 9110, 11.1), and some clients write `bearer`."""
    headers = {"authorization": sent.format(key=house.keys.sign(ADMIN))}
    assert (await house.http.get(f"{house.url}/api/engines", headers=headers)).status_code == 200
    assert (await house.http.get(f"{house.url}/metrics", headers=headers)).status_code == 200


async def test_a_proxy_with_a_password_of_its_own_does_not_hide_the_login(house):  # noqa: F811
    """Behind a proxy with basic authentication, which people put before a dashboard, the browser sends
    `Authorization: Basic` with every request. Any such header hides the cookie: the login succeeds, and the next
    request is 401."""
    await house.http.post(f"{house.url}/ui/login", content=house.keys.sign(ADMIN))
    assert (await house.http.get(f"{house.url}/ui/data/runs")).status_code == 200
    basic = {"authorization": "Basic dXNlcjpwYXNzd29yZA=="}
    assert (await house.http.get(f"{house.url}/ui/data/runs", headers=basic)).status_code == 200


def test_a_call_waits_no_longer_than_its_deadline():
    """client.py: `A call waits for at most its own deadline`. The deadline is one for each byte: a server (or a
    half-dead proxy) that sends one from time to time holds a trainer for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def trickle():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")
                while not ended.wait(0.2):
                    connection.sendall(b" ")

        server = threading.Thread(target=trickle, daemon=True)
        server.start()
        began = time.monotonic()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with contextlib.suppress(Unreachable), Client(url) as client:
            client(Call("GET", "/", lambda body: None, timeout_s=1))
        took = time.monotonic() - began
        ended.set()
        server.join(5)
    assert took < 10, f"a deadline of 1 s, and it took {took:.0f} s"


# Words that are not kept


async def test_the_end_of_an_attempt_may_be_told_twice(house):  # noqa: F811
    """docs/sdk.md: `end_attempt returns what the first ending made of the rollout`. After an infrastructure failure,
    which is when answers get lost, the same report again is status 409."""
    (attempt,) = await house.attempts()
    ending = end_attempt(attempt.rollout, 1, Ending(outcome=Outcome.INFRASTRUCTURE, reason="evicted"), 3)
    first = await house.admin(ending)
    assert await house.admin(ending) == first


async def test_a_lease_that_cannot_be_renewed_is_no_traceback(house, monkeypatch):  # noqa: F811
    """The trainer's client raises ServiceDied while it waits, when a service has ended for good. The thread that renews
    the lease does not expect it: the run's one line about the dead service comes with a traceback of the thread."""
    monkeypatch.setattr(closing, "LEASE_S", 0.4)
    wrong = []
    monkeypatch.setattr(threading, "excepthook", wrong.append)
    dead = threading.Event()

    def meanwhile():
        if dead.is_set():
            raise ServiceDied("the gateway ended with status 1")

    def close():
        key = house.keys.sign(ADMIN)
        with (
            contextlib.suppress(ServiceDied),
            Client(house.url, key, patience_s=30, meanwhile=meanwhile) as gateway,
            closing.closed(gateway, "r", CloseMode.FINISH, 1),
        ):
            dead.set()
            gateway._http.base_url = "http://127.0.0.1:1"  # as after its end
            time.sleep(0.5)

    await asyncio.to_thread(close)
    assert wrong == []


def test_a_second_controller_in_a_folder_is_refused(tmp_path):
    """The folder's lock tells a second controller that the first one lives, and it goes on all the same, in the first
    one's folders (template homes, logs, the attempts themselves when both are given the same rollout in turn). What it
    holds is not written down, so after its death nobody gives it back."""
    first = Predecessor(tmp_path, "first")
    with pytest.raises(ConfigError):
        Predecessor(tmp_path, "second")
    assert first.name == ""
