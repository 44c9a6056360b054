"""A model without a chat template gets one: built in, by name, or from a file."""

import json
import re

import pytest
from test_cli import complaint, lines, saltus_

import saltus
from saltus.engine.chat.chat_template import built_in_chat_templates, read_chat_template
from saltus.engine.encoding import answer_end_token
from tiny_models import END, byte_tokenizer, space_tokenizer

QUESTION = {"role": "user", "content": "Who are you?"}
ANSWER = {"role": "assistant", "content": "A cat."}
TALK = [QUESTION, ANSWER, {"role": "user", "content": "Where?"}]
FAST_CHAT_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
# Written after FastChat's conversation templates, Meta's reference code and Stanford's prompt, as published.
PUBLISHED = {
    "vicuna": f"<s>{FAST_CHAT_SYSTEM} USER: Who are you? ASSISTANT: A cat.</s>USER: Where? ASSISTANT:",
    "chatml": "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\nA cat.<|im_end|>\n"
    "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n",
    "llama-2": "<s>[INST] Who are you? [/INST] A cat. </s><s>[INST] Where? [/INST]",
    "alpaca": "<s>Below is an instruction that describes a task. Write a response that appropriately completes the"
    " request.\n\n### Instruction:\nWho are you?\n\n### Response:A cat.</s>\n\n"
    "### Instruction:\nWhere?\n\n### Response:",
}


def refused(cure: str):
    return pytest.raises(ValueError, match=re.escape(cure))


def rendered(name: str, messages: list[dict[str, str]], **settings) -> str:
    tokenizer = space_tokenizer()
    tokenizer.chat_template = read_chat_template(name)
    return tokenizer.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True} | settings)


@pytest.fixture
def bare_folder(tiny_folder):
    """A folder of the tiny model whose tokenizer has no template."""
    folder = tiny_folder(words="a cat sat on a mat")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize("name", built_in_chat_templates())
def test_a_built_in_template_writes_what_was_published(name):
    assert rendered(name, TALK) == PUBLISHED[name]


@pytest.mark.parametrize("name", built_in_chat_templates())
def test_an_answer_that_has_begun_goes_on_without_an_end(name):
    begun = rendered(name, TALK[:2], add_generation_prompt=False, continue_final_message=True)
    assert begun.endswith("A cat.")
    assert begun.startswith(rendered(name, TALK[:1]))


def test_a_system_message_replaces_the_template_s_own():
    talk = [{"role": "system", "content": "You are a cat."}, QUESTION]
    assert rendered("vicuna", talk) == "<s>You are a cat. USER: Who are you? ASSISTANT:"
    assert rendered("llama-2", talk) == "<s>[INST] <<SYS>>\nYou are a cat.\n<</SYS>>\n\nWho are you? [/INST]"
    assert rendered("alpaca", talk) == "<s>You are a cat.\n\n### Instruction:\nWho are you?\n\n### Response:"


def test_conversations_are_read_with_the_template_of_load(bare_folder, tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% for message in messages %}{% generation %}{{ message.content }}!{% endgeneration %}{% endfor %}"
    )
    with refused("has no chat template for messages; name one (--chat-template, chat_template=), such as vicuna"):
        saltus.load(str(bare_folder)).encode(TALK)
    mine = saltus.load(str(bare_folder), chat_template=str(file))
    assert mine.encode(TALK) == mine.encode("Who are you?!A cat.!Where?!", raw=True)
    vicuna = saltus.load(str(bare_folder), chat_template="vicuna")
    text = PUBLISHED["vicuna"].removeprefix("<s>").replace("</s>", END)  # the tokenizer has no begin token
    assert vicuna.encode(TALK) == vicuna.encode(text, raw=True)
    with refused("refuses these messages (vicuna has no role system here)"):
        vicuna.encode([QUESTION, {"role": "system", "content": "Be brief."}])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no chat template 'vicuno'; did you mean vicuna?"),
        ("", "is empty; write how messages become a text"),
        ("\n{% for message in messages %}", "line 2: this is not Jinja"),
        (b"\xff", "it is not UTF-8"),
    ],
)
def test_a_wrong_template_is_refused_in_a_line_before_a_model_is_loaded(content, said, tmp_path, monkeypatch):
    monkeypatch.setattr("saltus.engine.load.load_checkpoint", lambda *a: pytest.fail("a model was loaded"))
    monkeypatch.setattr("saltus.cli.open_engine.resolve", lambda *a, **k: pytest.fail("a model was fetched"))
    name = "vicuno" if content is None else str(tmp_path / "mine.jinja")
    if content is not None:
        (tmp_path / "mine.jinja").write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(said):
        saltus.load(chat_template=name)
    (tmp_path / "prompts.txt").write_text("hi")
    collect = ["collect", "text", "-f", tmp_path / "prompts.txt", "--out", tmp_path / "out"]
    for command in (
        *(["generate", "hi"], ["chat"], ["serve"], ["bench"], ["bench", "step"], ["tune"], ["demo"], ["lm-eval"]),
        collect,
    ):
        assert said in complaint(*command, "--chat-template", name)


@pytest.mark.slow
def test_spec_bench_s_second_turns_are_measured_with_a_named_template(bare_folder, tmp_path):
    row = {"question_id": 81, "category": "writing", "turns": ["the cat sat on the", "and the dog"]}
    suite = f"spec-bench:{lines(tmp_path / 'question.jsonl', row)}"
    asked = "bench", "-m", bare_folder, "--suite", suite, "-n", 4, "--json"
    assert "--chat-template" in complaint(*asked, "--methods", "")
    told = json.loads(saltus_(*asked, "--methods", "lookup", "--chat-template", "vicuna").stdout)
    assert told["suite"]["turns"] == 2
    assert told["settings"]["chat_template"] == "vicuna"
    assert told["methods"]["lookup"]["identical"] == 2


def test_generate_and_the_teacher_s_texts_take_a_template(bare_folder, tmp_path):
    prompts = lines(tmp_path / "prompts.jsonl", {"turns": ["the cat", "the dog"]})
    made = saltus_("generate", "-m", bare_folder, "--chat-template", "vicuna", "-f", prompts, "-n", 2, "--json").stdout
    assert len(made.splitlines()) == 2
    lines(prompts, {"messages": TALK})
    out = tmp_path / "teacher"
    saltus_("collect", "text", "-m", bare_folder, "--chat-template", "vicuna", "-f", prompts, "-n", 2, "--out", out)
    from saltus.training.data.teacher_texts import read_teacher_texts

    expected = saltus.load(str(bare_folder), chat_template="vicuna").encode(TALK)
    assert list(read_teacher_texts(out)[0].prompt) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("small_buffers")
def test_every_command_that_answers_takes_a_template(bare_folder, tmp_path, monkeypatch):
    """Without one, messages are refused."""
    monkeypatch.setenv("SALTUS_CACHE", str(tmp_path))
    prompts = lines(tmp_path / "prompts.jsonl", {"messages": TALK})
    tune = "tune", "-m", bare_folder, "-f", prompts, "--texts", 1, "--rounds", 1, "-n", 3, "--no-save", "--json"
    assert "has no chat template" in complaint(*tune)
    assert json.loads(saltus_(*tune, "--chat-template", "vicuna").stdout)["settings"]
    step = "bench", "step", "-m", bare_folder, "--nodes", 1, "--lengths", 8, "--batches", 1, "--rounds", 1, "--json"
    assert json.loads(saltus_(*step, "--chat-template", "vicuna").stdout)["settings"]
    demo = "demo", "the cat", "-m", bare_folder, "-n", 4
    raw, asked = (saltus_(*demo, *more).stdout for more in ((), ("--chat-template", "vicuna")))
    assert raw != asked


def test_lm_eval_s_model_takes_a_template(bare_folder):
    pytest.importorskip("lm_eval")
    from saltus.evaluation.benchmarks.lm_eval_model import model_class

    with refused("name one (--chat-template, chat_template=), such as vicuna"):
        model_class()(str(bare_folder)).apply_chat_template([QUESTION])
    named = model_class().create_from_arg_string(f"pretrained={bare_folder},chat_template=vicuna")
    text = PUBLISHED["vicuna"].removeprefix("<s>").replace("</s>", END)
    assert named.apply_chat_template(TALK) == text


def test_the_recipe_of_a_model_without_a_template_names_one_in_its_collect_command():
    told = complaint("train", "ptp", "--recipe", "vicuna-7b", "--work", "/nowhere")
    assert "--model lmsys/vicuna-7b-v1.5 --chat-template vicuna" in told


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (None, END),
        ("{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|turn|>' }}{% endfor %}", "<|turn|>"),
        ("{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}", END),
    ],
)
def test_an_answer_ends_with_the_token_that_its_template_puts_behind_it(template, end):
    """Of Gemma and Phi-3 it is not the tokenizer's end token."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.chat_template = template
    assert tokenizer.convert_ids_to_tokens(answer_end_token(tokenizer)) == end
