"""The engine as its clients meet it: a process behind HTTP."""

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from running_engine import CONTEXT, LETTERS, VOCABULARY, RunningEngine, environment, running_engine
from scripted_engine import Scripted, ScriptedEngine

from harnessed.config import EngineSettings
from harnessed.engine.app import GenerateRequest, Refusal, Routes
from harnessed.engine.generate import Batch, Sequence
from harnessed.engine.queue import Queue
from harnessed.engine.serve import StartError, serve
from harnessed.records import Version
from harnessed.weights import SharedWeights, read_state

LONG = CONTEXT - 3
"""Tokens that take seconds."""


def test_an_answer_has_its_tokens_with_logprobs_and_versions(engine, model):
    expected = Sequence([1, 2, 3], 8, 0.9, 11, frozenset())
    Batch(model).advance([expected], lambda: False)
    answer = engine.generate(seed=11, temperature=0.9)
    assert answer["tokens"] == expected.tokens
    assert answer["logprobs"] == pytest.approx(expected.logprobs, abs=1e-5)
    assert answer["versions"] == [Version(0, 0).pack()] * 8
    assert answer["finish"] == "length"
    assert engine.generate(seed=11, temperature=0.9, stop=[expected.tokens[0]])["finish"] == "stop"


def test_a_stop_string_ends_an_answer_with_the_token_that_completes_it(engine):
    whole = engine.generate(max_tokens=12)
    text = "".join(LETTERS[token] for token in whole["tokens"])
    stopped = engine.generate(max_tokens=12, stop_strings=["not there", text[4:7]])
    end = text.index(text[4:7]) + 3
    assert (stopped["tokens"], stopped["finish"]) == (whole["tokens"][:end], "stop")
    assert stopped["logprobs"] == pytest.approx(whole["logprobs"][:end], abs=1e-5)


def test_stop_strings_need_a_tokenizer(model):
    routes = Routes(Queue(model, None, most=1, threads=1), "tiny", VOCABULARY, CONTEXT, None)
    with pytest.raises(Refusal, match=r"tokenizer\.json"):
        routes._sequence(GenerateRequest(prompt=[1], max_tokens=1, temperature=1, seed=0, stop_strings=["x"]))


def test_many_at_once_get_what_each_gets_alone_and_every_token_is_counted(engine):
    draw = random.Random(0)
    bodies = [
        {"prompt": [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 50))], "seed": i, "max_tokens": 1 + i}
        for i in range(30)
    ]
    before = engine.health()["sampled_tokens"]
    together = engine.generate_all(bodies)
    assert [len(answer["tokens"]) for answer in together] == list(range(1, 31))
    assert engine.health()["sampled_tokens"] - before == sum(range(1, 31))
    for body, answer in zip(bodies, together, strict=True):
        assert engine.generate(**body)["tokens"] == answer["tokens"]


def test_a_small_top_p_leaves_the_likeliest_token(engine):
    greedy = engine.generate(temperature=0)
    nearly = engine.generate(top_p=1e-6, seed=4)
    assert nearly["tokens"] == greedy["tokens"]
    assert nearly["logprobs"] == [0.0] * 8, "of the tokens that it was sampled from"


def lines(response):
    """What a streamed answer showed, and its last line."""
    *shown, last = map(json.loads, response.text.splitlines())
    return [line["tokens"] for line in shown], last


def test_a_stream_shows_the_tokens_before_the_answer_that_is_given_without_it(engine):
    response = engine.post(stream=True, max_tokens=60)
    shown, last = lines(response)
    assert response.headers["content-type"] == "application/x-ndjson"
    assert last == engine.generate(max_tokens=60)
    together = [token for tokens in shown for token in tokens]
    assert together == last["tokens"][: len(together)]
    assert len(shown) > 1


def test_streams_among_others_show_their_own_tokens(engine):
    with ThreadPoolExecutor(8) as pool:
        asked = [{"prompt": [i + 1], "seed": i, "max_tokens": 20 + i, "stream": i % 2 == 0} for i in range(8)]
        answers = list(pool.map(lambda changes: engine.post(**changes), asked))
    for changes, response in zip(asked, answers, strict=True):
        shown, last = lines(response) if changes["stream"] else ([], response.json())
        assert last["tokens"][: sum(map(len, shown))] == [token for tokens in shown for token in tokens]
        assert last == engine.generate(**changes | {"stream": False}) | {"logprobs": last["logprobs"]}


def test_the_first_tokens_of_a_stream_come_long_before_its_end_and_a_client_that_leaves_costs_no_count(engine):
    before = engine.health()["sampled_tokens"]
    body = {"prompt": [1], "max_tokens": 1200, "temperature": 1, "seed": 0, "stream": True}
    with engine.http.stream("POST", "/generate", json=body) as response:
        assert json.loads(next(response.iter_lines()))["tokens"]
        assert engine.health()["running"] == 1
    health = engine.until(lambda health: health["running"] == 0)
    assert health["sampled_tokens"] - before == 1200


def test_health_says_what_is_served(engine):
    assert engine.health() | {"sampled_tokens": 0, "reused_tokens": 0} == {
        "status": "ok",
        "reason": "",
        "model": "tiny",
        "version": 0,
        "sampled_tokens": 0,
        "reused_tokens": 0,
        "running": 0,
        "waiting": 0,
        "paused": False,
        "context": CONTEXT,
    }


def test_pause_lets_running_answers_end_and_holds_later_ones_until_resume(engine):
    with ThreadPoolExecutor() as pool:
        running = pool.submit(engine.generate, max_tokens=200)
        engine.until(lambda health: health["running"] == 1)
        engine.pause()
        assert engine.health()["running"] == 0
        assert len(running.result(timeout=1)["tokens"]) == 200
        held = pool.submit(engine.generate)
        engine.until(lambda health: health["waiting"] == 1)
        time.sleep(0.1)
        assert not held.done()
        assert engine.health()["paused"]
        engine.resume()
        assert len(held.result(timeout=5)["tokens"]) == 8


def test_a_client_that_left_before_its_turn_costs_nothing(engine):
    before = engine.health()["sampled_tokens"]
    with engine.paused():
        with pytest.raises(httpx.ReadTimeout):
            body = {"prompt": [1], "max_tokens": 5, "temperature": 1, "seed": 0}
            httpx.post(f"{engine.url}/generate", json=body, timeout=0.1, trust_env=False)
        engine.until(lambda health: health["waiting"] == 0)
    engine.generate(max_tokens=3)
    assert engine.health()["sampled_tokens"] - before == 3


def test_tokens_of_a_client_that_left_during_its_answer_are_counted(engine):
    before = engine.health()["sampled_tokens"]
    with pytest.raises(httpx.ReadTimeout):
        body = {"prompt": [1], "max_tokens": 400, "temperature": 1, "seed": 0}
        httpx.post(f"{engine.url}/generate", json=body, timeout=0.1, trust_env=False)
    health = engine.until(lambda health: health["running"] == 0)
    assert health["sampled_tokens"] - before == 400


def test_an_interrupted_answer_ends_with_its_tokens_which_are_counted_and_can_be_continued(engine, model):
    before = engine.health()["sampled_tokens"]
    with ThreadPoolExecutor() as pool:
        running = pool.submit(engine.generate, max_tokens=LONG, id="mine")
        neighbour = pool.submit(engine.generate, max_tokens=300, seed=1, id="other")
        engine.until(lambda health: health["running"] == 2)
        time.sleep(0.05)
        assert engine.interrupt("mine")
        cut, other = running.result(timeout=2), neighbour.result(timeout=10)
    tokens = cut["tokens"]
    assert (cut["finish"], other["finish"]) == ("interrupted", "length")
    assert 0 < len(tokens) < LONG
    assert len(cut["logprobs"]) == len(cut["versions"]) == len(tokens)
    assert engine.health()["sampled_tokens"] - before == len(tokens) + 300
    alone = engine.generate(max_tokens=len(tokens))
    assert alone["tokens"] == tokens
    assert alone["logprobs"] == pytest.approx(cut["logprobs"], abs=1e-5)
    assert engine.generate(max_tokens=300, seed=1)["tokens"] == other["tokens"]
    likely = likeliest(model, [1, 2, 3])
    assert engine.generate(prompt=[1, 2, 3, *likely[:4]], temperature=0, max_tokens=4)["tokens"] == likely[4:]
    assert not engine.interrupt("mine"), "it has ended"


def test_an_interrupted_stream_ends_with_the_answer_so_far(engine):
    with ThreadPoolExecutor() as pool:
        running = pool.submit(engine.post, max_tokens=LONG, stream=True, id="mine")
        engine.until(lambda health: health["running"] == 1)
        time.sleep(0.05)
        assert engine.interrupt("mine")
        shown, last = lines(running.result(timeout=2))
    assert last["finish"] == "interrupted"
    together = [token for tokens in shown for token in tokens]
    assert together and together == last["tokens"][: len(together)]


@pytest.mark.parametrize("stream", [False, True])
def test_what_waits_while_the_engine_is_paused_is_interrupted_without_a_token(engine, stream):
    before = engine.health()["sampled_tokens"]
    with ThreadPoolExecutor() as pool, engine.paused():
        held = pool.submit(engine.post, stream=stream, id="mine")
        later = pool.submit(engine.generate, max_tokens=5, id="other")
        engine.until(lambda health: health["waiting"] == 2)
        assert engine.interrupt("mine")
        assert lines(held.result(timeout=2)) == (
            [],
            {"tokens": [], "logprobs": [], "versions": [], "finish": "interrupted"},
        )
        assert engine.health()["waiting"] == 1
        engine.resume()
        assert later.result(timeout=5)["finish"] == "length"
    assert engine.health()["sampled_tokens"] - before == 5


def test_a_pause_need_not_wait_for_what_is_interrupted(engine):
    with ThreadPoolExecutor() as pool:
        running = pool.submit(engine.generate, max_tokens=LONG, id="mine")
        engine.until(lambda health: health["running"] == 1)
        pausing = pool.submit(engine.pause)
        engine.until(lambda health: health["paused"])
        assert engine.interrupt("mine")
        pausing.result(timeout=1)
        assert running.result(timeout=1)["finish"] == "interrupted"
        engine.resume()
    assert len(engine.generate()["tokens"]) == 8


def test_many_are_interrupted_at_once_and_nothing_is_generated_when_that_is_answered(engine):
    """Those that wait for a place among them; the others go on."""
    names = [f"many {number}" for number in range(70)]
    with ThreadPoolExecutor(71) as pool:
        other = pool.submit(engine.generate, max_tokens=300, id="other")
        engine.until(lambda health: health["running"] == 1)
        running = [pool.submit(engine.generate, max_tokens=LONG, id=name) for name in names]
        engine.until(lambda health: health["running"] + health["waiting"] == 71)
        found = engine.http.post("/interrupt", json={"ids": [*names, "nobody"]}).json()["found"]
        health = engine.health()
        assert sorted(found) == sorted(names)
        assert health["running"] + health["waiting"] <= 1
        cut = [each.result(timeout=5) for each in running]
        assert {each["finish"] for each in cut} == {"interrupted"}
        assert {len(each["tokens"]) > 0 for each in cut} == {True, False}, "some had not begun"
        assert len(other.result(timeout=20)["tokens"]) == 300


def test_an_unknown_id_is_not_found_and_an_empty_one_refused(engine):
    assert not engine.interrupt("nobody")
    assert engine.http.post("/interrupt", json={"ids": [""]}).status_code == 400


async def test_a_queue_whose_last_waiting_request_is_interrupted_is_idle(model):
    """And does not spin: its loop answers others."""
    queue = Queue(model, None, most=1, threads=1)
    gone = asyncio.get_running_loop().create_future()
    first, second = (Sequence([1], most, 1.0, 0, frozenset()) for most in (40, 5))
    running = asyncio.create_task(queue.run())
    answers = [asyncio.create_task(queue.generate(s, gone, id)) for s, id in ((first, "first"), (second, "second"))]
    while not queue.running:
        await asyncio.sleep(0)
    assert await queue.interrupt({"second"}) == {"second"}
    assert not queue._startable.is_set()
    await asyncio.wait_for(asyncio.gather(*answers), 5)
    assert (len(first.tokens), second.tokens, second.finish) == (40, [], "interrupted")
    queue.end()
    running.cancel()


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"prompt": []}, "bad_request", "prompt: List should have at least 1 item"),
        ({"prompt": [1, VOCABULARY]}, "unknown_token", "prompt holds 40, but the model's token ids are 0 to 39"),
        ({"prompt": [-1]}, "unknown_token", "prompt holds -1"),
        ({"stop": [VOCABULARY]}, "unknown_token", "stop holds 40"),
        ({"max_tokens": LONG + 1}, "context", f"exceed the model's context of {CONTEXT}: shorten the prompt"),
        ({"max_tokens": 0}, "bad_request", "max_tokens: "),
        ({"temperature": -1}, "bad_request", "temperature: "),
        ({"temperature": 1e-9}, "bad_request", "must be 0 (greedy) or at least 0.001"),
        ({"top_p": 0}, "bad_request", "top_p: "),
        ({"top_p": 1.01}, "bad_request", "top_p: "),
        ({"top_k": 5}, "bad_request", "top_k: Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_generated_is_refused_with_the_reason(engine, changes, code, says):
    response = engine.post(**changes)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == code
    assert says in response.json()["error"]["message"]


def test_a_body_that_is_no_json_and_a_wrong_route_are_refused(engine):
    assert "the body: Invalid JSON" in engine.http.post("/generate", content=b"{").json()["error"]["message"]
    assert engine.http.get("/v1/models").json()["error"]["message"] == "GET /v1/models: Not Found"


def test_the_scripted_engine_of_other_tests_speaks_the_same_protocol(engine):
    def script(prompt, call):
        return {1: [5, 6, 7], 2: Scripted([5] * 20), 3: Scripted(status=503), 4: Scripted([1], hang_up=True)}[call]

    with ScriptedEngine(script, Version(1, 2), CONTEXT) as fake, httpx.Client(base_url=fake.url) as http:
        scripted = RunningEngine(engine.process, http, fake.url)
        assert scripted.health().keys() == engine.health().keys()
        answer = scripted.generate()
        assert answer.keys() == engine.generate().keys()
        assert (answer["tokens"], answer["finish"]) == ([5, 6, 7], "stop")
        assert answer["versions"] == [Version(1, 2).pack()] * 3
        assert scripted.generate()["finish"] == "length"
        assert scripted.post().status_code == 503
        with pytest.raises(httpx.RemoteProtocolError):
            scripted.post()
        refused, expected = scripted.post(max_tokens=LONG + 1), engine.post(max_tokens=LONG + 1)
        assert refused.status_code == expected.status_code
        assert refused.json()["error"]["code"] == expected.json()["error"]["code"]
        assert [call.answer for call in fake.log] == [[5, 6, 7], [5] * 8, [], [1], []]
        assert scripted.health()["sampled_tokens"] == fake.sampled_tokens == 12
        fake.script = lambda prompt, call: [5, 6]
        for each in (scripted, engine):
            response = each.post(stream=True)
            shown, last = lines(response)
            assert response.headers["content-type"] == "application/x-ndjson"
            assert last == each.generate() | {"logprobs": last["logprobs"]}
            assert shown[0] == last["tokens"][: len(shown[0])]
        with ThreadPoolExecutor() as pool:
            fake.script = lambda prompt, call: [call]
            scripted.pause()
            held = pool.submit(scripted.generate)
            scripted.until(lambda health: health["waiting"] == 1)
            scripted.resume()
            assert held.result(timeout=5)["tokens"] == [8]


# From here on the weights are shared, and this process is the trainer.


@pytest.fixture(scope="module")
def shared(folder, tmp_path_factory):
    """The shared weights' folder, and an engine that was started before it existed."""
    weights = tmp_path_factory.mktemp("shared") / "weights"
    with running_engine(folder, weights) as engine:
        yield weights, engine


@pytest.fixture
def trainer(shared, model):
    """The weights as a trainer that starts (again) has them: the model's own, under a version never used before."""
    weights, engine = shared
    state = read_state(weights)
    if state:
        engine.pause()
    trained = SharedWeights.create(weights, model, Version(0, state.version.number + 1 if state else 0))
    if state:
        engine.resume()
    return trained


def likeliest(model, prompt):
    """What the trainer's own copy of the weights generates greedily."""
    sequence = Sequence(prompt, 8, 0, 0, frozenset())
    Batch(model).advance([sequence], lambda: False)
    return sequence.tokens


def change(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)


def test_an_update_in_the_trainer_is_what_the_engine_generates_with_next(shared, trainer, model):
    _, engine = shared
    before = engine.generate(temperature=0)
    assert before["tokens"] == likeliest(model, [1, 2, 3])
    assert set(before["versions"]) == {trainer.version.pack()}
    following = Version(0, trainer.version.number + 1)
    with engine.paused(), trainer.writing(following):
        change(model)
    after = engine.generate(temperature=0)
    assert after["tokens"] == likeliest(model, [1, 2, 3])
    assert after["tokens"] != before["tokens"]
    assert set(after["versions"]) == {following.pack()}
    assert engine.health()["version"] == following.pack()


def test_a_request_during_a_write_waits_for_its_end(shared, trainer):
    _, engine = shared
    following = Version(0, trainer.version.number + 1)
    with ThreadPoolExecutor() as pool:
        with trainer.writing(following):
            held = pool.submit(engine.generate)
            engine.until(lambda health: health["waiting"] == 1)
            time.sleep(0.1)
            assert not held.done()
        assert set(held.result(timeout=5)["versions"]) == {following.pack()}


def test_tokens_sampled_while_somebody_wrote_without_a_pause_are_given_to_nobody(shared, trainer):
    _, engine = shared
    with ThreadPoolExecutor() as pool:
        running = pool.submit(engine.post, max_tokens=200)
        engine.until(lambda health: health["running"] == 1)
        with trainer.writing(Version(0, trainer.version.number + 1)):
            response = running.result(timeout=20)
    assert response.status_code == 503
    assert "POST /pause before writing" in response.json()["error"]["message"]
    assert len(engine.generate()["tokens"]) == 8


def test_a_stream_whose_weights_were_written_ends_with_the_reason_and_no_answer(shared, trainer):
    _, engine = shared
    with ThreadPoolExecutor() as pool:
        running = pool.submit(engine.post, max_tokens=200, stream=True)
        engine.until(lambda health: health["running"] == 1)
        with trainer.writing(Version(0, trainer.version.number + 1)):
            _, last = lines(running.result(timeout=20))
    assert "POST /pause before writing" in last["error"]["message"]


def test_a_generation_that_fails_answers_with_the_reason_and_the_engine_goes_on(shared, trainer, model):
    _, engine = shared
    norm = model.model.norm.weight
    good = norm.detach().clone()
    with engine.paused(), trainer.writing(Version(0, trainer.version.number + 1)), torch.no_grad():
        norm[0] = float("nan")
    response = engine.post()
    assert response.status_code == 500
    assert "weights hold infinite or undefined values" in response.json()["error"]["message"]
    with engine.paused(), trainer.writing(Version(0, trainer.version.number + 1)), torch.no_grad():
        norm.copy_(good)
    assert len(engine.generate()["tokens"]) == 8


DYING_TRAINER = """
import os, signal, sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
from harnessed.records import Version
from harnessed.weights import SharedWeights, read_state
weights, folder = map(Path, sys.argv[1:])
model = AutoModelForCausalLM.from_pretrained(folder)
number = read_state(weights).version.number
shared = SharedWeights.create(weights, model, Version(1, number + 1))
with shared.writing(Version(1, number + 2)), torch.no_grad():
    next(model.parameters()).zero_()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_trainer_killed_while_it_writes_stops_generation_until_a_checkpoint_is_loaded(shared, trainer, folder, model):
    weights, engine = shared
    engine.pause()
    killed = subprocess.run([sys.executable, "-c", DYING_TRAINER, weights, folder], env=environment(), timeout=60)
    assert killed.returncode == -signal.SIGKILL
    engine.resume()
    response = engine.post()
    assert response.status_code == 503
    assert "died while it wrote the weights" in response.json()["error"]["message"]
    health = engine.health()
    assert health["status"] == "unusable"
    assert "resume the training" in health["reason"]
    engine.pause()
    version = Version(2, read_state(weights).version.number + 1)
    SharedWeights.create(weights, model, version)
    engine.resume()
    answer = engine.generate(temperature=0)
    assert answer["tokens"] == likeliest(model, [1, 2, 3])
    assert set(answer["versions"]) == {version.pack()}
    assert engine.health()["status"] == "ok"


def test_sigterm_ends_the_engine_in_the_middle_of_an_answer(shared, trainer):
    _, engine = shared
    with ThreadPoolExecutor() as pool:
        running = pool.submit(engine.post, max_tokens=LONG)
        engine.until(lambda health: health["running"] == 1)
        began = time.monotonic()
        engine.process.terminate()
        engine.process.wait(timeout=5)
        assert time.monotonic() - began < 2
        assert running.exception(timeout=5) or running.result().status_code >= 500


def test_an_engine_without_weights_says_what_it_waited_for(folder, tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        pytest.raises(StartError, match=r"no weights after 0.2 s: the engine waits for .*state.json, which"),
    ):
        serve(listening, folder, tmp_path, EngineSettings(start_limit_s=0.2))


def test_an_engine_without_a_model_says_which_folder(tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        pytest.raises(StartError, match=r"cannot load the model in .*nowhere"),
    ):
        serve(listening, tmp_path / "nowhere", None, EngineSettings())
