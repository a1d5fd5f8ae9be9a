"""What the summary says of its books."""

import pytest

from harnessed.training.report import Summary


def summary(recorded: int, counted: int | None, fates: int, **restarts: int) -> Summary:
    return Summary(
        held_out_before=None,
        held_out_after=None,
        greedy_before=None,
        greedy_after=None,
        steps=1,
        rollouts=1,
        calls=1,
        sampled_tokens=recorded,
        engine_sampled_tokens=counted,
        trained_tokens=fates,
        lost_calls=0,
        restarts=restarts,
        fates={"trained": fates},
        outcomes={},
        seconds=1,
        seed=0,
        checkpoint=None,
        interrupted=False,
    )


WRONG = "THE BOOKS DO NOT BALANCE"


@pytest.mark.parametrize(
    ("books", "words"),
    [
        (summary(10, 10, 10), "the books balance"),
        (summary(10, None, 10), "the books balance"),
        (summary(10, 10, 9), WRONG),
        (summary(10, 12, 10), WRONG),
        (summary(10, 12, 10, controller=1), WRONG),
        (summary(10, 10, 10, gateway=1), "the books balance"),
        (summary(10, 12, 10, gateway=1), "each recorded token has one; 2 more were sampled for a gateway that died"),
        (summary(10, 9, 10, gateway=1), WRONG),
        (summary(10, 10, 9, gateway=1), WRONG),
        (summary(10, None, 10, engine=1), "each recorded token has one; what the engine had not answered when it died"),
        (summary(10, None, 9, engine=1), WRONG),
    ],
)
def test_the_books_balance_where_they_are_said_to(books, words):
    assert books.books.startswith(words)
    assert books.balanced == (words != WRONG)
