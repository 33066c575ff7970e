"""Prompts through a real chat template, against what transformers itself makes of the same turns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_engine.errors import BadPrompt
from dflash_engine.request import Message
from dflash_engine.tokenizer import Tokenizer
from pipelines.service.chat_tokenizer import TemplateTokenizer
from pipelines.service.dialect import Dialect
from tests.helpers import byte_level_tokenizer

TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call with <tool_call>{...}</tool_call><|im_end|>\n{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System must come first') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
)
USER = {"role": "user", "content": "Où est ma commande ?"}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}


def made(template):
    fast = byte_level_tokenizer()
    fast.chat_template = template
    return TemplateTokenizer(fast), fast


@pytest.fixture(scope="module")
def qwen():
    return made(TEMPLATE)[0]


def test_without_tools_a_conversation_has_the_ids_that_the_engine_gives_it():
    tokenizer = TemplateTokenizer(byte_level_tokenizer())
    turns = [{"role": "system", "content": "Be kind."}, USER]
    engine = Tokenizer(byte_level_tokenizer()).encode_chat([Message(**turn) for turn in turns])
    assert list(tokenizer.encode_chat(turns).tokens) == engine
    assert tokenizer.dialect == Dialect()


def test_a_template_says_what_the_model_can_do(qwen):
    assert qwen.dialect == Dialect(thinks=True, tools="json", thinking_switch=True, system_anywhere=False)
    xml, _ = made("{{ tools }}{{ messages[0].content }}<tool_call><function=x>")
    assert xml.dialect.tools == "xml"


def test_tools_calls_and_results_stand_in_the_prompt(qwen):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    turns = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
    ]
    text = b"".join(map(qwen.token_bytes, qwen.encode_chat(turns, [TOOL]).tokens)).decode()
    assert '"name": "f"' in text.split("Call with")[0]
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "<|im_start|>tool\n5<|im_end|>" in text


def test_thoughts_that_the_prompt_opens_are_told(qwen):
    assert qwen.encode_chat([USER]).thinking
    assert not qwen.encode_chat([USER], (), {"enable_thinking": False}).thinking


def test_the_bytes_of_single_tokens_make_the_text(qwen):
    text = "Où est 我的订单?"
    tokens = qwen.encode(text)
    assert b"".join(map(qwen.token_bytes, tokens)) == text.encode()
    assert qwen.decode(tokens) == text


@pytest.mark.parametrize("name", ["chat_template", "messages", "tools", "tokenize", "continue_final_message"])
def test_a_client_cannot_set_what_is_not_the_templates(qwen, name):
    with pytest.raises(BadPrompt, match=name):
        qwen.encode_chat([USER], (), {name: "{{ 1 }}"})


def test_a_template_that_refuses_or_is_missing_is_the_clients_error(qwen):
    with pytest.raises(BadPrompt, match="System must come first"):
        qwen.encode_chat([USER, {"role": "system", "content": "x"}])
    bare, _ = made(None)
    with pytest.raises(BadPrompt, match="no chat template"):
        bare.encode_chat([USER])
    assert bare.dialect == Dialect()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    parameters=JSON,
    arguments=JSON,
    content=st.text(max_size=10),
    options=st.dictionaries(st.text(max_size=5), JSON),
)
@settings(max_examples=150, deadline=None)
def test_odd_values_are_rendered_or_refused(qwen, parameters, arguments, content, options):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [USER, {"role": "assistant", "content": content, "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    try:
        assert qwen.encode_chat(turns, [tool], options).tokens
    except BadPrompt as error:
        assert str(error)


def test_half_of_a_surrogate_pair_is_the_clients_error(qwen):
    with pytest.raises(BadPrompt, match="surrogate"):
        qwen.encode_chat([{"role": "user", "content": "\ud83d"}])


def test_very_deep_values_are_refused(qwen):
    deep: object = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(BadPrompt):
        qwen.encode_chat([USER], [{"type": "function", "function": {"name": "f", "parameters": deep}}])
