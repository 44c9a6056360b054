"""Make tokenizers whose tokens are bytes, after a number of special tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saltus.loading.fetching import SourceError

NUM_SPECIAL_TOKENS = 64  # of EvaByte; byte b is token 64 + b
FIRST_SPECIAL_TOKENS = (
    "<pad>", "<bos>", "<eos>", "<unk>", "<sep>", "<repo_name>", "<file_sep>", "<t2v_token>", "<v2t_token>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
)  # fmt: skip
CHAT_TEMPLATE = (  # Llama 3's form, with a system message in every conversation
    "{%- set has_system = messages[0]['role'] == 'system' -%}"
    "{{- bos_token + '<|start_header_id|>system<|end_header_id|>\n\n' -}}"
    "{%- if has_system -%}{{- messages[0]['content'] -}}{%- endif -%}{{- '<|eot_id|>' -}}"
    "{%- for message in (messages[1:] if has_system else messages) -%}"
    "{%- if message['role'] not in ('user', 'assistant') -%}"
    "{{- raise_exception('EvaByte knows the roles user and assistant, after one system message at most') -}}"
    "{%- endif -%}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] + '<|eot_id|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}"
)


def byte_letters() -> list[str]:
    """The character of each byte in a byte-level vocabulary: its own if it is printable, else one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(hidden)) for byte in range(256)]


def byte_tokenizer(special_tokens: Sequence[str], **settings: Any) -> Any:
    """A tokenizer of Transformers: byte b is token `len(special_tokens)` + b. `settings` name the tokens' roles."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: number for number, token in enumerate([*special_tokens, *byte_letters()])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def evabyte_tokenizer(folder: Path) -> Any:
    """EvaByte's tokenizer, without running the code of its folder; special tokens may have other names there.

    A text begins with <bos>; special tokens in a text are recognised. Errors: SourceError.
    """
    from tokenizers.processors import TemplateProcessing

    count = NUM_SPECIAL_TOKENS
    names = [*FIRST_SPECIAL_TOKENS, *(f"<extra_id_{number}>" for number in range(len(FIRST_SPECIAL_TOKENS), count))]
    file = folder / "tokenizer_config.json"
    try:
        settings = json.loads(file.read_bytes()) if file.is_file() else {}
        for number, token in settings.get("added_tokens_decoder", {}).items():
            names[int(number)] = token["content"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SourceError(f"{file} is damaged ({error!r}); fetch the model again") from None
    pad, bos, eos, unknown, separator, *others = names
    tokenizer = byte_tokenizer(
        names, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unknown, sep_token=separator,
        additional_special_tokens=others, chat_template=settings.get("chat_template") or CHAT_TEMPLATE,
    )  # fmt: skip
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 1)])
    return tokenizer
