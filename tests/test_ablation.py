"""The ablation: its harness makes as many conversations as task and model want; its figures are what they say."""

import importlib
import itertools
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("ablation", "agent", "folders", "make_policy", "make_model", "demonstrations", "tasks")

TASK = {
    "prompt": "What is the value of port?",
    "folders": {
        "": {"app.conf": "host=cedar\n"},
        "east": {"db.conf": "port=amber\n"},
        "west": {"db.conf": "user=birch\n"},
    },
    "answer": "amber",
}


@pytest.fixture(scope="module")
def modules():
    """Those of demo and benchmark, which are found beside their configuration and not in a package."""
    before, found = list(sys.path), set(sys.modules)
    sys.path[:0] = [str(ROOT / "benchmarks" / "ablation"), str(ROOT / "examples" / "demo")]
    loaded = {name: importlib.import_module(name) for name in NAMES[1:]}
    sys.path.insert(0, str(ROOT / "benchmarks"))
    loaded["ablation"] = importlib.import_module("ablation")
    yield SimpleNamespace(**loaded)
    sys.path[:] = before
    for name in set(NAMES) - found:
        del sys.modules[name]


def bash(command):
    return f"```bash\n{command}\n```"


def play(modules, *commands):
    """The agent's submission and every request, as the texts of its messages; sub-agents look and report."""
    commands, asked = iter(commands), []

    def ask(messages):
        texts = [message["content"] for message in messages[1:]]
        asked.append(texts)
        if not texts[0].startswith("Folder "):
            return next(commands)
        if texts[-1] == texts[0]:
            return bash("grep port *")
        return bash(
            modules.demonstrations.SUBMIT + (texts[-1].strip().rpartition("=")[2] if "=" in texts[-1] else "none")
        )

    return modules.agent.solve(TASK, ask), asked


def test_a_key_that_is_elsewhere_takes_a_conversation_for_each_folder(modules):
    submitted, asked = play(
        modules, bash("grep port *"), bash("delegate"), bash(modules.demonstrations.SUBMIT + "amber")
    )
    assert submitted == "amber"
    assert {texts[0] for texts in asked} == {
        "What is the value of port?",
        "Folder east: What is the value of port?",
        "Folder west: What is the value of port?",
    }
    assert asked[1][2:] == ["returncode 1\n"]
    # the history of two commands is gone but for the last output
    assert asked[-1] == ["What is the value of port?", "returncode 0\neast: amber\nwest: none\n"]


def test_what_is_no_command_is_dropped_from_the_history(modules):
    submitted, asked = play(modules, "well", bash("rm -rf *"), bash("delegate now"), *["?"] * 3)
    assert submitted == ""
    assert len(asked) == modules.agent.CALLS
    assert asked[1] == [TASK["prompt"], "Please answer with exactly one bash block."]
    assert asked[2][-1] == "returncode 127\n"


def test_the_demonstrator_starts_poor_and_harder_tasks_give_more_rows(modules):
    rows = {True: [], False: []}
    successes = 0
    tasks = list(itertools.islice(modules.folders.train(0), 400))
    for task in tasks:
        demonstrator = modules.make_policy.Demonstrator(random.Random(task["id"]))
        successes += modules.agent.solve(task, demonstrator.answer) == task["answer"]
        key = task["prompt"].rstrip("?").split()[-1]
        easy = any(f"{key}=" in text for text in task["folders"][""].values())
        rows[easy].append(len(demonstrator.conversations))
    assert successes < 0.4 * len(tasks)
    assert np.mean(rows[False]) > 1.2 * np.mean(rows[True])


def test_tasks_have_one_answer(modules):
    for task in itertools.islice(modules.folders.held_out(0), 200):
        key = task["prompt"].rstrip("?").split()[-1]
        lines = [line for files in task["folders"].values() for text in files.values() for line in text.splitlines()]
        assert [line for line in lines if key in line] == [f"{key}={task['answer']}"]


def test_intervals_are_students(modules):
    values = np.array([[1.0], [2.0], [3.0], [4.0], [5.0]])
    mean, half = modules.ablation.interval(values)
    # deviation sqrt(2.5); t = 2.776 with four degrees of freedom
    assert (mean[0], half[0]) == (3.0, pytest.approx(2.776 * (2.5 / 5) ** 0.5))
