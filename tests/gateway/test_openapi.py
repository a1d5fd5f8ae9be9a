"""The description of the control routes is complete, and true."""

import html.parser
import inspect
import re
from typing import Any, get_args, get_type_hints

import jsonschema
import pytest
from pydantic import BaseModel, TypeAdapter

from harnessed import client, records
from harnessed.client import Call, claim, create_groups, get_rollout, get_status, post_reward
from harnessed.gateway.openapi import describe
from harnessed.gateway.operations import Packed
from harnessed.records import GroupSpec, Reward

SAMPLES: dict[Any, Any] = {
    str: "x",
    int: 1,
    float: 1.0,
    records.CloseMode: records.CloseMode.FINISH,
    records.RunSpec: records.RunSpec(id="x", policy="p"),
    records.EngineSpec: records.EngineSpec(id="x", url="http://x", run="x"),
    list[GroupSpec]: [GroupSpec(id="x", run="x", task={}, n=1)],
    records.Ending: records.Ending(outcome=records.Outcome.OK),
    records.Reward: records.Reward(reward=1.0),
    records.Metrics: records.Metrics(step=1, values={"loss": 0.5}),
    dict[str, dict[records.Fate, int]]: {"x": {records.Fate.TRAINED: 1}},
    records.Presence | None: records.Presence(run="x", slots=1),
    records.Event: records.Event(rollout="x", attempt=1, type="x"),
}
"""An argument of each type that functions of the client take."""


def calls() -> dict[str, tuple[Call, Any]]:
    """Function of the client that asks a control route -> a call that it makes, and the type of its answer."""
    made = {}
    for name, function in inspect.getmembers(client, inspect.isfunction):
        hints = get_type_hints(function)
        if not name.startswith("_") and getattr(hints.get("return"), "__origin__", None) is Call:
            answer = get_args(hints.pop("return"))[0]
            call = function(**{argument: SAMPLES[type_] for argument, type_ in hints.items()})
            if call.path.startswith("/api/"):
                made[name] = (call, answer)
    return made


@pytest.fixture
def operations(house):
    return house.operations


async def test_each_route_is_one_function_of_the_client_and_each_function_one_route(house, operations):
    made = calls()
    assert sorted(operation.name for operation in operations) == sorted(made)
    for operation in operations:
        call, answer = made[operation.name]
        assert call.method == operation.method, operation.name
        assert re.fullmatch(re.sub(r"{[^}]+}", "[^/]+", operation.path), call.path), operation.name
        assert set(call.query) == set(operation.query), operation.name
        given = operation.types["return"]
        assert (given, answer) == (Packed, list[records.Transcript]) or given == answer, operation.name
        assert (call.body is not None) == ("body" in operation.types), operation.name
        if "body" in operation.types:
            TypeAdapter(operation.types["body"]).validate_python(call.body)
    served = {(method, route.path) for route in house.routes for method in (route.methods or set()) - {"HEAD"}}
    described = {(operation.method, operation.path) for operation in operations}
    assert {each for each in served if each[1].startswith("/api/")} - described == {
        ("GET", "/api/openapi.json"),
        ("GET", "/api/docs"),
    }


async def test_every_route_and_its_every_record_are_described(operations):
    document = describe(operations)
    assert document["openapi"] == "3.1.0"
    count = 0
    for path, methods in document["paths"].items():
        for it in methods.values():
            count += 1
            assert it["summary"].endswith("."), it["operationId"]
            inside = {each["name"] for each in it["parameters"] if each["in"] == "path"}
            assert inside == set(re.findall(r"{(\w+)}", path)) and {"200", "401", "403"} <= it["responses"].keys()
    assert count == len(operations)
    schemas = document["components"]["schemas"]
    referred = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert referred == set(schemas)
    assert schemas["Limits"]["properties"]["tokens"]["description"].startswith("Most tokens sampled")
    assert schemas["WaitingCall"]["properties"].keys() >= {"for", "since"}


async def test_the_schemas_are_those_of_the_records(operations):
    """Each, looked at by itself, is what pydantic makes of its class."""
    schemas = describe(operations)["components"]["schemas"]
    compared = 0
    for name, schema in schemas.items():
        record = getattr(records, name.removesuffix("-Input").removesuffix("-Output"), None)
        if isinstance(record, type) and issubclass(record, BaseModel):
            modes = [
                record.model_json_schema(mode=mode, ref_template="#/components/schemas/{model}")
                for mode in ("validation", "serialization")
            ]
            assert schema in [{key: value for key, value in own.items() if key != "$defs"} for own in modes], name
            compared += 1
    assert compared > 20


async def test_what_is_answered_fits_its_schema(house, operations):
    described = (await house.http.get(f"{house.url}/api/openapi.json")).json()
    await house.admin(create_groups([GroupSpec(id="g", run="r", task={"a": [1]}, n=2)]))
    headers = {"authorization": house.admin._http.headers["authorization"]}
    for call in (claim("r", "me", 1, 1), get_rollout("g.0"), get_status(), post_reward("g.0", Reward(reward=1.0))):
        answer = await house.http.request(call.method, house.url + call.path, json=call.body, headers=headers)
        path = re.sub(r"g\.0", "{rollout}", call.path)
        schema = described["paths"][path][call.method.lower()]["responses"]["200"]["content"]["application/json"][
            "schema"
        ]
        jsonschema.validate(answer.json(), schema | {"components": described["components"]})


class Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes["href"]] if "href" in attributes else []
        self.loads += [tag] if "src" in attributes or tag in ("link", "script", "img") else []


async def test_the_page_shows_all_and_loads_nothing(house, operations):
    answer = await house.http.get(f"{house.url}/api/docs")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    page = Page()
    page.feed(answer.text)
    assert {operation.name for operation in operations} <= set(page.ids) and page.loads == []
    assert {link.removeprefix("#") for link in page.links} - {"openapi.json"} <= set(page.ids)
    assert (await house.http.get(f"{house.url}/api/openapi.json")).json() == describe(operations)
