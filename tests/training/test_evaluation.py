"""How held-out tasks are sampled, and what is made of them."""

import io

import pytest
from rich.console import Console
from transcripts import node, transcript

from harnessed.config import Evaluation
from harnessed.records import UNKNOWN_VERSION, Outcome, Purpose, Sampling, Version
from harnessed.training.display import Display, beside_success, success
from harnessed.training.evaluation import BESIDE, evaluate, judge, of_version, specs
from harnessed.training.failures import NothingMeasured
from harnessed.training.metrics import of_held_out
from harnessed.training.rollouts import Rollouts

TASKS = [{"prompt": str(i)} for i in range(3)]
TRAINING = Sampling(temperature=0.9, max_tokens=30)
LABEL = of_version(Version(1, 12))


class Done(Rollouts):
    """Every rollout gets a reward at once, and nothing is run."""

    def __init__(self, rewards):
        super().__init__(None, "r", 0, None, lambda: None)
        self.rewards = iter(rewards)

    def collect(self, specs):
        self.open = {spec.id: spec for spec in specs}
        return [[one(f"{spec.id}.{index}", next(self.rewards)) for index in range(spec.n)] for spec in specs]


class Books:
    """In place of a report."""

    def __init__(self):
        self.fates = []

    def transcript(self, transcript, task, fates, step):
        self.fates.append((transcript.rollout.id, task, dict(fates), step))


def one(id, reward, *versions):
    """A rollout with an answer of three tokens for each version."""
    nodes = [node(i, i - 1, [1], [2, 3, 9], version=version) for i, version in enumerate(versions or [0], 1)]
    outcome = Outcome.OK if reward is not None else Outcome.INFRASTRUCTURE
    return transcript(nodes, id=id, reward=reward, outcome=outcome, purpose=Purpose.EVALUATION)


def groups(settings, priority=0):
    return specs(Done([]), TASKS, settings, TRAINING, LABEL, priority)


def test_held_out_tasks_are_sampled_as_in_training_where_nothing_else_is_set():
    assert [group.sampling for group in groups(Evaluation())] == [TRAINING] * 3


def test_held_out_tasks_have_a_sampling_of_their_own_and_the_greedy_ones_its_limits():
    own = Sampling(temperature=0.6, top_p=0.95, max_tokens=50)
    greedy = own.model_copy(update={"temperature": 0.0})
    found = groups(Evaluation(sampling=own, greedy_tasks=1))
    assert [group.sampling for group in found] == [own, own, own, greedy]


def test_groups_say_which_version_they_began_with_and_draw_as_all_others_of_the_run():
    found = groups(Evaluation(samples=4, greedy_tasks=1), BESIDE)
    assert [(group.id, group.n) for group in found] == [
        ("r.held-out-1.12.0000", 4),
        ("r.held-out-1.12.0001", 4),
        ("r.held-out-1.12.0002", 4),
        ("r.held-out-1.12-greedy.0000", 1),
    ]
    assert {group.purpose for group in found} == {Purpose.EVALUATION}
    assert {group.priority for group in found} == {-1}
    later = specs(Done([]), TASKS, Evaluation(samples=4), TRAINING, of_version(Version(2, 30)))
    assert [group.seed for group in later] == [group.seed for group in found[:3]]
    assert {group.priority for group in later} == {0}


def test_success_is_the_mean_of_the_tasks_whatever_each_lost():
    rollouts, books = Done([1, 1, None, None, 0, None, None, None, 0.5]), Books()
    settings = Evaluation(samples=2, greedy_tasks=3)
    result = evaluate(rollouts, books, TASKS, settings, TRAINING, LABEL)
    assert (result.success, result.greedy) == (0.5, 0.5)
    assert (result.tasks, result.rollouts, result.unjudged) == (3, 6, 3)
    assert result.interval == pytest.approx((0.0945, 0.9055), abs=1e-3)  # Wilson, 1 of 2
    assert result.complaint.startswith("5 of 9 rollouts went wrong")
    assert rollouts.open == {}
    assert [(id, task, step) for id, task, _, step in books.fates][::2] == [
        ("r.held-out-1.12.0000.0", TASKS[0], None),
        ("r.held-out-1.12.0001.0", TASKS[1], None),
        ("r.held-out-1.12.0002.0", TASKS[2], None),
        ("r.held-out-1.12-greedy.0000.0", TASKS[0], None),
        ("r.held-out-1.12-greedy.0002.0", TASKS[2], None),
    ]
    assert [fates for _, _, fates, _ in books.fates[:2]] == [{"evaluation": 3}] * 2


def judged(*rollouts):
    """One for each task."""
    return judge(groups(Evaluation()), [[each] for each in rollouts], 0.95)


def test_the_versions_are_those_of_the_tokens():
    old, new = Version(0, 7), Version(1, 9)
    result = judged(one("a", 1, new.pack(), UNKNOWN_VERSION), one("b", 1, old.pack(), new.pack()), one("c", 1))
    assert result.versions == (Version(0, 0), new)
    assert judged(*[one("a", 1, UNKNOWN_VERSION)] * 3).versions is None


def test_a_set_up_that_is_broken_measures_nothing():
    with pytest.raises(NothingMeasured, match="measured nothing: 3 of 3 rollouts went wrong"):
        judged(*[one("a", None)] * 3)
    silent = transcript([], outcome=Outcome.AGENT_EXIT, reward=0.0)
    with pytest.raises(NothingMeasured):
        judged(silent, silent, silent)


def test_people_and_metrics_get_the_interval():
    result = judged(one("a", 1, Version(0, 3).pack()), one("b", 1, Version(0, 5).pack()), one("c", 0))
    assert success(result) == "0.667 (0.21 to 0.94)"
    assert beside_success(result) == "3 tasks, versions 0.0 to 0.5"
    line = of_held_out(result, 1.5)
    assert (line["held_out"], line["held_out_low"], line["held_out_high"]) == (result.success, *result.interval)
    assert line["held_out_versions"] == [[0, 0], [0, 5]]
    console = Console(file=io.StringIO(), width=200)
    Display(1, dict, console).held_out("after", result)
    assert "held-out success 0.667 (0.21 to 0.94) after training (3 tasks" in console.file.getvalue()


def test_rewards_without_an_interval_have_none():
    result = judge(groups(Evaluation())[:1], [[one("a", 0.5)]], 0.95)
    assert success(result) == "0.500"
    line = of_held_out(result, 1.0)
    assert (line["held_out_low"], line["held_out_high"]) == (None, None)


def test_beside_training_needs_a_time_in_between():
    with pytest.raises(ValueError, match=r"set evaluation\.every as well"):
        Evaluation(beside=True)
    assert Evaluation(beside=True, every=5).beside
