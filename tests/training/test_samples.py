import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transcripts import node, rollout, transcript

from harnessed.records import Attempt, Fate, Outcome, Overlong, Purpose, Transcript
from harnessed.training.failures import RowTooLong
from harnessed.training.samples import Bound, build


def test_a_linear_conversation_is_one_row():
    sample = build(transcript([node(1, 0, [1, 2], [3, 9]), node(2, 1, [4], [5, 6, 9])]))
    (row,) = sample.rows
    assert row.tokens.tolist() == [1, 2, 3, 9, 4, 5, 6, 9]
    assert row.trained.tolist() == [False, False, True, True, False, True, True, True]
    assert row.logprobs[2:4].tolist() == np.float32([-0.5, -0.51]).tolist()
    assert row.versions.tolist() == [-1, -1, 0, 0, -1, 0, 0, 0]
    assert sample.fates == {Fate.TRAINED: 5}


def test_a_dropped_answer_has_a_row_of_its_own_and_shared_answers_are_trained_once():
    nodes = [
        node(1, 0, [1, 2], [3, 9]),
        node(2, 1, [4], [5, 9]),  # dropped: the next request goes on from node 1
        node(3, 1, [7], [8, 9]),
    ]
    sample = build(transcript(nodes))
    assert [row.tokens.tolist() for row in sample.rows] == [[1, 2, 3, 9, 4, 5, 9], [1, 2, 3, 9, 7, 8, 9]]
    assert sample.rows[0].trained.tolist() == [False, False, True, True, False, True, True]
    assert sample.rows[1].trained.tolist() == [False, False, False, False, False, True, True]
    assert sample.fates == {Fate.TRAINED: 6}


def test_an_answer_that_nobody_received_is_not_trained():
    sample = build(transcript([node(1, 0, [1], [2, 9]), node(2, 1, [3], [4, 4, 9], delivered=False)]))
    assert [row.tokens.tolist() for row in sample.rows] == [[1, 2, 9]]
    assert sample.fates == {Fate.TRAINED: 2, Fate.UNDELIVERED: 3}


def test_answers_without_log_probabilities_are_context():
    sample = build(transcript([node(1, 0, [1], [2, 9], logprobs=[]), node(2, 1, [3], [4, 9])]))
    (row,) = sample.rows
    assert row.trained.tolist() == [False, False, False, False, True, True]
    assert sample.fates == {Fate.TRAINED: 2, Fate.NO_LOGPROB: 2}


def test_only_the_last_attempt_is_trained():
    attempts = [Attempt(1, [node(1, 0, [1], [2, 2, 9])]), Attempt(2, [node(1, 0, [1], [3, 9])])]
    sample = build(Transcript(rollout(attempt=2), attempts))
    assert [row.tokens.tolist() for row in sample.rows] == [[1, 3, 9]]
    assert sample.fates == {Fate.SUPERSEDED_ATTEMPT: 3, Fate.TRAINED: 2}


def test_each_outcome_has_its_fate():
    nodes = [node(1, 0, [1], [2, 9])]
    expected = {
        Outcome.OK: Fate.TRAINED,
        Outcome.AGENT_EXIT: Fate.TRAINED,
        Outcome.AGENT_TIMEOUT: Fate.TRAINED,
        Outcome.BUDGET: Fate.TRAINED,
        Outcome.INFRASTRUCTURE: Fate.INFRASTRUCTURE,
        Outcome.CANCELLED: Fate.CANCELLED,
    }
    for outcome, fate in expected.items():
        sample = build(transcript(nodes, outcome=outcome))
        assert sample.fates == {fate: 2}
        assert (sample.reward is None) == (fate != Fate.TRAINED)
    assert build(transcript(nodes, purpose=Purpose.EVALUATION)).fates == {Fate.EVALUATION: 2}


def test_a_sample_that_is_given_up_keeps_its_other_fates():
    sample = build(transcript([node(1, 0, [1], [2, 9]), node(2, 1, [3], [4], delivered=False)]))
    sample.give_up(Fate.GROUP_SKIPPED)
    assert sample.rows == []
    assert sample.fates == {Fate.GROUP_SKIPPED: 2, Fate.UNDELIVERED: 1}


@st.composite
def trees(draw):
    """Any tree that a gateway can record: parents come earlier and were delivered."""
    nodes = []
    for number in range(1, draw(st.integers(1, 12)) + 1):
        parents = [0] + [earlier.number for earlier in nodes if earlier.delivered]
        nodes.append(
            node(
                number,
                parent := draw(st.sampled_from(parents)),
                draw(st.lists(st.integers(0, 99), max_size=3)),
                # Each sampled token is a number of its own, so that it can be found in the rows.
                [1000 * number + i for i in range(draw(st.integers(1, 4)))],
                delivered=draw(st.integers(0, 5)) > 0,
                logprobs=None if draw(st.integers(0, 5)) else [],
                cut=draw(st.integers(0, 3)) // 3 if parent else 0,
            )
        )
    return nodes


bounds = st.builds(Bound, st.none() | st.integers(1, 30), st.sampled_from([Overlong.TRUNCATE, Overlong.DROP]))


@given(trees(), bounds)
def test_fates_add_up_and_each_trained_token_has_exactly_its_context(nodes, bound):
    sample = build(transcript(nodes), bound)
    assert all(len(row.tokens) <= (bound.tokens or 999) and row.trained.any() for row in sample.rows)
    assert sum(sample.fates.values()) == sum(each.sampled for each in nodes)
    trained = []
    for row in sample.rows:
        for position in np.flatnonzero(row.trained):
            token = int(row.tokens[position])
            trained.append(token)
            source = nodes[token // 1000 - 1]
            start = position - token % 1000
            context = row.tokens[:start].tolist()
            assert context == engine_context(nodes, source)
    assert len(trained) == len(set(trained)) == sample.fates[Fate.TRAINED]


LONG = [node(1, 0, [1, 2], [3, 9]), node(2, 1, [4], [5, 6, 9]), node(3, 1, [7], [8])]
"""Rows of 8 and 6 tokens that share 4."""


def test_a_row_that_is_too_long_is_cut():
    sample = build(transcript(LONG), Bound(6, Overlong.TRUNCATE))
    assert [row.tokens.tolist() for row in sample.rows] == [[1, 2, 3, 9, 4, 5], [1, 2, 3, 9, 7, 8]]
    assert sample.fates == {Fate.TRAINED: 4, Fate.OVERLONG: 2}
    assert sum(row.trained.sum() for row in sample.rows) == sample.trained_tokens


def test_a_row_that_is_cut_before_its_own_answers_is_none():
    sample = build(transcript(LONG), Bound(5, Overlong.TRUNCATE))
    assert [row.tokens.tolist() for row in sample.rows] == [[1, 2, 3, 9, 4]]
    assert sample.fates == {Fate.TRAINED: 2, Fate.OVERLONG: 4}


def test_what_a_dropped_row_shares_is_trained_in_the_row_that_fits():
    sample = build(transcript(LONG), Bound(6, Overlong.DROP))
    assert [row.tokens.tolist() for row in sample.rows] == [[1, 2, 3, 9, 7, 8]]
    assert sample.fates == {Fate.TRAINED: 3, Fate.OVERLONG: 3}


def test_a_row_that_is_too_long_ends_the_run_where_that_is_wanted():
    assert len(build(transcript(LONG), Bound(8, Overlong.FAIL)).rows) == 2
    with pytest.raises(RowTooLong, match=r"g\.0 gives a row of 8 tokens, and trainer\.row_tokens is 7"):
        build(transcript(LONG), Bound(7, Overlong.FAIL))


def test_the_answer_in_place_of_a_stop_that_history_writes_differently():
    """Node 2's context leaves out node 1's stop, which is trained in a row of its own."""
    nodes = [node(1, 0, [1], [2, 3, 99], version=5), node(2, 1, [4], [5], cut=1)]
    sample = build(transcript(nodes))
    assert [row.tokens.tolist() for row in sample.rows] == [[1, 2, 3, 99], [1, 2, 3, 4, 5]]
    assert [row.trained.tolist() for row in sample.rows] == [[False, True, True, True], [False] * 4 + [True]]
    assert sample.rows[1].versions.tolist() == [-1, 5, 5, -1, 0]
    assert sample.rows[1].logprobs[3] == 0


def engine_context(nodes, source):
    """What the engine was given when it sampled this answer, from the definition of the tree."""
    segment = np.frombuffer(source.segment, np.int32).tolist()
    if not source.parent:
        return segment
    parent = nodes[source.parent - 1]
    answer = np.frombuffer(parent.answer, np.int32).tolist()
    return engine_context(nodes, parent) + answer[: len(answer) - source.cut] + segment
