"""What people see of a row."""

import pytest
from policies import make_policy, make_tokenizer
from transcripts import node, transcript

from harnessed.browse.rows import marked
from harnessed.gateway.template import ChatTemplate
from harnessed.training.samples import build


@pytest.mark.parametrize("said", ["plain", "a\\", "b\\\\\\", "[green]", "[[x]]", "é\n"])
@pytest.mark.parametrize("colour", [True, False])
def test_text_is_shown_as_it_is(tmp_path, said, colour):
    ids = make_tokenizer().encode(said, add_special_tokens=False).ids
    (row,) = build(transcript([node(1, 0, ids, ids)])).rows
    shown = marked(row, ChatTemplate(make_policy(tmp_path)), colour=colour)
    assert shown.plain == (said + said if colour else f"{said}[[{said}]]")
