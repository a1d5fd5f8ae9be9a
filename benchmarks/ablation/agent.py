"""The ablation's harness: an agent that may send a sub-agent into every folder, and whose history is compacted.

It speaks the demo's conversations (`examples/demo/mini.yaml`) with tools of its own instead of a shell. Harnessed calls
`run`, like any Python harness, in a process of its own; `make_policy.py` lets a demonstrator take the policy's place.
How many rows a rollout gives is decided by the task and by what the model does: a conversation for every sub-agent, one
more after every compaction, and one more for every answer that is not a command.
"""

import json
import os
import re
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from demonstrations import SUBMIT, Message, Text
from folders import FOLDERS, Task

Ask = Callable[[list[Message]], str]
"""A conversation's next answer."""
Files = dict[str, str]

TEXT = Text()
CALLS = 6
"""Most answers of an agent."""
CALLS_OF_SUB_AGENT = 4
COMPACT_AFTER = 2
"""Commands in a conversation before its history is replaced by the last output."""
PATIENCE_S = 600.0


def run(task: Task) -> dict[str, Any]:
    """One attempt."""
    with ThreadPoolExecutor(len(FOLDERS)) as pool:
        return {"submission": solve(task, ask_policy, pool.map)}


def ask_policy(messages: list[Message]) -> str:
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""


def solve(task: Task, ask: Ask, each: Callable[..., Iterable[str]] = map) -> str:
    """What the agent submits; nothing if it does not. `each` runs the sub-agents."""
    below = {name: files for name, files in task["folders"].items() if name}
    reports: dict[str, str] = {}

    def sub_agent(folder: str) -> str:
        prompt = f"Folder {folder}: {task['prompt']}"
        return _work(prompt, CALLS_OF_SUB_AGENT, ask, lambda command: use_tool(below[folder], command))

    def use(command: str) -> tuple[str, int]:
        if command != "delegate" or reports:
            return use_tool(task["folders"][""], command)
        reports.update(zip(below, each(sub_agent, below), strict=True))
        return "".join(f"{folder}: {report or 'nothing'}\n" for folder, report in reports.items()), 0

    return _work(task["prompt"], CALLS, ask, use)


def _work(prompt: str, calls: int, ask: Ask, use: Callable[[str], tuple[str, int]]) -> str:
    """One agent or sub-agent, from its question to what it submits."""
    opening = TEXT.opening(prompt)
    messages, commands = opening, 0
    for _ in range(calls):
        answer = ask(messages)
        found = re.findall(TEXT.action_regex, answer, re.DOTALL)
        if len(found) != 1:
            messages = [*messages, TEXT.format_error()]
            continue
        if found[0].startswith(SUBMIT):
            return found[0].removeprefix(SUBMIT).strip()
        observation = TEXT.observation(*use(found[0]))
        commands += 1
        if commands % COMPACT_AFTER:
            messages = [*messages, {"role": "assistant", "content": answer}, observation]
        else:
            messages = [*opening, observation]
    return ""


def use_tool(files: Files, command: str) -> tuple[str, int]:
    """Output and return code of a command, among these files."""
    match command.split():
        case ["ls"]:
            return "".join(f"{name}\n" for name in sorted(files)), 0
        case ["cat", name] if name in files:
            return files[name], 0
        case ["grep", word, "*"]:
            lines = [f"{name}:{line}\n" for name in sorted(files) for line in files[name].splitlines() if word in line]
            return "".join(lines), 0 if lines else 1
    return "", 127
