"""Assemble what decodes with a method, once: its drafters, their networks, and what was measured of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import RLock
from typing import Any

from saltus.core.control.call_cost import CallCost
from saltus.core.forward import TARGET
from saltus.core.protocols import Network
from saltus.core.rules import RULES
from saltus.engine.auto_method import auto_candidates, resolve_method
from saltus.engine.decoding_setup import DecodingSetup
from saltus.engine.heterogeneous_vocabularies import VocabularyTranslation
from saltus.engine.prefix_tree import PrefixTree
from saltus.engine.sample_texts import take_ngram_model
from saltus.engine.target_drafters import is_drafter_spec, load_drafter_for_target
from saltus.engine.tuned_settings import TunedSettings
from saltus.loading.metadata import find_metadata
from saltus.methods import AUTO, LoadsNetwork, Method, UsesTrainedModel, make_methods, require_draft_models
from saltus.methods.shared.ngram_corpus import NgramCorpus
from saltus.methods.shared.ngram_model import NgramModel
from saltus.models.protocols import TargetNetwork

DEFAULT_MAX_DRAFT_TOKENS = 31  # draft tokens of a call, at most: 32 rows with the last token of the text
DEFAULT_WHOLE_TREE_TOKENS = 16  # where calls carry the whole tree, whether it pays or not
MAX_DRAFT_TOKENS = 384  # two blocks of 64 and four recycled tails of 64, as in Jacobi Forcing


def engine_is_closed(target_name: str) -> ValueError:
    """What any use of a closed engine is."""
    return ValueError(f"the engine of {target_name} is closed; load the model again")


def _for_trained_model(method: Method) -> Method:
    """The method as its trained model needs it, where there is one. Errors: ValueError for damaged metadata."""
    if not isinstance(method, UsesTrainedModel):
        return method
    metadata = find_metadata(Path(method.model))
    return method if metadata is None else method.for_trained_model(metadata.kind, metadata.training)


@dataclass(frozen=True)
class LoadedDraftNetwork:
    """A draft network as it was loaded, and how many tokens it reads."""

    network: Network | None  # None for an adapter, which is attached to the target
    context_length: int | None = None  # None if it has no bound
    translation: VocabularyTranslation | None = None  # of a model with another vocabulary


def no_ngram_model() -> None:
    """Of a decoder that has no tokenizer."""


@dataclass
class Decoder:
    """How requests are decoded on one target: its methods with their networks, and the kept prefixes of texts.

    Threads that share it, or copies of it, take turns: each step of `run_requests` holds the lock.
    """

    target: TargetNetwork
    target_name: str
    # (name, may it have another vocabulary?)
    load_draft_model: Callable[[str, bool], LoadedDraftNetwork] = field(repr=False)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # fields by method
    rule: str = "match"
    max_draft_tokens: int = 16  # draft tokens of a call, at most
    adaptive: bool = True
    batch_size: int = 16
    tuned_settings: TunedSettings | None = None  # of jacobi on this machine, by `saltus tune`
    corpus: NgramCorpus | None = None  # that drafters may copy from
    load_ngram_model: Callable[[], NgramModel | None] = no_ngram_model  # at the first use of a method that takes them
    auto_note: str | None = None  # for the user: why `auto` is not what it is where drafts cost little
    call_cost: CallCost = field(default_factory=CallCost, repr=False)
    prefix_tree: PrefixTree = field(default_factory=PrefixTree, repr=False)
    setups: dict[str, DecodingSetup] = field(default_factory=dict, repr=False)  # by method, made at first use
    learned: OrderedDict[str, Any] = field(default_factory=OrderedDict, repr=False)  # of all setups, see there
    draft_networks: dict[tuple[str, str], LoadedDraftNetwork] = field(default_factory=dict, repr=False)  # by name, spec
    lock: Any = field(default_factory=RLock, repr=False, compare=False)
    closed: bool = field(default=False, init=False)

    def copy_with(self, **changes: Any) -> Decoder:
        """The same decoder with some fields changed: new setups and prefix tree, nothing learned, shared call costs.

        Draft networks are shared, too, unless they are for another target.
        """
        loaded = dict(self.draft_networks) if changes.get("target", self.target) is self.target else {}
        new = {"setups": {}, "learned": OrderedDict(), "prefix_tree": PrefixTree(), "draft_networks": loaded}
        return replace(self, **new | changes)

    def close(self) -> None:
        """Forget networks and texts, after the step that runs; the next step of any text is a ValueError."""
        with self.lock:
            self.closed, self.corpus, self.load_ngram_model = True, None, no_ngram_model
            for kept in (self.setups, self.learned, self.draft_networks, self.prefix_tree):
                kept.clear()

    def require_open(self) -> None:
        """Raise ValueError if the decoder is closed."""
        if self.closed:
            raise engine_is_closed(self.target_name)

    def setup(self, method: str) -> DecodingSetup:
        """Methods (joined by +) with their networks, loaded at first use. Errors: ValueError of one line.

        What `auto` stands for is decided at its first use, since call costs change while texts are decoded.
        """
        self.require_open()
        if method not in self.setups:
            chosen, note = resolve_method(method, self.target, self.options, self.call_cost, self.rule, self._why_not)
            self.auto_note = note or self.auto_note
            if chosen not in self.setups:
                self.setups[chosen] = self._new_setup(chosen)
            self.setups[method] = self.setups[chosen]
        return self.setups[method]

    def _why_not(self, method: str) -> str | None:
        """Make the setup of a method unless it is there; the reason if it cannot be made."""
        try:
            self.setups[method] = self.setups.get(method) or self._new_setup(method)
        except ValueError as error:
            return str(error)
        return None

    def lacks_networks(self, method: str) -> bool:
        """True if `setup` would load a network for a method, or may for `auto`. Errors: ValueError of one line."""
        if method == AUTO or method in self.setups:
            return method not in self.setups
        pairs = [pair for each in self._made_methods(method)[0] for pair in each.draft_models.items()]
        return any(pair not in self.draft_networks for pair in pairs)

    def load_networks(self, method: str) -> None:
        """Load what `setup` would, on another thread than that of the calls; for `auto` what it probably will.

        Errors: ValueError of one line.
        """
        candidates = auto_candidates(self.target, self.options, self.rule) if method == AUTO else [method]
        for place, each in enumerate(candidates, 1):
            try:
                self._load_networks(self._made_methods(each)[0])
                return
            except ValueError:  # `auto` goes on to the next
                if place == len(candidates):
                    raise

    def chosen_method(self, method: str) -> str:
        """The method itself, or what `auto` stands for here."""
        setup = self.setup(method)
        return next(name for name, known in self.setups.items() if known is setup)

    def replace_network(self, name: str, network: Network) -> None:
        """Draft with another network of the same kind from now on, in all methods that use it."""
        for setup in self.setups.values():
            if name in setup.networks:
                setup.networks = {**setup.networks, name: network}
        for key, loaded in list(self.draft_networks.items()):  # another thread may be loading
            if key[0] == name:
                self.draft_networks[key] = replace(loaded, network=network)

    def _made_methods(self, method: str) -> tuple[list[Method], int]:
        """The methods of a spec with their options, and how many draft tokens a call has at most."""
        options, max_draft_tokens = self.options, self.max_draft_tokens
        if self.tuned_settings is not None and "jacobi" in method.split("+"):
            tuned = {**self.tuned_settings.options, **options.get("jacobi", {})}
            options, max_draft_tokens = {**options, "jacobi": tuned}, self.tuned_settings.max_draft_tokens
        made = [_for_trained_model(each) for each in make_methods(method, options)]
        require_draft_models(made)
        return made, max_draft_tokens

    def _new_setup(self, method: str) -> DecodingSetup:
        made, max_draft_tokens = self._made_methods(method)
        loaded = self._load_networks(made)
        ngram_model = self.load_ngram_model() if take_ngram_model(made) else None
        return DecodingSetup(
            made, {name: each.network for name, each in loaded.items() if each.network is not None}, self.rule,
            max_draft_tokens, self.adaptive, {name: each.context_length for name, each in loaded.items()},
            self.call_cost, self.corpus, ngram_model, learned=self.learned,
            translations={name: each.translation for name, each in loaded.items() if each.translation is not None},
        )  # fmt: skip

    def _load_networks(self, methods: Sequence[Method]) -> dict[str, LoadedDraftNetwork]:
        """The networks of methods by name, "target" first."""
        networks = {TARGET: LoadedDraftNetwork(self.target)}
        for method, name, spec in ((each, *pair) for each in methods for pair in each.draft_models.items()):
            if name in networks:
                raise ValueError(f"two methods draft with a network called {name!r}; give each method once")
            if (name, spec) not in self.draft_networks:
                self.draft_networks[name, spec] = self._load_draft_network(method, name, spec)
            networks[name] = self.draft_networks[name, spec]
        return networks

    def _load_draft_network(self, method: Method, name: str, spec: str) -> LoadedDraftNetwork:
        """What a method drafts with: of its own, another model, or something trained for the target."""
        if isinstance(method, LoadsNetwork):
            return LoadedDraftNetwork(method.load_network(self.target, self.target_name))
        if is_drafter_spec(spec):
            return LoadedDraftNetwork(load_drafter_for_target(spec, self.target, self.target_name, name))
        return self.load_draft_model(spec, getattr(method, "any_vocabulary", False) and self.rule == "match")


def check_rule(name: str) -> None:
    """Raise ValueError unless it is the name of a verification rule."""
    if name not in RULES:
        raise ValueError(f"rule is {name!r}, but must be one of {', '.join(RULES)}")


def default_max_draft_tokens(adaptive: bool, rule: str) -> int:
    """The draft tokens of a call, at most, where none are given."""
    return DEFAULT_MAX_DRAFT_TOKENS if adaptive and rule == "match" else DEFAULT_WHOLE_TREE_TOKENS


def check_max_draft_tokens(max_draft_tokens: int) -> None:
    """Raise ValueError unless calls can verify so many draft tokens."""
    if not 0 <= max_draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(f"max_draft_tokens is {max_draft_tokens}, but must lie in 0…{MAX_DRAFT_TOKENS}")
