"""One run of the command line: what is checked before anything starts, its folder, its services, its gateway.

`cli.py` opens a `Run` for `harnessed train` and `harnessed eval`; at its end every process that it started has ended.
A training that is resumed is the same run in another life; what its folder says of it is in `resuming.py`.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import yaml

from harnessed import logs, resuming
from harnessed.client import (
    ApiError,
    Client,
    Unreachable,
    close_turnstile,
    create_run,
    examine_template,
    get_turnstile,
    open_turnstile,
    pause_engine,
    register_engine,
    remove_engine,
    resume_engine,
)
from harnessed.config import Config, ConfigError
from harnessed.controller.check import check as check_controller
from harnessed.gateway.keys import ADMIN, METRICS, SECRET, Keyring
from harnessed.gateway.template import ChatTemplate
from harnessed.records import CloseMode, EngineSpec, History, RunSpec, Verdict, Version
from harnessed.services import Services, bind, url_of
from harnessed.training.closing import owner_of
from harnessed.training.failures import CannotWrite, WrongVersion
from harnessed.training.lineages import Lineage, go_on
from harnessed.training.resumed import Resumed
from harnessed.training.rollouts import Rollouts
from harnessed.training.watch import Watch
from harnessed.training.watchdog import Watchdog

ADMIN_KEY_VARIABLE = "HARNESSED_ADMIN_KEY"
"""Holds the admin key of a gateway that the run did not start itself."""
PATIENCE_S = 300.0
"""How long a run waits for a gateway or an engine that is away."""
ADMIN_KEY_FILE = "admin.key"
"""In the folder of a gateway, as the next two."""
METRICS_KEY_FILE = "metrics.key"
"""For a scraper of `GET /metrics`."""
URL_FILE = "gateway.url"
_FAREWELL_S = 5.0
"""How long a gateway that goes on may take to forget the run's engine."""
_LOADING_S = 600.0
"""How long the weights of a run that goes on may take to be loaded and written."""
_STILL_S = 120.0
"""How long an engine that lived on may take to stand still."""


def admin_key() -> str:
    """Raises ConfigError."""
    key = os.environ.get(ADMIN_KEY_VARIABLE, "").strip()
    if not key:
        raise ConfigError(f"gateway.url names a running gateway: set {ADMIN_KEY_VARIABLE} to its admin key")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{ADMIN_KEY_VARIABLE} holds characters that no key has")
    return key


def keep_keys(folder: Path) -> None:
    """Write the keys of a gateway in this folder into files for its owner alone."""
    keyring = Keyring.from_file(folder / SECRET)
    for name, key in ((ADMIN_KEY_FILE, ADMIN), (METRICS_KEY_FILE, METRICS)):
        path = folder / name
        path.touch(mode=0o600)
        path.write_text(keyring.sign(key), encoding="utf-8")


def hear_interrupts() -> None:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt: a shell starts its background jobs with SIGINT ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


class Run:
    """From the checks of a configuration to the end of all processes that were started for it."""

    def __init__(
        self, config: Config, path: Path, overrides: list[str], *, trains: bool = False, resume: bool = False
    ) -> None:
        """`path` and `overrides` are where the configuration came from; services read it again. `trains`: the folder
        becomes that of a training; `resume`: it is one.

        Raises ConfigError, CannotWrite.
        """
        self._config = config
        self._arguments = [str(path.resolve()), *overrides]
        _check(config)
        self.resumed: Resumed | None = None
        """None: this is the first life of the run."""
        self._lock: IO[str] | None = None
        if resume:
            self._take_up()
        gateway, engine = config.gateway, config.engine
        patience_s = resuming.LEFTOVERS_LIMIT_S if resume else 0.0
        self.gateway_url, self._gateway_socket = _place(
            gateway.url, gateway.host, gateway.port, "gateway.port", patience_s
        )
        self.engine_url, self._engine_socket = _place(engine.url, engine.host, engine.port, "engine.port", patience_s)
        if not resume:
            self._begin(trains=trains)
        self.id = self._record.id
        self._services = Services(self.folder / "logs", partial(logs.entry, config.gateway.log))
        self._engine_id = f"{self.id}-engine"
        self._is_registered = False
        self.gateway: Client

    def _begin(self, *, trains: bool) -> None:
        """A new run in a new folder; the last check, for it makes the folder."""
        id = f"{self._config.run.name}-{secrets.token_hex(3)}"
        self._record = resuming.RunRecord(id, time.time(), resuming.fingerprint(self._config.policy.model))
        self.folder = _new_folder(self._config)
        self._keep_config()
        if trains:
            self._lock = resuming.hold(self.folder)
            self._record.write(self.folder)

    def _take_up(self) -> None:
        """The run of a folder, in which no other process trains. Says in a line what goes on."""
        config, folder = self._config, resuming.find(self._config)
        self._lock = resuming.hold(folder)
        self.folder, self._record = folder, resuming.RunRecord.read(folder)
        resuming.check_policy(self._record, config.policy.model)
        changed = resuming.changes(folder, config)
        self.resumed = resuming.take_up(folder, self._record, config)
        resuming.wait_for_leftovers(folder, config)
        origin = self.resumed.checkpoint or "the first weights"
        print(f"resuming {self._record.id} in {folder} after step {self.resumed.step}, from {origin}", flush=True)
        if changed:
            print(f"with other settings than before: {'; '.join(changed)}", flush=True)
        self._keep_config()
        self._record.resumed = self.resumed.times
        self._record.write(folder)
        (folder / "summary.json").unlink(missing_ok=True)  # of a life that was interrupted, or took fewer steps

    def _keep_config(self) -> None:
        settings = yaml.safe_dump(resuming.used(self._config), sort_keys=False)
        text = f"# As it was used; it came from {self._arguments[0]}.\n{settings}"
        resuming.write_whole(self.folder / resuming.CONFIG_FILE, text)

    def __enter__(self) -> Self:
        hear_interrupts()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._services.stop()
        if self._is_registered and self._config.gateway.url is not None:
            self._remove_engine()
        if self._lock is not None:
            self._lock.close()

    def _remove_engine(self) -> None:
        """From a gateway that goes on without the run."""
        try:
            with Client(self.gateway_url, admin_key()) as gateway:
                gateway(dataclasses.replace(remove_engine(self._engine_id), timeout_s=_FAREWELL_S))
        except (ApiError, Unreachable) as error:
            print(f"warning: the run's engine is still registered: {error}")

    @property
    def restarts(self) -> Counter[str]:
        """How often each service died and was started again."""
        return self._services.restarts

    def tell(self, say: Callable[[str], None]) -> None:
        """Whom deaths and restarts of services are told from now on; called by a thread."""
        self._services.say = say

    def engine(self) -> Client:
        """The engine's own routes."""
        return self._client(self.engine_url, "")

    def _client(self, url: str, key: str) -> Client:
        return Client(url, key, patience_s=PATIENCE_S, meanwhile=self._services.check)

    def start(self, weights: Path | None) -> None:
        """Start the services and make the run known to its gateway; `weights`: what a trainer shares with the engine.

        Raises services.ServiceDied, client.ApiError, client.Unreachable, CannotWrite.
        """
        try:
            self._start_services(weights)
        except OSError as error:  # keys and logs are files
            raise CannotWrite(f"cannot write into {self.folder}: {error.strerror}") from error
        self._introduce()

    def _start_services(self, weights: Path | None) -> None:
        config = self._config
        options = ["--folder", str(self.folder)]
        if config.gateway.url is None:
            os.environ[ADMIN_KEY_VARIABLE] = Keyring.from_file(self.folder / SECRET).sign(ADMIN)
            self._services.start("gateway", [*self._arguments, *options], self._gateway_socket)
        engine_options = [*options, "--weights", str(weights)] if weights else options
        if config.engine.url is None:
            self._services.start("engine", [*self._arguments, *engine_options], self._engine_socket)
        if not config.controller.external:  # last, so that it ends first and can give back what it holds
            arguments = [*self._arguments, f"gateway.url={self.gateway_url}", *options, "--run-id", self.id]
            self._services.start("controller", arguments)

    def _introduce(self) -> None:
        """Make the run known to its gateway; one that is resumed again, since its policy may have moved."""
        config, policy = self._config, self._config.policy
        self.gateway = self._client(self.gateway_url, admin_key())
        run = RunSpec(
            id=self.id,
            policy=str(policy.model),
            limits=config.limits,
            history=policy.history,
            side_calls=config.harness.side_calls,
        )
        # The own one is still starting; a wrong URL of another one is told at once.
        first = self.gateway if config.gateway.url is None else Client(self.gateway_url, admin_key())
        first(create_run(run))
        examination = self.gateway(examine_template(self.id))
        template = ChatTemplate(policy.model)
        if template.writes_calls and not template.format.calls:
            print("warning: the policy's tool calls are in a format that no parser knows: they reach the agent as text")
        broken = examination.cases(Verdict.BROKEN)
        if broken and policy.history == History.EXACT:
            cases = "; ".join(broken)
            print(
                f"warning: the chat template does not say how a conversation goes on after: {cases} "
                "(`harnessed doctor` and docs/templates.md)"
            )

    @contextlib.contextmanager
    def weights_begin(self) -> Iterator[None]:
        """Around the first write of the weights in this life of the run, and `begin_lineage`.

        Of a run that is resumed, agents, gateway and engine may have lived on: calls are held, in the name of whoever
        holds them already, and an engine that is not ours is paused. It may be so still, by the trainer that died, and
        it generates nothing under that trainer's mark, which ends with this write.
        """
        if self.resumed is None:
            yield
            return
        owner = self.gateway(get_turnstile(self.id)).owner or owner_of(self.id)
        # What an engine cannot end in so short a time it discards when it sees that its weights have changed.
        self.gateway(close_turnstile(self.id, owner, CloseMode.INTERRUPT, _LOADING_S, drain_s=30))
        is_ours = self._config.engine.url is None  # and began after the last trainer's end
        try:
            if not is_ours:
                self.engine()(pause_engine(_STILL_S))
            yield
        finally:
            if not is_ours:
                self.engine()(resume_engine())
            self.gateway(open_turnstile(self.id, owner))

    def begin_lineage(self, first: Version) -> None:
        """Keep with which version the policy begins in this life, before any token is sampled from it.

        Raises WrongVersion if that was served before, and CannotWrite.
        """
        before, resumed = self._record.lineages, self.resumed
        if any(first.lineage <= each.lineage for each in before):
            raise WrongVersion(
                f"version {first.lineage}.{first.number} of the policy was served in an earlier life of this run: the "
                "weights that it shared with its engine are gone, and no version is used twice"
            )
        self._record.lineages = go_on(before, first, resumed.version if resumed else None)
        self._record.write(self.folder)

    @property
    def lineages(self) -> list[Lineage]:
        """Of the policy over all lives of the run, the present one last."""
        return self._record.lineages

    def wait_for_engine(self) -> None:
        """Register the engine as soon as it answers. Raises services.ServiceDied."""
        settings = self._config.engine
        engine = EngineSpec(
            id=self._engine_id, url=self.engine_url, run=self.id, speaks=settings.speaks, model=settings.model
        )

        def ready() -> bool:
            registered = self.gateway(register_engine(engine))
            self._is_registered = True
            return registered.healthy

        self._services.wait("the engine was not ready", ready, settings.start_limit_s)

    def watch(self) -> Watch:
        limits, evaluator = self._config.controller, self._config.evaluator
        # An attempt may be silent for as long as it may run; its evaluator and a lost lease come on top.
        stall_limit_s = limits.time_limit_s + evaluator.time_limit_s * evaluator.tries + 60
        asked = Client(self.gateway_url, admin_key())  # without patience: that it is away is what is to be told
        watchdog = Watchdog(asked, self.id, self._config.trainer.watchdog_s, lambda line: self._services.say(line))
        return Watch(self.gateway, self.id, watchdog, stall_limit_s=stall_limit_s)

    def rollouts(self, watch: Watch, tick: Callable[[], None]) -> Rollouts:
        def look_after() -> None:
            self._services.check()
            tick()

        return Rollouts(self.gateway, self.id, self._config.run.seed, watch, look_after)


def _check(config: Config) -> None:
    """Everything that can be known before anything starts."""
    ChatTemplate(config.policy.model)
    try:
        model = json.loads((config.policy.model / "config.json").read_bytes())
        context = dict(model).get("max_position_embeddings")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"policy.model: cannot read config.json in {config.policy.model}: {error}") from None
    if not any(config.policy.model.glob("*.safetensors")):
        raise ConfigError(f"policy.model: {config.policy.model} holds no weights (*.safetensors)")
    if context and config.limits.context > context:
        raise ConfigError(f"limits.context is {config.limits.context}, but the policy takes {context} tokens at most")
    if not config.controller.external:
        check_controller(config)
    if config.gateway.url is not None:
        admin_key()


def _new_folder(config: Config) -> Path:
    folder = config.run.folder or Path.cwd() / "runs" / f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if folder.exists() and any(folder.iterdir()):
        known = (folder / resuming.RUN_FILE).is_file()
        instead = "go on with its run by --resume, name another one" if known else "name another one"
        raise ConfigError(f"run.folder: {folder} is not empty; {instead}, or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.folder: cannot make {folder}: {error.strerror}") from None
    return folder


def _place(url: str | None, host: str, port: int, setting: str, patience_s: float) -> tuple[str, socket.socket | None]:
    """Where a service is: at the given URL, or at a socket of ours, which an earlier service of the run may have for a
    moment yet. Raises ConfigError."""
    if url is not None:
        return url, None
    deadline = time.monotonic() + patience_s
    while True:
        try:
            listener = bind(host, port, setting)
        except ConfigError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return url_of(listener), listener
