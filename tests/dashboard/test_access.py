"""Who gets to see the dashboard: the admin key's holder, and nobody else."""

import logging
import re

import pytest

from harnessed.client import ApiError, create_run, forget_metrics, list_metrics, post_fates, post_metrics
from harnessed.gateway.keys import ADMIN, Key, Scope
from harnessed.records import Fate, Metrics, RunSpec


def data_routes(house):
    names = {"run": "r", "group": "g", "rollout": "g.0", "attempt:int": "1", "number:int": "1"}
    paths = [route.path for route in house.routes if getattr(route, "path", "").startswith("/ui/data")]
    return [re.sub(r"\{([^}]+)\}", lambda match: names[match[1]], path) for path in paths]


async def log_in(house, key):
    return await house.http.post(f"{house.url}/ui/login", content=key)


async def test_data_needs_the_admin_key(house):
    (attempt,) = await house.attempts()
    routes = data_routes(house)
    assert len(routes) == 7
    for path in routes:
        url = house.url + path
        assert (await house.http.get(url)).status_code == 401
        assert (await house.http.get(url, headers={"authorization": "Bearer sk-hd.admin.Lw.forged"})).status_code == 401
        for key in (attempt.key, attempt.evaluator_key):
            for headers in ({"authorization": f"Bearer {key}"}, {"cookie": f"{await cookie_name(house)}={key}"}):
                refused = await house.http.get(url, headers=headers)
                assert refused.status_code == 403, path
                assert "g.0" not in refused.text
        given = await house.http.get(url, headers={"authorization": f"Bearer {house.keys.sign(ADMIN)}"})
        assert given.status_code == (404 if path.endswith("/1/1") else 200), path
        assert given.status_code == 404 or given.headers["cache-control"] == "no-store"


async def test_every_route_answers_on_either_database(either):
    """Whoever uses the SDK may read them too, with the key in the header."""
    house = either
    await house.make_run()
    (attempt,) = await house.attempts()
    client = house.openai(attempt.key)
    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    await house.admin(post_metrics("r", Metrics(step=1, values={"reward_mean": 0.5, "kl": None})))
    await house.admin(post_fates("r", {"g.0": {Fate.TRAINED: 9}}))
    with pytest.raises(ApiError, match=r"no rollout x\.0 in run r"):
        await house.admin(post_fates("r", {"x.0": {Fate.TRAINED: 9}}))
    with pytest.raises(ApiError, match="no run nothing"):
        await house.admin(post_metrics("nothing", Metrics(step=1, values={})))
    found = {}
    for path in data_routes(house):
        headers = {"authorization": f"Bearer {house.keys.sign(ADMIN)}"}
        response = await house.http.get(house.url + path, headers=headers)
        assert response.status_code == 200, (path, response.text)
        found[path] = response.json()["data"]
    assert found["/ui/data/runs"][-1]["rewards"] == [0.5]
    assert found["/ui/data/rollouts/g.0"]["fates"] == {"trained": 9}
    (node,) = found["/ui/data/rollouts/g.0"]["tries"][0]["nodes"]
    tokens = found["/ui/data/rollouts/g.0/1/1"]
    assert (node["context"], node["sampled"]) == (len(tokens["segment"]), len(tokens["answer"]))
    assert "".join(tokens["texts"][str(id)] for id in tokens["answer"]) == "answer 1<|im_end|>"
    assert [line.values for line in await house.admin(list_metrics("r"))] == [{"reward_mean": 0.5, "kl": None}]


async def test_a_run_that_is_resumed_takes_back_the_steps_after_its_checkpoint(house):
    await house.admin(create_run(RunSpec(id="other", policy=str(house.policy))))
    for run, step in (("r", 1), ("r", 2), ("r", 2), ("r", 3), ("other", 3), ("r", 4)):
        await house.admin(post_metrics(run, Metrics(step=step, values={})))
    await house.admin(forget_metrics("r", above=2))
    assert [line.step for line in await house.admin(list_metrics("r"))] == [1, 2, 2]
    assert [line.step for line in await house.admin(list_metrics("other"))] == [3]
    await house.admin(forget_metrics("r", above=2))
    await house.admin(post_metrics("r", Metrics(step=3, values={})))
    assert [line.step for line in await house.admin(list_metrics("r"))] == [1, 2, 2, 3]


async def cookie_name(house):
    name = (await log_in(house, house.keys.sign(ADMIN))).headers["set-cookie"].partition("=")[0]
    house.http.cookies.clear()
    return name


async def test_a_login_gives_a_cookie_that_no_script_and_no_other_site_can_use(house):
    response = await log_in(house, house.keys.sign(ADMIN))
    assert response.status_code == 204
    said = response.headers["set-cookie"].lower()
    assert "httponly" in said and "samesite=strict" in said
    assert (await house.http.get(f"{house.url}/ui/data/runs")).status_code == 200
    assert (await house.http.get(f"{house.url}/api/changes?run=r&after=0&wait_s=0")).status_code == 200
    # Another port of this host is the same site: the cookie opens nothing that changes anything.
    assert (await house.http.post(f"{house.url}/api/runs/r/cancel")).status_code == 401
    await house.http.post(f"{house.url}/ui/logout")
    assert (await house.http.get(f"{house.url}/ui/data/runs")).status_code == 401


@pytest.mark.parametrize(
    ("key", "status"),
    [
        (lambda keys: "", 401),
        (lambda keys: "sk-hd.admin.Lw.forged", 401),
        (lambda keys: "ü" * 3000, 413),
        (lambda keys: keys.sign(Key(Scope.ATTEMPT, "g.0", 1)), 403),
        (lambda keys: keys.sign(Key(Scope.EVALUATOR, "g.0")), 403),
    ],
    ids=["none", "forged", "long", "attempt", "evaluator"],
)
async def test_other_keys_do_not_log_in(house, key, status):
    response = await log_in(house, key(house.keys))
    assert response.status_code == status
    assert "set-cookie" not in response.headers


async def test_files_are_open_and_fenced(house):
    index = await house.http.get(f"{house.url}/", follow_redirects=True)
    assert index.url.path == "/ui/"
    policy = index.headers["content-security-policy"]
    assert "script-src 'self';" in policy and "unsafe" not in policy and "require-trusted-types-for" in policy
    for name in ("app.js", "style.css", "icon.svg"):
        file = await house.http.get(f"{house.url}/ui/{name}")
        assert file.status_code == 200
        assert file.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"(src|href)=\"(https?:)?//", index.text)
    for name in ("pages.py", "..%2fpages.py", "%2e%2e/pages.py", "nothing.js"):
        assert (await house.http.get(f"{house.url}/ui/{name}")).status_code == 404


async def test_an_address_with_a_key_logs_in_and_forgets_it(house, stranger, caplog):
    caplog.set_level(logging.DEBUG)
    key, asked = house.keys.sign(ADMIN), []
    stranger.on("request", lambda request: asked.append(request.url))
    await stranger.goto(f"{house.url}/ui/#key={key}")
    await stranger.wait_for_selector("h1:text('Runs')")
    assert key not in stranger.url
    assert key not in await stranger.content()
    assert asked and not any(key in url for url in asked)
    assert key not in caplog.text
    assert (
        await stranger.evaluate("document.cookie + JSON.stringify(localStorage) + JSON.stringify(sessionStorage)")
        == "{}{}"
    )


async def test_the_login_page_says_why_it_refuses(house, stranger):
    (attempt,) = await house.attempts()
    await stranger.goto(f"{house.url}/ui/#/run/r")
    for key, said in (("nonsense", "no key of this gateway"), (attempt.key, "of scope attempt")):
        await stranger.fill("input[name=key]", key)
        await stranger.click("button:text('Log in')")
        await stranger.wait_for_selector(f'.complaint:has-text("{said}")')
    await stranger.fill("input[name=key]", house.keys.sign(ADMIN))
    await stranger.click("button:text('Log in')")
    await stranger.wait_for_selector("h1:text-is('r')")
    await stranger.click("button:text('Log out')")
    await stranger.wait_for_selector("input[name=key]")
    await stranger.reload()
    await stranger.wait_for_selector("input[name=key]")
