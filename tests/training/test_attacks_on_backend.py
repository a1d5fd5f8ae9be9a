"""What was found by trying to break the trainer's settings, its checkpoints and its books."""

import json
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from policies import add_model, make_policy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from updates import groups_of, step, train

from harnessed.config import Advantage, ConfigError, Evaluation, Lora, Optimiser
from harnessed.config import Trainer as Settings
from harnessed.records import Fate
from harnessed.training.backends.local import LocalBackend
from harnessed.training.checkpoints import Checkpoints
from harnessed.training.failures import RunFailed
from harnessed.training.report import Report
from harnessed.training.selection import select
from harnessed.training.trainer import Trainer, packed_steps

FAST = Optimiser(learning_rate=1e-2)
LORA = {"lora": Lora(rank=4)}
GAE = {"advantage": Advantage(kind="gae")}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return add_model(make_policy(tmp_path_factory.mktemp("policy")))


def backend_of(model, folder, **settings):
    return LocalBackend(model, folder, Settings(**{"optimiser": FAST} | settings))


def checkpoint_of(model, folder, **settings):
    """Of a run of one step."""
    backend = backend_of(model, folder / "before", **settings)
    train(backend, [0])
    backend.save(folder / "step-00001", {"step": 1, "version": list(backend.version), "tasks": 5, "groups": []})
    return folder / "step-00001"


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce_plus_plus"])
def test_a_step_may_take_no_group(kind):
    assert select([], Advantage(kind=kind)).advantages == []


SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 300}


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", [GPTNeoXForCausalLM, LlamaForCausalLM])
def test_models_name_their_parts_as_they_like(tmp_path, family):
    """GPT-NeoX (Pythia, say) has `gpt_neox` and `embed_out` where others have `model` and `lm_head`: the first update
    ended with an AttributeError."""
    policy = saved(family(family.config_class(**SMALL, intermediate_size=64)), tmp_path / "policy")
    backend = backend_of(policy, tmp_path / "w", **GAE)
    train(backend, [0])
    assert backend.critic.values(step(), 2).tolist() == [0.0, 0.0]


def test_a_model_that_scales_its_logits_is_refused(tmp_path):
    """Its hidden states went through the output layer alone, so another distribution was trained than was sampled."""
    made = GraniteForCausalLM(GraniteConfig(**SMALL, intermediate_size=64, num_key_value_heads=4, logits_scaling=8.0))
    with pytest.raises(ConfigError, match=r"policy\.model.*Granite.*logits"):
        backend_of(saved(made, tmp_path / "policy"), tmp_path / "w")


FILES = {
    "training.pt": {},
    "harnessed.json": {},
    "model.safetensors": {},
    "adapter/adapter_config.json": LORA,
    "adapter/adapter_model.safetensors": LORA,
    "critic.pt": GAE,
}


@pytest.fixture(scope="module")
def checkpoints(model, tmp_path_factory):
    """A checkpoint for each of the files' settings."""
    kinds = {"plain": {}, "lora": LORA, "gae": GAE}
    return [(kind, checkpoint_of(model, tmp_path_factory.mktemp(name), **kind)) for name, kind in kinds.items()]


@pytest.fixture
def damaged(checkpoints, tmp_path):
    def copy(settings, change):
        (whole,) = [folder for kind, folder in checkpoints if kind == settings]
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        change(folder)
        return folder

    return copy


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [0, 0.5])
def test_a_checkpoint_that_is_cut_off_is_one_clear_line(model, damaged, tmp_path, name, share):
    def cut(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * share)])

    with pytest.raises(ConfigError, match=r"trainer\.resume_from"):
        backend_of(model, tmp_path / "w", resume_from=damaged(FILES[name], cut), **FILES[name])


@pytest.mark.parametrize("name", ["training.pt", "critic.pt", "adapter/adapter_config.json"])
@pytest.mark.parametrize("content", [{}, []], ids=["empty", "a list"])
def test_a_checkpoint_that_lacks_something_is_one_clear_line(model, damaged, tmp_path, name, content):
    def replace(folder):
        if name.endswith(".json"):
            (folder / name).write_text(json.dumps(content))
        else:
            torch.save(content, folder / name)

    with pytest.raises(ConfigError, match=r"trainer\.resume_from"):
        backend_of(model, tmp_path / "w", resume_from=damaged(FILES[name], replace), **FILES[name])


@pytest.mark.parametrize("file", ["training.pt", "critic.pt"])
def test_moments_of_other_weights_are_refused(model, damaged, tmp_path, file):
    def replace(folder):
        found = torch.load(folder / file)
        found["optimiser"]["param_groups"] = []
        torch.save(found, folder / file)

    with pytest.raises(ConfigError, match="moments of other weights"):
        backend_of(model, tmp_path / "w", resume_from=damaged(FILES[file], replace), **FILES[file])


def test_a_checkpoint_without_a_critic_says_so(model, damaged, tmp_path):
    with pytest.raises(ConfigError, match="was trained without a critic"):
        backend_of(model, tmp_path / "w", resume_from=damaged({}, lambda _: None), **GAE)


@pytest.mark.parametrize("settings", [{}, LORA, GAE], ids=["plain", "lora", "gae"])
@pytest.mark.parametrize(
    "change", [{"intermediate_size": 96}, {"num_hidden_layers": 1, "layer_types": ["full_attention"]}]
)
def test_a_checkpoint_of_another_model_is_refused(model, damaged, tmp_path, settings, change):
    """With adapters it was a KeyError or a RuntimeError; without, the engine was built otherwise than the trainer."""
    config = AutoConfig.from_pretrained(model)
    config.update(change)
    other = saved(AutoModelForCausalLM.from_config(config), tmp_path / "other")
    with pytest.raises(ConfigError, match="another shape"):
        backend_of(other, tmp_path / "w", resume_from=damaged(settings, lambda _: None), **settings)


def trainer_of(backend, **settings):
    """A trainer as far as its update goes."""
    trainer = Trainer.__new__(Trainer)
    trainer._config = SimpleNamespace(trainer=Settings(**settings))
    trainer._backend, trainer._engine_stands_still = backend, nullcontext
    return trainer


@pytest.mark.parametrize("epochs", [1, 2])
def test_what_a_skipped_step_would_have_trained_is_not_trained(model, tmp_path, epochs):
    """The second step's gradient is not finite: its tokens were in the books as trained. With a second epoch, the
    first one has trained none of them either."""
    settings = {"optimiser_steps": 3, "groups_per_step": 3, "epochs": epochs}
    trainer = trainer_of(backend_of(model, tmp_path / "w", **settings), **settings)
    taken = select(groups_of([(0, 1), (0, 1), (0, 1)]), Advantage())
    steps = packed_steps(taken, trainer._config.trainer, seed=0)
    steps[1][1][0].advantages[:] = float("inf")
    update = trainer._update(taken, steps)
    assert (update.applied, update.metrics["optimiser_steps"]) == (True, 1)
    trained = [sample.rollout for sample in steps[0][0]]
    for sample in taken.samples:
        assert sample.fates == ({Fate.TRAINED: 3} if sample.rollout in trained else {Fate.UPDATE_SKIPPED: 3})


def running(folder, backend, step):
    """A trainer of three steps whose rollouts are none; `step` takes it and the number."""
    trainer = trainer_of(backend, steps=3)
    trainer._config.evaluation = Evaluation()
    trainer._folder, trainer._steps, trainer._saved, trainer._booked = folder, 0, 0, backend.version
    trainer._consumed, trainer._flights, trainer._go_on, trainer._before = {}, SimpleNamespace(tasks=5), list, None
    trainer._checkpoints = Checkpoints(folder, keep=3, keep_best=1, note=str)
    trainer._display, trainer._rollouts = SimpleNamespace(phase=str), SimpleNamespace(give_up=list)
    trainer._report = SimpleNamespace(summary=str)
    trainer._train = lambda: [step(trainer, number) for number in (1, 2, 3)]
    trainer._summary, trainer._validation = str, SimpleNamespace(measure=lambda *_: None)
    return trainer


def kept_steps(folder):
    return [path.name for path in folder.glob("checkpoints/*")]


def one_step(trainer):
    train(trainer._backend, [0])
    trainer._steps, trainer._booked = 1, trainer._backend.version


@pytest.mark.parametrize("before", [0, 1], ids=["in the first step", "in the second"])
def test_weights_of_a_step_that_is_not_in_the_books_are_not_saved_under_the_one_before(model, tmp_path, before):
    """Ctrl-C while the critic learns: the policy has taken the step and the critic a part of it. It was saved as the
    checkpoint of the step before, from which a run that went on would have taken the step twice."""

    def step(trainer, number):
        if number == before + 1:
            train(trainer._backend, [1])
            raise KeyboardInterrupt
        one_step(trainer)

    running(tmp_path, backend_of(model, tmp_path / "w", **GAE), step).run()
    assert kept_steps(tmp_path) == []


@pytest.mark.parametrize("how", [KeyboardInterrupt, RunFailed, ConfigError])
def test_a_run_that_ends_before_its_time_keeps_what_it_has_learnt(model, tmp_path, how):
    """Tasks that run out, a run that stalls: all steps since the last checkpoint were lost."""

    def step(trainer, number):
        if number == 2:
            raise how("no more")
        one_step(trainer)

    with nullcontext() if how is KeyboardInterrupt else pytest.raises(how, match="no more"):
        running(tmp_path, backend_of(model, tmp_path / "w"), step).run()
    assert kept_steps(tmp_path) == ["step-00001"]
    assert backend_of(model, tmp_path / "w2", resume_from=tmp_path / "checkpoints" / "step-00001").step == 1


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("enforce fail at x.cc")])
def test_a_checkpoint_on_a_full_disk_is_one_clear_line_and_leaves_nothing(model, tmp_path, monkeypatch, error):
    """torch tells of a full disk as a RuntimeError. What was written so far stayed, and kept the disk full."""

    def full(*_):
        raise error

    monkeypatch.setattr(torch, "save", full)
    trainer = running(tmp_path, backend_of(model, tmp_path / "w"), lambda trainer, _: one_step(trainer))
    one_step(trainer)
    with pytest.raises(RunFailed, match=r"step-00001 \(is the disk full\?\)"):
        trainer._keep()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_full_run_folder_is_one_clear_line(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunFailed, match=r"metrics\.jsonl: No space left"):
        Report(tmp_path, None, "r", str).metrics(1, {"loss": float("nan")})


def test_weights_that_cannot_be_shared_are_one_clear_line(model, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write the policy into .*Not a directory"):
        backend_of(model, tmp_path / "file" / "w")
    backend_of(saved(LlamaForCausalLM(LlamaConfig(**SMALL)), tmp_path / "other"), tmp_path / "w")
    with pytest.raises(ConfigError, match=r"cannot write the policy into .*another model"):
        backend_of(model, tmp_path / "w")
