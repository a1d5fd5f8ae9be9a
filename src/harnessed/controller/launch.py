"""How each kind of harness is told its endpoint, model and limits. Called by local.py for every attempt.

For each kind: what its warm template prepares, and what one attempt runs in which environment.
"""

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from harnessed.config import Config, Harness
from harnessed.controller.fence import Fence
from harnessed.controller.folders import AttemptFolder, BadTask
from harnessed.controller.harnesses import (
    claude_code,
    codex,
    hermes,
    mini_swe_agent,
    openclaw,
    opencode,
    openhands,
    qwen_code,
)
from harnessed.controller.harnesses.libraries import ENVIRONMENTS
from harnessed.controller.harnesses.preset import Endpoint, Preset
from harnessed.controller.orders import Preparation
from harnessed.records import Assignment, Task

_MINI = mini_swe_agent.__name__
COMMANDS: dict[str, Preset] = {
    "claude-code": claude_code,
    "codex": codex,
    "hermes": hermes,
    "openclaw": openclaw,
    "opencode": opencode,
    "openhands": openhands,
    "qwen-code": qwen_code,
}
"""The kinds that are command-line harnesses."""


@dataclass(frozen=True)
class Launch:
    """What one attempt runs: a function with arguments, or a command."""

    environment: dict[str, str]
    function: str = ""
    arguments: list[Any] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """Path in HOME -> content."""


def preparation(harness: Harness) -> Preparation:
    path = [entry or os.getcwd() for entry in sys.path]  # noqa: PTH109 - a string is wanted
    if harness.kind == "mini-swe-agent":
        return Preparation(path, [_MINI], f"{_MINI}:warm_up", [str(harness.config)])
    return Preparation(path, [harness.function.partition(":")[0]] if harness.function else [])


def template_environment(harness: Harness) -> dict[str, str]:
    """What the harness finds in its environment when it is imported."""
    own = mini_swe_agent.ENVIRONMENT if harness.kind == "mini-swe-agent" else ENVIRONMENTS.get(harness.kind, {})
    return own | _base(harness)


def program(harness: Harness) -> list[str]:
    """What a kind that is a command starts, with arguments of the user's own; empty for the other kinds."""
    if harness.command is None and harness.kind in COMMANDS:
        return [COMMANDS[harness.kind].PROGRAM]
    return harness.command or []


def launch(
    config: Config, fence: Fence | None, gateway: str, assignment: Assignment, task: Task, folder: AttemptFolder
) -> Launch:
    """`task` is what the agent may see of the assignment's task."""
    harness = config.harness
    environment = _base(harness) | {
        "HOME": str(folder.home),
        "TMPDIR": str(folder.temporary),
        "HARNESSED_ROLLOUT": assignment.rollout,
        "HARNESSED_ATTEMPT": str(assignment.attempt),
    }
    if harness.kind == "mini-swe-agent":
        # It hands its environment on to the model's shell, so the key goes another way.
        settings = mini_swe_agent.settings(str(harness.config), gateway, assignment.key, fence, folder)
        return Launch(environment, f"{_MINI}:run", [_prompt(task), settings])
    environment = _endpoint(gateway, assignment.key) | environment
    if harness.kind in ENVIRONMENTS:
        return Launch(ENVIRONMENTS[harness.kind] | environment, harness.function or "", [task])
    if preset := COMMANDS.get(harness.kind):
        # An assignment does not say what it is for; the gateway holds each rollout to its own limit.
        held_out = config.evaluation.sampling or config.sampling
        answer = max(config.sampling.max_tokens, held_out.max_tokens)
        endpoint = Endpoint(gateway, assignment.key, config.limits.context, answer)
        start = preset.start(endpoint, _prompt(task))
        command = [*program(harness), *start.arguments]
        return Launch(start.environment | environment, command=command, files=start.files)
    filled = {"{task}": str(folder.task), "{folder}": str(folder.path)}
    return Launch(environment, command=[_fill(word, filled, task) for word in harness.command or []])


def _base(harness: Harness) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in harness.inherit if name in os.environ}
    return {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"} | inherited | harness.environment


def _endpoint(gateway: str, key: str) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": f"{gateway}/v1",
        "OPENAI_API_BASE": f"{gateway}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": gateway,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_AUTH_TOKEN": key,
        "GOOGLE_GEMINI_BASE_URL": gateway,
        "GEMINI_API_KEY": key,
    }


def _prompt(task: Task) -> str:
    prompt = task.get("prompt")
    if not isinstance(prompt, str):
        raise BadTask("the task has no text `prompt` for the agent")
    return prompt


def _fill(word: str, filled: dict[str, str], task: Task) -> str:
    for name, value in filled.items():
        word = word.replace(name, value)
    return word.replace("{prompt}", _prompt(task)) if "{prompt}" in word else word
