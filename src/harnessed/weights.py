"""One copy of a policy's weights in memory, shared by the trainer that writes them and the engine that reads them.

The trainer calls `SharedWeights.create` and does its optimiser steps inside `writing`; the engine waits until
`read_state` finds something, calls `SharedWeights.open`, and asks `readable` before it generates. A folder holds:

    layout.json   names and shapes, in the order of the file
    weights.bin   every parameter (tied ones once), then every persistent buffer, as flat float32
    state.json    the version, and the mark of a writer at work; replaced atomically; the last of the three to appear

Both processes map weights.bin and make the parameters of their model views of the map, so an in-place step of the
optimiser is seen by the engine at once, nothing is copied, and either process can be started again. What keeps them
apart is the protocol: the writer pauses the engine first, and marks the state before its first write and after its
last. A mark whose writer died says that the weights may be half written; they are of use again when `create` has
written them anew from a checkpoint. All this survives the death of any process. After a loss of power, create anew.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from harnessed.records import Version

Layout = list[tuple[str, list[int]]]
"""Name and shape of each tensor in weights.bin, in its order."""


class WeightsError(Exception):
    """The folder cannot be used as asked; the text says what to do."""


class DeadWriterError(WeightsError):
    """A writer died in the middle: the weights may be half written."""


@dataclass(frozen=True)
class Writer:
    """A process, named so that another one that gets its id later is not taken for it."""

    pid: int
    started: int
    """Clock ticks from the boot of the machine to the start of the process."""

    @classmethod
    def this_process(cls) -> Self:
        pid = os.getpid()
        started = _start_of(pid)
        if started is None:
            raise WeightsError("cannot read /proc/self/stat, which names the writer: shared weights need Linux's /proc")
        return cls(pid, started)

    def alive(self) -> bool:
        return _start_of(self.pid) == self.started


@dataclass(frozen=True)
class State:
    """What state.json says."""

    version: Version
    """Of the weights, as long as nobody writes; otherwise the last complete one."""
    writing: Writer | None
    """Set before a writer's first write, cleared after its last one, kept if it fails."""


def read_state(folder: Path) -> State | None:
    """The state of the weights in a folder; None: they were never complete, and nobody may map them yet."""
    path = folder / "state.json"
    try:
        found = json.loads(path.read_bytes())
        writing = found["writing"] and Writer(**found["writing"])
        return State(Version(*found["version"]), writing)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        # Never left by a killed process, since the file is replaced in one step.
        raise WeightsError(f"{path} is damaged: remove {folder} and create the weights anew") from error
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from error


class SharedWeights:
    """A model bound to the weights in a folder."""

    def __init__(self, folder: Path, version: Version) -> None:
        self._folder = folder
        self._version = version

    @classmethod
    def create(cls, folder: Path, model: torch.nn.Module, version: Version) -> Self:
        """Write the model's values into the folder, whatever it held, and bind the model to them.

        Weights that an engine has mapped already are written in place, under a mark: pause it first. `version` must
        have a higher number than whatever the folder served, since no version is used twice.
        """
        tensors = _tensors(model)
        layout = _layout(tensors)
        before = read_state(folder)
        if before is None:
            # No reader comes near before state.json is there, so leftovers of a killed `create` are overwritten.
            folder.mkdir(parents=True, exist_ok=True)
            _replace(folder / "layout.json", layout)
            _allocate(folder / "weights.bin", _size(layout))
        else:
            _check_layout(folder, layout)
            _begin(folder, before, version)
        flat = _map(folder, layout)
        for view, tensor in zip(_views(flat, layout), tensors.values(), strict=True):
            view.copy_(tensor.detach())
            tensor.data = view
        _replace_state(folder, State(version, None))
        return cls(folder, version)

    @classmethod
    def open(cls, folder: Path, model: torch.nn.Module) -> Self:
        """Bind the model to the weights in the folder; its own values are forgotten."""
        state = read_state(folder)
        if state is None:
            raise WeightsError(f"there are no complete weights in {folder}: the trainer has not created them yet")
        tensors = _tensors(model)
        layout = _layout(tensors)
        _check_layout(folder, layout)
        for view, tensor in zip(_views(_map(folder, layout), layout), tensors.values(), strict=True):
            tensor.data = view
        return cls(folder, state.version)

    @property
    def version(self) -> Version:
        """Of the last complete weights."""
        return self._state().version

    def readable(self) -> Version | None:
        """The version that may be used now; None while a writer is at work: wait. Raises DeadWriterError."""
        state = self._state()
        if state.writing is None:
            return state.version
        if state.writing.alive():
            return None
        raise DeadWriterError(
            f"the trainer (process {state.writing.pid}) died while it wrote the weights after version "
            f"{state.version.lineage}.{state.version.number}, so they may be half written: "
            f"resume the training, which loads its last checkpoint into {self._folder}"
        )

    @contextmanager
    def writing(self, version: Version) -> Iterator[None]:
        """Around every change of the model's values; pause the engine first. Ends as `version`.

        If the body raises, the mark stays, since the values may be half changed: `create` them from a checkpoint.
        """
        before = self._state()
        if before != State(self._version, None):
            raise WeightsError(
                f"the weights in {self._folder} are not as this process left them (version {self._version.lineage}."
                f"{self._version.number}): another writer took over, or an update failed; create them anew"
            )
        _begin(self._folder, before, version)
        yield
        _replace_state(self._folder, State(version, None))
        self._version = version

    def _state(self) -> State:
        state = read_state(self._folder)
        if state is None:
            raise WeightsError(f"{self._folder / 'state.json'} was removed while the weights are in use: start again")
        return state


def _begin(folder: Path, before: State, version: Version) -> None:
    """Set this process's mark."""
    if version.number <= before.version.number:
        raise WeightsError(
            f"version number {version.number} is not above {before.version.number}, which {folder} has served"
        )
    writer = Writer.this_process()
    if before.writing not in (None, writer) and before.writing.alive():
        raise WeightsError(f"process {before.writing.pid} is writing the weights in {folder}: end it first")
    _replace_state(folder, State(before.version, writer))


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, then persistent buffers; a tensor with several names (tied weights) comes once."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    persistent = model.state_dict(keep_vars=True)
    found |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    for name, tensor in found.items():
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise WeightsError(
                f"{name} is {tensor.dtype} on {tensor.device}: only float32 in main memory can be shared"
            )
    return found


def _layout(tensors: dict[str, torch.Tensor]) -> Layout:
    return [(name, list(tensor.shape)) for name, tensor in tensors.items()]


def _size(layout: Layout) -> int:
    """Number of values."""
    return sum(torch.Size(shape).numel() for _, shape in layout)


def _check_layout(folder: Path, layout: Layout) -> None:
    found: Layout = [(name, shape) for name, shape in json.loads((folder / "layout.json").read_bytes())]
    for (name, shape), (found_name, found_shape) in zip(layout, found, strict=False):
        if (name, shape) != (found_name, found_shape):
            raise WeightsError(
                f"{folder} holds the weights of another model: {found_name} {found_shape} where this one has "
                f"{name} {shape}; use the model that the trainer was started with, or another folder"
            )
    if len(layout) != len(found):
        raise WeightsError(f"{folder} holds {len(found)} tensors and the model has {len(layout)}: it is another model")
    expected, size = _size(layout) * 4, (folder / "weights.bin").stat().st_size
    if size != expected:
        raise WeightsError(
            f"{folder / 'weights.bin'} has {size} bytes where {expected} are needed: remove {folder} and create anew"
        )


def _allocate(path: Path, values: int) -> None:
    with path.open("wb") as file:
        # A full disk is an error here; in a sparse file it would be a SIGBUS at some later write to the map.
        os.posix_fallocate(file.fileno(), 0, values * 4)


def _map(folder: Path, layout: Layout) -> torch.Tensor:
    """The file as one tensor [values]."""
    return torch.from_file(str(folder / "weights.bin"), shared=True, size=_size(layout), dtype=torch.float32)


def _views(flat: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """The tensors of the layout, as views of the map [values]."""
    shapes = [torch.Size(shape) for _, shape in layout]
    return [part.view(shape) for part, shape in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]


def _replace_state(folder: Path, state: State) -> None:
    writing = asdict(state.writing) if state.writing else None
    _replace(folder / "state.json", {"version": list(state.version), "writing": writing})


def _replace(path: Path, value: Any) -> None:
    """Write JSON such that a reader sees the old file or the new one, complete."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(value), encoding="utf-8")
    unfinished.replace(path)


def _start_of(pid: int) -> int | None:
    """Start time of a process that runs; None if there is none, or only its unreaped remains."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # proc(5): pid (name) state ..., and the start time is the 22nd field; the name may hold spaces and brackets.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
