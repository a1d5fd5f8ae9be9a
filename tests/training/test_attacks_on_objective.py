"""Cases at the edge of what docs/algorithms.md says, each of which was wrong once."""

from packed import scored_groups
from test_packing import trained_by_packs, trained_by_rows
from transcripts import node, transcript

from harnessed.training.packing import pack
from harnessed.training.samples import build

STOP = 96


def test_a_prompt_ends_where_an_answer_was_a_stop_alone():
    """Nothing of the answer 1 stands in the rows that cut its stop off, and what follows it belongs to each alone."""
    start = [1, 2, 3, 4]
    nodes = [
        node(1, 0, start, [STOP]),
        node(2, 1, [5, 6, 7, 8], [9], cut=1),
        node(3, 1, [10, 11, 12], [13], cut=1),
        node(4, 1, [16], [17]),
    ]
    other = [node(1, 0, [*start, 5, 6, 7, 8, 14], [15])]
    samples = [build(transcript(each, id=f"g.{i}")) for i, each in enumerate((nodes, other))]
    groups = scored_groups([samples], [1.0, -1.0])
    assert trained_by_packs(pack(groups, 1000, share=True)) == trained_by_rows(groups)
