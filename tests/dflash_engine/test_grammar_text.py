"""Grammars as sampling parameters name them."""

from __future__ import annotations

import pickle

import pytest

from dflash_engine import BadSampling, SamplingParams
from dflash_engine.grammar_text import MAX_GRAMMAR_CHARS, GrammarText


def test_a_schema_is_the_same_as_an_object_and_as_text_in_any_layout():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    given = [schema, '{"type": "object",\n "properties": {"b": {}, "a": {}}}']
    found = {SamplingParams(json_schema=each).grammar for each in given}
    assert found == {GrammarText("json_schema", '{"type":"object","properties":{"b":{},"a":{}}}')}


def test_parameters_travel_as_json_and_pickle():
    for params in (SamplingParams(json_schema={"type": "null"}), SamplingParams(regex="a\\d", seed=1)):
        assert SamplingParams(**params.model_dump(exclude_unset=True)) == params
        assert SamplingParams.model_validate_json(params.model_dump_json(exclude_defaults=True)) == params
        assert pickle.loads(pickle.dumps(params)) == params
        assert params.needs_host
    assert SamplingParams().grammar is None and not SamplingParams().needs_host


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"json_schema": "{"}, "json_schema: .*not JSON"),
        ({"json_schema": "[1]"}, "json_schema: .*a JSON object"),
        ({"json_schema": "true"}, "a JSON object"),
        ({"json_schema": 5}, "json_schema: .*valid string"),
        ({"json_schema": {"a": {1, 2}}}, "not JSON: .*set"),
        ({"json_schema": {"a": float("nan")}}, "not JSON"),
        ({"json_schema": '{"a":' * 200_000}, "nested too deeply"),
        ({"json_schema": {"title": "x" * MAX_GRAMMAR_CHARS}}, "are the most"),
        ({"regex": "x" * (MAX_GRAMMAR_CHARS + 1)}, "regex: .*65537 characters; 65536 are the most"),
        ({"regex": 5}, "regex: .*valid string"),
        ({"regex": "a", "json_schema": {}}, "exclude each other"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos goes on behind the end"),
    ],
)
def test_what_is_no_grammar_is_refused_with_the_reason(fields, reason):
    with pytest.raises(BadSampling, match=reason):
        SamplingParams(**fields)
