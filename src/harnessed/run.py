"""One run of the command line: what is checked before anything starts, its folder, its services, its gateway.

`cli.py` opens a `Run` for `harnessed train` and `harnessed eval`; at its end every process that it started has ended.
"""

import dataclasses
import json
import os
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from harnessed import logs
from harnessed.client import (
    ApiError,
    Client,
    Unreachable,
    create_run,
    examine_template,
    register_engine,
    remove_engine,
)
from harnessed.config import Config, ConfigError, hide_passwords
from harnessed.controller.check import check as check_controller
from harnessed.gateway.keys import ADMIN, METRICS, SECRET, Keyring
from harnessed.gateway.template import ChatTemplate
from harnessed.records import EngineSpec, History, RunSpec, Verdict
from harnessed.services import Services, bind, url_of
from harnessed.training.rollouts import Rollouts
from harnessed.training.watch import Watch

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

    def __init__(self, config: Config, path: Path, overrides: list[str]) -> None:
        """`path` and `overrides` are where the configuration came from; services read it again. Raises ConfigError."""
        self._config = config
        self._arguments = [str(path.resolve()), *overrides]
        _check(config)
        self.id = f"{config.run.name}-{secrets.token_hex(3)}"
        gateway, engine = config.gateway, config.engine
        self.gateway_url, self._gateway_socket = _place(gateway.url, gateway.host, gateway.port, "gateway.port")
        self.engine_url, self._engine_socket = _place(engine.url, engine.host, engine.port, "engine.port")
        self.folder = _new_folder(config)  # the last check, for it makes the folder
        self._services = Services(self.folder / "logs", partial(logs.entry, config.gateway.log))
        self._engine_id = f"{self.id}-engine"
        self._is_registered = False
        self.gateway: Client

    def __enter__(self) -> Self:
        hear_interrupts()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._services.stop()
        if self._is_registered and self._config.gateway.url is not None:
            self._remove_engine()

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

        Raises services.ServiceDied, client.ApiError, client.Unreachable.
        """
        config = self._config
        settings = config.model_dump(mode="json")
        if config.gateway.database is not None:
            settings["gateway"]["database"] = hide_passwords(config.gateway.database)
        used = yaml.safe_dump(settings, sort_keys=False)
        (self.folder / "config.yaml").write_text(f"# As it was used; it came from {self._arguments[0]}.\n{used}")
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
        self.gateway = self._client(self.gateway_url, admin_key())
        policy = config.policy
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
        return Watch(self.gateway, self.id, stall_limit_s=stall_limit_s)

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
        raise ConfigError(f"run.folder: {folder} is not empty; name another one, or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.folder: cannot make {folder}: {error.strerror}") from None
    return folder


def _place(url: str | None, host: str, port: int, setting: str) -> tuple[str, socket.socket | None]:
    """Where a service is: at the given URL, or at a socket of ours. Raises ConfigError."""
    if url is not None:
        return url, None
    listener = bind(host, port, setting)
    return url_of(listener), listener
