"""The gateway, killed with -9 at each moment of a call and started again on its socket.

The client is an SDK that asks again by itself, or a caller that repeats its request where the SDK does not (a stream
after its first byte). Whatever happened, it gets one answer, every recorded token has one fate, and no token is trained
that the client does not have.
"""

import multiprocessing
import os
import signal
import sqlite3
import time
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path

import anthropic
import openai
import pytest
from gateway_main import serve
from listening import listen
from policies import make_policy
from scripted_engine import Scripted, ScriptedEngine
from texts import answer, ids, text

from harnessed.client import (
    Client,
    claim,
    create_groups,
    create_run,
    end_attempt,
    get_rollout,
    get_totals,
    get_transcripts,
    post_reward,
    register_engine,
    renew,
)
from harnessed.gateway.keys import ADMIN, Keyring
from harnessed.records import Ending, EngineSpec, Fate, GroupSpec, Limits, Outcome, Reward, RunSpec
from harnessed.training.samples import account, build

# A process that holds what every gateway imports, and is forked for each: else that would be most of what tests do.
PROCESSES = multiprocessing.get_context("forkserver")
IMPORTED = (
    "aiohttp harnessed.client harnessed.gateway.store harnessed.gateway.template prometheus_client uvicorn uvloop"
)
PROCESSES.set_forkserver_preload(IMPORTED.split())
ASKED = [{"role": "user", "content": "Go on, please."}]
PATIENCE_S = 60


class Mortal:
    """A gateway process on a socket that outlives it, with a run and one attempt."""

    def __init__(self, folder: Path, engine: ScriptedEngine) -> None:
        self.folder = folder
        self.engine = engine
        self.listener = listen()
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.admin = Client(self.url, Keyring.from_file(folder / "gateway.secret").sign(ADMIN), patience_s=PATIENCE_S)
        self.process: BaseProcess | None = None
        self.threads = ThreadPoolExecutor(4)

    def start(self, moment: str = "") -> None:
        self.process = PROCESSES.Process(target=serve, args=(self.listener, self.folder, moment))
        self.process.start()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)

    def come_back(self) -> None:
        """Started again, once it has died."""
        self.process.join(PATIENCE_S)
        assert self.process.exitcode == -signal.SIGKILL
        self.start()
        self.admin(renew("me"))

    def make_attempt(self) -> None:
        limits = Limits(context=2000)
        self.admin(create_run(RunSpec(id="r", policy=str(self.folder / "policy"), limits=limits)))
        self.admin(register_engine(EngineSpec(id="e", url=self.engine.url, run="r")))
        self.admin(create_groups([GroupSpec(id="g", run="r", task={}, n=1)]))
        (self.attempt,) = self.admin(claim("r", "me", 1, 3))

    def ask(self, messages=ASKED, how: str = "openai") -> str:
        """What a harness does: the text of the answer that it gets in the end."""
        if how == "anthropic":
            client = anthropic.Anthropic(base_url=self.url, auth_token=self.attempt.key, max_retries=6)
            return client.messages.create(model="m", max_tokens=100, messages=messages).content[0].text
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.attempt.key, max_retries=6)
        if how == "openai":
            return client.chat.completions.create(model="m", messages=messages).choices[0].message.content
        for _ in range(6):
            try:
                stream = client.chat.completions.create(model="m", messages=messages, stream=True)
                chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
            except openai.APIConnectionError:  # the stream broke
                continue
            assert chunks[-1].finish_reason
            return "".join(chunk.delta.content or "" for chunk in chunks)
        raise AssertionError("the stream broke six times")

    def soon(self, *arguments) -> "Future[str]":
        return self.threads.submit(self.ask, *arguments)

    def until(self, query: str) -> None:
        """Returns when the store has what is asked for."""
        deadline = time.monotonic() + PATIENCE_S
        with sqlite3.connect(f"file:{self.folder / 'gateway.db'}?mode=ro", uri=True, timeout=10) as database:
            while not database.execute(query).fetchone()[0]:
                assert time.monotonic() < deadline, f"in vain: {query}"
                time.sleep(0.01)

    def books(self):
        """Totals, and the texts of the trained answers; every recorded token has a fate."""
        ending = Ending(outcome=Outcome.OK, reward=1.0)
        assert self.admin(end_attempt("g.0", 1, ending, 3)).reward == 1.0
        (transcript,) = self.admin(get_transcripts("g"))
        totals, sample = self.admin(get_totals("r")), build(transcript)
        assert sum(sample.fates.values()) == totals.sampled_tokens
        assert sum(int(row.trained.sum()) for row in sample.rows) == sample.fates[Fate.TRAINED]
        (attempt,) = transcript.attempts
        _, ledger = account(transcript, attempt)
        said = {node.number: node.message["content"] for node in attempt.nodes}
        return totals, [said[number] for number, fates in ledger.items() if fates[0][0] == Fate.TRAINED]

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.listener.close()


@pytest.fixture
def mortal(tmp_path):
    make_policy(tmp_path / "policy")
    with ScriptedEngine(lambda prompt, call: answer(f"answer {call}")) as engine:
        mortal = Mortal(tmp_path, engine)
        mortal.start()
        try:
            mortal.make_attempt()
            yield mortal
        finally:
            mortal.close()


def dies_at(mortal: Mortal, moment: str) -> None:
    mortal.kill()
    mortal.process.join()
    mortal.start(moment)
    mortal.admin(renew("me"))


HOW = ["openai", "openai-streamed", "anthropic"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("moment", ["last token", "answer written"])
def test_killed_before_the_answer_was_committed_it_is_sampled_anew(mortal, moment, how):
    dies_at(mortal, moment)
    asking = mortal.soon(ASKED, how)
    mortal.come_back()
    assert asking.result(PATIENCE_S) == "answer 2"
    totals, trained = mortal.books()
    # The row of a call that dies so soon may not have been committed either.
    assert (totals.calls - totals.lost, totals.answers) == (1, 1)
    assert trained == ["answer 2"]
    assert mortal.engine.sampled_tokens == 2 * totals.sampled_tokens


@pytest.mark.parametrize("how", HOW)
def test_killed_before_the_last_byte_the_stored_answer_comes_again(mortal, how):
    dies_at(mortal, "committed")
    asking = mortal.soon(ASKED, how)
    mortal.come_back()
    assert asking.result(PATIENCE_S) == "answer 1"
    totals, trained = mortal.books()
    assert (totals.calls, totals.lost, totals.undelivered) == (1, 0, 0)
    assert trained == ["answer 1"]
    assert len(mortal.engine.log) == 1


@pytest.mark.parametrize("how", HOW)
def test_killed_before_it_marked_an_answer_as_delivered_the_next_request_proves_it(mortal, how):
    dies_at(mortal, "delivered")
    assert mortal.soon(ASKED, how).result(PATIENCE_S) == "answer 1"
    mortal.come_back()
    said = {"role": "assistant", "content": "answer 1"}
    assert mortal.ask([*ASKED, said, {"role": "user", "content": "more"}], how) == "answer 2"
    totals, trained = mortal.books()
    assert (totals.calls, totals.lost, totals.undelivered) == (2, 0, 0)
    assert trained == ["answer 1", "answer 2"]


def test_killed_before_it_marked_an_answer_as_delivered_the_same_request_gets_it_again(mortal):
    """To the gateway it is a retry of a client that got nothing."""
    dies_at(mortal, "delivered")
    assert mortal.ask() == "answer 1"
    mortal.come_back()
    assert mortal.ask() == "answer 1"
    totals, trained = mortal.books()
    assert (totals.calls, totals.undelivered, trained) == (1, 0, ["answer 1"])


def test_killed_when_it_had_marked_an_answer_that_was_lost_on_its_way_a_retry_gets_it_again(mortal):
    assert mortal.ask() == "answer 1"
    mortal.until("select delivered from nodes")
    mortal.kill()
    mortal.come_back()
    client = openai.OpenAI(base_url=f"{mortal.url}/v1", api_key=mortal.attempt.key)
    retry = {"x-stainless-retry-count": "1"}
    again = client.chat.completions.create(model="m", messages=ASKED, extra_headers=retry)
    assert again.choices[0].message.content == "answer 1"
    totals, trained = mortal.books()
    assert (totals.calls, totals.lost, trained) == (1, 0, ["answer 1"])


@pytest.mark.parametrize("how", HOW)
def test_killed_when_the_call_was_admitted_and_nothing_sampled(mortal, how):
    def script(prompt, call):
        if call == 1:
            mortal.until("select count(*) from calls where state = 'admitted'")
            mortal.kill()
        return answer(f"answer {call}")

    mortal.engine.script = script
    asking = mortal.soon(ASKED, how)
    mortal.come_back()
    assert asking.result(PATIENCE_S) == "answer 2"
    totals, trained = mortal.books()
    assert (totals.calls, totals.lost, totals.answers) == (2, 1, 1)
    assert trained == ["answer 2"]


def test_killed_after_the_first_token_of_a_stream(mortal):
    mortal.engine.script = lambda prompt, call: Scripted(answer(f"answer {call}"), stall_at=3 if call == 1 else 0)
    client = openai.OpenAI(base_url=f"{mortal.url}/v1", api_key=mortal.attempt.key, max_retries=6)
    stream = iter(client.chat.completions.create(model="m", messages=ASKED, stream=True))
    while not (next(stream).choices[0].delta.content):
        pass
    mortal.until("select count(*) from calls")
    mortal.kill()
    with pytest.raises(openai.APIConnectionError):
        list(stream)
    mortal.come_back()
    assert mortal.ask(ASKED, "openai-streamed") == "answer 2"
    totals, trained = mortal.books()
    assert (totals.calls, totals.lost, totals.answers) == (2, 1, 1)
    assert trained == ["answer 2"]


def test_killed_when_it_had_kept_what_was_sampled_for_a_client_that_left_the_answer_goes_on(mortal):
    whole = answer("a long answer")
    begun = []

    def script(prompt, call):
        begun.append(prompt)
        kept = len(prompt) - len(begun[0])
        return Scripted(whole[kept:], stall_at=3 if call == 1 else 0)

    mortal.engine.script = script
    client = openai.OpenAI(base_url=f"{mortal.url}/v1", api_key=mortal.attempt.key, max_retries=0)
    with client.chat.completions.create(model="m", messages=ASKED, stream=True) as stream:
        while not next(stream).choices[0].delta.content:
            pass
    mortal.until("select count(*) from nodes where finish = 'interrupted'")
    mortal.kill()
    mortal.come_back()
    assert mortal.ask() == "a long answer"
    totals, trained = mortal.books()
    assert text(begun[1][len(begun[0]) :]) == text(whole[:3])
    assert (totals.answers, totals.sampled_tokens, trained) == (1, len(whole), ["a long answer"])


@pytest.mark.parametrize("moment", ["end reported", "end written"])
def test_killed_between_reward_and_state_the_repeated_report_gives_one_of_each(mortal, moment):
    mortal.ask()
    mortal.admin(post_reward("g.0", Reward(reward=0.5, parts={"tests": 1.0})))
    dies_at(mortal, moment)
    assert mortal.admin(get_rollout("g.0")).reward == 0.5
    ending = Ending(outcome=Outcome.OK, reward=0.25)
    reporting = mortal.threads.submit(mortal.admin, end_attempt("g.0", 1, ending, 3))
    mortal.come_back()
    assert reporting.result(PATIENCE_S).reward == 0.5, "the first reward wins"
    rollout = mortal.admin(get_rollout("g.0"))
    assert (rollout.outcome, rollout.reward, rollout.parts, rollout.attempt) == ("ok", 0.5, {"tests": 1.0}, 1)
    assert mortal.admin(post_reward("g.0", Reward(reward=0.5, parts={"tests": 1.0}))).reward == 0.5
    (transcript,) = mortal.admin(get_transcripts("g"))
    assert build(transcript).fates == {Fate.TRAINED: len(ids("answer 1")) + 1}


def test_an_agent_that_gave_up_with_a_killed_gateway_did_not_fail_by_itself(mortal):
    def script(prompt, call):
        mortal.until("select count(*) from calls")  # of a call whose row was not written nobody can tell
        return answer("too late")

    mortal.engine.script = script
    dies_at(mortal, "last token")
    client = openai.OpenAI(base_url=f"{mortal.url}/v1", api_key=mortal.attempt.key, max_retries=0)
    with pytest.raises(openai.APIConnectionError):
        client.chat.completions.create(model="m", messages=ASKED)
    mortal.come_back()
    rollout = mortal.admin(end_attempt("g.0", 1, Ending(outcome=Outcome.AGENT_EXIT, reason="status 1"), 1))
    assert (rollout.outcome, rollout.reward) == (Outcome.INFRASTRUCTURE, None)
    assert "its gateway died before it had answered the last call; then status 1" in rollout.reason
