"""Build the ablation's policy: the demo's small Qwen3, warm-started on poor demonstrations in the ablation's harness.

    PYTHONPATH=examples/demo python benchmarks/ablation/make_policy.py OUT [--seed S]

Model, tokenizer and warm start are those of `examples/demo/make_model.py`. The demonstrator answers in the policy's
place while the harness itself runs, so what is taught is what will be seen.
"""

import random
from collections.abc import Iterator

import agent
import folders
import make_model
from demonstrations import STOP, SUBMIT, Message, Turn

# Shares of an agent's habits: the right way; giving up after it has looked; sending sub-agents without looking; the
# rest looks into one file only.
GOOD = 0.25
GIVES_UP = 0.30
DELEGATES = 0.20
# The same of a sub-agent, which cannot delegate.
GOOD_BELOW = 0.60
GIVES_UP_BELOW = 0.15
SLIPS = 0.03
"""Share of answers that are no command."""
NOTHING = ("unknown", "nothing")


def conversations(seed: int) -> Iterator[list[Turn]]:
    """Endless conversations of the poor demonstrator, on training tasks of a seed that no run trains on."""
    rng = random.Random(f"conversations/{seed}")
    for task in folders.train(-1 - seed):
        demonstrator = Demonstrator(rng)
        agent.solve(task, demonstrator.answer)
        yield from demonstrator.conversations


class Demonstrator:
    """Answers every call of one rollout. It copies exactly and chooses badly: choosing is left to training."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._habits: dict[str, str] = {}
        self.conversations: list[list[Turn]] = []
        """What it said, as rows."""

    def answer(self, messages: list[Message]) -> str:
        if self._rng.random() < SLIPS:
            return "I do not know."
        answer = f"```bash\n{self._command(messages)}\n```"
        self._keep(agent.TEXT.chat(messages), answer + STOP)
        return answer

    def _keep(self, prompt: str, answer: str) -> None:
        for row in self.conversations:
            before = "".join(turn.segment + turn.answer for turn in row)
            if prompt.startswith(before):
                row.append(Turn(prompt.removeprefix(before), answer))
                return
        self.conversations.append([Turn(prompt, answer)])

    def _command(self, messages: list[Message]) -> str:
        prompt, last = messages[1]["content"], messages[-1]["content"]
        is_sub_agent = prompt.startswith("Folder ")
        habit = self._habits.setdefault(prompt, self._habit(is_sub_agent))
        if not last.startswith("returncode "):
            return {"delegates": "delegate", "lists": "ls"}.get(habit, f"grep {prompt.rstrip('?').split()[-1]} *")
        lines = last.splitlines()[1:]
        if not lines:
            return "delegate" if habit == "good" and not is_sub_agent else SUBMIT + "unknown"
        if lines[0].endswith(".conf"):
            return f"cat {lines[0]}"
        if ": " in lines[0]:
            reports = [line.rpartition(": ")[2] for line in lines]
            found = [report for report in reports if report not in NOTHING]
            return SUBMIT + (found[0] if found and habit == "good" else reports[-1])
        return SUBMIT + ("unknown" if habit == "gives up" else lines[-1].rpartition("=")[2])

    def _habit(self, is_sub_agent: bool) -> str:
        shares = (GOOD_BELOW, GIVES_UP_BELOW, 0.0) if is_sub_agent else (GOOD, GIVES_UP, DELEGATES)
        shares = (*shares, 1 - sum(shares))
        return self._rng.choices(("good", "gives up", "delegates", "lists"), shares)[0]


if __name__ == "__main__":
    make_model.demonstrations = conversations
    make_model.main()
