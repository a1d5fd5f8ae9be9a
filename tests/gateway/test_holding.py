"""Calls that wait: the real SDKs are kept alive, take the answer whole, and learn of a failure by a reset."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import anthropic
import httpx
import openai
import pytest
from google import genai
from house import House
from policies import CALLING, make_policy
from scripted_engine import Logged, Scripted
from test_exchange import USER
from texts import answer, text
from wiretap import Wiretap

from harnessed.client import close_turnstile, end_attempt, get_transcripts, open_turnstile
from harnessed.gateway import delivery
from harnessed.gateway.session import Pending, attempt_ended
from harnessed.gateway.wire.turn import Turn
from harnessed.records import Assignment, CloseMode, Ending, Fate, Outcome
from harnessed.training.samples import build

LIMIT_S = 60
SAID = "one  two."
PATIENT = {"timeout": LIMIT_S, "max_retries": 0}
BROKEN = ("APIConnectionError", "ReadError", "RemoteProtocolError", "ClientPayloadError")
"""What SDKs raise when a connection breaks, of their own or of their HTTP clients."""
BROKEN += ("MidStreamFallbackError", "InternalServerError")  # litellm's words for it


async def until(condition) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


@dataclass
class Desk:
    """Where a client sits: the address that it calls, its key, what it says, and the SDKs."""

    url: str
    key: str
    prompt: str = "go"

    @property
    def said(self):
        return [{"role": "user", "content": self.prompt}]

    def openai(self, **settings):
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, **PATIENT | settings)

    def anthropic(self):
        return anthropic.AsyncAnthropic(base_url=self.url, auth_token=self.key, **PATIENT)

    def google(self, http=None):
        options = genai.types.HttpOptions(base_url=self.url, timeout=LIMIT_S * 1000, httpx_async_client=http)
        return genai.Client(api_key=self.key, http_options=options).aio

    def litellm(self, **options):
        import litellm

        path = "" if options["model"].startswith("anthropic") else "/v1"
        options = {"messages": self.said, "api_base": self.url + path, "api_key": self.key} | options
        return litellm.acompletion(**options, **PATIENT)


async def joined(chunks) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])


async def chat(desk):
    async with desk.openai() as client:
        return (await client.chat.completions.create(model="m", messages=desk.said)).choices[0].message.content


async def chat_streamed(desk):
    async with desk.openai() as client:
        return await joined(await client.chat.completions.create(model="m", messages=desk.said, stream=True))


async def chat_helped(desk):
    async with desk.openai() as client, client.chat.completions.stream(model="m", messages=desk.said) as stream:
        return (await stream.get_final_completion()).choices[0].message.content


async def completions(desk):
    async with desk.openai() as client:
        return (await client.completions.create(model="m", prompt=desk.prompt)).choices[0].text


async def completions_streamed(desk):
    async with desk.openai() as client:
        stream = await client.completions.create(model="m", prompt=desk.prompt, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])


async def responses(desk):
    async with desk.openai() as client:
        return (await client.responses.create(model="m", input=desk.prompt)).output_text


async def responses_streamed(desk):
    async with desk.openai() as client, client.responses.stream(model="m", input=desk.prompt) as stream:
        return (await stream.get_final_response()).output_text


async def messages(desk):
    async with desk.anthropic() as client:
        return (await client.messages.create(model="m", max_tokens=99, messages=desk.said)).content[0].text


async def messages_streamed(desk):
    async with (
        desk.anthropic() as client,
        client.messages.stream(model="m", max_tokens=99, messages=desk.said) as stream,
    ):
        return await stream.get_final_text()


async def gemini(desk):
    async with httpx.AsyncClient(timeout=LIMIT_S) as http:
        return (await desk.google(http).models.generate_content(model="m", contents=desk.prompt)).text


async def gemini_streamed(desk):
    async with httpx.AsyncClient(timeout=LIMIT_S) as http:
        stream = await desk.google(http).models.generate_content_stream(model="m", contents=desk.prompt)
        return "".join([chunk.text or "" async for chunk in stream])


async def gemini_streamed_by_aiohttp(desk):
    client = desk.google()
    stream = await client.models.generate_content_stream(model="m", contents=desk.prompt)
    said = "".join([chunk.text or "" async for chunk in stream])
    await client.aclose()
    return said


async def gemini_as_one_value(desk):
    async with httpx.AsyncClient(timeout=LIMIT_S, headers={"x-goog-api-key": desk.key}) as http:
        body = {"contents": [{"role": "user", "parts": [{"text": desk.prompt}]}]}
        asked = await http.post(f"{desk.url}/v1beta/models/m:streamGenerateContent", json=body)
        return "".join(part["candidates"][0]["content"]["parts"][0]["text"] for part in asked.json())


async def litellm_chat(desk):
    return (await desk.litellm(model="openai/m")).choices[0].message.content


async def litellm_chat_streamed(desk):
    return await joined(await desk.litellm(model="openai/m", stream=True))


async def litellm_messages(desk):
    return (await desk.litellm(model="anthropic/m", max_tokens=99)).choices[0].message.content


async def litellm_messages_streamed(desk):
    return await joined(await desk.litellm(model="anthropic/m", max_tokens=99, stream=True))


WHITE = b"1\r\n \r\n"
"""A chunk of white space."""
EMPTY = b'"delta":{},"logprobs":null,"finish_reason":null'
PING = b"event: ping"
CLIENTS = {
    chat: WHITE,
    chat_streamed: EMPTY,
    chat_helped: EMPTY,
    completions: WHITE,
    completions_streamed: b'"text":"","logprobs":null,"finish_reason":null',
    responses: WHITE,
    responses_streamed: b"event: response.in_progress",
    messages: WHITE,
    messages_streamed: PING,
    gemini: WHITE,
    gemini_streamed: b"\r\n2\r\n\r\n\r\n",
    gemini_streamed_by_aiohttp: b"\r\n2\r\n\r\n\r\n",
    gemini_as_one_value: b"\r\n2\r\n\r\n\r\n",
    litellm_chat: WHITE,
    litellm_chat_streamed: EMPTY,
    litellm_messages: WHITE,
    litellm_messages_streamed: PING,
}
"""Each with the sign of life that it gets."""


@dataclass
class Stage:
    """A client with an attempt and a line to the gateway of its own."""

    house: House
    client: Callable
    attempt: Assignment
    answers: list[Scripted]
    """Of the engine, to its calls in their order."""
    calls: list[Logged] = field(default_factory=list)
    tap: Wiretap | None = None

    @property
    def word(self) -> str:
        return f"<{self.client.__name__}>"

    @property
    def signs(self) -> int:
        """Of life, that the gateway gave."""
        return sum(heard.count(CLIENTS[self.client]) for heard in self.tap.heard)

    def ask(self) -> asyncio.Task:
        return asyncio.create_task(self.client(Desk(self.tap.url, self.attempt.key, f"go {self.word}")))

    async def answer(self) -> str:
        return await asyncio.wait_for(self.ask(), LIMIT_S)

    async def check(self) -> None:
        """One answer was recorded and delivered, and every token of the engine is in it."""
        await self.house.admin(end_attempt(self.attempt.rollout, 1, Ending(outcome=Outcome.OK, reward=1.0), 3))
        (transcript,) = await self.house.admin(get_transcripts(self.client.__name__))
        (node,) = transcript.attempts[-1].nodes
        assert node.delivered
        assert build(transcript).fates == {Fate.TRAINED: sum(len(call.answer) for call in self.calls)}


async def play(house, part, *answers: Scripted) -> None:
    """A part by all clients at once; first the engine is at a standstill until all have had three signs of life."""
    stages = []
    for client in CLIENTS:
        (attempt,) = await house.attempts(group=client.__name__)
        stages.append(Stage(house, client, attempt, list(answers)))

    def next_answer(prompt, number):
        (stage,) = [stage for stage in stages if stage.word in text(prompt)]
        stage.calls.append(house.engine.log[number - 1])
        return stage.answers[len(stage.calls) - 1]

    async def one(stage):
        async with Wiretap(house.url) as stage.tap:
            asking = stage.ask()
            await until(lambda: stage.signs >= 3)
            assert not asking.done()
            house.engine.paused = any(stage.signs < 3 for stage in stages)
            await part(stage, asking)
            await stage.check()

    house.engine.script, house.engine.paused = next_answer, True
    ends = await asyncio.gather(*map(one, stages), return_exceptions=True)
    for stage, end in zip(stages, ends, strict=True):
        if end is not None:
            end.add_note(stage.word)
    if failed := [end for end in ends if end is not None]:
        raise ExceptionGroup("some clients", failed)


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """litellm takes its time when it is imported, and fetches nothing then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm  # noqa: F401


@pytest.fixture
def short(monkeypatch):
    """Nobody waits for long before he hears that he does."""
    monkeypatch.setattr(delivery, "PING_S", 0.05)
    monkeypatch.setattr(delivery, "PATIENCE_S", 0.1)


@pytest.fixture
async def tap(house):
    async with Wiretap(house.url) as tap:
        yield tap


async def test_clients_that_wait_are_kept_alive_and_get_the_whole_answer(house, short):
    async def part(stage, asking):
        assert await asyncio.wait_for(asking, LIMIT_S) == SAID

    await play(house, part, Scripted(answer(SAID)))


async def test_a_failure_after_a_sign_of_life_is_a_reset_and_the_same_request_again_gets_the_rest(house, short):
    """The engine breaks its answer off and fails at the rest; no client takes that for the end of an answer."""
    whole = answer(SAID)

    async def part(stage, asking):
        with pytest.raises(Exception) as broken:
            await asyncio.wait_for(asking, LIMIT_S)
        assert type(broken.value).__name__ in BROKEN
        assert stage.tap.resets == 1
        assert await stage.answer() == SAID
        assert stage.calls[2].prompt == stage.calls[0].prompt + whole[:4]

    broken_off = Scripted(whole[:4], finish="interrupted")
    await play(house, part, broken_off, Scripted([], status=500), Scripted(whole[4:]))


async def test_a_client_that_leaves_while_it_waits_is_noticed_and_its_tokens_are_kept(house, short):
    whole = answer(SAID)

    async def part(stage, asking):
        await until(lambda: stage.calls and stage.calls[0].answer == whole[:4])
        asking.cancel()
        await asyncio.wait({asking})
        await until(lambda: stage.calls[0].finish == "interrupted")
        assert await stage.answer() == SAID
        assert stage.calls[1].prompt == stage.calls[0].prompt + whole[:4]

    await play(house, part, Scripted(whole, stall_at=4), Scripted(whole[4:]))


async def test_a_client_that_leaves_the_turnstile_and_comes_back_gets_its_answer_when_it_opens(house, short):
    gone = []

    async def part(stage, asking):
        asking.cancel()
        await asyncio.wait({asking})
        signs, again = stage.signs, stage.ask()
        await until(lambda: stage.signs >= signs + 3)
        gone.append(stage)
        if len(gone) == len(CLIENTS):
            assert house.turnstiles.held("r") == house.clients == len(CLIENTS)
            await house.admin(open_turnstile("r", "trainer"))
        assert await asyncio.wait_for(again, LIMIT_S) == SAID
        assert len(stage.calls) == 1

    await house.admin(close_turnstile("r", "trainer", CloseMode.FINISH, drain_s=0))
    await play(house, part, Scripted(answer(SAID)))


async def test_answers_without_a_wait_come_without_a_sign_of_life(house):
    house.engine.script = lambda prompt, call: answer(SAID)

    async def one(client):
        (attempt,) = await house.attempts(group=client.__name__)
        async with Wiretap(house.url) as tap:
            assert await client(Desk(tap.url, attempt.key)) == SAID
            signs = sum(heard.count(CLIENTS[client]) for heard in tap.heard)
            assert signs == (client is responses_streamed), client  # every answer there begins with one

    await asyncio.gather(*map(one, CLIENTS))


async def test_a_call_that_has_just_failed_is_no_answer_to_a_retry(house):
    """It may not have been dropped yet when the retry is looked at."""
    (attempt,) = await house.attempts()
    await chat(Desk(house.url, attempt.key))
    (session,) = house.memory._sessions.values()
    turn, place = Turn([USER], [], "m"), session.tree.place([USER], [])
    failed = Pending("c", place.prompt, asyncio.get_running_loop().create_future(), turn.wanted, waiting=0)
    session.wait_for(failed)
    failed.answers.set_exception(attempt_ended(session.attempt))
    assert session.retried(turn, place, retry_count=1) is None
    session.drop_delivered([1])


async def test_an_sdk_that_retries_hears_of_a_failure_after_a_sign_of_life_and_asks_again(house, tap, short):
    answers = [Scripted([], status=500), Scripted(answer(SAID))]
    house.engine.script = lambda prompt, call: answers[call - 1]
    (attempt,) = await house.attempts()
    house.engine.paused = True
    async with Desk(tap.url, attempt.key).openai(max_retries=2) as client:
        asking = asyncio.create_task(client.responses.create(model="m", input="go"))
        await until(lambda: tap.heard and tap.heard[0].count(WHITE) >= 3)
        house.engine.paused = False
        assert (await asyncio.wait_for(asking, LIMIT_S)).output_text == SAID
    assert tap.resets == 1


async def test_what_fails_before_a_sign_of_life_is_refused_with_a_status(house, tap, short):
    house.engine.script = lambda prompt, call: Scripted([], status=500)
    (attempt,) = await house.attempts()
    with pytest.raises(openai.APIStatusError) as refused:
        await chat_streamed(Desk(tap.url, attempt.key))
    assert refused.value.status_code == 503
    assert tap.resets == 0


async def test_a_long_call_of_a_tool_is_no_silence(house, tap, short):
    """Its tokens come one by one and nothing of them can be told before they are all there."""
    make_policy(house.policy, CALLING)
    await house.restart()
    called = ' so <tool_call>\n{"name": "look", "arguments": {"at": "the  door"}}\n</tool_call>'
    house.engine.script = lambda prompt, call: Scripted(answer(called), pace_s=0.01)
    (attempt,) = await house.attempts()
    look = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    async with Desk(tap.url, attempt.key).openai() as client:
        stream = await client.responses.create(model="m", input="go", tools=[look], stream=True)
        events = [event async for event in stream]
    kinds = [event.type for event in events]
    told = len(kinds) - kinds[::-1].index("response.output_text.delta")
    assert kinds[told:].count("response.in_progress") >= 3
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output[-1].name == "look"
