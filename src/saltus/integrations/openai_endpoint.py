"""Ask a server of OpenAI's protocol, such as vLLM's, llama.cpp's or Saltus's own, for completions of a text."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from saltus.core.sampling import Sampling

TIMEOUT_SECONDS = 600
OPTIONAL_FIELDS = ("add_special_tokens", "cache_prompt", "cache_salt")  # of some servers; others may refuse them
# Without these, servers take the model's recommended values, or their own: another distribution.
NEUTRAL = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
RETRYABLE_STATUSES = (408, 425, 429, 500, 502, 503, 504)  # of a server that may answer the same request later


class EndpointError(ValueError):
    """A server that refuses, for the `reason` that it gives, or does not answer (`status` is None).

    `retryable` if the same request may succeed later.
    """

    def __init__(self, line: str, status: int | None = None, reason: str = "", retry_after: float = 0.0) -> None:
        super().__init__(line)
        self.status, self.reason, self.retry_after = status, reason, retry_after
        self.retryable = status is None or status in RETRYABLE_STATUSES


@dataclass(frozen=True)
class OpenAIEndpoint:
    """A server's address, which ends in /v1, and the model that it serves."""

    url: str
    model: str
    api_key: str = field(default="", repr=False)
    bos_token: str = ""  # which servers put before a text by themselves
    refused: set[str] = field(default_factory=set, repr=False, compare=False)  # fields that this server does not know

    def completion_body(self, prompt: str, max_tokens: int, sampling: Sampling, seed: int) -> dict[str, Any]:
        """The request for a completion of a text whose chat template and special tokens are in it."""
        return {
            "model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "seed": seed, "add_special_tokens": False,
        } | {name: getattr(sampling, name) for name in NEUTRAL}  # fmt: skip

    def post_completion(self, body: dict[str, Any]) -> Any:
        """The open response; fields of single servers are left out if this one refuses them. Errors: EndpointError."""
        kept = [name for name in body if name not in self.refused or body[name] != NEUTRAL.get(name, body[name])]
        sent = {name: body[name] for name in kept}
        if "add_special_tokens" in self.refused:
            sent["prompt"] = body["prompt"].removeprefix(self.bos_token)
        try:
            return open_url(f"{self.url}/completions", sent, self.api_key)
        except EndpointError as error:
            neutral = [name for name, value in NEUTRAL.items() if sent.get(name) == value]
            optional = (*OPTIONAL_FIELDS, *neutral)
            unknown = next((name for name in optional if name in sent and name in str(error)), None)
            if error.status not in (400, 422) or unknown is None:
                raise
        self.refused.add(unknown)
        return self.post_completion(body)


def connect_endpoint(url: str, tokenizer: Any, model: str | None = None, api_key: str = "") -> OpenAIEndpoint:
    """A server and, unless `model` names another one, the first model that it lists. Errors: ValueError.

    The tokenizer is that of the model.
    """
    base = url.rstrip("/").removesuffix("/v1") + "/v1"
    if not base.startswith(("http://", "https://")):
        raise ValueError(f"--endpoint {url}: give an address such as http://localhost:8000")
    if model is None:
        with open_url(f"{base}/models", None, api_key) as response:
            try:
                model = str(json.load(response)["data"][0]["id"])
            except (ValueError, KeyError, IndexError, TypeError):
                raise ValueError(f"{base}/models lists no model; is a server of OpenAI's protocol there?") from None
    bos_token = tokenizer.bos_token or ""
    adds_it = bool(bos_token) and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
    return OpenAIEndpoint(base, model, api_key, bos_token if adds_it else "")


def open_url(url: str, body: Mapping[str, Any] | None, api_key: str, headers: Mapping[str, str] | None = None) -> Any:
    """The open response to a POST of a body, or to a GET. Errors: EndpointError of one line."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **(headers or {})}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        reason, pause = " ".join(error.read(300).decode(errors="replace").split()), error.headers.get("Retry-After", "")
        if not reason or (reason.startswith("<") and error.code not in (400, 422)):  # a page of some other server
            reason = "is a server of OpenAI's protocol there?"
        line = f"{url} refuses ({error.code}): {reason}"
        raise EndpointError(line, error.code, reason, float(pause) if pause.isdecimal() else 0.0) from None
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise EndpointError(f"{url} does not answer ({reason}); is the server running?") from None
