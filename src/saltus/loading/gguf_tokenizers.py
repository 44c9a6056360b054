"""Make the tokenizer that a GGUF file describes."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from saltus.loading.fetching import SourceError, first_line

CONTROL_TOKEN_TYPE, USER_TOKEN_TYPE = 3, 4  # of GGUF
SPECIAL_TOKENS = ("bos", "eos", "eot", "unknown", "padding")  # whose ids GGUF files have
MAX_TOKEN_LENGTH = 1024  # characters; merges of SentencePiece's tokens are found in the square of it
SPACE = "▁"  # what SentencePiece writes for a space

# How the tokenizers of each kind split a text before merging, by GGUF's names; the names of llama.cpp.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITS = {
    "llama-bpe": LLAMA3_SPLIT, "llama3": LLAMA3_SPLIT, "llama-v3": LLAMA3_SPLIT,
    "qwen2": QWEN2_SPLIT, "deepseek-r1-qwen": QWEN2_SPLIT,
}  # fmt: skip
WORD_KINDS = {"default", "gpt-2"}  # the split of GPT-2
DIGIT_KINDS = {"smollm", "starcoder", "refact", "command-r"}  # digits one by one, then the split of GPT-2
NFC_KINDS = {"qwen2", "deepseek-r1-qwen"}
BOS_KINDS = {"llama-bpe", "llama3", "llama-v3"}  # begin a text with the bos token unless the file says otherwise
KINDS = sorted({*SPLITS, *WORD_KINDS, *DIGIT_KINDS})


def make_tokenizer(metadata: dict[str, Any], file: str) -> Tokenizer:
    """The tokenizer of a GGUF file's metadata. Errors: SourceError for a damaged one, or a kind that is not supported.

    With it, the vocabulary, the special tokens and their ids in the metadata are known to fit together.
    """
    if "tokenizer.ggml.tokens" not in metadata:
        raise SourceError(f"{file} has no tokenizer; choose a file with a whole model")
    if (kind := metadata.get("tokenizer.ggml.model")) not in ("gpt2", "llama"):
        raise SourceError(f"{file} has a tokenizer of the kind {kind}; supported are gpt2 and llama")
    _check_metadata(metadata, kind, file)
    try:
        tokenizer, adds_bos = _byte_level(metadata, file) if kind == "gpt2" else (_sentencepiece(metadata), True)
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
        values = (
            metadata.get(f"tokenizer.ggml.{name}") if name in needed else metadata.get(f"tokenizer.ggml.{name}", [])
        )
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


def _add_special_tokens(tokenizer: Tokenizer, metadata: dict[str, Any], adds_bos: bool) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    for wanted, add in ((CONTROL_TOKEN_TYPE, tokenizer.add_special_tokens), (USER_TOKEN_TYPE, tokenizer.add_tokens)):
        special = wanted == CONTROL_TOKEN_TYPE
        # all at once: each call rebuilds the search for all of them
        add([AddedToken(token, normalized=False, special=special) for token, type in zip(tokens, types, strict=True)
             if type == wanted])  # fmt: skip
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        bos_token = (tokens[bos], bos)
        tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=f"{bos_token[0]} $A", pair=f"{bos_token[0]} $A {bos_token[0]} $B", special_tokens=[bos_token]
        )


def _byte_level(metadata: dict[str, Any], file: str) -> tuple[Tokenizer, bool]:
    kind = metadata.get("tokenizer.ggml.pre", "default")
    if kind not in KINDS:
        raise SourceError(f"{file} splits texts as {kind!r} does; supported are {', '.join(KINDS)}")
    vocabulary = {token: number for number, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", ())]
    tokenizer: Any = Tokenizer(BPE(vocabulary, merges, ignore_merges=kind in BOS_KINDS))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind not in SPLITS)
    if kind in SPLITS:
        first: list[Any] = [pre_tokenizers.Split(Regex(SPLITS[kind]), "isolated")]
    else:
        first = [pre_tokenizers.Digits(individual_digits=True)] if kind in DIGIT_KINDS else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, words])
    tokenizer.decoder = decoders.ByteLevel()
    if kind in NFC_KINDS:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, kind in BOS_KINDS


def _sentencepiece(metadata: dict[str, Any]) -> Tokenizer:
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
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    model = BPE(
        vocabulary, pairs, unk_token=None if unknown is None else tokens[unknown], fuse_unk=True, byte_fallback=True
    )
    tokenizer: Any = Tokenizer(model)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first" if prefix else "never", split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return tokenizer
