"""The service over an engine in this process: the fake one, and the embedded model."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import openai
import pytest

from dflash_engine.config import EngineConfig
from pipelines.service.app import create_app
from pipelines.service.config import ServiceConfig
from pipelines.service.local import open_local, served_model, serving

HELLO: Any = [{"role": "user", "content": "Name three colours."}]


def test_the_fake_engine_answers_both_apis():
    engine_config, config = EngineConfig(model="fake"), ServiceConfig()
    app = create_app(open_local(engine_config), served_model(engine_config, config), config)
    with serving(app) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x") as api:
            ask: Any = {"model": "fake", "messages": HELLO, "max_tokens": 20}
            greedy = {**ask, "temperature": 0}
            whole = api.chat.completions.create(**greedy)
            streamed = api.chat.completions.create(**greedy, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == (
                whole.choices[0].message.content
            )
        with anthropic.Anthropic(base_url=url, api_key="x") as other:
            answer = other.messages.create(**ask, extra_body={"temperature": 0})
            counted = other.messages.count_tokens(model="fake", messages=HELLO)
    assert answer.content[0].text == whole.choices[0].message.content
    assert counted.input_tokens == whole.usage.prompt_tokens == 4


@pytest.mark.slow
def test_the_embedded_model_answers_as_the_engine_itself_does():
    from dflash_engine.request import Message, Request, SamplingParams

    engine_config = EngineConfig(model="smollm2-135m", device="cpu", max_model_len=512)
    config = ServiceConfig(model_name="smol")
    engine = open_local(engine_config)
    sampling = SamplingParams(max_tokens=24, temperature=0.7, seed=3)

    async def directly() -> str:
        request = Request(messages=(Message("user", HELLO[0]["content"]),), sampling=sampling)
        return "".join([chunk.text async for chunk in engine.submit(request)])

    expected = asyncio.run(directly())
    app = create_app(engine, served_model(engine_config, config), config)
    with serving(app) as url:
        ask: Any = {"model": "smol", "messages": HELLO, "max_tokens": 24}
        warm: Any = {**ask, "temperature": 0.7, "seed": 3}
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x") as api:
            whole = api.chat.completions.create(**warm, logprobs=True, top_logprobs=1)
            streamed = api.chat.completions.create(**warm, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected
        with anthropic.Anthropic(base_url=url, api_key="x") as other:
            with other.messages.stream(**ask) as stream:
                message = stream.get_final_message()
            with pytest.raises(anthropic.BadRequestError, match="> 511 maximum"):
                other.messages.create(**{**ask, "messages": [{"role": "user", "content": "word " * 600}]})
    asyncio.run(engine.close())
    assert whole.choices[0].message.content == expected
    spelled = b"".join(bytes(token.bytes) for token in whole.choices[0].logprobs.content)
    assert spelled.startswith(expected.encode())
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == whole.usage.prompt_tokens
