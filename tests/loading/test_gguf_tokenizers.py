"""Tokenizers of GGUF files are those that Transformers makes of the same vocabulary."""

import json
import unicodedata

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import CohereTokenizer, GemmaTokenizer, GPT2Tokenizer, Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from saltus.loading.gguf_tokenizers import CASED_LETTERS, KINDS, TURN_ENDS, end_tokens, make_tokenizer

TEXTS = [
    "It's 1234 apples, isn't it?  No: 12,345!\n\n\nNext   line\t\ttabs", "naïve café — 漢字とかな 😀 ‘quoted’ ½ Ⅷ",
    "x=1;y_2 += 'Z'\r\n//comment\n", " leading", "trailing ", "I'LL we've THEY'RE camelCase HTTPServer",
    "a\u0301 combining हिन्दी ไทย", "",
]  # fmt: skip


def metadata_of(tokenizer: Tokenizer, **more) -> dict:
    """What a GGUF file says of a trained byte-pair tokenizer."""
    content = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    merges = [" ".join(merge) for merge in content["merges"]]
    return {f"tokenizer.ggml.{key}": value for key, value in {"tokens": tokens, "merges": merges, **more}.items()}


@pytest.fixture(scope="module")
def trained():
    """Byte-level, with merges across the borders of words, so that a split that is missing shows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        ("gpt-2", GPT2Tokenizer), ("olmo", GPT2Tokenizer), ("command-r", CohereTokenizer), ("qwen2", Qwen2Tokenizer),
        ("qwen35", Qwen3_5Tokenizer),
    ],
)  # fmt: skip
def test_a_byte_level_tokenizer_is_the_one_of_transformers(kind, theirs, trained):
    content = json.loads(trained.to_str())["model"]
    expected = theirs(vocab=content["vocab"], merges=[tuple(merge) for merge in content["merges"]])
    ours = make_tokenizer(metadata_of(trained, model="gpt2", pre=kind), "x.gguf")
    for text in TEXTS:
        assert ours.encode(text).ids == expected.encode(text, add_special_tokens=False), text
        assert ours.decode(ours.encode(text).ids) == expected.decode(expected.encode(text, add_special_tokens=False))


WORDS = {  # of "HTTPServer's cafés 12345 x();\n\n  y हि"
    "default": ["HTTPServer", "'s", "Ġcaf", "Ġ12345", "Ġx", "();"],
    "refact": ["HTTPServer", "'s", "Ġcaf", "Ġ", "1", "2", "3", "4", "5", "Ġx", "();"],
    "smaug-bpe": ["HTTPServer", "'s", "Ġcaf", "Ġ", "123", "45", "Ġx", "();ĊĊ"],
    "dbrx": ["HTTPServer", "'s", "Ġcaf", "Ġ", "123", "45", "Ġx", "();ĊĊ"],
    "jais-2": ["HTTPServer", "'s", "Ġcaf", "Ġ", "123", "45", "Ġx", "();ĊĊ"],
    "glm4": ["HTTPServer", "'s", "Ġcaf", "Ġ", "123", "45", "Ġx", "();ĊĊ"],
    "stablelm2": ["HTTPServer", "'s", "Ġcaf", "Ġ", "1", "2", "3", "4", "5", "Ġx", "();ĊĊ"],
    "tekken": ["HTTPServer", "'s", "Ġcaf", "Ġ", "1", "2", "3", "4", "5", "Ġx", "();ĊĊ"],
    "gpt-4o": ["HTTPServer's", "Ġcaf", "Ġ", "123", "45", "Ġx", "();ĊĊ"],
    "tiny_aya": ["HTTPServer's", "Ġcaf", "Ġ", "12", "345", "Ġx", "();ĊĊ"],
    "deepseek-v3": ["HTTPServer", "'s", "Ġcaf", "Ġ", "123", "45", "Ġx", "();ĊĊ"],
    "deepseek-llm": ["HTTPServer", "'", "s", "Ġcaf", "Ġ", "12345", "Ġx", "();", "Ċ", "Ċ"],
    "deepseek-coder": ["HTTPServer", "'", "s", "Ġcaf", "Ġ", "1", "2", "3", "4", "5", "Ġx", "();", "Ċ", "Ċ"],
    "seed-coder": ["HTTPServer", "'s", "Ġcaf", "Ġ", "1", "2", "3", "4", "5", "Ġx", "();", "ĊĊ"],
    "exaone-moe": ["HTTPServer", "'s", "Ġcaf", "Ġ", "1", "2", "3", "4", "5", "Ġx", "();Ċ", "Ċ"],
    "bailingmoe": ["HTTPServer", "'s", "Ġcaf", "Ġ", "1", "2", "3", "4", "5", "Ġx", "();ĊĊ"],
    "kimi-k2": ["HTTPServer's", "Ġcaf", "Ġ", "123", "45", "Ġx", "();ĊĊ"],
    "minicpm5": ["HTTPServer", "'s", "Ġcaf", "Ġ", "123", "45", "Ġx", "();ĊĊ"],
    "youtu": ["HTTPServer's", "Ġcaf", "Ġ", "1", "2", "3", "4", "5", "Ġx", "();ĊĊ"],
    "ufakzeka": ["HTTPServer", "'s", "Ġcaf", "Ġ", "1", "2", "3", "4", "5", "Ġx", "();ĊĊ"],
    "afmoe": ["HTTPServer", "'s", "Ġcaf", "Ġ", "12", "345", "Ġx", "();ĊĊ"],
    "falcon": ["HTTPServer", "'", "s", "Ġcaf", "Ġ", "123", "45", "Ġx", "();", "ĊĊ"],
    "laguna": ["HTTPServer", "'s", "Ġcaf", "Ġ", "1", "2", "3", "4", "5", "Ġx", "();", "ĊĊ"],
}


@pytest.mark.parametrize("kind", WORDS)
def test_texts_are_split_as_their_kind_does(kind, trained):
    made = make_tokenizer(metadata_of(trained, model="gpt2", pre=kind), "x.gguf")
    words = [text for text, _ in made.pre_tokenizer.pre_tokenize_str("HTTPServer's caf 12345 x();\n\n")]
    assert words[: len(WORDS[kind])] == WORDS[kind]
    for text in TEXTS:
        assert made.decode(made.encode(text).ids, skip_special_tokens=False) == text


def test_cases_and_scripts_split_as_newer_tokenizers_do(trained):
    def words(kind, text):
        made = make_tokenizer(metadata_of(trained, model="gpt2", pre=kind), "x.gguf")
        return len(made.pre_tokenizer.pre_tokenize_str(text))

    assert [words(kind, "camelCase") for kind in ("dbrx", "tekken", "gpt-4o")] == [1, 2, 2]
    assert [words(kind, "हि") for kind in ("qwen2", "qwen35", "gpt-4o", "deepseek-v3")] == [2, 1, 1, 1]
    assert [words(kind, "漢字abc") for kind in ("dbrx", "deepseek-v3", "afmoe")] == [1, 2, 2]
    assert [words(kind, " " * 31 + "x") for kind in ("dbrx", "jais-2")] == [2, 5]  # 16, 8, 4 and 2 spaces, " x"


# The pre-tokenizers of published tokenizer.json files: how each expression of a text's pieces is cut out.
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
HAN_LESS = r"[{}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]"
UPPER, LOWER = HAN_LESS.format(r"\p{Lu}\p{Lt}"), HAN_LESS.format(r"\p{Ll}")
PUBLISHED = {
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"],
    "seed-coder": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ],
    "exaone-moe": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "bailingmoe": [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "kimi-k2": [
        "|".join([
            r"[\p{Han}]+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?",
            rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
        ])
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", PUBLISHED)
def test_texts_are_split_as_the_published_tokenizer_does(kind, trained):
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in PUBLISHED[kind]]
    expected = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made = make_tokenizer(metadata_of(trained, model="gpt2", pre=kind), "x.gguf")
    for text in [*TEXTS, "a b c d ef g", "漢字abc ABCdef漢", "don't DON'T", "한국어 テスト", "  \n \r\n x/y//\n\n"]:
        assert made.pre_tokenizer.pre_tokenize_str(text) == expected.pre_tokenize_str(text), text


def test_words_of_deepseek_llm_are_of_cased_letters(trained):
    """Letters without cases stay with what no expression cuts out; its punctuation has a-z, so Ü is cut off."""
    made = make_tokenizer(metadata_of(trained, model="gpt2", pre="deepseek-llm"), "x.gguf")

    def pieces(text: str) -> list[str]:
        return [text[start:end] for _, (start, end) in made.pre_tokenizer.pre_tokenize_str(text)]

    assert pieces("Übung Σίσυφος, Ж 12漢字 か！x ") == [
        "Ü", "bung", " Σίσυφος", ",", " Ж", " ", "12", "漢字", " ", "か", "！", "x", " ",
    ]  # fmt: skip
    for each in CASED_LETTERS.split():
        first, last = (int(end, 16) for end in (each if "-" in each else f"{each}-{each}").split("-"))
        assert {unicodedata.category(chr(point)) for point in range(first, last + 1)} <= {"Lu", "Ll", "Lt", "Cn"}, each
        assert all(unicodedata.category(chr(end)) != "Cn" for end in (first, last))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_ascii_back(kind, trained):
    made = make_tokenizer(metadata_of(trained, model="gpt2", pre=kind), "x.gguf")
    text = "It's 1234 apples, isn't it?  No: 12,345!\n\n\nNext   line\t\ttabs"
    assert made.decode(made.encode(text).ids, skip_special_tokens=False) == text


def gemma() -> tuple[dict, list]:
    """A vocabulary of Gemma's kind and its merges, the most frequent first."""
    tokens = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\n",
        "\n\n",
        "<end_of_turn>",
    ]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "c"), ("a", "t"), ("▁c", "at"), ("▁", "▁")]
    tokens += ["▁", "t", "h", "e", "c", "a", *("".join(merge) for merge in merges)]
    return {token: number for number, token in enumerate(tokens)}, merges


GEMMA_TEXTS = ("the cat", " the  cat", "cat é 漢 z", "the\ncat\n\nthe", "cat<end_of_turn>\nthe", "")


@pytest.mark.parametrize("kind", ["llama", "gemma4"])
def test_gemmas_tokenizer_is_the_one_of_transformers(kind):
    """Runs of lines are tokens of their own (Gemma to Gemma 3), or merged (Gemma 4)."""
    vocabulary, merges = gemma()
    tokens, lines = list(vocabulary), ["\n", "\n\n"] if kind == "llama" else []
    merges = merges if lines else [("\n", "\n"), *merges]
    types = [3, 3, 3, 2, *[6] * 256, *([4, 4] if lines else [1, 1]), 3, *[1] * (len(tokens) - 263)]
    scores = [0.0] * 269 + [-float(rank) for rank in range(len(tokens) - 269)]  # of what is merged
    data = {
        "model": kind, "tokens": tokens, "token_type": types, "scores": scores, "bos_token_id": 2,
        "unknown_token_id": 3, "add_space_prefix": False, "eos_token_id": 1,
        "merges": [" ".join(merge) for merge in merges],
    }  # fmt: skip
    ours = make_tokenizer({f"tokenizer.ggml.{key}": value for key, value in data.items()}, "x.gguf")
    theirs = GemmaTokenizer(vocab=vocabulary, merges=merges)
    theirs.add_tokens([AddedToken(token, normalized=False) for token in (*lines, "<end_of_turn>")])
    for text in GEMMA_TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.encode("the").ids[0] == 2, "a text begins with the bos token"
    assert end_tokens({f"tokenizer.ggml.{key}": value for key, value in data.items()}) == [1, 262]


def test_special_tokens_of_phi_3_take_the_space_behind_them():
    tokens = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>", "<|endoftext|>", "▁", "a", "\n"]
    data = {
        "model": "llama", "tokens": tokens, "token_type": [2, 3, 3, 3, 3, 3, 1, 1, 1], "scores": [0.0] * len(tokens),
        "unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 5, "add_bos_token": False,
    }  # fmt: skip
    metadata = {f"tokenizer.ggml.{key}": value for key, value in data.items()} | {"general.architecture": "phi3"}
    made = make_tokenizer(metadata, "x.gguf")
    assert made.encode("<|user|>\na<|end|>\n<|endoftext|>\n").ids == [3, 7, 4, 5, 8]
    assert end_tokens(metadata) == [5, 4]
    other = make_tokenizer(metadata | {"general.architecture": "llama"}, "x.gguf")
    assert other.encode("<|user|>\na<|end|>\n").ids == [3, 8, 7, 4, 8]


def test_words_that_look_like_ends_are_no_ends():
    tokens = [*sorted(TURN_ENDS), "end"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 3}
    assert end_tokens(metadata) == 3
    assert end_tokens(metadata | {"tokenizer.ggml.token_type": [1] * len(tokens)}) == 3
    types = [3] * len(tokens)
    within = tokens.index("<|end|>")  # gpt-oss, which has the other two, ends a message by it, not its answer
    assert set(end_tokens(metadata | {"tokenizer.ggml.token_type": types})) == {*range(len(TURN_ENDS))} - {within}
    for kind, found in ((3, [1, 0]), (4, 1)):  # Qwen's base and chat models end texts by one, turns by the other
        qwen = {"tokens": ["<|endoftext|>", "<|im_end|>"], "token_type": [kind] * 2, "eos_token_id": 1}
        assert end_tokens({f"tokenizer.ggml.{key}": value for key, value in qwen.items()}) == found
    others = {
        "tokenizer.ggml.tokens": [token for token in tokens if token != "<|call|>"],
        "tokenizer.ggml.eos_token_id": 3,
    }
    assert len(end_tokens(others | {"tokenizer.ggml.token_type": types[1:]})) == len(TURN_ENDS) - 1
