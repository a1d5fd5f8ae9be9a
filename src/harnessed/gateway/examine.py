"""Examination of a policy's chat template: does a conversation go on after an answer as the template would write it?

With `history: exact` what follows an answer is encoded by difference (`template.py`). That is what the deployed
template shows the model only if the template adds the same text after every conversation and leaves earlier text as it
was; here both are tried on small conversations. A pure function of the policy's folder: `api.py` answers with it when a
run is created, and `harnessed doctor` prints it.
"""

from typing import Any

from harnessed.gateway.template import ChatTemplate, Messages, TemplateError
from harnessed.records import Examination, Finding, Verdict

_MARK = "mark7"
"""Stands in the answer under examination and nowhere else; nothing trims or escapes it."""
_USER = {"role": "user", "content": "more"}
_TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}}]  # fmt: skip
_EARLIER: list[Messages] = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}],
    [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go"}],
]


def examine(template: ChatTemplate) -> Examination:
    findings = []
    answer = {"role": "assistant", "content": _MARK}
    for suffix, tools in (("", []), (", tools declared", _TOOLS)):
        findings += [
            _going_on(template, f"user message{suffix}", answer, [_USER], tools),
            _going_on(
                template, f"system message{suffix}", answer, [{"role": "system", "content": "note"}, _USER], tools
            ),
            _going_on(template, f"one tool result{suffix}", _calling(1), _results(1), tools),
            _going_on(template, f"several tool results{suffix}", _calling(2), _results(2), tools),
        ]
    findings += [
        _kept(template, "reasoning in the text, then user", {"content": _THOUGHT}, [_USER]),
        _kept(template, "reasoning in the text, then tool result", {"content": _THOUGHT}, _results(1)),
        _kept(template, "reasoning_content, then user", {"content": "so", "reasoning_content": _MARK}, [_USER]),
        _kept(template, "reasoning_content, then tool result", {"reasoning_content": _MARK}, _results(1)),
        _white_space(template),
        _generation_prompt(template),
        _stop(template),
        _cut(template),
    ]
    return Examination(findings=[*findings, _read_calls(template)])


def _read_calls(template: ChatTemplate) -> Finding:
    """Are the calls of an answer read from what the model writes?"""
    case = "tool calls of an answer"
    if template.format.calls:
        return Finding(case=case, verdict=Verdict.EXACT, detail="")
    if template.writes_calls:
        detail = "No parser knows the format in which this template writes calls: answers with calls come as text."
    else:
        detail = "The template does not write tool calls."
    return Finding(case=case, verdict=Verdict.UNSUPPORTED, detail=detail)


_THOUGHT = f"<think>\n{_MARK}\n</think>\n\nso"


def _calling(n: int) -> dict[str, Any]:
    calls = [
        {
            "id": f"call0000{i}",
            "type": "function",
            "function": {"name": "look", "arguments": f'{{"at": "{_MARK}-{i}"}}'},
        }
        for i in range(n)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _results(n: int) -> Messages:
    return [
        {"role": "tool", "tool_call_id": f"call0000{i}", "name": "look", "content": f"result {i}"} for i in range(n)
    ]


def _going_on(template: ChatTemplate, case: str, answer: dict[str, Any], new: Messages, tools: Messages) -> Finding:
    """Does every conversation that the template renders go on with the text that `template.added` gives?"""
    pairs = []
    for earlier in _EARLIER:
        try:
            pairs.append((template.render(earlier, tools), template.render([*earlier, answer, *new], tools)))
        except TemplateError as error:
            refusal = str(error)
    if not pairs:
        return Finding(case=case, verdict=Verdict.UNSUPPORTED, detail=f"Not supported by the template: {refusal}.")
    try:
        added = template.added(new, tools)
    except TemplateError as error:
        return Finding(case=case, verdict=Verdict.BROKEN, detail=f"The call would be refused: {error}.")
    if answer.get("tool_calls") and all(_MARK not in full for _, full in pairs):
        return Finding(case=case, verdict=Verdict.UNSUPPORTED, detail="The template does not write tool calls.")
    if any(_MARK not in full for _, full in pairs):
        return Finding(case=case, verdict=Verdict.BROKEN, detail="The template leaves the answer out.")
    tails = {full.rpartition(_MARK)[2] for _, full in pairs}
    if len(tails) > 1 or not tails.pop().endswith(added):
        return Finding(case=case, verdict=Verdict.BROKEN, detail="What follows an answer depends on what came before.")
    if any(not full.startswith(prompt) for prompt, full in pairs):
        detail = "When messages follow, the template rewrites the prompt that the answer was sampled after."
        return Finding(case=case, verdict=Verdict.DIFFERS, detail=detail)
    return Finding(case=case, verdict=Verdict.EXACT, detail="")


def _kept(template: ChatTemplate, case: str, said: dict[str, Any], new: Messages) -> Finding:
    """Is the reasoning of an earlier answer still there when messages follow?"""
    answer: dict[str, Any] = {"role": "assistant", "content": ""} | said
    if new[0]["role"] == "tool":
        answer = answer | {"tool_calls": [_PLAIN_CALL]}
    return _shows(template, case, [*_EARLIER[0], answer, *new], _MARK, "The template strips or ignores it.")


_PLAIN_CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": '{"at": "door"}'}}


def _white_space(template: ChatTemplate) -> Finding:
    text = f" \n{_MARK} \n"
    answer = {"role": "assistant", "content": text}
    return _shows(template, "white space around an answer", [*_EARLIER[0], answer, _USER], text, "It is trimmed.")


def _generation_prompt(template: ChatTemplate) -> Finding:
    detail = "Before an answer in history stands another text than the generation prompt it was sampled after."
    conversation = [*_EARLIER[0], {"role": "assistant", "content": _MARK}, _USER]
    try:
        prompt = template.render(_EARLIER[0], [])
    except TemplateError as error:
        return Finding(case="generation prompt", verdict=Verdict.UNSUPPORTED, detail=str(error))
    return _shows(template, "generation prompt", conversation, prompt + _MARK, detail)


def _stop(template: ChatTemplate) -> Finding:
    detail = (
        "History writes another text after an answer than the stop that is sampled: the context branches before it."
    )
    stops = [_MARK + template.written([id]) for id in template.stop_ids]
    conversation = [*_EARLIER[0], {"role": "assistant", "content": _MARK}, _USER]
    findings = [_shows(template, "stop token", conversation, stop, detail) for stop in stops]
    return next((finding for finding in findings if finding.verdict == Verdict.EXACT), findings[0])


def _cut(template: ChatTemplate) -> Finding:
    """Encoded in two pieces, as it is here, or at once, as a server would."""
    case, answer = "tokens at the cut", {"role": "assistant", "content": _MARK}
    try:
        full = template.render([*_EARLIER[0], answer, _USER], [])
    except TemplateError as error:
        return Finding(case=case, verdict=Verdict.UNSUPPORTED, detail=str(error))
    end = full.rindex(_MARK) + len(_MARK) if _MARK in full else 0
    if template.encode(full[:end]) + template.encode(full[end:]) == template.encode(full):
        return Finding(case=case, verdict=Verdict.EXACT, detail="")
    return Finding(
        case=case, verdict=Verdict.DIFFERS, detail="A token would span the end of an answer and what follows."
    )


def _shows(template: ChatTemplate, case: str, conversation: Messages, text: str, otherwise: str) -> Finding:
    try:
        shown = text in template.render(conversation, [])
    except TemplateError as error:
        return Finding(case=case, verdict=Verdict.UNSUPPORTED, detail=f"Not supported by the template: {error}.")
    verdict = Verdict.EXACT if shown else Verdict.DIFFERS
    return Finding(case=case, verdict=verdict, detail="" if shown else otherwise)
