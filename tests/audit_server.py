"""A server of OpenAI's protocol for tests of `saltus check`: a tiny language, rounding noise, and faults on request.

Requests with `"speculative": false` are answered without any fault of FAULTS_OF_SPECULATION.
"""

import hashlib
import json
import re
import threading
import time
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

WORDS = [
    " the", " cat", " dog", " sat", " on", " a", " mat", " log", " and", " ran", ".", ",", " was", " old", " red",
    " sea", " is", " house", " boat", " wind", " at", " night", " bell", " rang", " twice", "\n", " lamp", " so",
    " he", " she",
]  # fmt: skip
LEADS = {b"\xc3": (b"\xa9", b"\xbc"), b"\xf0\x9f": (b"\xa6\x98", b"\x90\x8b"), b" \xe6": (b"\x97\xa5", b"\x9c\xac")}
VOCABULARY = [b"", *(word.encode() for word in WORDS), *LEADS, *(tail for tails in LEADS.values() for tail in tails)]
END, TAILS = 0, [VOCABULARY.index(tail) for tails in LEADS.values() for tail in tails]
FAULTS_OF_SPECULATION = (
    "changed tokens", "stop dropped", "chunk repeated", "one token too many", "wrong usage", "wrong logprobs",
    "split characters", "invalid JSON under load", "invalid calls", "garbage after a prefix hit", "seed ignored",
    "sampling biased", "wrong finish_reason", "worse answers", "texts mixed up under load", "one prompt changed",
    "no end of streams", "no likeliest tokens",
)  # fmt: skip
FAULTS = (*FAULTS_OF_SPECULATION, "switch ignored")
PREFIX = 200


def _hash(*parts):
    return list(np.frombuffer(hashlib.blake2b(repr(parts).encode(), digest_size=16).digest(), dtype=np.uint32))


def is_changed(prompt):
    """True if "one prompt changed" changes the text of this prompt."""
    return _hash(prompt)[0] % 5 == 0


@lru_cache(maxsize=1 << 16)  # tests ask the same prompts
def law(prompt, last_tokens, length, salt):
    """The logits of the next token: a function of the prompt and the last three tokens."""
    rng = np.random.default_rng(_hash(prompt, last_tokens, length, salt))
    lead = VOCABULARY[last_tokens[-1]] if last_tokens else b""
    allowed = [VOCABULARY.index(tail) for tail in LEADS.get(lead, ())]
    mask = np.full(len(VOCABULARY), -np.inf)
    mask[allowed or [i for i in range(len(VOCABULARY)) if i not in TAILS]] = 0
    if length < 20:
        mask[END] = -np.inf
    return rng.normal(0, 3, len(VOCABULARY)) + mask


@lru_cache(maxsize=1 << 16)
def gumbel_noise(seed, position):
    return np.random.default_rng(_hash(seed, position)).gumbel(size=len(VOCABULARY))


class AuditedServer:
    """State of one server: its faults, and how many requests are open."""

    def __init__(self, faults=(), noise=0.003, seed=0, missing=(), strict=False, penalty=0.0):
        self.faults, self.missing, self.strict, self.penalty = set(faults), set(missing), strict, penalty
        self.noise, self.lock = noise, threading.Lock()
        self.seeds = np.random.default_rng(seed)
        self.open, self.drafted, self.accepted, self.prefixes, self.last = 0, 0, 0, set(), ""

    def rng(self):
        with self.lock:
            return np.random.default_rng(int(self.seeds.integers(1 << 62)))

    def answer(self, body):
        on = body.get("speculative", True) is not False
        faults = self.faults if on else self.faults - set(FAULTS_OF_SPECULATION)
        chance = self.rng()
        prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        busy = self.open > 2
        if "texts mixed up under load" in faults and busy and self.last:
            prompt, self.last = self.last, prompt
        else:
            self.last = prompt
        if body.get("tools"):
            return self._call(prompt, faults, chance)
        tokens, reason = self._tokens(prompt, body, faults, chance, busy)
        text = b"".join(token for token, _, _ in tokens).decode("utf-8", "ignore")
        for stop in body.get("stop") or ():
            if stop in text and "stop dropped" not in faults:
                text, reason = text[: text.index(stop)], "stop"
        if on or "switch ignored" in self.faults:
            with self.lock:
                self.drafted += 2 * len(tokens)
                self.accepted += len(tokens)
        if "wrong finish_reason" in faults:
            reason = "stop"
        count = len(tokens) + (3 if "wrong usage" in faults else 0)
        return {"text": text, "reason": reason, "tokens": tokens, "count": count, "prompt": prompt, "faults": faults}

    def _call(self, prompt, faults, chance):
        arguments = '{"name": "Jane Austen", "born": 1775}'
        if "invalid calls" in faults and chance.random() < 0.4:
            arguments = arguments[:-1]
        call = {"id": "call_1", "type": "function", "function": {"name": "save_person", "arguments": arguments}}
        found = {"text": "", "reason": "tool_calls", "tokens": [], "count": 9, "prompt": prompt, "faults": faults}
        return found | {"calls": [call]}

    def _tokens(self, prompt, body, faults, chance, busy):
        limit = body.get("max_tokens", 16) + ("one token too many" in faults)
        if body.get("response_format"):
            year = 1500 + _hash(prompt)[0] % 500
            said = f'{{"name": "cat", "born": {year}}}'
            if "invalid JSON under load" in faults and busy and chance.random() < 0.5:
                said = said[:-1] + " and so on"
            return self._spelled(said, limit)
        if found := re.search(r"What is (\d+) plus (\d+)", prompt):
            right = _hash("right", prompt)[0] % 10 < 7
            if "worse answers" in faults:
                right = right and _hash("worse", prompt)[0] % 10 < 5
            return self._spelled(f"#### {int(found[1]) + int(found[2]) + (not right)}", limit)
        salt = 0
        if "garbage after a prefix hit" in faults and len(prompt) > PREFIX:
            salt = int(prompt[:PREFIX] in self.prefixes)
            self.prefixes.add(prompt[:PREFIX])
        if "one prompt changed" in faults and is_changed(prompt):
            salt = 1
        return self._sampled(prompt, body, faults, chance, limit, salt)

    def _spelled(self, said, limit):
        tokens = [(character.encode(), 0.0, {character.encode(): 0.0}) for character in said]
        return tokens[:limit], "stop" if len(tokens) <= limit else "length"

    def _sampled(self, prompt, body, faults, chance, limit, salt):
        temperature, seed, ids, made = body.get("temperature", 1.0), body.get("seed"), [], []
        if "sampling biased" in faults:
            temperature *= 0.6
        if "seed ignored" in faults or seed is None or "seed" in self.missing:
            seed = int(chance.integers(1 << 30))
        while len(ids) < limit:
            logits = law(prompt, tuple(ids[-3:]), len(ids), salt if len(ids) > 4 else 0)
            logits = logits + chance.normal(0, self.noise, len(VOCABULARY))
            scores = logits if temperature == 0 else logits / temperature + gumbel_noise(seed, len(ids))
            if self.penalty:  # llama-cpp-python has one by default
                scores = scores - self.penalty * np.isin(np.arange(len(scores)), ids)
            chosen = int(scores.argmax())
            whole = VOCABULARY[chosen] not in LEADS and not (ids and VOCABULARY[ids[-1]] in LEADS)
            if "changed tokens" in faults and chance.random() < 0.01 and whole:
                chosen = 1 + int(chance.integers(len(WORDS)))
            if chosen == END:
                return made, "stop"
            top = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            if "wrong logprobs" in faults:
                top = top / 2
            likeliest = np.argsort(-top)[:20] if body.get("logprobs") else ()
            listed = {VOCABULARY[i]: float(top[i]) for i in likeliest if np.isfinite(top[i])}
            if "no likeliest tokens" in faults and chance.random() < 0.3:  # of accepted drafts, as in llama.cpp 11434
                top[chosen], listed = 0.0, {}
            ids.append(chosen)
            made.append((VOCABULARY[chosen], float(max(top[chosen], -99)), listed))
        return made, "length"


def _chunks(server, found):
    """The text in pieces; split in the middle of characters where that is the fault."""
    data, chance = found["text"].encode(), server.rng()
    if "split characters" in found["faults"]:
        pieces = [data[i : i + 5].decode("utf-8", "replace") for i in range(0, len(data), 5)]
    else:
        pieces = [found["text"][i : i + 6] for i in range(0, len(found["text"]), 6)]
    if "chunk repeated" in found["faults"] and len(pieces) > 3 and chance.random() < 0.5:
        pieces.insert(3, pieces[2])
    return pieces


def _logprobs(tokens, chat):
    if chat:
        return {
            "content": [
                {
                    "token": text.decode("utf-8", "replace"), "bytes": list(text), "logprob": value,
                    "top_logprobs": [
                        {"token": t.decode("utf-8", "replace"), "bytes": list(t), "logprob": v} for t, v in top.items()
                    ],
                }
                for text, value, top in tokens
            ]
        }  # fmt: skip
    return {
        "tokens": [text.decode("utf-8", "replace") for text, _, _ in tokens],
        "token_logprobs": [value for _, value, _ in tokens],
        "top_logprobs": [{t.decode("utf-8", "replace"): v for t, v in list(top.items())[:5]} for _, _, top in tokens],
    }


class Handler(BaseHTTPRequestHandler):
    state: AuditedServer

    def log_message(self, *_):
        pass

    def do_GET(self):
        state = self.state
        if self.path == "/v1/models":
            return self._send(200, {"data": [{"id": "tiny", "owned_by": "vllm"}]})
        if self.path == "/version":
            return self._send(200, {"version": "0.1"})
        if self.path == "/metrics" and "metrics" not in state.missing:
            if "draft counts" in state.missing:  # as of vLLM without speculation
                return self._send(200, "vllm:generation_tokens_total 9.0\n")
            lines = {"drafts": state.accepted, "draft_tokens": state.drafted, "accepted_tokens": state.accepted}
            text = "".join(
                f'vllm:spec_decode_num_{name}_total{{model_name="tiny"}} {n}.0\n' for name, n in lines.items()
            )
            return self._send(200, "# TYPE vllm:spec_decode_num_draft_tokens counter\n" + text)
        return self._send(404, {"error": {"message": "not here"}})

    def do_POST(self):
        state, body = self.state, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat = self.path.endswith("/chat/completions")
        if self.headers.get("X-Speculative") == "off":
            body["speculative"] = False
        fields = {"logprobs": "logprobs", "JSON schemas": "response_format", "tools": "tools"}
        refused = next((field for name, field in fields.items() if name in state.missing and body.get(field)), None)
        if refused or (chat and "chat" in state.missing):
            return self._send(400, {"error": {"message": f"unknown field {refused}"}})
        with state.lock:
            state.open += 1
        try:
            time.sleep(0.01 if body.get("response_format") else 0.001)
            found = state.answer(body)
            return self._stream(body, found, chat) if body.get("stream") else self._whole(body, found, chat)
        finally:
            with state.lock:
                state.open -= 1

    def _usage(self, found):
        prompt = len(found["prompt"].split())
        return {"prompt_tokens": prompt, "completion_tokens": found["count"], "total_tokens": prompt + found["count"]}

    def _choice(self, body, found, chat):
        choice = {"index": 0, "finish_reason": found["reason"]}
        message = {"content": found["text"], "tool_calls": found.get("calls")}
        choice |= {"message": message} if chat else {"text": found["text"]}
        if body.get("logprobs"):
            choice["logprobs"] = _logprobs(found["tokens"], chat)
        return choice

    def _whole(self, body, found, chat):
        self._send(200, {"choices": [self._choice(body, found, chat)], "usage": self._usage(found)})

    def _stream(self, body, found, chat):
        self.send_response(200)
        self.end_headers()
        pieces = _chunks(self.state, found)
        events = [{"choices": [{"delta": {"content": piece}} if chat else {"text": piece}]} for piece in pieces]
        if found.get("calls"):
            events.append({"choices": [{"delta": {"tool_calls": [{"index": 0, **found["calls"][0]}]}}]})
        events.append({"choices": [{"delta": {}, "finish_reason": found["reason"]}]})
        events.append({"choices": [], "usage": self._usage(found)})
        said = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)
        if "no end of streams" not in found["faults"]:
            said += "data: [DONE]\n\n"
        self.wfile.write(said.encode())

    def _send(self, status, body):
        self.send_response(status)
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    request_queue_size = 64
    daemon_threads = True


@contextmanager
def audited_server(*faults, **settings):
    """The address of a server with these faults."""
    unknown = set(faults) - set(FAULTS)
    assert not unknown, unknown
    handler = type("Handler", (Handler,), {"state": AuditedServer(faults, **settings)})
    server = _Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
