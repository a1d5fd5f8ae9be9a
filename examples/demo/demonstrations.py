"""Poor demonstrations of mini-swe-agent at work, as the text that the policy will see and write.

`make_model.py` warm-starts the policy on them. The text is made by the same templates as in a real rollout: the
harness's messages come from `mini.yaml`, rendered as mini-swe-agent renders them, and the chat template is the one
that is saved with the model. Only the shell is imitated, for the few commands that the demonstrator knows.
"""

import random
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jinja2 import Environment, StrictUndefined
from tasks import Task

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo "
STOP = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Shares of the demonstrator's habits: the right way, and giving up after it has looked; else it looks in one file only.
GOOD = 0.20
GIVES_UP = 0.40
# Share of episodes that begin after an answer that mini-swe-agent refused.
SLIPS = 0.05

Message = dict[str, str]


class Turn(NamedTuple):
    """One call of an episode: the text that leads to the answer, and the answer with its stop token."""

    segment: str
    answer: str


class Text:
    """All text around the policy's answers: `mini.yaml`'s templates and the chat template, compiled once."""

    def __init__(self) -> None:
        config = Path(__file__).with_name("mini.yaml")
        mini: dict[str, Any] = yaml.safe_load(config.read_text(encoding="utf-8"))
        # mini-swe-agent renders with jinja's defaults and StrictUndefined.
        environment = Environment(undefined=StrictUndefined)
        self._system = environment.from_string(mini["agent"]["system_template"])
        self._instance = environment.from_string(mini["agent"]["instance_template"])
        self._observation = environment.from_string(mini["model"]["observation_template"])
        self._format_error = environment.from_string(mini["model"]["format_error_template"])
        self._chat = environment.from_string(CHAT_TEMPLATE)
        self.action_regex: str = mini["model"]["action_regex"]

    def opening(self, prompt: str) -> list[Message]:
        """The two messages that mini-swe-agent begins with."""
        return [
            {"role": "system", "content": self._system.render()},
            {"role": "user", "content": self._instance.render(task=prompt)},
        ]

    def observation(self, output: str, returncode: int) -> Message:
        """The message that reports a command's output."""
        result = {"output": output, "returncode": returncode}
        return {"role": "user", "content": self._observation.render(output=result)}

    def format_error(self) -> Message:
        """The message that follows an answer without exactly one bash block; that answer is dropped from history."""
        return {"role": "user", "content": self._format_error.render()}

    def chat(self, messages: list[Message], *, prompt: bool = True) -> str:
        """The conversation as the policy sees it; with `prompt`, up to where it is to answer."""
        return self._chat.render(messages=messages, add_generation_prompt=prompt)

    def after(self, answer: str, messages: list[Message]) -> str:
        """What `chat` adds after an answer and its stop token when `messages` follow it."""
        stub: list[Message] = [{"role": "assistant", "content": answer}]
        stop = len(self.chat(stub, prompt=False).rpartition(STOP)[0]) + len(STOP)
        return self.chat([*stub, *messages])[stop:]


def demonstrate(task: Task, text: Text, rng: random.Random) -> list[Turn]:
    """One episode of the poor demonstrator."""
    messages = text.opening(task["prompt"])
    if rng.random() < SLIPS:
        messages.append(text.format_error())
    turns: list[Turn] = []
    segment = text.chat(messages)
    commands = _demonstrator(task, rng)
    command = next(commands)
    while True:
        answer = f"```bash\n{command}\n```"
        if re.findall(text.action_regex, answer, re.DOTALL) != [command]:
            raise ValueError(f"mini.yaml: action_regex {text.action_regex!r} does not find the command in {answer!r}")
        turns.append(Turn(segment, answer + STOP))
        if command.startswith(SUBMIT):
            return turns
        output = imitate_shell(task["files"], command)
        segment = text.after(answer, [text.observation(output, 0)])
        command = commands.send(output)


def _demonstrator(task: Task, rng: random.Random) -> Generator[str, str, None]:
    """Commands of one episode; is sent each one's output.

    It copies exactly and chooses badly: the policy is to learn to copy here, and to choose by reinforcement learning.
    """
    key = task["prompt"].rstrip("?").split()[-1]
    luck = rng.random()
    if luck < GOOD:
        found = yield f"grep {key} *"
        yield SUBMIT + found.strip().rpartition("=")[2]
    elif luck < GOOD + GIVES_UP:
        yield f"grep {key} *"
        yield SUBMIT + "unknown"
    else:
        listed = yield "ls"
        shown = yield f"cat {listed.split()[0]}"
        yield SUBMIT + shown.strip().rpartition("=")[2]


def imitate_shell(files: dict[str, str], command: str) -> str:
    """What bash prints in a folder with these files, for the demonstrator's commands; all of them exit with 0."""
    match command.split():
        case ["ls"]:
            return "".join(f"{path}\n" for path in sorted(files))
        case ["cat", path]:
            return files[path]
        case ["grep", key, "*"]:
            lines = [(path, line) for path in sorted(files) for line in files[path].splitlines()]
            return "".join(f"{path}:{line}\n" for path, line in lines if key in line)
    raise ValueError(f"no imitation of {command!r}")
