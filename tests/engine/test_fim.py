"""Causal models with fill-in-the-middle tokens: prompts of each family, and the routes that fill."""

import json
import shutil

import httpx
import openai
import pytest
from test_cli import saltus_
from tokenizers import AddedToken
from transformers import AutoTokenizer

import saltus
from saltus.engine.fim import fim_prompt
from saltus.engine.fim_formats import FORMATS, find_fim_format
from tiny_models import space_tokenizer
from tiny_server import JSON, serving

BEFORE, AFTER = "the cat sat on the ", " and the cat sat on the log and the mat"
NAMES = ("qwen", "starcoder", "codellama", "deepseek")
TOKENS = {name: (form.before, form.after, form.middle) for name, form in zip(NAMES, FORMATS, strict=True)}


@pytest.fixture(scope="module")
def coder(tiny_folder, tmp_path_factory, partners):
    """An engine whose tokenizer has the tokens of a family, and more of its tokens."""

    def load(family: str, *more: str) -> saltus.Engine:
        folder = tmp_path_factory.mktemp(family) / "model"
        shutil.copytree(tiny_folder(vocab_size=320, max_position_embeddings=2048), folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_special_tokens({"additional_special_tokens": [*TOKENS[family], *more]})
        tokenizer.save_pretrained(folder)
        return saltus.load(str(folder), "lookup", options=partners, adaptive=False)

    return load


@pytest.fixture(scope="module")
def engine(coder) -> saltus.Engine:
    return coder("qwen", "<|file_sep|>", "<|repo_name|>")


@pytest.mark.parametrize("family", NAMES)
def test_each_family_has_its_tokens_around_the_texts(coder, family):
    engine = coder(family)
    tokenizer, form = engine.tokenizer, find_fim_format(engine.tokenizer)
    prompt = fim_prompt(tokenizer, "it", BEFORE, AFTER)
    before, after, middle = tokenizer.convert_tokens_to_ids([form.before, form.after, form.middle])
    text = [tokenizer(part, add_special_tokens=False).input_ids for part in (BEFORE, AFTER)]
    assert prompt.tokens == [before, *text[0], after, *text[1], middle]
    assert {before, after, middle} <= prompt.end_tokens
    filled = engine.infill(f"{BEFORE}[[…]]{AFTER}", open_tokens=12, temperature=1.0, seed=2)
    assert filled.text == BEFORE + filled.fillings[0] + AFTER
    assert "".join(filled.token_texts[0]) == filled.fillings[0]


def test_special_tokens_in_a_text_stay_text(engine):
    prompt = fim_prompt(engine.tokenizer, "it", "a <|fim_middle|> b", "<|fim_suffix|>")
    ids = engine.tokenizer.convert_tokens_to_ids(TOKENS["qwen"])
    assert [prompt.tokens.count(token) for token in ids] == [1, 1, 1]


def test_tokenizers_that_put_a_space_before_a_text_do_not_change_it():
    tokenizer = space_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS["codellama"])})
    prompt = fim_prompt(tokenizer, "it", "the cat", "sat the")
    texts = tokenizer.convert_ids_to_tokens(prompt.tokens)
    at = texts.index("▁<SUF>")
    assert "".join(texts[texts.index("▁<PRE>") + 1 : at]) == "the▁cat"
    assert "".join(texts[at + 1 : -1]) == "sat▁the"


def test_other_files_come_before(engine, coder):
    prompt = fim_prompt(engine.tokenizer, "it", BEFORE, AFTER, [("a.py", "the log"), ("b.py", "the mat")])
    text = engine.tokenizer.decode(prompt.tokens)
    assert text.startswith("<|repo_name|>project\n<|file_sep|>a.py\nthe log\n<|file_sep|>b.py\nthe mat\n<|file_sep|>")
    assert text.endswith(f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>")
    other = coder("codellama")
    assert "--- snippet ---" in other.tokenizer.decode(
        fim_prompt(other.tokenizer, "it", BEFORE, AFTER, [("a.py", "the log")]).tokens
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "T=1"])
def test_every_method_fills_alike_and_lookup_drafts_from_both_sides(engine, temperature):
    settings = {"open_tokens": 40, "temperature": temperature, "seed": 1}
    plain = engine.infill(f"{BEFORE}[[…]]{AFTER}", method="plain", **settings)
    for method in ("lookup", "jacobi", "jacobi+lookup"):
        assert engine.infill(f"{BEFORE}[[…]]{AFTER}", method=method, **settings).tokens == plain.tokens
    chunks = list(engine.stream_infill(f"{BEFORE}[[…]]{AFTER}", **settings))
    assert "".join(chunk.text for chunk in chunks) == plain.text
    assert engine.infill(BEFORE, suffix=AFTER, **settings).text == plain.text


@pytest.mark.parametrize(
    ("text", "message"),
    [("a [[8]] b", "one hole"), ("a [[…]] b [[…]]", "one hole"), ("nothing", "no hole")],
)
def test_what_a_causal_model_cannot_fill_is_refused(engine, text, message):
    with pytest.raises(ValueError, match=message):
        engine.infill(text)


@pytest.fixture(scope="module")
def unspecial(tiny_folder, tmp_path_factory) -> saltus.Engine:
    """As Qwen2.5-Coder's tokenizer_config.json has them: added tokens that are not called special."""
    folder = tmp_path_factory.mktemp("unspecial") / "model"
    shutil.copytree(tiny_folder(vocab_size=320, max_position_embeddings=2048), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = [*TOKENS["qwen"], "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    tokenizer.save_pretrained(folder)
    return saltus.load(str(folder), "lookup", adaptive=False)


def test_words_of_a_text_stay_words_whatever_the_tokenizer_calls_special(unspecial):
    said = "a <|fim_middle|> b <|file_sep|>"
    prompt = fim_prompt(unspecial.tokenizer, "it", said, "<|fim_suffix|>")
    ids = unspecial.tokenizer.convert_tokens_to_ids([*TOKENS["qwen"], "<|file_sep|>"])
    assert [prompt.tokens.count(token) for token in ids] == [1, 1, 1, 0]
    assert unspecial.tokenizer.decode(prompt.before) == said


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ends", ["<|file_sep|>", "<|fim_pad|>", "<|end|>"])
def test_an_editor_that_writes_the_prompt_itself_stops_at_the_tokens_that_it_names(unspecial, ends, stream):
    """As Continue, Twinny and others ask `/v1/completions`: marked texts, and marks among the stop strings."""
    before, after, middle = TOKENS["qwen"]
    end = unspecial.tokenizer.convert_tokens_to_ids(ends)
    stops = [
        "<|endoftext|>",
        *TOKENS["qwen"],
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
        "<|end|>",
        "/src/",
        "```",
    ]
    asked = {
        "model": "tiny", "prompt": f"{before}{BEFORE}{after}{AFTER}{middle}", "max_tokens": 40, "temperature": 0.8,
        "top_p": 0.95, "stop": stops, "seed": 3, "stream": stream, "presence_penalty": 0, "frequency_penalty": 0,
        "logit_bias": {str(end): 6}, "ignore_eos": True, "repeat_penalty": 1.0, "cache_prompt": True,
    }  # fmt: skip
    with serving(unspecial) as (_, address):
        answer = httpx.post(f"{address}/v1/completions", json=asked)
    if stream:
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
        text, reason = "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]
    else:
        choice = answer.json()["choices"][0]
        text, reason = choice["text"], choice["finish_reason"]
    settings = {"temperature": 0.8, "top_p": 0.95, "seed": 3, "logit_bias": ((end, 6.0),), "ignore_eos": True}
    whole = unspecial.generate(asked["prompt"], raw=True, max_new_tokens=40, method="plain", **settings)
    assert end in whole.tokens
    first = whole.tokens[: whole.tokens.index(end)]
    assert (text, reason) == (unspecial.tokenizer.decode(first, skip_special_tokens=True), "stop")
    filled = fim_prompt(unspecial.tokenizer, "it", BEFORE, AFTER).tokens
    assert unspecial.encode(asked["prompt"], raw=True) == filled


def test_a_model_without_the_tokens_says_which_have_them(tiny_folder):
    with pytest.raises(ValueError, match=r"Qwen2\.5-Coder"):
        saltus.load(str(tiny_folder())).infill("a [[…]] b")


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine) as (_, address):
        yield address


def test_the_route_fills_as_the_engine_does(url, engine):
    asked = {"input_prefix": "the cat sat ", "prompt": "on the ", "input_suffix": AFTER, "n_predict": 12, "seed": 3}
    answer = httpx.post(f"{url}/infill", headers=JSON, json=asked).json()
    settings = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 3}
    expected = engine.infill(BEFORE, suffix=AFTER, open_tokens=12, method="plain", **settings)
    assert answer["content"] == expected.fillings[0]
    assert answer["tokens_predicted"] == len(expected.tokens)
    assert answer["stop"]
    assert answer["timings"]["predicted_n"] == len(expected.tokens)
    lines = httpx.post(f"{url}/infill", headers=JSON, json={**asked, "stream": True}).text.split("\n\n")

    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(chunk["content"] for chunk in chunks) == expected.fillings[0]
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_an_editors_plug_in_gets_the_fields_that_it_wants(url):
    asked = {
        "input_prefix": BEFORE, "input_suffix": AFTER, "input_extra": [{"text": "a", "filename": "b", "time": 1.5}],
        "prompt": "", "n_predict": 8, "n_indent": 0, "top_k": 40, "top_p": 0.99, "stream": False,
        "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 500,
        "response_fields": ["content", "timings/prompt_n", "timings/predicted_ms", "truncated", "tokens_cached"],
    }  # fmt: skip
    answer = httpx.post(f"{url}/infill", headers=JSON, json=asked).json()
    assert answer.keys() == set(asked["response_fields"])
    warm = httpx.post(f"{url}/infill", headers=JSON, json={**asked, "n_predict": 0}).json()
    assert warm["content"] == ""
    wrong = httpx.post(f"{url}/infill", headers=JSON, json={**asked, "temprature": 1})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temprature")


def test_completions_with_a_suffix(url, engine):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    asked = {"model": "tiny", "prompt": BEFORE, "max_tokens": 12, "seed": 3}
    answer = client.completions.create(**asked, suffix=AFTER)
    expected = engine.infill(BEFORE, suffix=AFTER, open_tokens=12, temperature=1.0, seed=3)
    assert answer.choices[0].text == expected.fillings[0]
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(**{**asked, "prompt": [5, 6]}, suffix=AFTER)


def test_a_server_whose_model_cannot_fill_says_so(tiny_folder):
    with serving(saltus.load(str(tiny_folder()), "lookup")) as (_, address):
        answer = httpx.post(f"{address}/infill", headers=JSON, json={"input_prefix": "a", "input_suffix": "b"})
        assert answer.status_code == 400
        assert "fill-in-the-middle" in answer.json()["error"]["message"]


def test_the_command_fills_by_a_model_of_code_without_a_method(coder):
    folder = coder("qwen").target.name
    found = saltus_("infill", "-m", folder, "--open", 12, "--json", f"{BEFORE}[[…]]{AFTER}")
    assert json.loads(found.stdout)["method"] == "lookup"
    assert "lookup" in saltus_("infill", "-m", folder, "--open", 12, f"{BEFORE}[[…]]{AFTER}").stderr


def test_a_hole_that_is_cut_off_says_so_and_has_room_for_128_tokens(coder, engine):
    folder = coder("qwen").target.name
    cut = saltus_("infill", "-m", folder, "--open", 2, f"{BEFORE}[[…]]{AFTER}")
    assert "cut at the length limit; raise --open" in cut.stderr
    assert (
        json.loads(saltus_("infill", "-m", folder, "--open", 2, "--json", f"{BEFORE}[[…]]{AFTER}").stdout)[
            "finish_reason"
        ]
        == "length"
    )
    request = engine.infill_request(f"{BEFORE}[[…]]{AFTER}").request
    assert request.max_new_tokens == 128
