"""Log-probabilities over HTTP: of new tokens, of echoed prompts, and of the likeliest tokens beside."""

# ruff: noqa: F811  fixtures

import pytest

from tiny_server import MESSAGES, PROMPT, alone, client, engine, server  # noqa: F401


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_several_prompts_with_echo_and_logprobs(client, engine, stream):
    asked = {"prompt": [PROMPT, "a dog"], "seed": 1, "max_tokens": 12, "n": 2, "echo": True, "logprobs": 0}
    answer = client.completions.create(model="tiny", stream=stream, **asked)
    found, logprobs = [""] * 4, [[] for _ in range(4)]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            found[choice.index] += choice.text
            if choice.logprobs is not None:
                logprobs[choice.index] += choice.logprobs.token_logprobs
    texts = [
        alone(engine, prompt, raw=True, seed=1 + i, max_new_tokens=12, logprobs=True)
        for prompt in asked["prompt"] for i in range(2)
    ]  # fmt: skip
    assert found == [text.prompt + text.text for text in texts]
    assert logprobs == [text.logprobs for text in texts]


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_say_where_each_token_stands_in_the_text(client, stream):
    words = {str(token): 100 for token in range(97, 105)}  # letters, each of a character
    asked = {"prompt": PROMPT, "seed": 1, "max_tokens": 8, "echo": True, "logprobs": 0, "logit_bias": words}
    answer = client.completions.create(model="tiny", stream=stream, **asked)
    choices = [part.choices[0] for part in (answer if stream else [answer])]
    text = "".join(choice.text for choice in choices)
    offsets = [
        (offset, token) for choice in choices if choice.logprobs is not None
        for offset, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True)
    ]  # fmt: skip
    assert len(offsets) == 8
    for offset, token in offsets:
        assert text[offset:].startswith(token)
    assert offsets[0][0] == len(PROMPT)


def test_the_likeliest_tokens_of_each_position(client, engine):
    settings = {"model": "tiny", "temperature": 0.0, "max_tokens": 6}
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **settings)
    for entry in chat.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
    assert len(chat.choices[0].logprobs.content) == 6
    text = client.completions.create(prompt=PROMPT, logprobs=2, **settings).choices[0].logprobs
    assert [max(likely.values()) for likely in text.top_logprobs] == text.token_logprobs
