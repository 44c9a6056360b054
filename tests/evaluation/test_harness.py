"""lm-evaluation-harness on our models: the scores of its own class, with fewer calls."""

import json
import re
import subprocess
import sys
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from test_gguf import tiny as tiny_gguf
from test_gguf import write as write_gguf
from transformers import AutoTokenizer
from typer.testing import CliRunner

import saltus
from saltus.cli.app import app
from saltus.cli.lm_eval import complete_arguments
from saltus.evaluation.benchmarks.lm_eval_model import model_class
from saltus.evaluation.benchmarks.loglikelihood import score_continuations
from saltus.loading.load_model import load_model
from saltus.models.packed_decoder import PackedDecoder
from tiny_models import space_tokenizer, tiny_llama

pytest.importorskip("lm_eval")

WORDS = "the cat sat on the mat and the dog sat on the log"
QUESTIONS = [
    {"ask": "the cat sat on", "choices": ["the mat", "the log", "the", "a dog"], "gold": 0},
    {"ask": "the dog  ", "choices": ["sat on the log", "sat on the mat", "Zürich – 🐈"], "gold": 1},
    {"ask": f"{WORDS} {WORDS} and", "choices": ["the cat", "then " * 50, "then " * 50 + "the cat"], "gold": 2},
    {"ask": "so. " * 300, "choices": ["the mat", "the log"], "gold": 0},  # longer than the model reads
]
TEXTS = [WORDS, "", "the ca", (WORDS + "; ") * 40, "é" * 700]
PROMPTS = [WORDS, "the cat", "on the log " * 80 + "a cat", "<|user|>the dog<|end|><|assistant|>"]
CONTEXT = 512


@pytest.fixture(scope="module", autouse=True)
def no_list_of_packages():
    """lm_eval asks pip for what is installed after each run, which takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        yield


@pytest.fixture(scope="module")
def folder(tiny_folder) -> str:
    return str(tiny_folder())


@pytest.fixture(scope="module")
def theirs(folder):
    from lm_eval.models.huggingface import HFLM

    return HFLM(folder, device="cpu", dtype="float32", batch_size=2)


def ours(model: object, **arguments):
    return model_class()(model, **{"dtype": "float32", "device": "cpu", **arguments})


def tasks(place: Path) -> list[dict]:
    """Three tasks over files in a folder, one of each kind of request."""

    def task(name: str, kind: str, rows: list[dict], **more) -> dict:
        file = place / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        source = {"data_files": {"test": str(file)}, "cache_dir": str(place / "cache")}
        return {
            "task": name, "dataset_path": "json", "dataset_kwargs": source, "test_split": "test", "output_type": kind,
        } | more  # fmt: skip

    return [
        task(
            "choose", "multiple_choice", QUESTIONS, doc_to_text="{{ask}}", doc_to_choice="choices",
            doc_to_target="gold",
        ),
        task(
            "perplexity", "loglikelihood_rolling", [{"text": text} for text in TEXTS if text], doc_to_text="",
            doc_to_target="{{text}}", metric_list=[{"metric": "bits_per_byte"}],
        ),
        task(
            "write", "generate_until", [{"text": text} for text in PROMPTS], doc_to_text="{{text}}", doc_to_target="",
            generation_kwargs={"until": ["d", " m"], "max_gen_toks": 40, "do_sample": False},
            metric_list=[{"metric": "exact_match"}],
        ),
    ]  # fmt: skip


def evaluated(model: object, inputs: list[dict], **settings) -> dict:
    """Scores by task, and what the model answered, document by document."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    own = TaskManager(include_defaults=False)  # thousands of others take their time
    results = simple_evaluate(model=model, tasks=inputs, bootstrap_iters=0, task_manager=own, **settings)
    answers = {
        task: [row["resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]
        for task, rows in results["samples"].items()
    }
    return {"results": results["results"], "answers": answers}


def counted(model) -> list:
    """The Forwards that a model's network will be asked, and how many decided tokens each had to read."""
    network, inputs = model.engine.network, []
    before = network.forward

    def forward(batch, kv_caches):
        batch_outputs = before(batch, kv_caches)
        inputs.append([(ask, outputs.context_tokens_read) for ask, outputs in zip(batch, batch_outputs, strict=True)])
        return batch_outputs

    network.forward = forward
    return inputs


def requests(*arguments: tuple) -> list:
    from lm_eval.api.instance import Instance

    return [Instance("generate_until", {}, each, i) for i, each in enumerate(arguments)]


@pytest.fixture(scope="module")
def scored_by_theirs(theirs, tmp_path_factory) -> tuple[list[dict], dict]:
    inputs = tasks(tmp_path_factory.mktemp("tasks"))
    return inputs, evaluated(theirs, inputs)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "together"), [("plain", 1), ("lookup", 1), ("jacobi+lookup", 3)])
def test_scores_are_those_of_lm_eval_s_own_class(folder, scored_by_theirs, method, together):
    inputs, one = scored_by_theirs
    two = evaluated(ours(folder, method=method, batch_size=together), inputs)
    assert one["results"]["choose"]["acc,none"] == two["results"]["choose"]["acc,none"]
    for a, b in zip(one["answers"]["choose"], two["answers"]["choose"], strict=True):
        for [(likelihood, greedy)], [(likelihood_, greedy_)] in zip(a, b, strict=True):
            assert likelihood_ == pytest.approx(likelihood, abs=1e-4, rel=1e-6)
            assert greedy_ is greedy
    for a, b in zip(one["answers"]["perplexity"], two["answers"]["perplexity"], strict=True):
        assert b[0][0] == pytest.approx(a[0][0], abs=1e-4, rel=1e-6)
    assert one["answers"]["write"] == two["answers"]["write"]
    assert len({str(answer) for answer in two["answers"]["write"]}) > 2


@pytest.mark.slow
def test_what_greedy_decoding_would_write_is_found_at_any_length(folder, theirs):
    model = ours(folder)
    prompt = model.tok_encode(WORDS)
    written = saltus.load(folder, "plain", dtype="float32").generate(
        WORDS, raw=True, max_new_tokens=CONTEXT - len(prompt), ignore_eos=True
    )
    tokens = written.tokens
    assert len(tokens) > 450
    other = [*tokens[:-1], (tokens[-1] + 1) % 300]
    pairs = [(prompt, tokens[:n]) for n in (1, 2, 199, 200, 201, 202, 401, len(tokens))] + [(prompt, other)]
    inputs = [(None, context, continuation) for context, continuation in pairs]
    for together in (1, 2, 16):
        model.batch_size = together
        found = model._loglikelihood_tokens(inputs, disable_tqdm=True)
        assert [greedy for _, greedy in found] == [True] * 8 + [False]
        for one, two in zip(theirs._loglikelihood_tokens(inputs, disable_tqdm=True), found, strict=True):
            assert two[0] == pytest.approx(one[0], abs=1e-4, rel=1e-6)
            assert one[1] is two[1]


def test_choices_of_one_question_take_one_call_and_examples_are_read_once(folder):
    model = ours(folder)
    inputs = counted(model)
    shots, questions = [5, 6, 7, 8] * 30, [[9, 10], [11, 12], [13, 14]]
    pairs = [([*shots, *question], [20, 21, choice]) for choice in (30, 31, 32, 33) for question in questions]
    score_continuations(model.engine.network, pairs)
    calls = [call for each in inputs for call in each]
    assert len(calls) == 3
    assert [read for _, read in calls] == [122, 2, 2]
    assert [len(ask.tokens) for ask, _ in calls] == [2, 2, 2]  # 20 and 21 are shared, the choices only scored


def test_a_call_never_has_more_nodes_than_there_is_room_for(folder):
    model = ours(folder)
    inputs = counted(model)
    pairs = [([1, 2, 3 + i % 5], [10 + i, *range(50), i]) for i in range(40)] + [([1, 2], list(range(100)) * 3)]
    alone = score_continuations(model.engine.network, pairs)
    together = score_continuations(model.engine.network, pairs, batch_size=4)
    assert max(sum(len(ask.tokens) for ask, _ in call) for call in inputs) <= 200
    for one, two in zip(alone, together, strict=True):
        assert one.log_likelihood == two.log_likelihood


def test_prompts_that_begin_alike_are_read_once(folder):
    model = ours(folder, method="plain")
    inputs = counted(model)
    settings = {"until": [], "max_gen_toks": 2}
    prompts = [f"{WORDS}. {WORDS}. the {animal}" for animal in ("cat", "dog", "log", "mat", "sun")]
    written = model.generate_until(requests(*((prompt, settings) for prompt in prompts)), disable_tqdm=True)
    read = sorted((outputs for call in inputs for _, outputs in call), reverse=True)
    length = len(model.tok_encode(prompts[0]))
    assert read[0] > length / 2 > read[1]  # only the first one finds the prefix cache empty
    afresh = [ours(folder, method="plain").generate_until(requests((prompt, settings)), True) for prompt in prompts]
    assert written == [text for [text] in afresh]


@pytest.mark.slow
def test_answers_are_kept_and_not_asked_for_again(folder, tmp_path):
    inputs = tasks(tmp_path)
    model = ours(folder)
    first = evaluated(model, inputs, use_cache=str(tmp_path / "kept"))
    calls = counted(model)
    again = evaluated(model, inputs, use_cache=str(tmp_path / "kept"))
    assert not calls
    as_lists = json.loads(json.dumps(first["answers"]))
    assert json.loads(json.dumps(again["answers"])) == as_lists


def test_every_answer_reaches_the_cache_as_soon_as_it_is_known(folder):
    class Kept:
        def __init__(self):
            self.told = []

        def add_partial(self, kind, request, answer):
            self.told.append((kind, request, answer))

    model = ours(folder)
    model.set_cache_hook(Kept())
    found = model.loglikelihood(requests(("the cat", " sat"), ("", "the dog")), disable_tqdm=True)
    rolled = model.loglikelihood_rolling(requests((WORDS,)), disable_tqdm=True)
    settings = {"until": ["d"], "max_gen_toks": 8}
    written = model.generate_until(requests((WORDS, settings)), disable_tqdm=True)
    told = {(kind, str(request)): answer for kind, request, answer in model.cache_hook.told}
    assert told == {
        ("loglikelihood", str(("the cat", " sat"))): found[0],
        ("loglikelihood", str(("", "the dog"))): found[1],
        ("loglikelihood_rolling", str((WORDS,))): rolled[0],
        ("generate_until", str((WORDS, settings))): written[0],
    }


@pytest.mark.slow
def test_sampled_repetitions_differ_and_methods_do_not(folder):
    settings = {"until": [], "max_gen_toks": 24, "do_sample": True, "temperature": 1.0, "top_k": 0}
    inputs = requests(*[(WORDS, settings)] * 3, ("the dog", settings))
    written = [
        ours(folder, method=method, batch_size=together, seed=3).generate_until(inputs, disable_tqdm=True)
        for method, together in (("plain", 1), ("lookup", 1), ("jacobi", 4))
    ]
    assert written[0] == written[1] == written[2]
    assert len(set(written[0])) == 4
    assert ours(folder, seed=4).generate_until(inputs, disable_tqdm=True) != written[0]


def test_a_task_that_does_not_sample_is_greedy_whatever_its_temperature(folder):
    texts = [
        ours(folder).generate_until(requests((WORDS, {"until": ["zz"], "max_gen_toks": 12, **distribution})), True)
        for distribution in (
            {},
            {"do_sample": False, "temperature": 0.9},
            {"temperature": 0.0, "top_p": 0.9, "num_beams": 1},
        )
    ]
    assert texts[0] == texts[1] == texts[2]


def test_unset_laws_are_the_model_s_own_and_then_those_of_transformers(folder):
    from saltus.evaluation.benchmarks.lm_eval_requests import sampling_from_kwargs

    model = ours(folder).engine.network.model
    sampled = {"do_sample": True, "temperature": 0.7}
    assert sampling_from_kwargs(sampled, model).top_k == 50
    model.generation_config.repetition_penalty = 1.3
    model.generation_config.top_k = 7
    assert sampling_from_kwargs(sampled, model).top_k == 7
    assert sampling_from_kwargs({**sampled, "top_k": 3}, model).top_k == 3
    assert sampling_from_kwargs({"do_sample": False}, model) == saltus_sampling(repetition_penalty=1.3)


def saltus_sampling(**distribution):
    from saltus.core.sampling import Sampling

    return Sampling(**distribution)


def test_stop_strings_may_be_special_tokens(folder, theirs):
    stops = ["<|user|>", "<|assistant|>", "<|pad|>", "<|system|>", *"aeiou"]
    for prompt in (WORDS, "the dog", "on on on"):
        inputs = requests((prompt, {"until": list(stops), "max_gen_toks": 100}))
        assert ours(folder).generate_until(inputs, disable_tqdm=True) == theirs.generate_until(
            inputs, disable_tqdm=True
        )


def test_a_text_ends_with_any_end_token_and_with_special_tokens_that_are_stop_strings(folder):
    from saltus.evaluation.benchmarks.lm_eval_requests import EndCondition

    tokenizer = ours(folder).tokenizer
    user, pad = tokenizer.convert_tokens_to_ids(["<|user|>", "<|pad|>"])
    letters = tokenizer.encode("cat")
    ending = EndCondition(tokenizer, frozenset({pad}), ("<|user|>", "tc"))
    assert [ending(token) for token in (*letters, pad, *letters, user)] == [
        *[False] * len(letters), True, *[False] * len(letters), True,
    ]  # fmt: skip


@pytest.mark.parametrize("begin", [None, True, False])
def test_begin_tokens_and_chats_are_those_of_lm_eval_s_own_class(tmp_path, folder, theirs, begin):
    from lm_eval.models.huggingface import HFLM

    tiny_llama(vocab_size=300, bos_token_id=1, eos_token_id=2).save_pretrained(tmp_path)
    space_tokenizer().save_pretrained(tmp_path)
    one = HFLM(str(tmp_path), device="cpu", add_bos_token=begin)
    two = ours(str(tmp_path), add_bos_token=begin)
    assert one.prefix_token_id == two.prefix_token_id
    for text in ("the cat", "<s>the cat", " the", "the cat "):
        assert one.tok_encode(text) == two.tok_encode(text)
        assert one.tok_encode(text, add_special_tokens=False) == two.tok_encode(text, add_special_tokens=False)
    settings = {"until": ["sat"], "max_gen_toks": 9}
    for text in ("the cat", "<s>the cat", " the"):
        read = one.tok_batch_encode([text], left_truncate_len=512 - 9)[0][0].tolist()
        assert two._new_request(text, settings, 0).request.prompt == read
    long = "the cat sat " * 200 + "the cat"
    read = one.tok_batch_encode([long], left_truncate_len=512 - 9)[0][0].tolist()
    assert two._new_request(long, settings, 0).request.prompt == read
    inputs = requests(*((text, settings) for text in ("the cat", "<s>the cat", " the")))
    assert one.generate_until(inputs, disable_tqdm=True) == two.generate_until(inputs, disable_tqdm=True)
    talk = [{"role": "user", "content": "the cat"}]
    assert ours(folder).apply_chat_template(talk) == theirs.apply_chat_template(talk)
    assert ours(folder).chat_template(True) == theirs.chat_template(True)
    assert ours(folder).tokenizer_name == theirs.tokenizer_name


def test_wrong_arguments_are_refused_in_a_line(folder):
    for arguments, said in [
        ({"metod": "plain"}, "model argument metod is unknown to saltus; did you mean method?"),
        ({"lookup.longset": 3}, "lookup has no option longset; it has max_ngram_size"),
        ({"method": "lokup"}, "unknown method 'lokup'; did you mean lookup"),
        ({"batch_size": "many"}, "batch_size is many, but must be 1 or more, or auto"),
        ({"seed": -1}, "seed is -1"),
        ({"enable_thinking": True}, "enable_thinking needs think_end_token"),
    ]:
        with pytest.raises(ValueError, match=re.escape(said)):
            ours(folder, **arguments)
    model = ours(folder)
    for settings, said in [
        ({"max_gen_toks": 512}, "max_gen_toks is 512"),
        ({"num_beams": 4}, "num_beams must be 1"),
        ({"typical_p": 0.4}, "typical_p is unknown"),
    ]:
        with pytest.raises(ValueError, match=said):
            model.generate_until(requests((WORDS, {"until": [], **settings})), disable_tqdm=True)
    with pytest.raises(ValueError, match="reads at most 512"):
        model._loglikelihood_tokens([(None, [1], [2] * 513)], disable_tqdm=True)


def test_options_and_devices_of_a_command_line_reach_the_engine(folder):
    made = model_class().create_from_arg_string(
        f"pretrained={folder},method=lookup,lookup.max_ngram_size=3,max_draft_tokens=5,dtype=float32",
        {"batch_size": "auto:4", "max_batch_size": 8, "device": None if torch.cuda.is_available() else "cuda:0"},
    )
    assert made.engine.decoder.options == {"lookup": {"max_ngram_size": 3}}
    assert (made.engine.decoder.max_draft_tokens, made.batch_size) == (5, 8)
    assert made.get_model_info()["saltus_method"] == "lookup"


def test_a_model_in_packed_blocks_is_described_with_the_parameters_of_the_matrices(tmp_path):
    model = tiny_gguf("llama, tied")
    write_gguf(model, tmp_path / "tiny.gguf", [Q.Q8_0])
    made = ours(str(tmp_path / "tiny.gguf"), dtype="auto")
    assert isinstance(made.engine.network.model, PackedDecoder)
    assert made.engine.method == "lookup", "as auto chooses, for a model without a drafter"
    assert made.get_model_info()["model_num_parameters"] == model.num_parameters()


def test_the_thoughts_of_a_model_are_no_part_of_its_answer(folder):
    settings = {"until": [], "max_gen_toks": 60}
    [whole] = ours(folder).generate_until(requests((WORDS, settings)), disable_tqdm=True)
    mark = whole[10:12]
    [answer] = ours(folder, think_end_token=mark).generate_until(requests((WORDS, settings)), disable_tqdm=True)
    assert answer == whole.split(mark)[-1].lstrip() != whole


# The command


def test_the_harness_is_light_until_it_is_used():
    code = (
        "import sys, saltus.evaluation.benchmarks.lm_eval_model;"
        "print({'lm_eval', 'datasets', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_without_the_package_it_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r'which is not installed; pip install "\.\[lm-eval\]" in the clone$'):
        model_class.__wrapped__()


def test_arguments_are_completed_by_what_they_leave_out():
    run = ["run", "--model", "saltus"]
    assert complete_arguments(["--tasks", "x"]) == [*run, "--tasks", "x"]
    assert complete_arguments(["run", "-t", "x"]) == [*run, "-t", "x"]
    assert complete_arguments(["--tasks", "x", "--model", "hf"]) == ["run", "--tasks", "x", "--model", "hf"]
    assert complete_arguments(["--model=hf"]) == ["run", "--model=hf"]
    assert complete_arguments(["--model_args", "seed=1"]) == [*run, "--model_args", "seed=1"]
    applied = [*run, "-t", "x", "--apply_chat_template", "--model_args", "chat_template=vicuna"]
    assert complete_arguments(["-t", "x", "--chat-template", "vicuna"]) == applied
    assert complete_arguments(["--chat-template=vicuna", "-t", "x"]) == applied
    again = complete_arguments(["--apply_chat_template", "--chat-template", "vicuna", "-t", "x"])
    assert again.count("--apply_chat_template") == 1
    assert complete_arguments(["ls", "tasks"]) == ["ls", "tasks"]
    assert complete_arguments(["--help"]) == ["--help"]


def command(*arguments: object, code: int = 0):
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["lm-eval", *map(str, arguments)], prog_name="saltus")
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def without_other_tasks(monkeypatch):
    """lm_eval reads the files of thousands of tasks first, each time."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))


@pytest.mark.slow
@pytest.mark.usefixtures("without_other_tasks")
def test_the_command_scores_a_task_of_one_s_own(folder, tmp_path):
    import yaml

    for task in tasks(tmp_path):
        (tmp_path / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))
    given = ["--tasks", "write,choose", "--include_path", tmp_path, "--limit", 2]
    texts = []
    for method in ("plain", "lookup"):
        out = tmp_path / method
        settings = f"pretrained={folder},method={method},dtype=float32"
        said = command(*given, "--model_args", settings, "--output_path", out, "--log_samples")
        assert "|choose|" in said.stdout
        texts.append([json.loads(line)["resps"] for line in next(out.rglob("samples_write*")).open()])
        results = json.loads(next(out.rglob("results*")).read_text())
        assert results["config"]["saltus_method"] == method
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("without_other_tasks")
def test_the_command_teaches_and_complains_in_a_line(folder, tmp_path):
    assert "saltus lm-eval run --help" in command("--help").stdout
    assert "--num_fewshot" in command("run", "--help").stdout
    (tmp_path / "none.yaml").write_text("task: none\n")
    wrong = command("--tasks", "no_such_task", "--include_path", tmp_path, code=2)
    assert "saltus: Tasks not found: no_such_task; `saltus lm-eval ls tasks` shows all\n" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-m", "my-model"], "lm_eval has no option -m; name the model by --model_args pretrained=my-model"),
        (["--tasks", "x", "-m"], "lm_eval has no option -m; name the model by --model_args pretrained=NAME"),
        (["nonsense"], "unrecognized arguments: nonsense; see `saltus lm-eval --help`"),
        (["--limit", "few"], "argument --limit/-L: invalid float value: 'few'; see `saltus lm-eval run --help`"),
    ],
)
def test_wrong_arguments_are_a_line(arguments, said):
    assert command(*arguments, code=2).stderr == f"saltus: {said}\n"


@pytest.mark.external
@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_scores_alike(model_folder, tmp_path):
    from lm_eval.models.huggingface import HFLM

    facts = [
        ("The capital of France is", ["Paris", "London", "Rome", "a river"], 0),
        ("Water freezes at zero degrees", ["Celsius", "Fahrenheit", "west"], 0),
        ("Two and two are", ["four", "five", "three apples"], 0),
        ("The opposite of hot is", ["cold", "warm", "a kettle", "cold and wet"], 0),
    ]
    inputs = tasks(tmp_path)
    rows = [{"ask": ask, "choices": choices, "gold": gold} for ask, choices, gold in facts]
    (tmp_path / "choose.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "write.jsonl").write_text("".join(json.dumps({"text": f"Q: {row['ask']}\nA:"}) + "\n" for row in rows))
    inputs[2]["generation_kwargs"] |= {"until": ["\n\n"], "max_gen_toks": 14}
    inputs = [inputs[0], inputs[2]]
    folder = str(model_folder)
    one = evaluated(
        HFLM(load_model(folder, model_folder, torch.float32), tokenizer=AutoTokenizer.from_pretrained(folder)), inputs
    )
    lookup = evaluated(ours(folder, method="lookup"), inputs)
    assert one["results"]["choose"]["acc,none"] == lookup["results"]["choose"]["acc,none"] > 0.5
    for a, b in zip(one["answers"]["choose"], lookup["answers"]["choose"], strict=True):
        for [(likelihood, greedy)], [(likelihood_, greedy_)] in zip(a, b, strict=True):
            assert (likelihood_, greedy_) == (pytest.approx(likelihood, abs=1e-2), greedy)
    assert one["answers"]["write"] == lookup["answers"]["write"]
