"""Random numbers for each position of a text, and for each token there: functions of seed, stream, position, token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import ArrayLike

from saltus.core.value_types import SettingError

BLOCK = 1024  # positions generated and cached together; a multiple of the four words that one Philox counter gives
GROUP_SIZE = 64  # tokens whose least random number is generated first
GROUP_STRIDE = 1024  # between the ids of a group's tokens
GROUP_COUNTER = 1 << 40  # counters of groups; those of tokens are their ids
LOW_BITS = np.uint64(GROUP_SIZE - 1)  # of a group's word: the place of its least number; a uniform has the upper 52
MAX_WORD = (1 << 64) - 1
FACTORS = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64
ARRAY_FACTORS = tuple(map(np.uint64, FACTORS))


@dataclass(frozen=True)
class Noise:
    """The randomness of one text. Streams are independent: "text" picks tokens, "accept/2" verifies sibling 2."""

    seed: int

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise SettingError(f"seed is {self.seed}, but must be 0 or more", "seed")

    def uniforms(self, stream: str, positions: ArrayLike | int) -> np.ndarray:
        """Uniforms in [0, 1), float64, in the shape of `positions` (integers ≥ 0)."""
        positions = np.asarray(positions, dtype=np.int64)
        if not positions.size:
            return np.empty(positions.shape)
        first, last = int(positions.min()) // BLOCK, int(positions.max()) // BLOCK
        if first < 0:
            raise ValueError(f"noise was requested at position {positions.min()}, but positions start at 0")
        if first == last:
            return np.asarray(_block(self.seed, stream, first)[positions % BLOCK])
        blocks, rows = np.unique(positions // BLOCK, return_inverse=True)
        uniforms = np.stack([_block(self.seed, stream, block) for block in blocks.tolist()])
        return uniforms[rows.reshape(positions.shape), positions % BLOCK]

    def uniform(self, stream: str, position: int | np.integer) -> float:
        """The uniform of one position ≥ 0."""
        block, word = divmod(int(position), BLOCK)
        return float(_block(self.seed, stream, block)[word])

    def of_tokens(self, stream: str, position: int | np.integer, vocab: int) -> TokenNoise:
        """The random numbers of tokens 0…vocab − 1 at one position ≥ 0; independent of the position's uniform."""
        keys = self.token_keys(stream, position).tolist()
        return _token_noise(keys[0], keys[1], num_groups(vocab))

    def keys_of_tokens(self, stream: str, positions: np.ndarray) -> np.ndarray:
        """`token_keys` of positions, uint64 [positions, 2]."""
        first, last, count = int(positions[0]), int(positions[-1]), len(positions)
        block, word = divmod(2 * first, BLOCK)
        if (
            last - first == count - 1
            and first >= 0
            and word + 2 * count <= BLOCK
            and (positions[1:] > positions[:-1]).all()
        ):
            return _words(self.seed, f"{stream}/tokens", block)[word : word + 2 * count].reshape(count, 2)
        return np.stack([self.token_keys(stream, position) for position in positions.tolist()])

    def token_keys(self, stream: str, position: int | np.integer) -> np.ndarray:
        """The two words, uint64, of which the random numbers of the tokens at a position ≥ 0 are made."""
        if position < 0:
            raise ValueError(f"noise was requested at position {position}, but positions start at 0")
        block, word = divmod(2 * int(position), BLOCK)
        return _words(self.seed, f"{stream}/tokens", block)[word : word + 2]


@lru_cache(maxsize=1024)
def _block(seed: int, stream: str, block: int) -> np.ndarray:
    """Uniforms of the positions of a block; word p of the sequence belongs to position p."""
    return (_words(seed, stream, block) >> np.uint64(11)) * 2.0**-53


@lru_cache(maxsize=1024)
def _words(seed: int, stream: str, block: int) -> np.ndarray:
    """Philox 4×64 (Salmon et al. 2011) keyed by (seed, stream)."""
    key = np.frombuffer(blake2b(f"{int(seed)}/{stream}".encode(), digest_size=16).digest(), dtype="<u8")
    return np.random.Philox(key=key, counter=block * BLOCK // 4).random_raw(BLOCK)


@dataclass(frozen=True, eq=False)
class TokenNoise:
    """Independent exponentials E(t) of rate 1, one for each token t; −log E(t) is Gumbel noise.

    The tokens t, t + 1024, …, 64 of them, form a group. The least of 64 exponentials has rate 64, each of them is the
    least with equal probability, and every other one exceeds it by an exponential of rate 1. So a group has one random
    number for its least E and the place of that, and every other token one for its excess. Where the least E of a group
    is too large already, no token's own number is needed.
    """

    keys: tuple[int, int]
    uniforms: np.ndarray  # [groups] U in (0, 1): the least E of a group is −log(1 − U) / 64
    bounds: np.ndarray  # [groups] at most the least E
    tokens: np.ndarray  # [groups] the token that has it, which may lie beyond the vocabulary

    def exponential(self, token: int) -> float:
        """E(token), by scalar functions: it does not depend on how arrays are cut into vectors."""
        group = int(groups_of(token))
        least = -math.log1p(-self.uniforms.item(group)) / GROUP_SIZE
        if token == self.tokens.item(group):
            return least
        return least - math.log1p(-_open_uniforms(_hash_number(token, *self.keys)))

    def exponentials(self, tokens: np.ndarray) -> np.ndarray:
        """E of each token, but for the rounding of arrays: for drafts, which need not be exact."""
        groups = groups_of(tokens)
        values = np.log1p(-_open_uniforms(_hash(tokens.view(np.uint64), *self.keys)))
        values *= tokens != self.tokens[groups]
        values += np.log1p(-self.uniforms[groups]) / GROUP_SIZE
        return -values

    def exponential_bounds(self, tokens: np.ndarray) -> np.ndarray:
        """At most E of each token."""
        groups = groups_of(tokens)
        bounds = _logarithm_bounds(_open_uniforms(_hash(tokens.view(np.uint64), *self.keys)))
        bounds *= tokens != self.tokens[groups]
        bounds += self.bounds[groups]
        return bounds


@lru_cache(maxsize=64)
def _token_noise(first_key: int, second_key: int, count: int) -> TokenNoise:
    counters, first = _group_constants(count)
    words = _hash(counters, first_key, second_key)
    uniforms = _open_uniforms(words)
    words &= LOW_BITS
    words *= np.uint64(GROUP_STRIDE)
    tokens = words.view(np.int64)
    tokens += first
    return TokenNoise((first_key, second_key), uniforms, _logarithm_bounds(uniforms, 1 / GROUP_SIZE), tokens)


@lru_cache(maxsize=16)
def _group_constants(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The counters of groups 0…count − 1, and their first tokens."""
    return np.arange(GROUP_COUNTER, GROUP_COUNTER + count, dtype=np.uint64), first_tokens(np.arange(count))


def first_tokens(groups: np.ndarray) -> np.ndarray:
    """The first token of each group: 1,024 groups share 65,536 consecutive tokens."""
    return (groups >> 10 << 16) | (groups & (GROUP_STRIDE - 1))


def num_groups(vocab: int) -> int:
    """The number of groups that hold the tokens 0…vocab − 1."""
    spans, rest = divmod(vocab, GROUP_STRIDE * GROUP_SIZE)
    return spans * GROUP_STRIDE + min(rest, GROUP_STRIDE)


def groups_of(tokens):
    """The groups of tokens, int or int array. Neighbours belong to different groups: arrays of tokens form rows."""
    return (tokens >> 16 << 10) | (tokens & (GROUP_STRIDE - 1))


def _logarithm_bounds(uniforms: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """scale · (U + U²/2), which is at most −scale · log(1 − U)."""
    bounds = uniforms * (0.5 * scale)
    bounds += scale
    bounds *= uniforms
    return bounds


def _hash(counters: np.ndarray, first_key: int, second_key: int) -> np.ndarray:
    """SplitMix64 (Steele et al. 2014) of counters, with a key before each multiplication; all uint64."""
    x = counters * ARRAY_FACTORS[0]
    x += np.uint64(first_key)
    x ^= x >> 30
    x *= ARRAY_FACTORS[1]
    x += np.uint64(second_key)
    x ^= x >> 27
    x *= ARRAY_FACTORS[2]
    x ^= x >> 31
    return x


def _hash_number(counter: int, first_key: int, second_key: int) -> int:
    """`_hash` of one counter in Python's integers, which is faster."""
    x = (counter * FACTORS[0] + first_key) & MAX_WORD
    x = ((x ^ (x >> 30)) * FACTORS[1] + second_key) & MAX_WORD
    x = ((x ^ (x >> 27)) * FACTORS[2]) & MAX_WORD
    return x ^ (x >> 31)


def _open_uniforms(words):
    """Uniforms in (0, 1) from the upper 52 bits: odd multiples of 2⁻⁵³, so that no logarithm is infinite."""
    uniforms = (words >> 12) + 0.5
    uniforms *= 2.0**-52
    return uniforms
