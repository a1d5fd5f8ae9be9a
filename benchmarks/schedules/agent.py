"""The harness of `../schedules.py`: the demo's conversation with tools that take their time.

It speaks as mini-swe-agent does with `examples/demo/mini.yaml`, and imitates the few commands of the demo's policy in
place of a shell, so that a rollout costs a few milliseconds of CPU beside its model calls. Harnessed calls `run` in a
process of its own. How long a tool takes is drawn from a log-normal by the task's name, the rollout's number in its
group and the number of the call alone, so it is the same whatever the schedule.
"""

import http.client
import json
import math
import os
import random
import re
import time
from typing import Any
from urllib.parse import urlsplit

from demonstrations import SUBMIT, Message, Text
from tasks import Task

TEXT = Text()
CALLS = 4
"""Most answers, as in `mini.yaml`."""
SHOWN = 300
"""Characters of an output that are shown, as in `mini.yaml`."""
PATIENCE_S = 600.0


class Policy:
    """The endpoint that the environment names, on one connection."""

    def __init__(self) -> None:
        address = urlsplit(os.environ["OPENAI_BASE_URL"])
        self._path = f"{address.path}/chat/completions"
        self._connection = http.client.HTTPConnection(address.netloc, timeout=PATIENCE_S)
        self._headers = {
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        }

    def ask(self, messages: list[Message]) -> str:
        body = json.dumps({"model": "policy", "messages": messages})
        self._connection.request("POST", self._path, body, self._headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != http.client.OK:
            raise RuntimeError(f"status {response.status}: {answer[:300]!r}")
        return json.loads(answer)["choices"][0]["message"]["content"] or ""


def run(task: Task) -> dict[str, Any]:
    """One attempt; returns what mini-swe-agent would report."""
    policy, sibling = Policy(), os.environ["HARNESSED_ROLLOUT"].rpartition(".")[2]
    messages = TEXT.opening(task["prompt"])
    for call in range(CALLS):
        answer = policy.ask(messages)
        found = re.findall(TEXT.action_regex, answer, re.DOTALL)
        if len(found) != 1:
            messages = [*messages, TEXT.format_error()]
            continue
        if found[0].startswith(SUBMIT):
            return {"exit_status": "Submitted", "submission": found[0].removeprefix(SUBMIT)}
        time.sleep(tool_s(task["id"], sibling, call))
        output, code = use_tool(task["files"], found[0])
        messages = [*messages, {"role": "assistant", "content": answer}, TEXT.observation(output[:SHOWN], code)]
    return {"exit_status": "LimitsExceeded", "submission": ""}


def tool_s(task: str, sibling: str, call: int) -> float:
    """How long this tool call takes: seconds. Those of held-out tasks, which are not timed, take none."""
    if task.startswith("held-out"):
        return 0.0
    median, sigma = float(os.environ["TOOL_MEDIAN_S"]), float(os.environ["TOOL_SIGMA"])
    return random.Random(f"{task}/{sibling}/{call}").lognormvariate(math.log(median), sigma)


def use_tool(files: dict[str, str], command: str) -> tuple[str, int]:
    """Output and return code of a command among these files; an unknown one is not found."""
    match command.split():
        case ["ls"]:
            return "".join(f"{path}\n" for path in sorted(files)), 0
        case ["cat", path] if path in files:
            return files[path], 0
        case ["grep", word, "*"]:
            lines = [f"{path}:{line}\n" for path in sorted(files) for line in files[path].splitlines() if word in line]
            return "".join(lines), 0 if lines else 1
    return "", 127
