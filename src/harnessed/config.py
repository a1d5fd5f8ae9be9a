"""Every setting of Harnessed: one typed tree. `loading.py` reads it; every part gets the piece that it needs.

Relative paths are relative to the configuration file, and modules named in it are looked up beside it first.
"""

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from harnessed.records import CloseMode, Dialect, History, Limits, Overlong, Sampling, SideCall


class ConfigError(Exception):
    """The configuration cannot work; the text says what to change. The command line ends with it and status 2."""


def beside_the_configuration(path: Path, info: ValidationInfo) -> Path:
    base: Path = (info.context or {}).get("base", Path.cwd())
    return Path(os.path.normpath(base / path.expanduser()))


ConfigPath = Annotated[Path, AfterValidator(beside_the_configuration)]
"""A path that is relative to the configuration file's folder."""


def _fill_places(command: list[str], info: ValidationInfo) -> list[str]:
    base: Path = (info.context or {}).get("base", Path.cwd())
    return [word.replace("{here}", str(base)).replace("{python}", sys.executable) for word in command]


Command = Annotated[list[str], AfterValidator(_fill_places)]
"""A program and its arguments; `{here}` is the configuration file's folder, `{python}` the interpreter that runs us."""

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""`module:function`; the module may lie beside the configuration file."""


_PASSWORD = re.compile(r"(://[^:@/\s]*:).*(?=@)|(password=)[^&\s'\"]*")


def hide_passwords(text: str) -> str:
    """Those of addresses, such as `postgresql://user:password@host/name`."""
    return _PASSWORD.sub(lambda found: f"{found[1] or found[2]}***", text)


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Run(Settings):
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,40}$")
    folder: ConfigPath | None = None
    """Where everything of the run goes. Default: `runs/<name>-<date>-<time>` in the current folder. Must be new."""
    project: str = Field("harnessed", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,60}$")
    """Under which name `trainer.trackers` file the run."""
    seed: int = Field(0, ge=0)


class Policy(Settings):
    model: ConfigPath
    """A transformers folder: config.json, safetensors, tokenizer.json and a chat template."""
    history: History = History.EXACT
    """What stands in a context for earlier answers. `exact`: the sampled tokens. `template`: what the chat template
    makes of them; where it changes one (strips its reasoning, say) the conversation goes on in a new training row.
    docs/templates.md says what each means for deployment."""


class Tasks(Settings):
    """Where tasks come from: a JSONL file, or a `module:function` that takes a seed and yields tasks."""

    train: str
    held_out: str
    hidden: list[str] = []
    """Fields of a task that only the evaluator sees (answers, tests)."""


_NEEDED = {
    "mini-swe-agent": "config",
    "command": "command",
    "python": "function",
    "langchain": "function",
    "openai-agents": "function",
}
"""What a kind of harness cannot do without."""


class Harness(Settings):
    kind: Literal[
        "mini-swe-agent",
        "claude-code",
        "codex",
        "hermes",
        "openclaw",
        "opencode",
        "openhands",
        "qwen-code",
        "langchain",
        "openai-agents",
        "python",
        "command",
    ]
    """docs/harnesses.md has a section for each."""
    function: FunctionName | None = None
    """kinds `python`, `langchain` and `openai-agents`: called with the task in a process of its own. What it returns is
    kept as result.json."""
    command: Command | None = None
    """kind `command`: program and arguments, run in the workspace. Filled in: `{prompt}`, `{task}` (a JSON file),
    `{folder}` (the attempt's), `{here}` (the configuration's), `{python}` (the interpreter that runs Harnessed). Kinds
    of command-line harnesses: the program with arguments of your own, where it is not the usual one on the PATH."""
    config: ConfigPath | None = None
    """kind `mini-swe-agent`: the harness's own YAML."""
    environment: dict[str, str] = {}
    """Variables for the agent, beside those that name its endpoint. Nothing else is inherited."""
    inherit: list[str] = []
    """Names of variables that the agent gets from the controller's own environment."""
    side_calls: list[SideCall] = []
    """Requests that are not trained, with the fate `side_call`: those for titles, say, `[{tools: false}]` or `[{system:
    "conversation title"}]`, a regular expression for the system messages. By default all are trained."""
    shell: Literal["auto", "bubblewrap", "plain"] = "auto"
    """kind `mini-swe-agent`: what the model's commands run in. `auto`: bubblewrap where it works, else plain."""

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> "Harness":
        if (needed := _NEEDED.get(self.kind)) and getattr(self, needed) is None:
            raise ValueError(f"kind {self.kind} needs the setting harness.{needed}")
        return self


class Evaluator(Settings):
    """Judges what an attempt left: a number, or a mapping with `reward`, named parts, and `call_rewards` for single
    calls if it likes (docs/your-agent.md)."""

    function: FunctionName | None = None
    """Called with (task, folder): the whole task, and a copy of the attempt's folder."""
    command: Command | None = None
    """Run in the copy; `{task}` is the whole task as a JSON file, `{here}` the configuration's folder. The last line of
    its output is the JSON result."""
    time_limit_s: float = Field(60, gt=0, allow_inf_nan=False)
    tries: int = Field(2, ge=1)
    """How often a broken evaluator is run on the same result before the rollout leaves its group."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> "Evaluator":
        if (self.function is None) == (self.command is None):
            raise ValueError("set either evaluator.function or evaluator.command")
        return self


Url = Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$")]


class Gateway(Settings):
    url: Url | None = None
    """A running gateway to use; none: the run starts its own."""
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    """0: any free port."""
    database: Annotated[str, Field(pattern="^postgresql://")] | None = None
    """A PostgreSQL database for the records, `postgresql://user@host/name`: several gateways may share it, and work as
    one then. They need the same `gateway.secret` in their folders. None: an SQLite file in the gateway's folder. A
    password is best left to ~/.pgpass."""
    power_safe: bool = False
    """Records survive power loss too, not only the death of a process; each commit then waits for the disk."""
    keep_days: float = Field(30, gt=0)
    """So long after the last sign of life of a run, what its rollouts said is deleted; how they ended stays."""
    body_mb: int = Field(64, ge=1)
    """Largest request of an agent."""
    generation_limit_s: float = Field(600, gt=0, allow_inf_nan=False)
    """Longest wait for one answer of an engine, an engine that is being started again included."""
    log: Literal["text", "json"] = "text"
    """Lines of gateway, controller and engine: for people, or one JSON object each. Neither ever holds a key."""


class Controller(Settings):
    external: bool = False
    """True: `harnessed controller` runs elsewhere; false: the run starts its own."""
    slots: int = Field(16, ge=1)
    """Attempts at once."""
    time_limit_s: float = Field(600, gt=0, allow_inf_nan=False)
    """Of one attempt. Its outcome is then agent_timeout."""
    attempts: int = Field(3, ge=1)
    """Attempts of a rollout whose infrastructure failed, the first one included."""
    keep_folders: Literal["all", "failed", "none"] = "failed"
    """Which attempts' folders stay on disk: all, those that did not end ok, or none."""
    file_size_mb: int = Field(256, ge=1)
    """Largest file that the agent can write."""
    processes: int = Field(512, ge=1)
    """Processes of the agent at once, where the system can limit them (it cannot for root)."""


class EngineSettings(Settings):
    url: Url | None = None
    """A running engine to use; none: the run starts the small one of this project."""
    speaks: Dialect = Dialect.TOKENS
    """How a running engine is asked. `tokens`: as the engine of this project. `chat`: OpenAI's Chat Completions with
    `return_token_ids`, as vLLM has them; it says no version, so staleness is not checked."""
    model: str = ""
    """The name under which an engine that speaks chat serves the policy."""
    weights: ConfigPath | None = None
    """Folder of the weights that the trainer writes and a running engine reads; needed to train with `engine.url`."""
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    threads: int = Field(1, ge=1)
    """CPU threads. More than one slows tiny models down."""
    batch: int = Field(64, ge=1)
    """Most sequences generated at once."""
    cache_mb: int = Field(256, ge=0)
    """Memory for keys and values of sequences that ended, so that the next turn of a conversation computes only what is
    new. A token takes 1 kB with the demo's model and 230 kB with Qwen3-0.6B, and what exceeds the whole is not kept. 0:
    every prompt is computed from its start."""
    start_limit_s: float = Field(120, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _chats_elsewhere(self) -> "EngineSettings":
        if self.speaks == Dialect.CHAT and not (self.url and self.model):
            raise ValueError("engine.speaks: chat needs engine.url and engine.model, the server and the name it serves")
        return self


Fraction = Annotated[float, Field(ge=0, lt=1)]


class Optimiser(Settings):
    kind: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit`: moments in 8 bits, two bytes for a weight in place of eight; needs bitsandbytes (`pip install -e
    '.[eight-bit]'`)."""
    learning_rate: float = Field(1e-6, gt=0, allow_inf_nan=False)
    warmup: int = Field(0, ge=0)
    """Updates in which the learning rate rises in equal parts to its full height."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How it goes on from there: stays, or falls to 0 over the rest of trainer.steps."""
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    clip_norm: float = Field(1.0, gt=0)
    """Largest gradient norm."""


class Advantage(Settings):
    """How rewards become advantages; docs/algorithms.md has the formulas."""

    kind: Literal["grpo", "rloo", "reinforce_plus_plus", "gae"] = "grpo"
    """What a rollout is compared with. `grpo`: the mean of its group. `rloo`: the mean of the others. `gae`: what a
    critic expects. `reinforce_plus_plus`: the mean of its group, then divided by the deviation over the whole step."""
    normalise_deviation: bool = True
    """kind `grpo`: divide by the deviation of the group. False: Dr. GRPO."""
    per: Literal["rollout", "row"] = "rollout"
    """Who counts in the mean and deviation of a group. `row`: each training row does, so that a rollout counts as often
    as it has rows; only to compare with, docs/algorithms.md explains the mistake."""
    equal_groups: Literal["skip", "keep"] = "skip"
    """Groups whose rewards are all equal. `skip`: not trained, fate `group_skipped`. `keep`: they count in R with
    advantages of 0, and what the KL and entropy terms ask of them."""
    refill: int = Field(0, ge=0)
    """In place of skipped groups others are run, so many times `trainer.groups_per_step` for one update at most (DAPO's
    dynamic sampling)."""
    per_call: bool = False
    """Each call has an advantage of its own, from the rewards that the evaluator gave for calls (`calls`) and from the
    rollout's, which is added at its last call. kind `gae` does so always."""
    discount: float = Field(1.0, ge=0, le=1)
    """Worth of a reward one call later; with `per_call` or kind `gae`."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """kind `gae`: 1 trusts the rewards that came, 0 the critic."""

    @model_validator(mode="after")
    def _makes_sense(self) -> "Advantage":
        if self.refill and self.equal_groups == "keep":
            raise ValueError("trainer.advantage.refill: takes the place of skipped groups, and equal_groups is keep")
        if self.refill and self.kind == "gae":
            raise ValueError("trainer.advantage.refill: takes the place of skipped groups, and kind gae skips none")
        if self.per == "row" and (self.per_call or self.kind == "gae"):
            raise ValueError("trainer.advantage.per: row compares whole rollouts, without per_call and kind gae")
        if self.discount < 1 and not self.per_call and self.kind != "gae":
            raise ValueError("trainer.advantage.discount: a rollout is one whole without trainer.advantage.per_call")
        if self.gae_lambda < 1 and self.kind != "gae":
            raise ValueError(f"trainer.advantage.gae_lambda: belongs to kind gae, and kind is {self.kind}")
        return self


class Importance(Settings):
    """The weight pi_old / pi_engine, for what engine and trainer compute differently. It has no gradient."""

    level: Literal["token", "sequence", "none"] = "token"
    """`sequence`: the product over an answer."""
    bound: Literal["truncate", "mask"] = "truncate"
    """What becomes of a weight above the cap. `truncate`: it is the cap. `mask`: it is 0."""
    cap: float = Field(2.0, gt=0)


class Kl(Settings):
    """Keeps the policy near the reference: policy.model as it was when the run began."""

    coefficient: float = Field(0.0, ge=0, allow_inf_nan=False)
    """0: there is no reference."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """In the loss k1 pulls nowhere: its gradient is zero on average. It is for the reward."""
    place: Literal["loss", "reward"] = "loss"
    """`reward`: the sum over a rollout's trained tokens, times the coefficient, is taken from its reward."""


class Objective(Settings):
    """docs/algorithms.md has the formulas."""

    loss: Literal["ppo", "gspo", "cispo", "policy_gradient"] = "ppo"
    clip_low: float = Field(0.2, ge=0, le=1)
    """The ratio pi / pi_old is clipped to 1 - clip_low .. 1 + clip_high. `gspo` wants far less: its paper has 3e-4 and
    4e-4. `cispo` without a lower bound, as in its paper: 1."""
    clip_high: float = Field(0.2, ge=0)
    dual_clip: float | None = Field(None, gt=1)
    """losses `ppo` and `gspo`: the objective of a token with a negative advantage A is at least so many times A."""
    importance: Importance = Importance()
    old: Literal["recompute", "engine"] = "recompute"
    """What pi_old is. `recompute`: the trainer's own probabilities when the update starts. `engine`: those recorded by
    the engine; the importance weight is then 1."""
    kl: Kl = Kl()
    entropy: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Coefficient of the bonus for entropy."""
    normalisation: Literal["rollout", "token", "sample", "constant"] = "rollout"
    """What a trained token weighs. `rollout`: 1 / (R * T_r). `token`: 1 / all trained tokens of the step. `constant`:
    1 / (R * constant). `sample`: 1 / (rows * tokens of its row), the mistake that docs/algorithms.md explains."""
    constant: int | None = Field(None, ge=1)
    """Tokens; for normalisation `constant`."""

    @model_validator(mode="after")
    def _fits_together(self) -> "Objective":
        if (self.normalisation == "constant") != (self.constant is not None):
            raise ValueError(
                "trainer.objective.constant: set it (in tokens) together with trainer.objective.normalisation: "
                f"constant, and only then; normalisation is {self.normalisation}"
            )
        if self.dual_clip is not None and self.loss not in ("ppo", "gspo"):
            raise ValueError(f"trainer.objective.dual_clip: works with loss ppo or gspo, not with {self.loss}")
        return self


class Lora(Settings):
    """Low-rank adapters, arXiv 2106.09685."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0, allow_inf_nan=False)
    """What an adapter adds is multiplied by alpha / rank."""
    targets: list[str] = []
    """Names of the linear layers that get one, such as `[q_proj, v_proj]`. None: all but the output layer."""


class Critic(Settings):
    """With `trainer.advantage.kind: gae`: a model as large as the policy that learns what rollouts are worth."""

    optimiser: Optimiser = Optimiser(learning_rate=1e-5)
    epochs: int = Field(1, ge=1)
    """Steps of its optimiser for each update, each over all calls."""
    clip: float | None = Field(0.2, gt=0)
    """A value is not rewarded for moving further than this, in units of reward, in one update. None: it may."""


class Schedule(Settings):
    """When groups are rolled out and when the policy is updated; docs/schedules.md explains the choice."""

    kind: Literal["sync", "collocated", "async"] = "sync"
    """`sync`: an update waits for all groups in flight. `collocated`: engine and trainer share their devices; an update
    takes the groups that are complete and holds the others' calls meanwhile. `async`: each has its own; calls are held
    while the new weights are copied."""
    groups_in_flight: int | None = Field(None, ge=1)
    """Groups that run at once or wait for their update. None: `trainer.groups_per_step` for sync, else twice as many,
    as far as `staleness` allows."""
    staleness: int = Field(2, ge=1)
    """Most updates between the oldest trained token of a rollout and the update that trains it. Kept by waiting: an
    update that would let a running group grow older does not start before that group is complete. For sync it is 0."""
    at_update: CloseMode = CloseMode.INTERRUPT
    """What becomes of answers that are being generated. `interrupt`: they stop, and go on from their tokens. `finish`:
    they run to their end, for `finish_s` at most."""
    finish_s: float = Field(120, gt=0, le=600)
    remake: int = Field(0, ge=0, le=2)
    """So often a group is cancelled and made again where an update would have to wait for it. It favours tasks that
    are quick."""


Share = Annotated[float, Field(ge=0, le=1)]


class Safety(Settings):
    """What a run warns of, makes again, and stops for; docs/watching.md tells."""

    skipped_updates: int = Field(5, ge=1)
    """So many updates in a row whose loss or gradient is not finite end the run."""
    entropy_fraction: Fraction = 0.1
    """A warning when the entropy falls below this fraction of its first value."""
    equal_groups: Share = 0.9
    """A warning when more than this share of the groups of the last 5 steps had equal rewards."""
    truncated: Share = 0.5
    """A warning when more than this share of a step's answers were cut for their length."""
    infrastructure: Share = 0.25
    """A batch of which more than this share failed by infrastructure is not trained: its tasks are run again."""
    remake: int = Field(2, ge=0)
    """So often; then the run ends."""
    alike_steps: int = Field(3, ge=1)
    """So many batches in a row whose agents all exit in the same way and get the same reward end the run. Where no
    token was sampled, or all failed by infrastructure, one does."""


class Trainer(Settings):
    steps: int = Field(100, ge=1)
    groups_per_step: int = Field(8, ge=1)
    group_size: int = Field(8, ge=2)
    threads: int = Field(1, ge=1)
    micro_batch_tokens: int = Field(16_384, ge=1)
    """Most tokens in one forward pass, unless a single row is longer."""
    optimiser_steps: int = Field(1, ge=1)
    """So many for each update, each over whole groups."""
    epochs: int = Field(1, ge=1)
    """How often an update goes over its groups, each time with `optimiser_steps` steps."""
    share_prefixes: bool = True
    """What rows begin with in common is computed once, where that pays."""
    row_tokens: int | None = Field(None, ge=1)
    """Longest training row, in tokens. None: as long as limits.context lets them become."""
    overlong: Overlong = Overlong.TRUNCATE
    """What becomes of a longer one. `truncate`: its first row_tokens are trained. `drop`: it is not trained. `fail`:
    the run ends. Tokens that are not trained for this reason have the fate `overlong`."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass. `bfloat16`: matrices are multiplied in it (autocast); weights, moments,
    log-probabilities and the loss stay in float32, and so does the engine."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass and compute the rest again: less memory, a third more
    work, the same gradients."""
    lora: Lora | None = None
    """Set (`{}` for what follows): only adapters are trained. The engine serves the sum of weights and adapters; the
    learning rate that suits is ten times higher or more."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps. The last step is always kept."""
    keep_checkpoints: int = Field(3, ge=1)
    """So many of the last ones."""
    keep_best: int = Field(1, ge=0)
    """So many of those with the highest held-out success, beside the last ones. A checkpoint has one if the held-out
    tasks were run at its step: `evaluation.every` should be a multiple of `checkpoint_every`."""
    resume_from: ConfigPath | None = None
    """A checkpoint folder of another run: this one goes on from its weights, its optimiser and its step. policy.model
    stays what it was."""
    watchdog_s: float = Field(120, gt=0, allow_inf_nan=False)
    """When nothing has moved for so long, a line says who waits for whom."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = []
    """Who else gets the metrics. Each writes into a folder of its name in the run's, and nothing leaves the machine
    unless its own environment variables say so; docs/metrics.md has a section for them."""
    schedule: Schedule = Schedule()
    optimiser: Optimiser = Optimiser()
    advantage: Advantage = Advantage()
    objective: Objective = Objective()
    critic: Critic = Critic()
    safety: Safety = Safety()

    @property
    def groups_in_flight(self) -> int:
        return self.schedule.groups_in_flight or self.groups_per_step * min(2, self._updates_in_flight)

    @property
    def _updates_in_flight(self) -> int:
        """Updates that may take the groups of one version."""
        # With `async` the update during which they were created has its groups already.
        staleness = self.schedule.staleness
        return {"sync": 1, "collocated": staleness + 1, "async": staleness}[self.schedule.kind]

    @model_validator(mode="after")
    def _steps_take_whole_groups(self) -> "Trainer":
        if self.optimiser_steps > self.groups_per_step:
            raise ValueError(
                f"trainer.optimiser_steps: {self.optimiser_steps} steps of whole groups need as many groups; "
                f"trainer.groups_per_step is {self.groups_per_step}"
            )
        return self

    @model_validator(mode="after")
    def _keeps_its_bound(self) -> "Trainer":
        schedule, least = self.schedule, self.groups_per_step
        most = least * self._updates_in_flight
        if not least <= self.groups_in_flight <= most:
            raise ValueError(
                f"trainer.schedule.groups_in_flight: {self.groups_in_flight} is not {least} (trainer.groups_per_step) "
                f"to {most}, which is what {schedule.kind} can train"
                + (f" within staleness {schedule.staleness}" if schedule.kind != "sync" else " at once")
            )
        return self


class Evaluation(Settings):
    tasks: int = Field(64, ge=1)
    """Held-out tasks, run before the first and after the last step."""
    samples: int = Field(1, ge=1)
    """Rollouts of each."""
    every: int | None = Field(None, ge=1)
    """So many steps apart they are run in between as well."""
    beside: bool = False
    """Those in between. False: training waits for them, and one version of the policy is measured. True: training goes
    on meanwhile, they get the slots that it leaves free, and what they measure are the versions from the one at their
    start to the one at their end."""
    greedy_tasks: int = Field(0, ge=0)
    """The first so many of them are run greedily as well, once each."""
    confidence: float = Field(0.95, gt=0, lt=1)
    """Of the interval that is told with the success; docs/metrics.md says what it means."""
    sampling: Sampling | None = None
    """How held-out tasks are sampled, with the settings of `sampling`; as in training where it is left out."""

    @model_validator(mode="after")
    def _is_beside_something(self) -> "Evaluation":
        if self.beside and self.every is None:
            raise ValueError("evaluation.beside: says how they are run in between; set evaluation.every as well")
        return self


class Config(Settings):
    run: Run = Run()
    policy: Policy
    tasks: Tasks
    harness: Harness
    evaluator: Evaluator
    gateway: Gateway = Gateway()
    controller: Controller = Controller()
    engine: EngineSettings = EngineSettings()
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    trainer: Trainer = Trainer()
    evaluation: Evaluation = Evaluation()

    @model_validator(mode="after")
    def _trains_on_what_was_sampled(self) -> "Config":
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature: greedy answers cannot be trained on, since none could have been another; "
                "for held-out tasks set evaluation.sampling.temperature"
            )
        if self.sampling.top_p < 1:
            raise ValueError(
                f"sampling.top_p: {self.sampling.top_p:g} cannot be trained on, since the trainer computes "
                "log-probabilities over the whole vocabulary; for held-out tasks set evaluation.sampling.top_p"
            )
        return self
