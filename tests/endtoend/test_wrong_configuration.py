"""Wrong configuration ends with one clear line and status 2, never with a traceback, and starts nothing."""

import socket

import pytest
from command import environment, harnessed, make_config, processes_of


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return make_config(tmp_path_factory.mktemp("wrong"))


def complaint_of(*arguments, env=None) -> str:
    result = harnessed("train", *arguments, env=env)
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("trainer.stps=3", "did you mean trainer.steps?"),
        ("trainer.steps=soon", "trainer.steps"),
        ("policy.model=/no/such/folder", "/no/such/folder"),
        ("limits.context=100000", "limits.context"),
        ("harness.function=no_such_module:run", "no_such_module"),
        ("harness.function=agent:no_such_function", "no_such_function"),
        ("evaluator.function=agent:no_such_function", "no_such_function"),
        ("tasks.train=no_such_module:tasks", "no_such_module"),
        ("tasks.held_out=no_such_file.jsonl", "no_such_file.jsonl"),
        ("gateway.url=http://127.0.0.1:9", "HARNESSED_ADMIN_KEY"),
        ("trainer.resume_from=no/such/checkpoint", "harnessed.json is missing"),
    ],
)
def test_a_wrong_setting(config, override, complaint):
    assert complaint in complaint_of(config, override, "run.folder=unused")
    assert processes_of(config.parent) == {}


@pytest.mark.parametrize("service", ["gateway", "engine"])
def test_a_port_in_use(config, service):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = complaint_of(config, f"{service}.port={port}", "run.folder=unused")
    assert f"127.0.0.1:{port}" in line
    assert f"{service}.port" in line


@pytest.mark.parametrize(
    ("package", "overrides", "complaint"),
    [
        ("minisweagent", ["harness.kind=mini-swe-agent", "harness.config=/etc/hostname"], "pip install"),
        ("torch", [], "pip install"),
        ("peft", ["trainer.lora={}"], "pip install"),
        ("bitsandbytes", ["trainer.optimiser.kind=adamw8bit"], "pip install bitsandbytes"),
    ],
)
def test_a_missing_package(config, tmp_path, package, overrides, complaint):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class WithoutIt:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        hidden = name.partition('.')[0] == {package!r}\n"
        "        return None if hidden else PathFinder.find_spec(name, path, target)\n"
        "sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutIt\n"
    )
    env = environment(PYTHONPATH=str(tmp_path))
    line = complaint_of(config, "run.folder=unused", *overrides, env=env)
    assert complaint in line


def test_a_missing_configuration():
    assert "/no/such.yaml" in complaint_of("/no/such.yaml")
