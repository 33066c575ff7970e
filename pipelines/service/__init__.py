"""The engine over HTTP, in the forms that OpenAI's and Anthropic's clients speak.

The way of a request:
    app.py                     routes, errors, CORS; local.py runs it in this process
    *_routes.py                the key, the body, the model's name        keys.py, body.py, *_body.py
    *_reply.py                 prompt -> engine -> answer, whole or as events
        anthropic_prompt.py, openai_chat.py   turns and tools for the chat template   chat_tokenizer.py
        service.py             room and limits, then the choices together   limits.py, generation.py
        reading.py, output.py  text -> thoughts, words, tool calls, as the model's dialect.py has them
        anthropic_messages.py, openai_chat.py, openai_completions.py   the objects that clients read
    watched.py                 all of it ends when the client goes

Translation is pure and apart from HTTP. The engine is anything with `engine_client.EngineClient`.
"""
