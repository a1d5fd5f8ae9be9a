"""The control routes described: `GET /api/openapi.json` (OpenAPI 3.1), and `GET /api/docs`, the same as a page.

Nothing is written here that is said elsewhere: routes and types are those of `api.py`, descriptions the docstrings of
`client.py` and `records.py`. Neither needs a key, for neither says anything of this gateway.
"""

import asyncio
import functools
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
import orjson
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from harnessed import __version__, client
from harnessed.gateway.operations import Operation, Packed

PAGE = Path(__file__).with_name("openapi.html")
_SCHEMAS = "#/components/schemas/"
_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]}},
    "required": ["error"],
}
_STATUSES = {
    "400": "The request is not what it should be; the message says where.",
    "401": "No key of this gateway was sent.",
    "403": "The key does not open this route.",
    "404": "There is no such thing.",
    "409": "It contradicts the records.",
}


def description_routes(operations: list[Operation]) -> list[Route]:
    """Written when somebody asks for the first time: it takes a tenth of a second, which no start should wait for, and
    no call."""

    @functools.cache
    def json() -> bytes:
        return orjson.dumps(describe(operations), option=orjson.OPT_INDENT_2)

    @functools.cache
    def html() -> str:
        environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        page = environment.from_string(PAGE.read_text(encoding="utf-8"))
        return page.render(api=describe(operations), schemas=_SCHEMAS)

    async def openapi(_: Request) -> Response:
        return Response(await asyncio.to_thread(json), media_type="application/json")

    async def docs(_: Request) -> Response:
        return HTMLResponse(await asyncio.to_thread(html))

    return [Route("/api/openapi.json", openapi), Route("/api/docs", docs)]


def describe(operations: list[Operation]) -> dict[str, Any]:
    """The document."""
    schemas, components = _schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = re.sub(r":\w+}", "}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Harnessed",
            "version": __version__,
            "summary": "The control routes of a gateway.",
            "description": inspect.cleandoc(client.__doc__ or ""),
        },
        "paths": paths,
        "components": {
            "schemas": components | {"Refusal": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


_Key = tuple[str, JsonSchemaMode]
"""Name of an operation, and `validation` for what it takes, `serialization` for what it gives."""


def _schemas(operations: list[Operation]) -> tuple[dict[_Key, dict[str, Any]], dict[str, Any]]:
    """What each operation takes and gives, and the records that these refer to."""
    adapters: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = []
    for operation in operations:
        if "body" in operation.types:
            adapters.append((operation.name, "validation", TypeAdapter(operation.types["body"])))
        if not _is_packed(operation):
            adapters.append((operation.name, "serialization", TypeAdapter(operation.types["return"])))
    found, rest = TypeAdapter.json_schemas(adapters, ref_template=_SCHEMAS + "{model}")
    return {(str(name), mode): schema for (name, mode), schema in found.items()}, rest.get("$defs", {})


def _operation(operation: Operation, schemas: dict[_Key, dict[str, Any]]) -> dict[str, Any]:
    words = inspect.cleandoc(getattr(client, operation.name).__doc__ or "")
    summary, _, rest = words.partition("\n\n")
    keys = ", ".join(f"`{scope}`" for scope in operation.opens)
    answer: dict[str, Any] = {"description": "Done."}
    if _is_packed(operation):
        answer["content"] = {Packed.media_type: {"schema": {"type": "string", "format": "binary"}}}
    else:
        answer["content"] = {"application/json": {"schema": schemas[operation.name, "serialization"]}}
    refusal = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}Refusal"}}}
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": " ".join(summary.split()),
        "description": " ".join([*rest.split(), f"Keys of scope: {keys}."]),
        "parameters": list(_parameters(operation)),
        "responses": {"200": answer}
        | {status: {"description": why, "content": refusal} for status, why in _STATUSES.items()},
    }
    if "body" in operation.types:
        content = {"application/json": {"schema": schemas[operation.name, "validation"]}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _parameters(operation: Operation) -> Iterable[dict[str, Any]]:
    for name, convertor in re.findall(r"{(\w+)(?::(\w+))?}", operation.path):
        schema = {"type": "integer" if convertor == "int" else "string"}
        yield {"name": name, "in": "path", "required": True, "schema": schema}
    for name, type_ in operation.query.items():
        yield {"name": name, "in": "query", "required": True, "schema": TypeAdapter(type_).json_schema()}


def _is_packed(operation: Operation) -> bool:
    return operation.types["return"] is Packed
