import json
from pathlib import Path

import pytest
from policies import TEMPLATE, make_policy, make_tokenizer

from harnessed.config import ConfigError
from harnessed.gateway.template import ChatTemplate, TemplateError

TOKENIZER = make_tokenizer()
STOP = TOKENIZER.token_to_id("<|im_end|>")
USER = {"role": "user", "content": "hi"}


def text(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def test_the_first_segment_is_the_whole_rendering(tmp_path):
    template = ChatTemplate(make_policy(tmp_path))
    segment = template.first_segment([{"role": "system", "content": "S"}, USER], [])
    assert text(segment) == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.stop_ids == [STOP]


def test_a_later_segment_starts_right_after_the_sampled_stop(tmp_path):
    template = ChatTemplate(make_policy(tmp_path))
    segment, cut = template.next_segment([USER], [], STOP)
    assert cut == 0
    assert text(segment) == "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_an_answer_that_was_cut_gets_the_stop_from_the_template(tmp_path):
    template = ChatTemplate(make_policy(tmp_path))
    segment, cut = template.next_segment([USER], [], TOKENIZER.encode("a").ids[0])
    assert cut == 0
    assert text(segment) == "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_before_a_stop_that_the_template_writes_differently_the_context_goes_on(tmp_path):
    folder = make_policy(tmp_path)
    other = TOKENIZER.token_to_id("<|endoftext|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [STOP, other]}))
    segment, cut = ChatTemplate(folder).next_segment([USER], [], other)
    assert cut == 1
    assert text(segment).startswith("<|im_end|>\n<|im_start|>user")


def test_a_character_that_was_cut_in_two_is_not_delivered_by_half(tmp_path):
    template = ChatTemplate(make_policy(tmp_path))
    ids = TOKENIZER.encode("aé", add_special_tokens=False).ids
    assert template.text(ids[:-1], stopped=False) == "a"
    assert template.text([*ids, STOP], stopped=True) == "aé"


def test_a_template_that_refuses_says_so(tmp_path):
    refusing = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + TEMPLATE
    template = ChatTemplate(make_policy(tmp_path, refusing))
    with pytest.raises(TemplateError, match="user first"):
        template.first_segment([{"role": "system", "content": "S"}], [])


@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_folder_that_lacks_something_is_a_configuration_error(tmp_path, missing):
    folder = make_policy(tmp_path / "policy")
    (folder / missing).unlink()
    if missing == "generation_config.json":  # the tokenizer's eos_token serves as well
        assert ChatTemplate(folder).stop_ids == [STOP]
    else:
        with pytest.raises(ConfigError, match=str(folder)):
            ChatTemplate(folder)


def test_a_missing_folder_is_named():
    with pytest.raises(ConfigError, match="/nowhere"):
        ChatTemplate(Path("/nowhere"))


@pytest.mark.parametrize(
    ("content", "rendered"),
    [
        ([{"type": "text", "text": "one"}], "one"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two", "cache_control": {}}], "one\ntwo"),
        ([], ""),
        (None, ""),
    ],
)
def test_text_in_blocks_is_rendered_as_text(tmp_path, content, rendered):
    template = ChatTemplate(make_policy(tmp_path))
    segment = template.first_segment([{"role": "user", "content": content}], [])
    assert text(segment) == f"<|im_start|>user\n{rendered}<|im_end|>\n<|im_start|>assistant\n"


def test_a_tokenizer_that_was_saved_with_truncation_and_padding_cuts_and_pads_nothing(tmp_path):
    folder = make_policy(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.enable_truncation(10)
    tokenizer.enable_padding(length=200)
    tokenizer.save(str(folder / "tokenizer.json"))
    segment = ChatTemplate(folder).first_segment([{"role": "user", "content": "x" * 60}], [])
    assert text(segment).count("x") == 60
    assert text(segment).endswith("<|im_start|>assistant\n")


def test_text_that_looks_like_the_stub_is_text(tmp_path):
    template = ChatTemplate(make_policy(tmp_path))
    odd = "before \u2402answer\u2403 after"
    segment, _ = template.next_segment([{"role": "user", "content": odd}], [], STOP)
    assert text(segment) == f"\n<|im_start|>user\n{odd}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"nonsense"),
        ("tokenizer_config.json", b"[1]"),
        ("generation_config.json", b"{"),
        ("chat_template.jinja", b"\xff\xfe"),
        ("chat_template.jinja", b"{% if %}"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content):
    folder = make_policy(tmp_path / "policy")
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError):
        ChatTemplate(folder)


def test_the_date_is_the_day_on_which_the_run_was_created(tmp_path):
    template = ChatTemplate(make_policy(tmp_path, "{{ strftime_now('%Y') }}" + TEMPLATE))
    old, new = template.at(1_000_000_000), template.at(1_500_000_000)
    assert text(old.first_segment([USER], [])).startswith("2001")
    assert text(new.first_segment([USER], [])).startswith("2017")


def test_the_generation_tag_of_transformers_is_transparent(tmp_path):
    tagged = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert ChatTemplate(make_policy(tmp_path, tagged)).render([USER], []) == "hi"


def test_the_template_named_tool_use_serves_requests_with_tools(tmp_path):
    folder = make_policy(tmp_path)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    (folder / "chat_template.jinja").write_text("without")
    template = ChatTemplate(folder)
    assert (template.render([USER], []), template.render([USER], [{"type": "function"}])) == ("without", "with tools")
