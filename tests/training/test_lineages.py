"""How old tokens are, over the lives of a run."""

import pytest

from harnessed.records import Version
from harnessed.training.lineages import Lineage, go_on, next_version, updates_at, updates_between

# Killed after update 5, went on from the checkpoint of 3; killed after one more; again from that of 3; then from 4.
LIVES = [Lineage(0, 0, 0), Lineage(1, 6, 3), Lineage(2, 8, 3), Lineage(3, 10, 4)]


@pytest.mark.parametrize(
    ("token", "current", "updates"),
    [
        ((0, 0), (0, 0), 0),
        ((0, 1), (0, 5), 4),
        ((0, 3), (1, 6), 0),  # the same weights under another name
        ((0, 2), (1, 6), 1),
        ((0, 5), (1, 6), 2),  # two back
        ((0, 5), (1, 7), 3),  # two back and one forth
        ((0, 4), (1, 9), 4),
        ((1, 7), (2, 8), 1),  # a branch of one update
        ((1, 6), (2, 8), 0),
        ((0, 3), (2, 9), 1),
        ((0, 5), (2, 9), 3),
        ((2, 9), (3, 10), 0),
        ((2, 9), (3, 11), 1),
        ((2, 11), (3, 10), 2),
        ((1, 7), (3, 10), 2),  # the third went on from 4, which the second's branch never was
        ((0, 5), (3, 12), 5),
        ((0, 0), (3, 12), 6),
        ((3, 11), (3, 12), 1),
    ],
)
def test_updates_between_a_token_and_the_current_weights(token, current, updates):
    assert updates_between(Version(*token), Version(*current), LIVES) == updates


def test_a_checkpoint_older_than_the_last_start_leaves_that_life_too():
    """That from which the second life had gone on was damaged since."""
    lives = [Lineage(0, 0, 0), Lineage(1, 9, 8), Lineage(2, 12, 5)]
    assert updates_between(Version(1, 11), Version(2, 12), lives) == 5
    assert updates_between(Version(0, 8), Version(2, 13), lives) == 4
    assert updates_between(Version(0, 4), Version(2, 13), lives) == 2


def test_lives_go_on_from_what_they_loaded():
    lives = go_on([], Version(0, 0), None)
    lives = go_on(lives, Version(1, 6), Version(0, 3))
    assert lives == LIVES[:2]
    assert go_on(lives, Version(2, 8), Version(1, 6)) == LIVES[:3]
    assert go_on(lives, Version(2, 8), None)[-1] == Lineage(2, 8, 0)
    assert go_on([], Version(1, 21), Version(0, 20)) == [Lineage(1, 21, 0)]  # of another run


def test_updates_that_were_skipped_do_not_count():
    """Step 7 was reached with three versions."""
    lives = go_on([Lineage(0, 0, 0)], Version(1, 4), Version(0, 3))
    assert updates_between(Version(0, 3), Version(1, 4), lives) == 0


def test_a_version_of_nobody_is_an_error():
    with pytest.raises(LookupError, match=r"4\.1"):
        updates_at(Version(4, 1), LIVES)
    with pytest.raises(LookupError, match=r"1\.2"):
        updates_at(Version(1, 2), LIVES)


def test_a_new_life_is_above_everything_that_was_served():
    assert next_version([]) == Version(0, 0)
    assert next_version([Version(0, 5), Version(2, 3)]) == Version(3, 6)
