"""The OpenAPI document of the gateway."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from starlette.routing import Route
from tests.unit.gateway.sdk import MODEL, run, served
from tests.unit.gateway.test_fuzz import GOOD

from etude.gateway import DIALECTS, create_app
from etude.gateway.openapi import document
from etude.signals import FeedbackWriter


def test_the_document_has_every_field_that_a_body_may_have_and_the_values_that_are_taken() -> None:
    made = document([MODEL], has_keys=True, feedback=FeedbackWriter.bodies)
    schemas = made["components"]["schemas"]
    for dialect in DIALECTS.values():
        body = made["paths"][dialect.path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema, decoder = schemas[body.removeprefix("#/components/schemas/")], dialect.decoder
        assert set(schema["properties"]) == {*decoder.kind.__struct_fields__, *decoder.neutral, *decoder.harmless}
        assert schema["additionalProperties"] is False
        assert schema["properties"]["model"] == {"enum": [MODEL]}
    of_chat = schemas["ChatCompletionRequest"]["properties"]
    assert of_chat["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 16}
    assert of_chat["best_of"] == {"enum": [None, 1]}
    assert "max_tokens" in schemas["MessagesRequest"]["required"]
    assert "max_tokens" not in schemas["CountTokensRequest"]["required"]
    assert made["security"] == [{"bearer": []}, {"header": []}]
    for path, operations in made["paths"].items():
        refusals = {
            status for operation in operations.values() if "responses" in operation for status in operation["responses"]
        }
        assert ("401" in refusals) == (path not in ("/health", "/openapi.json")), path


def test_schemas_are_named_after_the_apis_and_no_name_is_of_a_module_or_a_private_class() -> None:
    made = document([MODEL], has_keys=True, feedback=FeedbackWriter.bodies)
    schemas = made["components"]["schemas"]
    assert {"ChatCompletionRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest"} <= schemas.keys()
    assert {"ChatCompletionMessage", "ResponsesTool", "MessagesTool", "FeedbackSignal"} <= schemas.keys()
    for name, schema in schemas.items():
        assert re.fullmatch("([A-Z][a-zA-Z]+)+", name), name
        assert schema.get("title", name) == name
    referred = set(re.findall('"#/components/schemas/([^"]*)"', json.dumps(made)))
    assert referred == schemas.keys()
    assert "etude." not in json.dumps(schemas)


def test_the_gateway_offers_its_document_and_the_document_has_all_its_paths() -> None:
    async def work() -> None:
        async with served() as at:
            answer = await at.http.get(str(at.http.base_url).removesuffix("/v1/") + "/openapi.json")
            assert answer.status_code == 200
            assert answer.json() == document([MODEL], has_keys=False)
            routes = [route for route in create_app([*at.gateway.models.values()]).routes if isinstance(route, Route)]
            offered = {route.path.replace(":path", "") for route in routes} - {"/v1/feedback"}
            assert set(answer.json()["paths"]) == offered

    run(work)


@pytest.mark.parametrize("path", GOOD)
def test_a_body_that_is_taken_fits_the_document(path: str) -> None:
    made = document([MODEL], has_keys=False)
    schema = made["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    checker = jsonschema.Draft202012Validator({**schema, "components": made["components"]})
    checker.validate({"model": MODEL, **GOOD[path]})
    for wrong in ({"model": "other"}, {"unknown": 1}, {"temperature": 3}):
        assert not checker.is_valid({"model": MODEL, **GOOD[path], **wrong}), wrong
