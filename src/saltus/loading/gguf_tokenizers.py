"""Make the tokenizer that a GGUF file describes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from saltus.loading.fetching import SourceError, first_line

CONTROL_TOKEN_TYPE, USER_TOKEN_TYPE = 3, 4  # of GGUF
SPECIAL_TOKENS = ("bos", "eos", "eot", "unknown", "padding")  # whose ids GGUF files have
MAX_TOKEN_LENGTH = 1024  # characters; merges of SentencePiece's tokens are found in the square of it
SPACE = "▁"  # what SentencePiece writes for a space
DECODING = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]

# What ends a turn of a conversation, also where a file names another token or none for that; by llama.cpp's list.
TURN_ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>",
    "<|tool_response>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>",
}  # fmt: skip
TEXT_ENDS = {"<|endoftext|>", "<|end_of_text|>", "[EOS]", "<eos>"}  # likewise, but where they are control tokens alone
KEEPS_SPACE = {"<unk>", "<s>", "<|endoftext|>"}  # of Phi-3's special tokens; the others take the spaces behind them

# How byte-level tokenizers split a text before merging.
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3_SPLIT = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPACES = "".join(rf"|\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
JAIS2_SPLIT = LLAMA3_SPLIT.replace(r"|\s+(?!\S)|\s+", rf"{SPACES}|\s")
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35_SPLIT = QWEN2_SPLIT.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"  # cases, or of scripts without
TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3_SPLITS = (
    r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)  # fmt: skip
SEED_CODER_SPLIT = QWEN2_SPLIT.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
BAILING_SPLIT = QWEN2_SPLIT.replace(r"|\s*[\r\n]+", r"|\s*[\r\n]")
UFAKZEKA_SPLIT = QWEN2_SPLIT.removeprefix(f"{CONTRACTIONS}|")
EXAONE_MOE_SPLIT = (  # single letters behind single spaces belong to a word
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
KIMI_SPLIT = r"\p{Han}+|" + GPT4O_SPLIT.replace(r"[\r\n/]*", r"[\r\n]*").replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_CODER_SPLITS = r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", EAST_ASIAN, r"\p{N}"
# Letters that have cases, as code points; not those that came with later versions of Unicode.
CASED_LETTERS = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1"
    " 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A"
    " 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4"
    " 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128"
    " 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D"
    " A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3"
    " 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
DEEPSEEK_LLM_SPLITS = (
    r"[\r\n]", rf"\s?[{re.sub('[0-9A-F]+', lambda point: chr(int(point[0], 16)), CASED_LETTERS).replace(' ', '')}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$", EAST_ASIAN, r"\p{N}+",
)  # fmt: skip
YOUTU_SPLITS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    GPT4O_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}"),
)
AFMOE_SPLITS = (  # digits by threes from the right, scripts of Asia without spaces, then as DeepSeek V3
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff"
    "\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
    DEEPSEEK_V3_SPLITS[2],
)  # fmt: skip
FALCON_SPLITS = (
    r"[\p{P}$+<=>^~|`]+", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)", "[0-9][0-9][0-9]",
)  # fmt: skip
MINICPM5_SPLITS = r"\p{N}{1,3}", LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}+")


@dataclass(frozen=True)
class ByteLevelKind:
    """How a byte-level tokenizer splits: by expressions in turn, or as GPT-2 does, perhaps after single digits."""

    splits: tuple[str, ...] = ()
    single_digits: bool = False
    prefers_words: bool = False  # a word that is a token stays whole, whatever its merges
    adds_bos: bool = False  # unless the file says otherwise
    composes: bool = False  # characters and their accents (NFC)


KINDS = {  # by GGUF's names
    name: kind
    for names, kind in {
        "default gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum": ByteLevelKind(),
        "smollm starcoder refact codeshell exaone minerva-7b mellum2": ByteLevelKind(single_digits=True),
        "command-r": ByteLevelKind(single_digits=True, composes=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": ByteLevelKind(
            (LLAMA3_SPLIT,), prefers_words=True, adds_bos=True
        ),
        "smaug-bpe": ByteLevelKind((LLAMA3_SPLIT,), prefers_words=True),
        "dbrx chatglm-bpe glm4": ByteLevelKind((LLAMA3_SPLIT,)),
        "jais-2": ByteLevelKind((JAIS2_SPLIT,)),
        "qwen2 deepseek-r1-qwen f2llmv2": ByteLevelKind((QWEN2_SPLIT,), composes=True),
        "stablelm2 megrez hunyuan solar-open grok-2 kormo": ByteLevelKind((QWEN2_SPLIT,)),
        "qwen35": ByteLevelKind((QWEN35_SPLIT,), composes=True),
        "tekken": ByteLevelKind((TEKKEN_SPLIT,), prefers_words=True, adds_bos=True),
        "gpt-4o llama4 kanana2 minimax-m2 talkie": ByteLevelKind((GPT4O_SPLIT,)),
        "tiny_aya cohere2moe": ByteLevelKind((r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O_SPLIT)),
        "deepseek-v3 hunyuan-dense joyai-llm": ByteLevelKind(DEEPSEEK_V3_SPLITS),
        "deepseek-llm": ByteLevelKind(DEEPSEEK_LLM_SPLITS),
        "deepseek-coder": ByteLevelKind(DEEPSEEK_CODER_SPLITS),
        "seed-coder": ByteLevelKind((SEED_CODER_SPLIT,)),
        "exaone-moe": ByteLevelKind((EXAONE_MOE_SPLIT,)),
        "bailingmoe bailingmoe2 llada-moe": ByteLevelKind((BAILING_SPLIT,)),
        "kimi-k2": ByteLevelKind((KIMI_SPLIT,)),
        "minicpm5": ByteLevelKind(MINICPM5_SPLITS, prefers_words=True),
        "youtu": ByteLevelKind(YOUTU_SPLITS, prefers_words=True),
        "ufakzeka": ByteLevelKind((UFAKZEKA_SPLIT,)),
        "afmoe": ByteLevelKind(AFMOE_SPLITS),
        "falcon": ByteLevelKind(FALCON_SPLITS),
        "laguna": ByteLevelKind((r"[^\n]+|[\n]+", QWEN2_SPLIT)),
    }.items()
    for name in names.split()
}


def make_tokenizer(metadata: dict[str, Any], file: str) -> Tokenizer:
    """The tokenizer of a GGUF file's metadata. Errors: SourceError for a damaged one, or a kind that is not supported.

    With it, the vocabulary, the special tokens and their ids in the metadata are known to fit together.
    """
    if "tokenizer.ggml.tokens" not in metadata:
        raise SourceError(f"{file} has no tokenizer; choose a file with a whole model")
    makers = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4}
    if (kind := metadata.get("tokenizer.ggml.model")) not in makers:
        raise SourceError(f"{file} has a tokenizer of the kind {kind}; supported are {', '.join(makers)}")
    _check_metadata(metadata, kind, file)
    try:
        tokenizer, adds_bos = makers[kind](metadata, file)
        _add_special_tokens(tokenizer, metadata, adds_bos)
    except SourceError:
        raise
    except Exception as error:  # the library raises bare exceptions
        raise SourceError(f"{file} has a tokenizer that does not load ({first_line(error)}); fetch it again") from error
    return tokenizer


def _check_metadata(metadata: dict[str, Any], kind: str, file: str) -> None:
    """Raise SourceError unless lists are of one length and type, and special tokens are in the vocabulary."""
    tokens = metadata["tokenizer.ggml.tokens"]
    needed = ["tokens", *(["scores"] if kind == "llama" else [])]
    for name, types in {"tokens": str, "merges": str, "scores": int | float, "token_type": int}.items():
        values = metadata.get(f"tokenizer.ggml.{name}", None if name in needed else [])
        if not isinstance(values, list) or not all(isinstance(value, types) for value in values):
            raise SourceError(f"{file}: its tokenizer's {name} are missing or of another type; fetch it again")
        if name != "merges" and (values or name in needed) and len(values) != len(tokens):
            raise SourceError(f"{file} has {len(tokens):,} tokens and {len(values):,} {name}; fetch it again")
    for name in SPECIAL_TOKENS:
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None and (type(number) is not int or not 0 <= number < len(tokens)):
            raise SourceError(
                f"{file}: its {name} token is number {number!r} of {len(tokens):,} tokens; fetch it again"
            )
    if kind == "llama" and (long := next((token for token in tokens if len(token) > MAX_TOKEN_LENGTH), None)):
        raise SourceError(
            f"{file} has a token of {len(long):,} characters, which begins with {long[:16]!r}; tokens have at most"
            f" {MAX_TOKEN_LENGTH}"
        )


def end_tokens(metadata: dict[str, Any]) -> int | list[int] | None:
    """The tokens that end a text, and a turn of a conversation, of metadata that `make_tokenizer` has checked."""
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or ()
    known = {CONTROL_TOKEN_TYPE: TURN_ENDS | TEXT_ENDS, USER_TOKEN_TYPE: TURN_ENDS}
    added = [number for number, type in enumerate(types) if tokens[number] in known.get(type, ())]
    ends = [token for token in named if token is not None] + added
    if {"<|return|>", "<|call|>"} <= {tokens[each] for each in ends}:  # gpt-oss, whose answers have several messages
        ends = [each for each in ends if tokens[each] != "<|end|>"]
    ends = list(dict.fromkeys(ends))
    return ends if len(ends) > 1 else next(iter(ends), None)


def _add_special_tokens(tokenizer: Tokenizer, metadata: dict[str, Any], adds_bos: bool) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    takes_space = (metadata.get("general.architecture"), metadata["tokenizer.ggml.model"]) == ("phi3", "llama")
    for wanted, add in ((CONTROL_TOKEN_TYPE, tokenizer.add_special_tokens), (USER_TOKEN_TYPE, tokenizer.add_tokens)):
        special = wanted == CONTROL_TOKEN_TYPE
        # all at once: each call rebuilds the search for all of them
        add([AddedToken(token, normalized=False, special=special, rstrip=special and takes_space and
                        token not in KEEPS_SPACE)
             for token, type in zip(tokens, types, strict=True) if type == wanted])  # fmt: skip
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        name = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=f"{name} $A", pair=f"{name} $A {name} $B", special_tokens=[(name, bos)]
        )


def _merges(metadata: dict[str, Any]) -> list[Any]:
    """Pairs of tokens; what is none is an error of the library."""
    return [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", ())]


def _byte_level(metadata: dict[str, Any], file: str) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether texts begin with a bos token."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in KINDS:
        raise SourceError(f"{file} splits texts as {name!r} does; supported are {', '.join(sorted(KINDS))}")
    kind = KINDS[name]
    vocabulary = {token: number for number, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    tokenizer: Any = Tokenizer(BPE(vocabulary, _merges(metadata), ignore_merges=kind.prefers_words))
    first: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in kind.splits]
    if kind.single_digits:
        first = [pre_tokenizers.Digits(individual_digits=True)]
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not kind.splits)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, words])
    tokenizer.decoder = decoders.ByteLevel()
    if kind.composes:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, kind.adds_bos


def _gemma4(metadata: dict[str, Any], file: str) -> tuple[Tokenizer, bool]:
    """Byte-pair encoding of a whole text, in which spaces are visible; unknown characters fall back to bytes."""
    tokenizer = _with_byte_fallback(metadata, _merges(metadata))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(DECODING)
    return tokenizer, True


def _with_byte_fallback(metadata: dict[str, Any], merges: list[Any]) -> Any:
    """Byte-pair encoding by these merges; unknown characters fall back to bytes."""
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    unknown_token = None if unknown is None else tokens[unknown]
    return Tokenizer(BPE(vocabulary, merges, unk_token=unknown_token, fuse_unk=True, byte_fallback=True))


def _sentencepiece(metadata: dict[str, Any], file: str) -> tuple[Tokenizer, bool]:
    """Byte-pair encoding of SentencePiece: spaces are visible, unknown characters fall back to bytes."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        for end in range(1, len(token)):
            left, right = token[:end], token[end:]
            if left in vocabulary and right in vocabulary:
                merges.append((-score, vocabulary[left], vocabulary[right], left, right))
    pairs = [(left, right) for *_, left, right in sorted(merges)]
    tokenizer = _with_byte_fallback(metadata, pairs)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first" if prefix else "never", split=False)
    tokenizer.decoder = decoders.Sequence([*DECODING, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return tokenizer, True
