"""Weights shared by processes."""

import subprocess
import sys
import time

import pytest
import torch

from harnessed.records import Version
from harnessed.weights import DeadWriterError, SharedWeights, WeightsError, read_state

FIRST = Version(0, 0)


class Tied(torch.nn.Module):
    """As small as a model with tied weights and a buffer can be."""

    def __init__(self, inner=3):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, inner)
        self.head = torch.nn.Linear(inner, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((2,), 7.0))
        self.register_buffer("derived", torch.zeros(4), persistent=False)


def values(model):
    return torch.cat([model.embedding.weight.detach().flatten(), model.scale]).tolist()


def another_process(program, *arguments):
    """Runs beside this one; stdin and stdout are the test's."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_the_file_holds_each_parameter_once_and_the_buffers_that_matter(tmp_path):
    model = Tied()
    before = values(model)
    SharedWeights.create(tmp_path / "w", model, FIRST)
    stored = torch.from_file(str(tmp_path / "w" / "weights.bin"), size=17)
    assert (tmp_path / "w" / "weights.bin").stat().st_size == 17 * 4
    assert stored.tolist() == before == values(model)
    assert model.head.weight is model.embedding.weight


def test_a_reader_has_the_writers_values_and_sees_its_steps(tmp_path):
    trained, served = Tied(), Tied()
    writer = SharedWeights.create(tmp_path, trained, FIRST)
    reader = SharedWeights.open(tmp_path, served)
    assert values(served) == values(trained)
    optimiser = torch.optim.AdamW(trained.parameters(), lr=0.1)
    trained.head(trained.embedding(torch.tensor([1, 2]))).sum().backward()
    before = values(trained)
    with writer.writing(Version(0, 1)):
        assert reader.readable() is None, "a live writer is at work"
        assert reader.version == FIRST
        optimiser.step()
    assert values(served) == values(trained) != before
    assert reader.readable() == reader.version == writer.version == Version(0, 1)


READER = """
import sys, torch
from pathlib import Path
from harnessed.weights import SharedWeights
model = torch.nn.Linear(2, 2)
shared = SharedWeights.open(Path(sys.argv[1]), model)
print("open", flush=True)
for line in sys.stdin:
    print(list(shared.readable()), model.bias.tolist(), flush=True)
"""


def test_another_process_sees_a_step_without_reading_the_file_again(tmp_path):
    model = torch.nn.Linear(2, 2)
    writer = SharedWeights.create(tmp_path, model, FIRST)
    with another_process(READER, tmp_path) as reader:
        assert reader.stdout.readline() == "open\n"
        with writer.writing(Version(0, 1)), torch.no_grad():
            model.bias.copy_(torch.tensor([0.25, -8.0]))
        reader.stdin.write("now\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "[0, 1] [0.25, -8.0]\n"
        reader.stdin.close()


WRITER = """
import sys, torch
from pathlib import Path
from harnessed.records import Version
from harnessed.weights import SharedWeights
model = torch.nn.Linear(2, 2)
shared = SharedWeights.create(Path(sys.argv[1]), model, Version(0, 1))
with shared.writing(Version(0, 2)), torch.no_grad():
    model.weight.zero_()
    print("half", flush=True)
    sys.stdin.read()
"""


def test_the_mark_of_a_killed_writer_stands_until_the_weights_are_created_anew(tmp_path):
    model = torch.nn.Linear(2, 2)
    reader = SharedWeights.create(tmp_path, model, FIRST)
    with another_process(WRITER, tmp_path) as writer:
        assert writer.stdout.readline() == "half\n"
        assert reader.readable() is None
        with pytest.raises(WeightsError, match=f"process {writer.pid} is writing"):
            SharedWeights.create(tmp_path, model, Version(1, 2))
        writer.kill()
        # Not waited for yet: a process that nobody has reaped writes no more.
        deadline = time.monotonic() + 5
        while read_state(tmp_path).writing.alive():
            assert time.monotonic() < deadline, "the killed writer counts as alive"
        with pytest.raises(DeadWriterError, match=f"process {writer.pid}.* died while it wrote .* after version 0.1"):
            reader.readable()
    with pytest.raises(WeightsError, match="another writer took over"), reader.writing(Version(0, 2)):
        pass
    checkpoint = torch.nn.Linear(2, 2)
    SharedWeights.create(tmp_path, checkpoint, Version(1, 2))
    assert reader.readable() == Version(1, 2)
    assert torch.equal(model.weight, checkpoint.weight), "written in place: who had it mapped has it"


def test_a_failed_update_leaves_the_mark(tmp_path):
    model = Tied()
    shared = SharedWeights.create(tmp_path, model, FIRST)
    with pytest.raises(ZeroDivisionError), shared.writing(Version(0, 1)):
        _ = 1 / 0
    assert shared.readable() is None
    with pytest.raises(WeightsError, match="an update failed; create them anew"), shared.writing(Version(0, 1)):
        pass
    assert SharedWeights.create(tmp_path, model, Version(1, 1)).readable() == Version(1, 1)


def test_nobody_opens_weights_that_were_never_complete(tmp_path):
    folder = tmp_path / "w"
    assert read_state(folder) is None
    SharedWeights.create(folder, Tied(), FIRST)
    (folder / "state.json").unlink()  # as after a kill within the first `create`
    with pytest.raises(WeightsError, match="the trainer has not created them yet"):
        SharedWeights.open(folder, Tied())
    SharedWeights.create(folder, Tied(inner=4), FIRST)
    SharedWeights.open(folder, Tied(inner=4))


@pytest.mark.parametrize("use", [SharedWeights.open, lambda f, m: SharedWeights.create(f, m, Version(0, 1))])
def test_weights_of_another_model_are_refused(tmp_path, use):
    SharedWeights.create(tmp_path, Tied(), FIRST)
    with pytest.raises(
        WeightsError, match=r"another model: embedding.weight \[5, 3\] where this one has embedding.weight \[5, 4\]"
    ):
        use(tmp_path, Tied(inner=4))
    larger = Tied()
    larger.more = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(WeightsError, match="another model"):
        use(tmp_path, larger)


def test_a_truncated_file_is_refused(tmp_path):
    SharedWeights.create(tmp_path, Tied(), FIRST)
    with (tmp_path / "weights.bin").open("r+b") as file:
        file.truncate(8)
    with pytest.raises(WeightsError, match="8 bytes where 68 are needed"):
        SharedWeights.open(tmp_path, Tied())


def test_only_float32_is_shared(tmp_path):
    with pytest.raises(WeightsError, match=r"embedding.weight is torch.bfloat16 on cpu"):
        SharedWeights.create(tmp_path, Tied().bfloat16(), FIRST)
    counting = Tied()
    counting.register_buffer("seen", torch.tensor(3))
    with pytest.raises(WeightsError, match=r"seen is torch.int64"):
        SharedWeights.create(tmp_path, counting, FIRST)
    assert read_state(tmp_path) is None


def test_no_version_number_is_used_twice(tmp_path):
    shared = SharedWeights.create(tmp_path, Tied(), Version(0, 4))
    with pytest.raises(WeightsError, match="version number 4 is not above 4"), shared.writing(Version(0, 4)):
        pass
    with pytest.raises(WeightsError, match="version number 3 is not above 4"):
        SharedWeights.create(tmp_path, Tied(), Version(1, 3))
    assert shared.readable() == Version(0, 4)
