"""Of a request that goes on from an earlier one only the rest is read; it has to mean what the whole means."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harnessed.gateway.transcript import Tree
from harnessed.gateway.wire import chat
from harnessed.gateway.wire.body import read_growing
from harnessed.gateway.wire.turn import WireError

TEXT = st.text(st.sampled_from('ab"\\[]{},:\né messages'), max_size=12)
VALUE = st.recursive(TEXT | st.integers(0, 9) | st.none(), lambda each: st.lists(each, max_size=3), max_leaves=5)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": VALUE})
FIELDS = st.dictionaries(st.sampled_from(["model", "tools", "x"]), VALUE, max_size=3)


@st.composite
def bodies(draw: st.DrawFn) -> list[bytes]:
    """Two requests of one harness, the second of which mostly goes on from the first."""
    messages = draw(st.lists(MESSAGE, min_size=1, max_size=4))
    first, last, more = draw(FIELDS), draw(FIELDS), draw(st.lists(MESSAGE, max_size=3))
    write = draw(st.sampled_from([json.dumps, lambda value: orjson.dumps(value).decode()]))
    requests = [{**first, "messages": messages, **last}, {**first, "messages": messages + more, **draw(FIELDS)}]
    texts = [write(request) for request in requests]
    if draw(st.booleans()):  # a field that comes twice: the last one counts
        texts[1] = texts[1][:-1] + ', "messages": ' + write(draw(st.lists(MESSAGE, max_size=2))) + "}"
    return [text.encode() for text in texts]


@given(bodies())
def test_what_goes_on_from_a_known_request_means_what_it_says(bodies):
    _, _, before = read_growing(bodies[0], "messages", None)
    whole = orjson.loads(bodies[1])
    known = before if before and before.begins(bodies[1]) else None
    request, same, beginning = read_growing(bodies[1], "messages", known)
    assert request == whole
    assert same <= len(whole["messages"])
    if beginning:
        assert bodies[1].startswith(beginning.whole)
        assert beginning.items == whole["messages"]


def test_what_is_known_is_not_read_again():
    asked = [{"role": "user", "content": "hello"}]
    first = chat.parse(orjson.dumps({"model": "m", "messages": asked}), {})
    longer = [*asked, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "go on"}]
    second = chat.parse(orjson.dumps({"model": "m", "messages": longer}), {}, first.beginning)
    assert second.messages == longer
    assert second.messages[0] is first.messages[0]
    assert second.known == 1


@pytest.mark.parametrize("rest", [b',{"role":1}]}', b',"text"]}', b",]}", b"}", b"]"])
def test_a_fault_in_the_rest_is_found(rest):
    first = chat.parse(b'{"messages":[{"role":"user","content":"hello"}]}', {})
    with pytest.raises(WireError):
        chat.parse(first.beginning.whole + rest, {}, first.beginning)


def test_places_are_the_same_with_and_without_what_is_known():
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    tree = Tree()
    tree.place(messages, [])
    again = tree.place([*messages, {"role": "user", "content": "go on"}], [])
    assert again == Tree().place([*messages, {"role": "user", "content": "go on"}], [])
    other = tree.place(messages, [{"type": "function", "function": {"name": "look"}}])
    assert other.prompt != tree.place(messages, []).prompt


KNOWN = b'{"messages":[{"role":"user","content":"a"}'
MORE = b',{"role":"user","content":{"x":["]"]}}'
AGAIN = b'],"messages":[{"role":"user","content":"b"},{"role":"user","content":"c"}]}'


@pytest.mark.parametrize("body, begins", [(KNOWN + MORE + b'],"k":[1]}', KNOWN + MORE), (KNOWN + AGAIN, None)])
def test_the_last_of_equal_fields_counts_and_a_list_ends_with_its_last_object(body, begins):
    _, _, before = read_growing(KNOWN + b"]}", "messages", None)
    request, _, beginning = read_growing(body, "messages", before)
    assert request == orjson.loads(body)
    assert (beginning.whole if beginning else None) == begins
