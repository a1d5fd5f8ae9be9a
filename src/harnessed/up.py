"""`harnessed up`: a gateway and a controller that stand by themselves, for trainers that come and go.

A trainer names them with `gateway.url` and `controller.external`. `cli.py` calls `up`.
"""

import os
import time
from functools import partial
from pathlib import Path

from harnessed import logs
from harnessed.client import Client, list_engines
from harnessed.config import Config, ConfigError
from harnessed.controller.check import check
from harnessed.run import ADMIN_KEY_FILE, ADMIN_KEY_VARIABLE, admin_key, hear_interrupts, keep_keys
from harnessed.services import Services, bind, url_of

START_LIMIT_S = 60.0


def up(config: Config, given: list[str], folder: Path, *, engine: bool) -> None:
    """Start them and look after them until Ctrl-C, which ends them in order.

    `given`: the configuration file and the overrides, which services read again. `engine`: start one too; it serves the
    policy as it is, or what a trainer writes into `engine.weights`. Raises ConfigError, services.ServiceDied.
    """
    if config.gateway.url is not None:
        raise ConfigError("`harnessed up` starts a gateway of its own: leave out gateway.url")
    if engine and config.engine.url is not None:
        raise ConfigError("`harnessed up --engine` starts an engine of its own: leave out engine.url")
    if not config.controller.external:
        check(config)
    gateway_socket = bind(config.gateway.host, config.gateway.port, "gateway.port")
    engine_socket = bind(config.engine.host, config.engine.port, "engine.port") if engine else None
    url, options = url_of(gateway_socket), ["--folder", str(folder)]
    keep_keys(folder)
    key_file = folder / ADMIN_KEY_FILE
    os.environ[ADMIN_KEY_VARIABLE] = key_file.read_text(encoding="utf-8")
    logs.configure(config.gateway.log)
    hear_interrupts()
    with Services(folder / "logs", partial(logs.entry, config.gateway.log)) as services:
        services.say = logs.say
        services.start("gateway", [*given, *options], gateway_socket)
        if engine_socket is not None:
            services.start("engine", [*given, *options], engine_socket)
        if not config.controller.external:  # last, so that it ends first and can give back what it holds
            services.start("controller", [*given, f"gateway.url={url}", *options])
        with Client(url, admin_key(), patience_s=START_LIMIT_S, meanwhile=services.check) as client:
            client(list_engines())
        if engine_socket is not None:
            logs.say(f"engine on {url_of(engine_socket)}")
        logs.say(f"gateway on {url}; its admin key, for {ADMIN_KEY_VARIABLE}, is in {key_file}; Ctrl-C ends all")
        try:
            while True:
                services.check()
                time.sleep(1)
        except KeyboardInterrupt:
            logs.say("ending")
