"""The command `harnessed`: reads the configuration, starts what is needed, and says in one line what went wrong.

Exit status: 0 done; 1 a run that failed; 2 a configuration that cannot work; 130 interrupted. Torch is imported by the
trainer's and the engine's process only, and harness packages by the controller's children only.
"""

import argparse
import asyncio
import importlib.util
import itertools
import json
import math
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from harnessed import logs, resuming, services
from harnessed.browse.arguments import add_commands, add_timeline_arguments
from harnessed.browse.status import add_status_arguments
from harnessed.client import ApiError, AsyncClient, Unreachable
from harnessed.config import Config, ConfigError
from harnessed.config import Trainer as TrainerSettings
from harnessed.loading import load
from harnessed.records import TRAINED_OUTCOMES, Purpose, Task
from harnessed.run import ADMIN_KEY_FILE, ADMIN_KEY_VARIABLE, URL_FILE, Run, admin_key, keep_keys
from harnessed.training.failures import RunFailed


def main() -> NoReturn:
    arguments = _parse(sys.argv[1:])
    try:
        sys.exit(arguments.run(arguments))
    except ConfigError as error:
        logs.say(str(error))
        sys.exit(2)
    except (services.ServiceDied, RunFailed, Unreachable, ApiError) as error:
        logs.say(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        logs.say("interrupted")
        sys.exit(130)


def _parse(given: list[str]) -> argparse.Namespace:
    """argparse takes no further overrides after an option: they are what it does not know."""
    parser = _parser()
    arguments, left = parser.parse_known_args(given)
    if left and (not hasattr(arguments, "overrides") or any(word.startswith("-") for word in left)):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        arguments.overrides += left
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harnessed", description="Train the model behind an AI agent through the harness that ships."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, description in (
        ("train", train, "train the policy on the tasks of a configuration"),
        ("eval", evaluate, "run the held-out tasks alone"),
        ("up", start_house, "start a gateway and a controller together, until Ctrl-C"),
        ("gateway", serve_gateway, "serve harnesses and keep the records"),
        ("controller", run_controller, "run agents for a gateway"),
        ("engine", serve_engine, "serve a policy's tokens"),
    ):
        command = commands.add_parser(name, help=description, description=description)
        command.add_argument("config", type=Path, help="YAML file; docs/configuration.md has every setting")
        command.add_argument("overrides", nargs="*", metavar="section.setting=value")
        # For services that a run starts (services.py): who owns them, their socket, the run's folder.
        command.add_argument("--owner", type=int, help=argparse.SUPPRESS)
        command.add_argument("--listener", type=int, help=argparse.SUPPRESS)
        command.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
        command.add_argument("--run-id", help=argparse.SUPPRESS)
        command.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
        command.set_defaults(run=_with_config(run))
        if name == "train":
            instead = command.add_mutually_exclusive_group()
            description = "run one rollout of the first task, and print the rows that it would give"
            instead.add_argument("--dry-run", action="store_true", help=description)
            description = "go on with the run in run.folder, or with the newest one of that name in ./runs"
            instead.add_argument("--resume", action="store_true", help=description)
        if name == "up":
            description = "start an engine too, with the policy of the configuration"
            command.add_argument("--engine", action="store_true", help=description)
    description = "examine a policy's tokenizer and chat template"
    command = commands.add_parser("doctor", help=description, description=description)
    command.add_argument("--model", type=Path, required=True, help="folder of the policy")
    command.set_defaults(run=doctor)
    description = "who waits for whom at a gateway, and since when; exit status 0 if it is ready"
    add_status_arguments(commands.add_parser("status", help=description, description=description))
    description = "draw engine, trainer and rollouts of runs over time, and say how busy they were"
    add_timeline_arguments(commands.add_parser("timeline", help=description, description=description))
    description = "look into what a run recorded"
    add_commands(commands.add_parser("rollouts", help=description, description=description))
    return parser


def _with_config(run: Callable[[Config, argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    def command(arguments: argparse.Namespace) -> int:
        if arguments.owner:
            services.die_with(arguments.owner)
        return run(load(arguments.config, arguments.overrides), arguments)

    return command


def train(config: Config, arguments: argparse.Namespace) -> int:
    _need_torch("train")
    from harnessed.training.trackers import open_trackers

    _check_trainer(config.trainer)
    if arguments.resume and (nothing_to_do := resuming.finished(resuming.find(config), config.trainer.steps)):
        print(nothing_to_do)
        return 0
    if config.trainer.resume_from is not None and not arguments.resume:
        _check_checkpoint(config.trainer.resume_from, config.trainer)
    if config.engine.url is not None and config.engine.weights is None:
        raise ConfigError("engine.url names a running engine: set engine.weights to the folder that both of them map")
    first, later, held_out = _read_tasks(config, arguments.config.resolve().parent)
    if arguments.dry_run:
        return dry_run(config, arguments, first[0])
    with (
        Run(config, arguments.config, arguments.overrides, trains=True, resume=arguments.resume) as run,
        open_trackers(config, run.folder, run.id, run.resumed) as track,
    ):
        settings = config.trainer
        if run.resumed is not None and run.resumed.checkpoint is not None:
            settings = settings.model_copy(update={"resume_from": run.resumed.checkpoint})
        weights = config.engine.weights or run.folder / "policy"
        print("starting gateway, engine and controller ...", flush=True)
        run.start(weights)
        print(f"dashboard: {run.gateway_url}/ui/ (its key is the gateway's {ADMIN_KEY_FILE})", flush=True)
        from harnessed.training.backends.local import LocalBackend
        from harnessed.training.display import Display
        from harnessed.training.trainer import Trainer

        served = run.resumed.served if run.resumed else ()
        with run.weights_begin():
            backend = LocalBackend(config.policy.model, weights, settings, seed=config.run.seed, served=served)
            run.begin_lineage(backend.version)
        run.wait_for_engine()
        watch = run.watch()
        with Display(config.trainer.steps, lambda: watch.counts) as display:
            run.tell(display.note)
            trainer = Trainer(
                config,
                run.folder,
                run.id,
                run.gateway,
                run.engine(),
                backend,
                run.rollouts(watch, display.tick),
                display,
                itertools.chain(first, later),
                held_out,
                run.restarts,
                track,
                run.lineages,
                run.resumed,
            )
            summary = trainer.run()
    display.summary(summary, str(run.folder))
    return 130 if summary.interrupted else 0


def _read_tasks(config: Config, base: Path) -> tuple[list[Task], Iterator[Task], list[Task]]:
    """Those of the first update, further ones for training, the held-out ones. Raises ConfigError."""
    from harnessed.training.tasks import check_hidden, stream, take

    later = stream(config.tasks.train, base, config.run.seed, shuffle=True)
    first = take(later, config.trainer.groups_per_step, "tasks.train")
    all_held_out = stream(config.tasks.held_out, base, config.run.seed, shuffle=False)
    held_out = take(all_held_out, config.evaluation.tasks, "tasks.held_out")
    check_hidden(config.tasks.hidden, [*first, *held_out])
    return first, later, held_out


def _check_trainer(settings: TrainerSettings) -> None:
    """What it needs beside torch, before anything starts. Raises ConfigError."""
    from harnessed.training.trackers import check_trackers

    check_trackers(settings.trackers)
    if settings.lora is not None and importlib.util.find_spec("peft") is None:
        raise ConfigError("trainer.lora needs peft: pip install -e '.[train]' in the folder of Harnessed")
    optimisers = [settings.optimiser, *([settings.critic.optimiser] if settings.advantage.kind == "gae" else [])]
    eight_bit = any(optimiser.kind == "adamw8bit" for optimiser in optimisers)
    if eight_bit and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError("trainer.optimiser.kind: adamw8bit needs bitsandbytes: pip install bitsandbytes")


def _check_checkpoint(folder: Path, settings: TrainerSettings) -> None:
    """Whether a new run can go on from it. Raises ConfigError."""
    from harnessed.training.backends import checkpoint

    step = checkpoint.read(folder, settings).step
    if step >= settings.steps:
        raise ConfigError(f"trainer.resume_from: it has taken {step} steps: raise trainer.steps above it")


def dry_run(config: Config, arguments: argparse.Namespace, task: Task) -> int:
    """One rollout, and what training would make of it; the weights stay as they are."""
    from rich.console import Console

    from harnessed.browse.rows import print_rows
    from harnessed.gateway.template import ChatTemplate
    from harnessed.training.samples import Bound

    with Run(config, arguments.config, arguments.overrides) as run:
        run.start(weights=None)
        run.wait_for_engine()
        rollouts = run.rollouts(run.watch(), tick=lambda: None)
        ((transcript,),) = rollouts.collect(
            rollouts.specs("dry-run", [task], 1, Purpose.TRAIN, config.sampling, draws="dry-run")
        )
    bound = Bound(config.trainer.row_tokens, config.trainer.overlong)
    print_rows(Console(highlight=False, soft_wrap=True), transcript, ChatTemplate(config.policy.model), bound)
    print(f"run folder: {run.folder}")
    return 0 if transcript.rollout.outcome in TRAINED_OUTCOMES else 1


def evaluate(config: Config, arguments: argparse.Namespace) -> int:
    _need_torch("eval")  # the engine's
    from harnessed.training.display import Display, beside_success, success
    from harnessed.training.evaluation import evaluate as evaluate_held_out
    from harnessed.training.report import Report
    from harnessed.training.tasks import stream, take

    tasks = take(
        stream(config.tasks.held_out, arguments.config.resolve().parent, config.run.seed, shuffle=False),
        config.evaluation.tasks,
        "tasks.held_out",
    )
    with Run(config, arguments.config, arguments.overrides) as run:
        run.start(weights=None)
        run.wait_for_engine()
        watch = run.watch()
        with Display(0, lambda: watch.counts) as display:
            run.tell(display.note)
            display.phase("held-out tasks")
            result = evaluate_held_out(
                run.rollouts(watch, display.tick),
                Report(run.folder, run.gateway, run.id, display.note),
                tasks,
                config.evaluation,
                config.sampling,
                "evaluation",
            )
    (run.folder / "evaluation.json").write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    display.note(f"held-out success {success(result)} ({beside_success(result)})")
    if result.complaint:
        display.note(result.complaint)
    display.note(f"run folder: {run.folder}")
    return 0


def start_house(config: Config, arguments: argparse.Namespace) -> int:
    from harnessed.up import up

    given = [str(arguments.config.resolve()), *arguments.overrides]
    up(config, given, _service_folder(config, arguments), engine=arguments.engine)
    return 0


def serve_gateway(config: Config, arguments: argparse.Namespace) -> int:
    from harnessed.gateway.app import serve

    logs.configure(config.gateway.log)
    folder = _service_folder(config, arguments)
    listener = _listener(arguments, config.gateway.host, config.gateway.port, "gateway.port")
    url = services.url_of(listener)
    (folder / URL_FILE).write_text(url, encoding="utf-8")
    keep_keys(folder)
    if not arguments.owner:
        logs.say(f"gateway on {url}; its admin key, for {ADMIN_KEY_VARIABLE}, is in {folder / ADMIN_KEY_FILE}")
    serve(listener, folder, config.gateway)
    return 0


def run_controller(config: Config, arguments: argparse.Namespace) -> int:
    from harnessed.controller.check import check
    from harnessed.controller.reconciler import run_controller as reconcile

    logs.configure(config.gateway.log)
    check(config)
    if config.gateway.url is None:
        raise ConfigError("gateway.url is missing: name the gateway that this controller works for")

    url, folder = config.gateway.url, _service_folder(config, arguments) / "attempts"

    async def run() -> None:
        # As long as it lives: who runs it may start the gateway later.
        async with AsyncClient(url, admin_key(), patience_s=math.inf) as client:
            await reconcile(config, client, folder, arguments.run_id or config.run.name)

    asyncio.run(run())
    return 0


def serve_engine(config: Config, arguments: argparse.Namespace) -> int:
    _need_torch("engine")
    from harnessed.engine.serve import StartError, serve
    from harnessed.weights import WeightsError

    logs.configure(config.gateway.log)
    listener = _listener(arguments, config.engine.host, config.engine.port, "engine.port")
    if not arguments.owner:
        logs.say(f"engine on {services.url_of(listener)}")
    try:
        serve(listener, config.policy.model, arguments.weights or config.engine.weights, config.engine)
    except (StartError, WeightsError) as error:
        raise ConfigError(str(error)) from error
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    from harnessed.doctor import report

    return report(arguments.model)


def _listener(arguments: argparse.Namespace, host: str, port: int, setting: str) -> socket.socket:
    """The socket that the owner handed down, or one of our own."""
    if arguments.listener is not None:
        return socket.socket(fileno=arguments.listener)
    return services.bind(host, port, setting)


def _service_folder(config: Config, arguments: argparse.Namespace) -> Path:
    """A service that was started by hand may come back to the folder that it had."""
    folder: Path = arguments.folder or config.run.folder or Path.cwd() / "runs" / config.run.name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _need_torch(command: str) -> None:
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        raise ConfigError(f"`harnessed {command}` needs torch: pip install -e '.[train]' in its folder")


if __name__ == "__main__":
    main()
