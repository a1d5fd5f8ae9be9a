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
