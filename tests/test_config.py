from pathlib import Path

import pytest
import yaml

from harnessed.config import ConfigError
from harnessed.loading import load

MINIMAL = {
    "policy": {"model": "model"},
    "tasks": {"train": "tasks:train", "held_out": "tasks.jsonl"},
    "harness": {"kind": "python", "function": "agent:run"},
    "evaluator": {"function": "tasks:reward"},
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def test_paths_are_relative_to_the_file_and_those_of_overrides_to_the_shell(path, monkeypatch):
    elsewhere = path.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load(path).policy.model == path.parent / "model"
    assert load(path, ["policy.model=mine", "run.folder=out"]).policy.model == elsewhere / "mine"
    assert load(path, ["run.folder=out"]).run.folder == elsewhere / "out"


def test_overrides_are_typed_yaml(path):
    config = load(path, ["trainer.steps=5", "trainer.optimiser.learning_rate=0.5", "tasks.hidden=[a, b]"])
    assert (config.trainer.steps, config.trainer.optimiser.learning_rate, config.tasks.hidden) == (5, 0.5, ["a", "b"])


def test_held_out_tasks_may_be_sampled_otherwise(path):
    assert load(path).evaluation.sampling is None
    config = load(path, ["evaluation.sampling={temperature: 0.6, top_p: 0.95}"])
    assert (config.evaluation.sampling.temperature, config.evaluation.sampling.top_p) == (0.6, 0.95)
    assert config.sampling.top_p == 1


def test_a_section_that_is_off_can_be_set_in_an_override(path):
    """In the configuration that a run keeps, sections without settings are null."""
    path.write_text(yaml.safe_dump(load(path).model_dump(mode="json")))
    assert load(path, ["trainer.lora.rank=8"]).trainer.lora.rank == 8
    assert load(path, ["evaluation.sampling.temperature=0"]).evaluation.sampling.temperature == 0


def test_bounds_that_are_infinite_bound_nothing(path):
    objective = load(path, ["trainer.objective={clip_high: .inf, importance: {cap: .inf}}"]).trainer.objective
    assert objective.clip_high == objective.importance.cap == float("inf")


def test_objectives_that_fit_together(path):
    trainer = load(path, ["trainer.objective={normalisation: constant, constant: 100, dual_clip: 3}"]).trainer
    assert (trainer.objective.constant, trainer.objective.dual_clip) == (100, 3)
    assert load(path, ["trainer.advantage={per_call: true, discount: 0.9}"]).trainer.advantage.discount == 0.9
    assert load(path, ["trainer.advantage={kind: gae, discount: 0.9}"]).trainer.advantage.kind == "gae"


@pytest.mark.parametrize(
    ("schedule", "groups"),
    [
        ("{}", 8),
        ("{kind: collocated}", 16),
        ("{kind: collocated, groups_in_flight: 24}", 24),
        ("{kind: collocated, staleness: 1}", 16),
        ("{kind: async}", 16),
        ("{kind: async, staleness: 1}", 8),
    ],
)
def test_as_many_groups_are_in_flight_as_staleness_allows(path, schedule, groups):
    assert load(path, [f"trainer.schedule={schedule}"]).trainer.groups_in_flight == groups


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("trainer.stpes=5", "unknown setting trainer.stpes; did you mean trainer.steps?"),
        ("trainer.optimizer.learning_rate=1", "unknown setting trainer.optimizer; did you mean trainer.optimiser?"),
        ("trainer.optimiser.learning_rat=1", "did you mean trainer.optimiser.learning_rate?"),
        ("trianer.steps=5", "unknown setting trianer; did you mean trainer?"),
        ("gateway.zzz=1", "unknown setting gateway.zzz; known here: url, host"),
        ("trainer.steps=many", "trainer.steps: "),
        ("trainer.steps=0", "trainer.steps: "),
        ("sampling.top_p=0.9", "whole vocabulary; for held-out tasks set evaluation.sampling.top_p"),
        ("sampling.temperature=0", "for held-out tasks set evaluation.sampling.temperature"),
        ("trainer.optimiser.learning_rate=.inf", "trainer.optimiser.learning_rate: "),
        ("trainer.objective.kl.coefficient=.inf", "trainer.objective.kl.coefficient: "),
        ("trainer.objective.entropy=.nan", "trainer.objective.entropy: "),
        ("trainer.lora.alpha=.inf", "trainer.lora.alpha: "),
        ("trainer.advantage.gae_lambda=0.9", "belongs to kind gae, and kind is grpo"),
        ("sampling.top_p=0", "sampling.top_p: "),
        ("evaluation.sampling.top_p=1.5", "evaluation.sampling.top_p: "),
        ("evaluation.sampling.topp=1", "did you mean evaluation.sampling.top_p?"),
        ("gateway.port=70000", "gateway.port: "),
        ("harness.kind=no-such", "harness.kind: "),
        ("harness.kind=command", "harness.command"),
        ("evaluator.command=[x]", "evaluator.function or evaluator.command"),
        ("evaluator.function=nonsense", "module:function"),
        ("run.name=a b", "run.name: "),
        ("trainer.objective.clip=0.2", "unknown setting trainer.objective.clip; did you mean trainer.objective.clip_"),
        ("trainer.objective.loss=gpro", "trainer.objective.loss: "),
        ("trainer.objective.normalisation=constant", "set it (in tokens) together with"),
        ("trainer.objective.constant=100", "normalisation is rollout"),
        ("trainer.objective.dual_clip=1", "trainer.objective.dual_clip: "),
        ("trainer.objective={loss: cispo, dual_clip: 3}", "works with loss ppo or gspo, not with cispo"),
        ("trainer.objective.kl.coefficient=-1", "trainer.objective.kl.coefficient: "),
        ("trainer.objective.importance.cap=0", "trainer.objective.importance.cap: "),
        ("trainer.advantage={refill: 1, equal_groups: keep}", "takes the place of skipped groups"),
        ("trainer.advantage={refill: 1, kind: gae}", "kind gae skips none"),
        ("trainer.advantage.discount=0.9", "a rollout is one whole without trainer.advantage.per_call"),
        ("trainer.optimiser_steps=9", "trainer.groups_per_step is 8"),
        ("trainer.schedule.groups_in_flight=9", "9 is not 8 (trainer.groups_per_step) to 8, which is what sync can"),
        ("trainer.schedule={kind: collocated, groups_in_flight: 25}", "25 is not 8 (trainer.groups_per_step) to 24"),
        ("trainer.schedule={kind: collocated, groups_in_flight: 7}", "7 is not 8 (trainer.groups_per_step) to 24"),
        ("trainer.schedule={kind: async, groups_in_flight: 17}", "to 16, which is what async can train within"),
        ("trainer.steps", "section.setting=value"),
        ("trainer.steps.more=1", "trainer.steps"),
        ("trainer=5", "trainer: "),
        ("trainer.steps=[", "YAML"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(path, override, complaint):
    with pytest.raises(ConfigError) as error:
        load(path, [override])
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "mapping"),
        ("- a", "mapping"),
        ("a: [", "not YAML"),
        ("policy: {model: x}", "the setting tasks is missing"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path, text, complaint):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint) as error:
        load(path)
    assert str(path) in str(error.value)


def test_a_missing_file():
    with pytest.raises(ConfigError, match=r"/nowhere\.yaml"):
        load(Path("/nowhere.yaml"))
