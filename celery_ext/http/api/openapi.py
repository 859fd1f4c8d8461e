"""The OpenAPI 3.1 document, from the operations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kombu_delayed import __version__

from ..problems import MEDIA_TYPE
from .models import ProblemAnswer
from .operations import Operation, all_paths

_REF = "#/components/schemas/{model}"

_WHY = {
    400: "The request cannot be read.",
    401: "A token is needed.",
    403: "The token does not allow it.",
    404: "There is nothing of this name.",
    409: "It is in another state.",
    413: "The body is too large.",
    415: "The body has another content type.",
    422: "A field is wrong; `errors` names it.",
    429: "Too many requests; `Retry-After` says when to try again.",
    503: "Overloaded, or Redis does not answer; `Retry-After` says when to try again.",
}

_ALWAYS = (400, 401, 403, 429, 503)


def document(operations: Iterable[Operation], server: str = "") -> dict[str, Any]:
    shown = list(operations)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kombu-delayed",
            "version": __version__,
            "description": "Delayed tasks over HTTP. Times are ISO 8601, lengths of time are like "
            '`"15s"` or `"3d"`. Errors are `application/problem+json`.',
        },
        "servers": [{"url": server or "/"}],
        "security": [{}, {"token": []}],
        "paths": {
            path: {each.method.lower(): _operation(each) for each in found}
            for path, found in all_paths(shown).items()
        },
        "components": {
            "schemas": _schemas(shown),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas(operations: list[Operation]) -> dict[str, Any]:
    models: dict[tuple[type[BaseModel], str], None] = {(ProblemAnswer, "validation"): None}
    for each in operations:
        if each.body is not None:
            models[(each.body, "validation")] = None
        for answer in each.answers.values():
            if answer is not None:
                models[(answer, "validation")] = None
    _, found = models_json_schema(list(models), ref_template=_REF)  # type: ignore[arg-type]
    schemas: dict[str, Any] = found["$defs"]
    for schema in schemas.values():
        if "due" in schema.get("properties", {}) and "delay" in schema["properties"]:
            schema["not"] = {"required": ["due", "delay"]}
    return schemas


def _operation(each: Operation) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": each.name,
        "summary": each.summary,
        "tags": [each.tag],
        "parameters": [*_path_parameters(each), *_query_parameters(each)],
        "responses": _responses(each),
        "x-scope": each.scope,
    }
    if each.body is not None:
        schema: dict[str, Any] = {"$ref": _REF.format(model=each.body.__name__)}
        if each.body_type != "application/json":
            schema = {
                "type": "string",
                "description": f"A JSON object a line, as of {each.body.__name__}.",
            }
        found["requestBody"] = {"required": True, "content": {each.body_type: {"schema": schema}}}
    return found


def _path_parameters(each: Operation) -> list[dict[str, Any]]:
    schema = {"type": "string", "minLength": 1}
    return [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name in re.findall(r"\{(\w+)\}", each.path)
    ]


def _query_parameters(each: Operation) -> list[dict[str, Any]]:
    if each.query is None:
        return []
    schema = each.query.model_json_schema(ref_template=_REF)
    return [
        {"name": name, "in": "query", "required": False, "schema": _not_null(of)}
        for name, of in schema["properties"].items()
    ]


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove null from a schema: in a query, an optional parameter is left out instead."""
    given = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(given) != 1:
        return schema
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    return {**rest, **given[0]}


def _responses(each: Operation) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for status, model in each.answers.items():
        found[str(status)] = {"description": "Done."}
        if status == 204:
            continue
        schema = {"$ref": _REF.format(model=model.__name__)} if model else {"type": "string"}
        found[str(status)]["content"] = {each.answer_type: {"schema": schema}}
    wrong = {*_ALWAYS, *each.problems}
    if each.body is not None:
        wrong |= {413, 415, 422}
    if each.query is not None or "{" in each.path:
        wrong |= {422}
    problem = {"schema": {"$ref": _REF.format(model="ProblemAnswer")}}
    for status in sorted(wrong):
        found[str(status)] = {"description": _WHY[status], "content": {MEDIA_TYPE: problem}}
    return found
