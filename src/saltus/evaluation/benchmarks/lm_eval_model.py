"""A model class for lm-evaluation-harness: log-likelihoods by trees, texts by any method.

Tokens, truncation and stopping are those of lm_eval's own class for Transformers' models, so that scores compare.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from saltus.engine.method_options import DEFAULT_METHOD
from saltus.evaluation.benchmarks.lm_eval_requests import EndCondition, LmEvalRequest, sampling_from_kwargs

MODEL_NAME = "saltus"
AUTO_BATCH_SIZE = 16  # texts at once where batch_size is "auto"
DEFAULT_MAX_LENGTH = 2048  # as in lm_eval, for models that do not state theirs

logger = logging.getLogger("lm_eval.saltus")  # lm_eval shows messages of its own loggers only


@lru_cache(maxsize=1)
def model_class() -> type[Any]:
    """Register the model class as "saltus" with lm_eval. Errors: ValueError if lm_eval is not installed."""
    try:
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import register_model
    except ModuleNotFoundError as error:
        raise ValueError(
            f'lm-eval needs {error.name}, which is not installed; pip install ".[lm-eval]" in the clone'
        ) from error
    return register_model(MODEL_NAME)(type("SaltusLM", (SaltusLMBase, TemplateLM), {"__doc__": SaltusLMBase.__doc__}))


class SaltusLMBase:
    """A model of lm_eval that decodes with Saltus; `model_class` joins it with lm_eval's base class.

    `pretrained` (or `model`) is a name, a folder, a GGUF file or an Engine. `method`, `dtype`, `weights`,
    `arithmetic`, `rule`, `max_draft_tokens` and `options` are those of `saltus.load`; an argument such as
    `lookup.max_ngram_size=5` is an option too.
    If a task samples, each request has a seed of its own, derived from `seed`, its prompt and the number of its
    repetition, and `coupling` says which token its random numbers pick. Errors: ValueError.
    """

    cache_hook: Any

    def __init__(
        self,
        pretrained: Any = None,
        *,
        model: Any = None,
        method: str = DEFAULT_METHOD,
        dtype: str = "auto",
        weights: str = "file",
        arithmetic: str = "auto",
        device: str | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        seed: int = 0,
        coupling: Any = None,
        rule: str = "match",
        max_draft_tokens: int | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | int | None = None,
        **fields: Any,
    ) -> None:
        super().__init__()
        from saltus.core.noise import Noise
        from saltus.core.picking import DEFAULT_COUPLING
        from saltus.core.sampling import Sampling
        from saltus.engine.engine import Engine
        from saltus.engine.load import load

        Noise(seed)  # refuses a negative seed
        self.coupling = Sampling(coupling=coupling or DEFAULT_COUPLING).coupling
        chosen = _method_options(options, fields)
        self.batch_size = _parse_batch_size(batch_size, max_batch_size)
        source = pretrained if pretrained is not None else model
        settings = {
            "dtype": dtype, "weights": weights, "arithmetic": arithmetic, "rule": rule, "options": chosen,
            "max_draft_tokens": max_draft_tokens, "device": device or "auto", "chat_template": chat_template,
        }  # fmt: skip
        named = {} if source is None else {"model": str(source)}
        self.engine = (
            source if isinstance(source, Engine) else load(method=method, **named, **settings, tuned_settings=False)
        )
        self.seed, self.max_gen_toks, self.add_bos_token = seed, max_gen_toks, add_bos_token
        self.tokenizer = _tokenizer_with_bos_setting(self.engine.tokenizer, add_bos_token)
        self.max_length = max_length or self.engine.target.context_length or _tokenizer_max_length(self.tokenizer)
        known = (prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        if not (prefixes := [token for token in known if token is not None]):
            raise ValueError(f"{self.engine.target.name} has no begin or end token; give prefix_token_id=N")
        self._prefix_token_id = prefixes[0]
        self.enable_thinking, self.think_end_token = enable_thinking, _parse_think_end_token(think_end_token)
        if enable_thinking and self.think_end_token is None:
            raise ValueError(
                "enable_thinking needs think_end_token, which ends the thoughts; give it, such as </think>"
            )
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.template_arguments = {**(chat_template_args or {}), **thinking}
        self._device = self.engine.network.model.device
        self.num_generated_tokens = self.num_target_calls = 0  # written, and what that took

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict, additional_config: dict | None = None) -> Any:
        """How lm_eval creates the model; the model's own arguments override lm_eval's settings.

        lm_eval passes cuda:0 by default; without a GPU that means the CPU.
        """
        import torch

        given = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if str(given.get("device", "")).startswith("cuda") and not torch.cuda.is_available():
            del given["device"]
        return cls(**{**given, **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> Any:
        """The same, from `key=value,key=value`."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self._prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Facts about the model for lm_eval's results file."""
        import saltus

        model, tokens, calls = self.engine.network.model, self.num_generated_tokens, self.num_target_calls
        return {
            "model_num_parameters": sum(weight.numel() for weight in model.parameters()),
            "model_dtype": str(model.dtype),
            "saltus_version": saltus.__version__,
            "saltus_method": self.engine.method,
            "saltus_rule": self.engine.decoder.rule,
            "saltus_seed": self.seed,
            "saltus_coupling": self.coupling,
            "saltus_calls": calls,
            "saltus_tokens_per_call": tokens / calls if calls else None,
        }

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text; a begin token that the text contains is not doubled."""
        if add_special_tokens is None:
            begins = string.startswith(self.tokenizer.decode(self.prefix_token_id))
            add_special_tokens = False if begins else self.add_bos_token
        return self._encode(string, add_special_tokens)

    def _encode(self, string: str, add_special_tokens: bool | None) -> list[int]:
        settings = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **settings))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as one text; without a system message if the template has no system role."""
        from saltus.engine.chat.template_limits import render_chat

        def rendered(messages: list[dict[str, str]]) -> str:
            return render_chat(
                self.tokenizer,
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self.template_arguments,
            )

        if not self.tokenizer.chat_template:
            raise ValueError(
                f"{self.engine.target.name} has no chat template; name one (--chat-template, chat_template=), such as"
                " vicuna, or leave --apply_chat_template out"
            )
        try:
            return rendered(chat_history)
        except ValueError:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            logger.warning("the chat template refuses these messages; trying without those of the system")
            return rendered(others)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether greedy decoding would give it."""
        from tqdm import tqdm

        from saltus.evaluation.benchmarks.loglikelihood import score_continuations

        if self.enable_thinking:
            raise ValueError(
                "enable_thinking is for tasks that generate, and this one scores given texts; leave it out"
            )
        pairs = [self._truncate_context(request, context, continuation) for request, context, continuation in requests]
        with tqdm(total=len(pairs), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:

            def done(index: int, score: Any) -> None:
                bar.update()
                if requests[index][0] is not None:  # for rolling windows the caller caches
                    answer = (score.log_likelihood, score.is_greedy)
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)

            scores = score_continuations(self.engine.network, pairs, self.batch_size, done)
        return [(each.log_likelihood, each.is_greedy) for each in scores]

    def _truncate_context(
        self, request: Any, context: list[int], continuation: list[int]
    ) -> tuple[list[int], list[int]]:
        """Cut a pair from the left to the context length; its last token is scored but not read."""
        if not (context and continuation):
            raise ValueError(f"the continuation of {str(request)[:80]!r} adds no token to its context; mend the task")
        if len(continuation) > self.max_length:
            raise ValueError(
                f"a continuation has {len(continuation):,} tokens, but the model reads at most {self.max_length:,};"
                " use a task of type loglikelihood_rolling, or another model"
            )
        excess = len(context) + len(continuation) - self.max_length - 1
        if excess > 0:
            logger.warning("a context is %d tokens too long for the model; its beginning is cut off", excess)
        return context[max(excess, 0) :], continuation

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in windows of the context length."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows, owners = [], []
        for owner, (text,) in enumerate(request.args for request in requests):
            cut = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            for context, continuation in map(make_disjoint_window, cut):
                windows.append((None, context, continuation))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (log_likelihood, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += log_likelihood
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context up to a stop string, decoded by the engine's method."""
        from tqdm import tqdm

        repeats: Counter[str] = Counter()
        jobs = []
        for context, settings in (request.args for request in requests):
            identity = f"{context}\0{settings}"
            jobs.append(self._new_request(context, settings, repeats[identity]))
            repeats[identity] += 1
        with tqdm(total=len(jobs), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            for job in self._generate(jobs):
                job.answer = self._postprocess(job)
                self.cache_hook.add_partial("generate_until", (job.context, job.generation_kwargs), job.answer)
                bar.update()
        tokens = sum(len(job.request.tokens) for job in jobs)
        calls = sum(len(job.request.calls) for job in jobs)
        self.num_generated_tokens += tokens
        self.num_target_calls += calls
        if calls:
            logger.info("%s: %d tokens in %d calls, %.2f a call", self.engine.method, tokens, calls, tokens / calls)
        return [job.answer for job in jobs]

    def _new_request(self, context: str, generation_kwargs: Mapping[str, Any], repetition: int) -> LmEvalRequest:
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

        from saltus.engine.request import Request

        wanted: dict[str, Any] = {**normalize_gen_kwargs(dict(generation_kwargs), self.max_gen_toks)}
        end = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        stops = handle_stop_sequences(wanted.pop("until", None), eos=end)
        length = wanted.pop("max_gen_toks")
        max_prompt_tokens = self.max_length - length
        if max_prompt_tokens <= 0:
            raise ValueError(f"max_gen_toks is {length:,}, but prompt and answer share {self.max_length:,}; lower it")
        special = False if context.startswith(self.tokenizer.bos_token or "\0") else self.add_bos_token
        prompt = self._encode(context, special) or [self.prefix_token_id]
        if len(prompt) > max_prompt_tokens:
            logger.warning("a prompt is %d tokens too long; its beginning is cut off", len(prompt) - max_prompt_tokens)
        prompt = prompt[-max_prompt_tokens:]
        if "max_length" in wanted:
            length = max(int(wanted.pop("max_length")) - len(prompt), 0)
            length = min(length, self.max_length - len(prompt))
        sampling = replace(sampling_from_kwargs(wanted, self.engine.network.model), coupling=self.coupling)
        seed = blake2b(f"{self.seed}/{repetition}/{context}".encode(), digest_size=6).digest()
        ending = EndCondition(self.tokenizer, self.engine.target.end_tokens, tuple(stops))
        text = Request(prompt, length, int.from_bytes(seed, "little"), sampling, ending)
        return LmEvalRequest(context, generation_kwargs, stops, text)

    def _generate(self, requests: Sequence[LmEvalRequest]) -> Iterator[LmEvalRequest]:
        """Yield each request as it finishes. Prompts are sorted, so that shared prefixes are read once."""
        from saltus.engine.scheduler import run_requests

        waiting = sorted(requests, key=lambda job: list(job.request.prompt))
        by_request = {id(job.request): job for job in waiting}
        texts = [job.request for job in waiting]
        for finished in run_requests(self.engine.decoder, texts, self.engine.method, batch_size=self.batch_size):
            yield from (by_request[id(request)] for request in finished)

    def _postprocess(self, request: LmEvalRequest) -> str:
        from lm_eval.models.utils import postprocess_generated_text

        ends, thought = self.engine.target.end_tokens, self.think_end_token
        tokens = [token for token in request.request.tokens if token not in ends]
        if isinstance(thought, int):
            thoughts = len(tokens) - tokens[::-1].index(thought) if thought in tokens else 0
            answer = self.tokenizer.decode(tokens[thoughts:], skip_special_tokens=True).lstrip()
            return postprocess_generated_text(answer, request.stop_strings, None)
        return postprocess_generated_text(
            self.tokenizer.decode(tokens, skip_special_tokens=True), request.stop_strings, thought
        )


def _method_options(
    options: Mapping[str, Mapping[str, Any]] | None, arguments: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Options by method from arguments such as `lookup.max_ngram_size`. Errors: ValueError for any other name."""
    chosen = {method: dict(values) for method, values in (options or {}).items()}
    for name, value in arguments.items():
        method, dot, key = name.partition(".")
        if not (method and dot and key):
            known = [
                each for each in inspect.signature(SaltusLMBase.__init__).parameters if each not in ("self", "fields")
            ]
            near = difflib.get_close_matches(name, known, n=1)
            offer = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}, and METHOD.FIELD"
            raise ValueError(f"model argument {name} is unknown to saltus; {offer}")
        chosen.setdefault(method, {})[key] = value
    return chosen


def _parse_batch_size(requested: int | str | None, maximum: int | None) -> int:
    if requested is None or str(requested).startswith("auto"):
        return min(AUTO_BATCH_SIZE, maximum or AUTO_BATCH_SIZE)
    if not str(requested).isdigit() or int(requested) < 1:
        raise ValueError(f"batch_size is {requested}, but must be 1 or more, or auto")
    return int(requested)


def _tokenizer_with_bos_setting(loaded: Any, add_bos_token: bool | None) -> Any:
    """The engine's tokenizer, or one from the same folder that adds, or omits, a begin token."""
    if add_bos_token is None:
        return loaded
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(loaded.name_or_path, add_bos_token=add_bos_token, trust_remote_code=False)


def _tokenizer_max_length(tokenizer: Any) -> int:
    """The context length that a tokenizer states, if it states one (else its number is huge)."""
    length = getattr(tokenizer, "model_max_length", None)
    return int(length) if length and length < 10**9 else DEFAULT_MAX_LENGTH


def _parse_think_end_token(given: str | int | None) -> str | int | None:
    return int(given) if isinstance(given, str) and given.isdigit() else given
