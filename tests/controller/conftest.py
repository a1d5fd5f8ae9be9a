"""The runner and the gateway that tests share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file, also for the controller's processes

from controller_runs import Running, make_config, running
from scripted_gateway import ScriptedGateway


@pytest.fixture(scope="session")
def gateway() -> Iterator[ScriptedGateway]:
    scripted = ScriptedGateway()
    yield scripted
    scripted.close()


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory, gateway: ScriptedGateway) -> Iterator[Running]:
    with running(make_config(), tmp_path_factory.mktemp("local"), gateway) as started:
        yield started
