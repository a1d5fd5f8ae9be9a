"""The numerical example of docs/algorithms.md comes out of the code."""

from pathlib import Path
from typing import get_args

import pytest
from transcripts import node, transcript

from harnessed.config import Advantage, Importance, Kl, Objective
from harnessed.training.advantages import advantages
from harnessed.training.batching import scored
from harnessed.training.samples import build

PAGE = (Path(__file__).parent.parent.parent / "docs" / "algorithms.md").read_text()
REWARDS, ROWS = [1, 1, 0, 0], [1, 1, 1, 5]
CENTRED = Advantage(normalise_deviation=False)


def samples():
    """Each row an answer of four tokens in a conversation of its own."""
    return [
        build(transcript([node(n + 1, 0, [n], [5, 6, 7, 9]) for n in range(rows)], id=f"g.{place}", reward=reward))
        for place, (reward, rows) in enumerate(zip(REWARDS, ROWS, strict=True))
    ]


def weights(normalisation):
    found = scored(samples(), [0.0] * len(REWARDS), normalisation)
    return [sum(float(row.weights.sum()) for row in rows) for rows in found]


def test_the_table_of_rollouts_and_rows():
    (by_rollouts,) = advantages([REWARDS], CENTRED)
    (by_rows,) = advantages([[r for r, rows in zip(REWARDS, ROWS, strict=True) for _ in range(rows)]], CENTRED)
    of_rows = [by_rows[sum(ROWS[:place])] for place in range(len(ROWS))]
    columns = (REWARDS, ROWS, by_rollouts, weights("rollout"), of_rows, weights("sample"))
    for number, (reward, rows, a, w, row_a, row_w) in enumerate(zip(*columns, strict=True), 1):
        cells = f"{number} | {reward} | {rows} | {a:+.3f} | {w:.3f} | {w * a:+.3f} | {row_a:+.3f} | {row_w:.3f}"
        assert f"| {cells} | {row_w * row_a:+.3f} |" in PAGE
    assert sum(w * a for w, a in zip(weights("rollout"), by_rollouts, strict=True)) == pytest.approx(0, abs=1e-7)


def test_what_the_text_says_of_it():
    (by_rollouts,) = advantages([REWARDS], CENTRED)
    sample = weights("sample")
    assert f"pushed down {sample[3] / sample[2]:.0f} times as much" in PAGE
    total = sum(w * a for w, a in zip(sample, by_rollouts, strict=True))
    assert f"add up to {total:.3f}" in PAGE


def test_the_options_are_all_on_the_page():
    for section, names in ((Objective, ["loss", "old", "normalisation"]), (Importance, ["bound"]), (Kl, ["place"])):
        for name in names:
            for option in get_args(section.model_fields[name].annotation):
                assert option in PAGE, option
    for section in (Objective, Advantage):
        for name in section.model_fields:
            assert f"`{name}" in PAGE or f"{name}`" in PAGE, name
