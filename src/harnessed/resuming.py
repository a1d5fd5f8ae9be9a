"""The folder of a training over its lives: one trainer holds it at a time, and `--resume` finds it again.

run.json makes a folder that of a run; it is there before anything is started. Nothing in the folder names its place, so
it may be moved. `run.py` calls this.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import yaml

from harnessed.config import Config, ConfigError, hide_passwords
from harnessed.records import Version
from harnessed.training.failures import CannotWrite
from harnessed.training.lineages import Lineage
from harnessed.training.resumed import Resumed

RUN_FILE = "run.json"
CONFIG_FILE = "config.yaml"
TRAINER_LOCK = "trainer.lock"
_PATIENCE_S = 5.0
"""A trainer that was killed a moment ago may still have the folder for so long."""
LEFTOVERS_LIMIT_S = 30.0
"""How long the services of a trainer that died may take to end."""
_LOCKS = {"gateway": "gateway.lock", "controller": "attempts/controller"}
"""What the services hold as long as they live (gateway/store.py, controller/predecessor.py)."""
_FIXED = ("run.seed", "trainer.lora", "trainer.optimiser.kind")
"""Settings on which the order of tasks, the weights and the moments of the run depend."""
_SAMPLED_BYTES, _SAMPLES = 2**16, 64
"""A larger file than this many blocks is compared by so many blocks of it."""


@dataclass(slots=True)
class RunRecord:
    """run.json."""

    id: str
    created: float
    policy: str
    """Fingerprint of policy.model."""
    resumed: int = 0
    """How often."""
    lineages: list[Lineage] = field(default_factory=list)
    """Of the policy, in the order in which they began."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ConfigError."""
        path = folder / RUN_FILE
        try:
            found = json.loads(path.read_bytes())
            found["lineages"] = [Lineage(*each) for each in found["lineages"]]
            return cls(**found)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"--resume: cannot read {path}: {' '.join(str(error).split())}") from error

    def write(self, folder: Path) -> None:
        """Raises CannotWrite."""
        write_whole(folder / RUN_FILE, json.dumps(asdict(self), indent=1) + "\n")


def find(config: Config) -> Path:
    """The folder to go on in: run.folder, or the newest run of that name. Raises ConfigError."""
    folder, name = config.run.folder, config.run.name
    if folder is not None:
        if not (folder / RUN_FILE).is_file():
            raise ConfigError(
                f"--resume: {folder} holds no {RUN_FILE}, so no run was begun there; to begin one, leave out --resume "
                "and name a folder that is new or empty"
            )
        return folder
    runs = Path.cwd() / "runs"
    records = {path.parent: RunRecord.read(path.parent) for path in runs.glob(f"*/{RUN_FILE}")}
    mine = [folder for folder, record in records.items() if record.id.rpartition("-")[0] == name]
    if not mine:
        raise ConfigError(f"--resume: there is no run of the name {name} in {runs}: set run.folder, or begin one")
    return max(mine, key=lambda folder: records[folder].created)


def finished(folder: Path, steps: int) -> str:
    """One line if there is nothing left to do, else nothing."""
    try:
        summary = json.loads((folder / "summary.json").read_bytes())
        if summary["interrupted"] or summary["steps"] < steps:
            return ""
        return f"the run in {folder} has taken its {summary['steps']} steps; to go on, raise trainer.steps above that"
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--resume: cannot read {folder / 'summary.json'}: {error}") from error


def hold(folder: Path) -> IO[str]:
    """A file that says, as long as it is open, that this process trains in the folder. Raises ConfigError."""
    file = (folder / TRAINER_LOCK).open("a+", encoding="utf-8")
    deadline = time.monotonic() + _PATIENCE_S
    while not _lock(file):
        if time.monotonic() > deadline:
            file.seek(0)
            who = file.read().strip() or "unknown"
            file.close()
            raise ConfigError(
                f"another trainer (process {who}) works in {folder}: end it, or choose another run.folder"
            )
        time.sleep(0.05)
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def wait_for_leftovers(folder: Path, config: Config) -> None:
    """Services end with their trainer, in their own time: return when those of this folder have. Raises ConfigError."""
    ours = {"gateway": config.gateway.url is None, "controller": not config.controller.external}
    deadline = time.monotonic() + LEFTOVERS_LIMIT_S
    for service, name in _LOCKS.items():
        said = False
        while ours[service] and _is_locked(folder / name):
            if not said:
                print(f"waiting for the {service} of the run's earlier trainer to end", flush=True)
            said = True
            if time.monotonic() > deadline:
                raise ConfigError(f"--resume: a {service} still works in {folder} (it holds {folder / name}): end it")
            time.sleep(0.05)


def take_up(folder: Path, record: RunRecord, config: Config) -> Resumed:
    """Where the run of this folder goes on. Raises ConfigError."""
    notes: dict[str, Any] = {"step": 0, "version": None, "groups": []}
    from harnessed.training.checkpoints import Checkpoints  # needs torch, as only trainers do

    own = Checkpoints(folder, keep=1, keep_best=1, note=print).newest()
    checkpoint = own or config.trainer.resume_from
    if checkpoint is not None:
        notes |= _notes(checkpoint)
    version = Version(*notes["version"]) if notes["version"] else None
    served = [Version(each.lineage, each.number) for each in record.lineages]
    return Resumed(
        times=record.resumed + 1,
        checkpoint=checkpoint,
        step=notes["step"],
        version=version,
        groups=frozenset(notes["groups"] if own else []),
        served=tuple([*served, version] if version else served),
    )


def _notes(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / "harnessed.json"
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        return {name: found[name] for name in ("step", "version", "groups")}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--resume: cannot read {path}: {' '.join(str(error).split())}") from error


def check_policy(record: RunRecord, model: Path) -> None:
    """Raises ConfigError if it is not that which the run began with, wherever it lies."""
    if record.policy != fingerprint(model):
        raise ConfigError(
            f"--resume: policy.model: {model} is not the model that the run began with: set it as it was, or begin "
            "another run"
        )


def changes(folder: Path, config: Config) -> list[str]:
    """Settings that are not as they were, as `name: before -> now`. Raises ConfigError for those that have to be."""
    path = folder / CONFIG_FILE
    try:
        before = dict(_flat(yaml.safe_load(path.read_text(encoding="utf-8"))))
    except (OSError, yaml.YAMLError, AttributeError) as error:
        raise ConfigError(f"--resume: cannot read {path}: {' '.join(str(error).split())}") from error
    now = dict(_flat(used(config)))
    changed = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    for name in sorted(changed):
        if name.startswith(_FIXED):
            raise ConfigError(
                f"--resume: {name} was {_shown(before, name)} and is {_shown(now, name)}: set it as it was, or begin "
                "another run"
            )
    changed -= {"run.folder", "policy.model"}  # what they hold is compared
    secret = "harness.environment."
    return [
        name if name.startswith(secret) else f"{name}: {_shown(before, name)} -> {_shown(now, name)}"
        for name in sorted(changed)
    ]


def used(config: Config) -> dict[str, Any]:
    """The settings as config.yaml keeps them."""
    settings = config.model_dump(mode="json")
    if config.gateway.database is not None:
        settings["gateway"]["database"] = hide_passwords(config.gateway.database)
    return settings


def write_whole(path: Path, text: str) -> None:
    """Who reads it sees the old file or the new one. Raises CannotWrite."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror}") from error


def fingerprint(model: Path) -> str:
    """Of what makes a policy: weights, tokenizer and chat template. Raises ConfigError."""
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    files = [path for name in names if (path := model / name).is_file()]
    digest = hashlib.blake2b(digest_size=16)
    try:
        for path in [*files, *sorted(model.glob("*.safetensors"))]:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            for block in _blocks(path):
                digest.update(block)
    except OSError as error:
        raise ConfigError(f"policy.model: cannot read {error.filename}: {error.strerror}") from error
    return digest.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    """All of a file, or parts from all over it: other weights differ everywhere."""
    size = path.stat().st_size
    stride = max(_SAMPLED_BYTES, size // _SAMPLES)
    with path.open("rb") as file:
        for start in range(0, size, stride):
            file.seek(start)
            yield file.read(_SAMPLED_BYTES)


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _shown(settings: dict[str, Any], name: str) -> str:
    """One that is in no configuration is off."""
    return json.dumps(settings.get(name))


def _lock(file: IO[str]) -> bool:
    try:
        # The lock ends with the process that has it, whatever ends the process.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_locked(path: Path) -> bool:
    try:
        with path.open("r+", encoding="utf-8") as file:
            return not _lock(file)
    except FileNotFoundError:
        return False
