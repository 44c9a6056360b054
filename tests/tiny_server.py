"""A server with a tiny model, for the tests of serving: its address, OpenAI's client for it, and the text to expect.

A test file imports the fixtures that it uses by name.
"""

import socket
import threading
import time
from contextlib import contextmanager

import openai
import pytest
import uvicorn

import saltus
from saltus.server.app import make_app
from saltus.server.connections import server_config
from saltus.server.served_request import Limits
from saltus.server.service import Service
from tiny_models import TEMPLATE

PROMPT = "the cat sat on the mat and the cat sat on the log and the"
JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def serving(engine, limits=None, ngram_cache_bytes=0, learner=None, name="tiny", certificate=None, **settings):
    """A service, and the address that it listens on."""
    service = Service(engine, name, limits or Limits(), ngram_cache_bytes, learner)
    server = uvicorn.Server(server_config(make_app(service, **settings), certificate=certificate))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield service, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def engine(tiny_folder, partners) -> saltus.Engine:
    made = saltus.load(str(tiny_folder()), "lookup", options=partners, adaptive=False)
    made.tokenizer.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def server(engine):
    with serving(engine) as (service, url):
        yield service, url


@pytest.fixture
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server[1] + "/v1", api_key="any", max_retries=0)


def alone(engine, prompt=MESSAGES, **settings) -> saltus.Generation:
    settings = {"temperature": 1.0, "max_new_tokens": 24, **settings}
    return engine.generate(prompt, method="plain", **settings)
