"""Every harness, unmodified from its registry, through gateway and local runner to the end of a small task.

The engine's answers are scripted tokens in the format that the policy's template writes: some thought and some text,
then a call of the harness's own shell; a second call; the last words. Two rollouts run at once, so that a call that is
told for another's would be seen, and every answer is waited for, so that each harness meets the signs of life. No
harness reaches more than this machine's own addresses.
"""

import asyncio
import json
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest
from packages import FOLDER, NODE
from policies import CALLING, make_policy
from scripted_engine import Scripted
from texts import answer, ids, text

from harnessed.client import claim, create_groups, end_attempt, get_totals, get_transcripts, renew
from harnessed.config import Config
from harnessed.controller.local import LocalRunner
from harnessed.gateway import delivery
from harnessed.records import Fate, GroupSpec, Outcome
from harnessed.training.samples import build

LIMIT_S = 150
WORDS = ("amber", "birch")
MINI = Path(find_spec("minisweagent").origin).parent / "config" / "mini.yaml" if find_spec("minisweagent") else Path()


@dataclass
class Case:
    """A harness in this suite."""

    tool: str
    """Its shell; empty: it is told commands in the text."""
    harness: dict
    """The configuration's section."""
    more: dict = field(default_factory=dict)
    """Further arguments of the shell."""
    parameter: str = "command"
    rows: float = 1.0
    """Of a rollout."""
    side_calls: int = 0
    last: str = ""
    """The call that ends the task, where words do not."""
    needs: Path | None = None


def sdk(function, kind="python"):
    return Case("bash", {"kind": kind, "function": f"sdk_agents:{function}"})


def program(kind, path, tool, **case):
    path = FOLDER / path
    return Case(tool, {"kind": kind, "command": [str(path)]}, needs=path, **case)


def mini(config, tool="bash"):
    finish = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    return Case(tool, {"kind": "mini-swe-agent", "config": config, "shell": "plain"}, last=finish)


BIN = "node_modules/.bin/"
CASES = {
    "mini-swe-agent": mini("mini.yaml"),
    "mini-swe-agent, text": mini("text.yaml", ""),
    "mini-swe-agent, responses": mini("responses.yaml"),
    "claude-code": program("claude-code", BIN + "claude", "Bash", more={"description": "Write"}),
    "codex": program("codex", BIN + "codex", "exec_command", parameter="cmd"),
    "opencode": program("opencode", BIN + "opencode", "bash", more={"description": "Write"}),
    "openai, chat": sdk("openai_chat"),
    "openai, chat streamed": sdk("openai_chat_streamed"),
    "openai, responses": sdk("openai_responses"),
    "anthropic": sdk("anthropic_messages"),
    "google-genai": sdk("google_genai"),
    "litellm": sdk("litellm_chat"),
    "openai-agents": sdk("openai_agents", "openai-agents"),
    "langchain": sdk("langchain", "langchain"),
    "langchain, anthropic": sdk("langchain_anthropic", "langchain"),
    "qwen-code": program("qwen-code", BIN + "qwen", "run_shell_command", more={"is_background": False}),
    "hermes": program("hermes", "hermes/bin/hermes", "terminal"),
    "openhands": program("openhands", "openhands/bin/openhands", "terminal", more={"security_risk": "LOW"}),
    # It ends every request with a message that is gone from the next one.
    "openclaw": program("openclaw", BIN + "openclaw", "exec", rows=3.0),
}


def write(case, command):
    """An answer that runs a command."""
    if not case.tool:
        return f"Now.\n\n```mswea_bash_command\n{command}\n```"
    call = {"name": case.tool, "arguments": {**case.more, case.parameter: command}}
    return f"<think>\n Hm,\n so. \n</think>\n\n Now \n\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


def script(case):
    """The policy: it knows how far it is by its own answers in the context."""

    def next_answer(prompt, _):
        said = text(prompt)
        if case.tool and "<|im_start|>tools" not in said:
            return slowly("A title")
        step = said.count("<|im_start|>assistant\n") - 1
        (word,) = {word for word in WORDS if f"the word {word}" in said}
        last = write(case, case.last) if case.last else " \nDone,  it is written. "
        steps = [write(case, f"echo '{word}  é' > out.txt"), write(case, "cat out.txt"), last]
        return slowly(steps[step])

    return next_answer


def slowly(said):
    """It begins late, and stops for a while in the middle of the text."""
    return Scripted(answer(said), delay_s=0.3, stall_at=len(ids(said.partition("o")[0])) + 1, stall_s=0.3)


def configuration(case, house, tmp_path):
    environment = {"PATH": f"{NODE}:/usr/local/bin:/usr/bin:/bin"}
    # Whatever a harness would fetch from elsewhere fails at once.
    environment |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    environment |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
    harness = {"environment": environment} | case.harness
    if "config" in harness:
        harness["config"] = str(mini_config(tmp_path, harness["config"]))
    return Config.model_validate(
        {
            "policy": {"model": str(house.policy)},
            "tasks": {"train": "t.jsonl", "held_out": "t.jsonl", "hidden": ["word"]},
            "harness": harness,
            "evaluator": {"function": "sdk_agents:judge"},
            "controller": {"time_limit_s": LIMIT_S, "keep_folders": "all"},
            "limits": {"context": 1_000_000},
            "sampling": {"max_tokens": 4000},
        }
    )


def mini_config(folder, name):
    """The package's own configurations, with the model class as the harness's command line would choose it."""
    import yaml

    own = MINI.parent / ("mini_textbased.yaml" if name == "text.yaml" else "mini.yaml")
    tree = yaml.safe_load(own.read_text())
    classes = {"text.yaml": "litellm_textbased", "responses.yaml": "litellm_response"}
    if name in classes:
        tree["model"]["model_class"] = classes[name]
    tree["agent"] |= {"mode": "yolo", "agent_class": "default"}
    path = folder / name
    path.write_text(yaml.safe_dump(tree))
    return path


async def run(config, house, tmp_path):
    """Two rollouts at once; how they ended."""
    tasks = [{"prompt": f"Write the word {word} into out.txt.", "word": word} for word in WORDS]
    specs = [GroupSpec(id=task["word"], run="r", task=task, n=1, sampling=config.sampling) for task in tasks]
    await house.admin(create_groups(specs))
    runner = LocalRunner(config, house.url, tmp_path / "attempts", asyncio.Event(), lambda _: asyncio.sleep(0, 0.0))
    await runner.open()
    try:
        assignments = await house.admin(claim("r", "controller", 2, 3))
        for assignment in assignments:
            runner.start(assignment)
        async with asyncio.timeout(LIMIT_S + 30):
            while not all(runner.attempts().values()):
                await house.admin(renew("controller"))
                await asyncio.sleep(0.2)
        ended = {name: end.ending for name, end in runner.attempts().items()}
    finally:
        await runner.close()
    for assignment in assignments:
        await house.admin(end_attempt(assignment.rollout, 1, ended[f"{assignment.rollout}/1"], 3))
    return ended


@pytest.mark.parametrize("name", CASES)
async def test_a_task_is_worked_through(name, house, tmp_path, monkeypatch):
    monkeypatch.setattr(delivery, "PING_S", 0.05)
    monkeypatch.setattr(delivery, "PATIENCE_S", 0.05)
    case = CASES[name]
    if case.needs and not case.needs.exists():
        missing = FOLDER / "missing.json"
        known = json.loads(missing.read_text()) if missing.is_file() else {}
        pytest.skip(f"{name}: {known.get(name, '`make harnesses` fetches it')}")
    make_policy(house.policy, CALLING)
    await house.restart()
    house.engine.context, house.engine.script = 10**7, script(case)
    await house.make_run(context=1_000_000)
    ended = await run(configuration(case, house, tmp_path), house, tmp_path)
    logs = {log.parent.name: log.read_text()[-3000:] for log in tmp_path.glob("attempts/*/log.txt")}
    assert [(ending.outcome, ending.reward) for ending in ended.values()] == [(Outcome.OK, 1.0)] * 2, (ended, logs)

    samples = []
    for word, other in (WORDS, WORDS[::-1]):
        (transcript,) = await house.admin(get_transcripts(word))
        (attempt,) = transcript.attempts
        said = json.dumps([[node.messages, node.message] for node in attempt.nodes])
        assert word in said and other not in said, "each call stands on its own rollout"
        assert len(attempt.nodes) == 3 + case.side_calls, [node.message for node in attempt.nodes]
        samples.append(build(transcript))
    totals = await house.admin(get_totals("r"))
    sampled = house.engine.sampled_tokens
    assert (totals.sampled_tokens, totals.lost, totals.undelivered) == (sampled, 0, 0)
    assert sum(sample.fates.get(Fate.TRAINED, 0) for sample in samples) == sampled
    assert sum(len(sample.rows) for sample in samples) / 2 == case.rows


def test_nearly_all_of_them_are_here(request):
    """So that a suite that skips its harnesses is not taken for one that ran them."""
    present = [name for name, case in CASES.items() if case.needs is None or case.needs.exists()]
    kinds = {name.partition(",")[0] for name in present}
    if not FOLDER.exists():
        pytest.skip("`make harnesses` fetches them")
    assert len(kinds) >= 10, sorted(kinds)
