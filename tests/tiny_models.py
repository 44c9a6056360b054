"""Tiny models and tokenizers, made on the spot, the default model, and other fixtures of several files."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    XLNetConfig,
    XLNetLMHeadModel,
    set_seed,
)

from saltus.kernels import native
from saltus.kernels.native import processor

END, PAD = "<|end|>", "<|pad|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if not loop.last or message['role'] != 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture(autouse=True)
def few_threads(request: pytest.FixtureRequest):
    """Threads that wait for each other make tiny models slow, more so on a busy machine."""
    threads = torch.get_num_threads()
    if request.node.get_closest_marker("model") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model, fetched on first use."""
    from saltus.loading.sources import DEFAULT_MODEL, resolve

    return resolve(DEFAULT_MODEL)


@pytest.fixture
def no_pdf(monkeypatch):
    """Figures are written as SVG and PNG, but not as PDF, which has its fonts and takes as long as both."""
    monkeypatch.setattr("saltus.evaluation.reports.benchmark_plots.FORMATS", ("svg", "png"))


@pytest.fixture
def no_figures(monkeypatch):
    """A benchmark draws none, neither in files nor in its page."""
    monkeypatch.setattr("saltus.evaluation.reports.benchmark_plots.draw_figures", lambda results, records: {})


@pytest.fixture
def small_buffers(monkeypatch):
    """`saltus bench step` measures the machine's speed over few numbers, wrongly and at once."""
    from saltus.evaluation.profiling import roofline

    measure = partial(roofline.measure_machine_speed, megabytes=2, size=128, repeats=1)
    monkeypatch.setattr(roofline, "measure_machine_speed", measure)


def byte_tokenizer(words: str = "the cat sat on the mat and the dog sat on the log") -> PreTrainedTokenizerFast:
    """Byte-level, as GPT-2's and Llama 3's: any text has tokens, and a token may be half a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [END, PAD, "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [words] * 3, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=TEMPLATE)


def space_tokenizer() -> PreTrainedTokenizerFast:
    """Of Llama 2's kind: a word carries the space before it, and unknown characters fall back to bytes."""
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))])}
    merges = []
    for word in ("the", "cat", "sat"):
        for letter in "▁" + word:
            vocab.setdefault(letter, len(vocab))
        for end in range(2, len(word) + 2):
            whole = ("▁" + word)[:end]
            vocab.setdefault(whole, len(vocab))
            merges.append((whole[:-1], whole[-1]))
    merges = list(dict.fromkeys(merges))
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def tiny_xlnet(seed: int = 0) -> XLNetLMHeadModel:
    """Random, with laws that are far from flat."""
    set_seed(seed)
    settings = {"vocab_size": 300, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "initializer_range": 0.4}
    return XLNetLMHeadModel(XLNetConfig(**settings))


def tiny_llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    """Two layers of random weights, large enough that its laws have favourites."""
    settings = {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "initializer_range": 0.25, "eos_token_id": 0, "pad_token_id": 1, "bos_token_id": None,
    }  # fmt: skip
    set_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**settings | changes)).eval()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Callable[..., Path]:
    """A folder with a tiny Llama and a byte-level tokenizer: tiny_folder(seed, dtype, words, **configuration)."""
    made: dict[str, Path] = {}

    def folder(seed: int = 0, dtype: torch.dtype = torch.float32, words: str | None = None, **changes) -> Path:
        key = repr((seed, dtype, words, changes))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("tiny")
            tiny_llama(seed, **changes).to(dtype).save_pretrained(made[key])
            (byte_tokenizer(words) if words else byte_tokenizer()).save_pretrained(made[key])
        return made[key]

    return folder


@pytest.fixture(scope="session")
def architecture_folder(tmp_path_factory) -> Callable[..., Path]:
    """A folder with a tiny model of an architecture by its class, and a byte-level tokenizer."""
    from architectures import tiny

    made: dict[str, Path] = {}

    def folder(name: str, seed: int = 0, **sizes: int) -> Path:
        key = repr((name, seed, sizes))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("architecture")
            model = tiny(name, seed, vocab_size=300, eos_token_id=0, pad_token_id=1, bos_token_id=2, **sizes)
            model.save_pretrained(made[key])
            byte_tokenizer().save_pretrained(made[key])
        return made[key]

    return folder


@pytest.fixture(scope="session")
def tiny_drafter(tiny_folder, tmp_path_factory) -> Callable[..., Path]:
    """A folder with an untrained drafter for a tiny model: tiny_drafter(model, **shape)."""
    from saltus.methods.ptp.network import DrafterShape, DraftModel
    from saltus.methods.shared.drafter_files import save_drafter

    def folder(model: LlamaForCausalLM | None = None, **changes) -> Path:
        target = model or LlamaForCausalLM.from_pretrained(tiny_folder())
        set_seed(5)
        shape = DrafterShape(
            **{"hidden": 32, "intermediate": 48, "hidden_state_layers": (1,), "heads": 4, "kv_heads": 2} | changes
        )
        embeddings = target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach()
        drafter = DraftModel(shape, torch.arange(2, 290), *embeddings)
        out = tmp_path_factory.mktemp("drafter")
        save_drafter("drafter", drafter, out, "tiny", target, {})
        return out

    return folder


@pytest.fixture(scope="session")
def tiny_heads(tiny_folder, tmp_path_factory) -> Callable[..., Path]:
    """A folder with untrained heads of a circuit for a tiny model: tiny_heads(model, **shape)."""
    from saltus.methods.mtpc.heads import HeadShape, new_head_model
    from saltus.methods.shared.drafter_files import save_drafter
    from saltus.training.data.seeded_generator import seeded_generator

    def folder(model: LlamaForCausalLM | None = None, **changes) -> Path:
        target = model or LlamaForCausalLM.from_pretrained(tiny_folder())
        shape = HeadShape(**{"hidden": 32, "circuit": "hmm", "window": 4, "rank": 3, "subspace_dim": 3} | changes)
        heads = new_head_model(shape, torch.arange(2, 290), target, seeded_generator(5, "weights"))
        out = tmp_path_factory.mktemp("heads")
        save_drafter("heads", heads, out, "tiny", target, {})
        return out

    return folder


@pytest.fixture(scope="session")
def partners(tiny_folder, tiny_drafter, tiny_heads) -> dict[str, dict[str, str]]:
    """Options with which every method drafts for the tiny model of seed 0, whatever it needs for that."""
    return {
        "small_model": {"model": str(tiny_folder(seed=1))},
        "ptp": {"model": str(tiny_drafter())},
        "mtpc": {"model": str(tiny_heads()), "min_probability": 0.0},
        "assd": {"draft": "bigram"},
    }


# The matrix unit's instructions on integers in plain C (tiles_emulated.h): few processors have it.
EMULATED = {"amx-int8-emulated": ([*processor.INSTRUCTION_SETS["avx512-vnni"][0], "-DEMULATE_TILES"], "avx512_vnni")}
OWN_SETS = [
    name for name, (_, needed) in processor.INSTRUCTION_SETS.items() if needed in processor.processor_features().split()
]
OPTIMISED = "generic", "avx2", *EMULATED  # as for users, or slow without; the others are compiled in half the time


@pytest.fixture(params=[*processor.INSTRUCTION_SETS, *EMULATED])
def instruction_set(request, monkeypatch):
    """Kernels that are compiled for an instruction set, below this processor's own or emulated."""
    if request.param in OWN_SETS[-1:]:
        pytest.skip("it is this processor's own: all other tests run its code")
    known = {
        name: (flags if name in OPTIMISED else [*flags, "-O1"], needed)
        for name, (flags, needed) in (processor.INSTRUCTION_SETS | EMULATED).items()
    }
    monkeypatch.setattr(processor, "INSTRUCTION_SETS", known)
    needed = known[request.param][1]
    if needed not in processor.processor_features().split():
        pytest.skip(f"this processor lacks {needed}")
    monkeypatch.setenv("SALTUS_ISA", request.param)
    native.load_kernels.cache_clear()
    yield request.param
    native.load_kernels.cache_clear()
