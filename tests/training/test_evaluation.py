"""How held-out tasks are sampled."""

import pytest

from harnessed.config import Evaluation
from harnessed.records import Sampling
from harnessed.training.evaluation import evaluate
from harnessed.training.rollouts import Rollouts

TASKS = [{"prompt": str(i)} for i in range(3)]
TRAINING = Sampling(temperature=0.9, max_tokens=30)


class Asked(Exception):
    pass


class OnlyAsked(Rollouts):
    """Runs nothing."""

    def collect(self, specs):
        raise Asked([spec.sampling for spec in specs])


def asked(settings):
    with pytest.raises(Asked) as caught:
        evaluate(OnlyAsked(None, "r", 0, None, lambda: None), None, TASKS, settings, TRAINING, "before")
    return caught.value.args[0]


def test_held_out_tasks_are_sampled_as_in_training_where_nothing_else_is_set():
    assert asked(Evaluation()) == [TRAINING] * 3


def test_held_out_tasks_have_a_sampling_of_their_own_and_the_greedy_ones_its_limits():
    own = Sampling(temperature=0.6, top_p=0.95, max_tokens=50)
    greedy = own.model_copy(update={"temperature": 0.0})
    assert asked(Evaluation(sampling=own, greedy_tasks=1)) == [own, own, own, greedy]
