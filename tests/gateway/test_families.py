"""Real tokenizers and chat templates, compared with transformers; fetched by `make families`."""

import os

import pytest
from families import FOLDER, PACKAGES

from harnessed.gateway.examine import examine
from harnessed.gateway.template import ChatTemplate

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="`make families` fetches them")
MESSAGES = [{"role": "user", "content": "Where is the key?"}]
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "<Look> é", "parameters": {"type": "object"}}}
]


@pytest.mark.parametrize("family", PACKAGES)
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["plain", "tools"])
def test_the_first_segment_is_what_transformers_makes(family, tools, monkeypatch):
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(FOLDER / family)
    expected = theirs.apply_chat_template(MESSAGES, tools=tools or None, add_generation_prompt=True, return_dict=False)
    assert ChatTemplate(FOLDER / family).first_segment(MESSAGES, tools) == expected


TAILS = ["", ", tools declared"]
FIELD = {"reasoning_content, then user", "reasoning_content, then tool result"}
RESULTS = [f"{n}{tail}" for n in ("one tool result", "several tool results") for tail in TAILS]
EXPECTED = {
    "qwen2_5": {"differs": FIELD},
    "qwen3": {"differs": {"reasoning in the text, then user", "reasoning_content, then user"}},
    "llama3_2": {
        "differs": FIELD | {"reasoning in the text, then tool result", "white space around an answer"},
        "unsupported": {f"several tool results{tail}" for tail in TAILS},
    },
    # The system prompt goes before the last user message, and so do tools.
    "mistral_nemo": {
        "differs": FIELD | {"reasoning in the text, then tool result", *RESULTS},
        "unsupported": {f"system message{tail}" for tail in TAILS},
        "broken": {f"user message{tail}" for tail in TAILS},
    },
    # All system messages are moved to the front; tool calls are written only where content is null, not where empty.
    "deepseek_v3": {"differs": FIELD | {f"system message{tail}" for tail in TAILS}, "broken": set(RESULTS)},
}


@pytest.mark.parametrize("family", PACKAGES)
def test_the_examination_finds_what_the_template_does(family):
    found = {}
    for finding in examine(ChatTemplate(FOLDER / family)).findings:
        found.setdefault(str(finding.verdict), set()).add(finding.case)
    del found["exact"]
    assert found == EXPECTED[family]


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llama3_2"])
def test_six_turns_read_as_the_template_writes_them(family):
    template = ChatTemplate(FOLDER / family)
    history = list(MESSAGES)
    context = template.first_segment(history, TOOLS)
    for turn in range(6):
        answer = template.encode(f"answer {turn}") + template.stop_ids
        history.append({"role": "assistant", "content": f"answer {turn}"})
        new = [{"role": "user", "content": f"and {turn}?"}]
        segment, cut = template.next_segment(new, TOOLS, answer[-1])
        assert cut == 0
        history += new
        context += answer + segment
        assert template.written(context) == template.render(history, TOOLS)


def test_tokens_sampled_in_another_way_drift_when_the_text_is_encoded_again():
    template = ChatTemplate(FOLDER / "qwen3")
    sampled = [id for letter in "hello" for id in template.encode(letter)]
    assert template.written(sampled) == "hello"
    assert template.encode("hello") != sampled
