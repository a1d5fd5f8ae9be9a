"""What can be known to be wrong with harness and evaluator before anything starts. Called by the command line."""

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from harnessed.config import Config, ConfigError, Harness
from harnessed.controller import fence
from harnessed.controller.launch import COMMANDS, preparation, program, template_environment

_IMPORT_LIMIT_S = 120
_RESOLVE = """
import importlib, json, sys
sys.path[:], name = json.loads(sys.argv[1])
module, _, function = name.partition(":")
if not callable(getattr(importlib.import_module(module), function, None)):
    sys.exit(f"module {module} has no function {function}")
"""


def check(config: Config) -> None:
    """Raises ConfigError with one line that says what to change. May take as long as importing the harness does."""
    harness, evaluator = config.harness, config.evaluator
    path = template_environment(harness)["PATH"]
    if harness.kind == "mini-swe-agent":
        _check_mini_swe_agent(harness)
        # Also says in one line, here where somebody reads it, that there is no sandbox.
        fence.find(harness.shell, config.controller.file_size_mb << 20)
    for setting, function in (("harness.function", harness.function), ("evaluator.function", evaluator.function)):
        if function:
            _check_function(setting, function, harness)
    commands = {"evaluator.command": evaluator.command}
    if harness.kind == "command" or harness.kind in COMMANDS:
        commands["harness.command"] = program(harness)
    for setting, command in commands.items():
        if command is not None and (not command or not shutil.which(command[0], path=path)):
            raise ConfigError(f"{setting}: there is no program {(command or [''])[0]!r} on the PATH")


def _check_mini_swe_agent(harness: Harness) -> None:
    if not importlib.util.find_spec("minisweagent"):
        raise ConfigError("harness.kind is mini-swe-agent, which is not installed: pip install mini-swe-agent")
    try:
        tree = yaml.safe_load((harness.config or Path()).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"harness.config: cannot read {harness.config}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"harness.config: {harness.config} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict) or "agent" not in tree:
        raise ConfigError(f"harness.config: {harness.config} has no section `agent`")


def _check_function(setting: str, function: str, harness: Harness) -> None:
    """Resolve it as the warm template will: in a process of its own, for importing runs the module's code."""
    argument = json.dumps([preparation(harness).path, function])
    with tempfile.TemporaryDirectory() as home:
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-c", _RESOLVE, argument],
                env={"HOME": home, **template_environment(harness)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_IMPORT_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{setting}: importing {function} takes more than {_IMPORT_LIMIT_S} s") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        raise ConfigError(f"{setting} is {function!r}: {said}")
