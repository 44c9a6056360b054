"""Taxi rides as a stream of tokens: the number of the New York neighbourhood, one of 25, of each pick-up (PTP, App. C).

    python experiments/taxi_data.py --rides uber-raw-data-apr14.csv.zip --centres yellow_sample.csv.gz --out taxi.npz
    python experiments/taxi_data.py --synthetic 200000 --out taxi.npz

The neighbourhoods are k-means centres of the yellow cabs' pick-ups. The stream is a month of rides in chronological
order, and its last six days are held out. `--synthetic` makes a similar stream without these files.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import zipfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from saltus.training.data.seeded_generator import seeded_generator

LATITUDES, LONGITUDES = (40.5, 41.0), (-74.3, -73.6)
SHRINK = np.cos(np.radians(40.75))  # a degree of longitude is that much shorter than one of latitude
CENTRES = 25
TRAINING_DAYS = 24
WEIGHTS = (25.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1600.0)  # of a prior, in tokens


@dataclass(frozen=True)
class Stream:
    """Tokens in chronological order; the two parts do not overlap."""

    train: np.ndarray
    validate: np.ndarray
    vocab: int

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, train=self.train, validate=self.validate, vocab=self.vocab)


def load(path: Path) -> Stream:
    """The stream that `Stream.save` wrote."""
    with np.load(path) as file:
        return Stream(file["train"].astype(np.int64), file["validate"].astype(np.int64), int(file["vocab"]))


def _inside(latitude: np.ndarray, longitude: np.ndarray) -> np.ndarray:
    return (
        (LATITUDES[0] < latitude)
        & (latitude < LATITUDES[1])
        & (LONGITUDES[0] < longitude)
        & (longitude < LONGITUDES[1])
    )


def read_centres(path: Path) -> np.ndarray:
    """Pick-ups of yellow cabs, [rides, 2], in degrees of latitude."""
    with gzip.open(path, "rt", newline="") as file:
        rows = [(row["pickup_latitude"], row["pickup_longitude"]) for row in csv.DictReader(file)]
    latitude, longitude = np.array(rows, dtype=np.float64).T
    valid = _inside(latitude, longitude)
    return np.stack([latitude[valid], longitude[valid] * SHRINK], 1)


def read_rides(path: Path, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Places [rides, 2] and days of the month, in chronological order.

    Times have a resolution of one minute, and ties are broken at random.
    """
    with zipfile.ZipFile(path) as archive, archive.open(archive.namelist()[0]) as raw:
        rows = list(csv.DictReader(io.TextIOWrapper(raw, newline="")))
    times = np.array([datetime.strptime(row["Date/Time"], "%m/%d/%Y %H:%M:%S") for row in rows], dtype="datetime64[s]")
    latitude, longitude = np.array([(row["Lat"], row["Lon"]) for row in rows], dtype=np.float64).T
    valid = _inside(latitude, longitude)
    times, places = times[valid], np.stack([latitude[valid], longitude[valid] * SHRINK], 1)
    order = np.lexsort([seeded_generator(seed, "ties").random(len(times)), times])
    days = (times - times.astype("datetime64[M]")).astype("timedelta64[D]").astype(int) + 1
    return places[order], days[order]


def nearest(points: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, float]:
    """The number of each point's centre, and the sum of the squared distances."""
    numbers, total = [], 0.0
    for part in np.array_split(points, max(1, len(points) // 50_000)):
        distances = ((part[:, None] - centres) ** 2).sum(-1)
        numbers.append(distances.argmin(-1))
        total += float(distances.min(-1).sum())
    return np.concatenate(numbers), total


def k_means(points: np.ndarray, k: int, seed: int, starts: int = 10) -> np.ndarray:
    """Lloyd's algorithm from k-means++ (Arthur & Vassilvitskii 2007); the best of some starts, [k, 2]."""
    best, least = points[:k], np.inf
    for start in range(starts):
        generator, total = seeded_generator(seed, "k-means", start), np.inf
        centres = points[generator.integers(len(points))][None]
        while len(centres) < k:
            distances = ((points[:, None] - centres) ** 2).sum(-1).min(-1)
            centres = np.concatenate(
                [centres, points[generator.choice(len(points), p=distances / distances.sum())][None]]
            )
        for _ in range(300):
            numbers, total = nearest(points, centres)
            moved = np.array([points[numbers == i].mean(0) if (numbers == i).any() else centres[i] for i in range(k)])
            if np.allclose(moved, centres, rtol=0, atol=1e-9):
                break
            centres = moved
        if total < least:
            best, least = centres, total
    return best[np.lexsort(best.T)]


def taxi(rides: Path, centres: Path, seed: int = 0) -> Stream:
    """The stream of real rides: April 1–24 to train, 25–30 to validate."""
    middle = k_means(read_centres(centres), CENTRES, seed)
    places, days = read_rides(rides, seed)
    tokens, _ = nearest(places, middle)
    return Stream(tokens[days <= TRAINING_DAYS], tokens[days > TRAINING_DAYS], CENTRES)


def synthetic(length: int, seed: int = 0, vocab: int = CENTRES, drift: float = 0.3, stay: float = 0.97) -> Stream:
    """A stream of a hidden Markov model with 6 states, as a city has over the day; 5/6 of it is for training.

    `drift` is the deviation of a state's logits from the common ones, `stay` the probability to keep the state.
    """
    generator = seeded_generator(seed, "synthetic")
    common = generator.normal(size=vocab) * 0.7
    logits = common + drift * generator.normal(size=(6, vocab))
    distributions = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    changes = generator.random(length) > stay
    states = generator.integers(len(distributions), size=length)[
        np.maximum.accumulate(np.where(changes, np.arange(length), 0))
    ]
    tokens = (distributions.cumsum(-1)[states] < generator.random((length, 1))).sum(-1).clip(max=vocab - 1)
    num_training = length * 5 // 6
    return Stream(tokens[:num_training], tokens[num_training:], vocab)


def chunks(tokens: np.ndarray, length: int, stride: int) -> np.ndarray:
    """Overlapping pieces, [pieces, length]."""
    if len(tokens) < length:
        raise ValueError(
            f"the stream has {len(tokens)} tokens, but a chunk {length}; take shorter chunks or more rides"
        )
    return np.lib.stride_tricks.sliding_window_view(tokens, length)[::stride]


def held_out(stream: Stream, length: int, most: int = 400) -> np.ndarray:
    """Pieces spread over the held-out days: [pieces, 2 · length]. The second half of each is predicted."""
    pieces = chunks(stream.validate, 2 * length, length)
    return pieces[np.linspace(0, len(pieces) - 1, min(most, len(pieces))).astype(int)]


def baselines(stream: Stream, length: int) -> dict[str, float]:
    """Perplexities of counts on the second halves of `held_out`.

    Counts of the training days, of the `length` tokens before each token, and so far in the second half. The last two
    have the unigram distribution as a prior, with the weight that is best on training tokens.
    """
    pieces, sample = held_out(stream, length), chunks(stream.train, 2 * length, length)[:2000]
    unigram = _unigram(stream)
    perplexities = {"unigram": float(np.exp(-np.log(unigram[pieces[:, length:]]).mean()))}
    for name, first in (("last counts", 0), ("counts in the chunk", length)):
        weight = min(WEIGHTS, key=lambda weight: _counted(sample, unigram, weight, first))
        perplexities[name] = _counted(pieces, unigram, weight, first)
    return perplexities


def _counted(pieces: np.ndarray, prior: np.ndarray, weight: float, first: int) -> float:
    """Perplexity of the second halves under the counts of `length` tokens before each, those from `first` on."""
    length = pieces.shape[1] // 2
    ones = np.eye(len(prior), dtype=np.int32)[pieces]
    ones[:, :first] = 0
    sums = np.zeros((len(pieces), 2 * length + 1, len(prior)), dtype=np.int32)
    np.cumsum(ones, axis=1, out=sums[:, 1:])
    counts = sums[:, length:-1] - sums[:, :length]
    tokens = pieces[:, length:]
    own = np.take_along_axis(counts, tokens[..., None], 2)[..., 0]
    return float(np.exp(-np.log((own + weight * prior[tokens]) / (counts.sum(-1) + weight)).mean()))


def _unigram(stream: Stream) -> np.ndarray:
    counts = np.bincount(stream.train, minlength=stream.vocab) + 1.0
    return counts / counts.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rides", type=Path, help="Uber's pick-ups of April 2014, as the NYC TLC released them (zip)")
    parser.add_argument("--centres", type=Path, help="yellow cabs with pickup_latitude and pickup_longitude (csv.gz)")
    parser.add_argument("--synthetic", type=int, metavar="TOKENS", help="length of a synthetic stream")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if not options.synthetic and not (options.rides and options.centres):
        parser.error("give --rides and --centres, or --synthetic")
    if options.synthetic:
        stream = synthetic(options.synthetic, options.seed)
    else:
        stream = taxi(options.rides, options.centres, options.seed)
    stream.save(options.out)
    print(f"{len(stream.train):,} tokens to train, {len(stream.validate):,} to validate, in {options.out}")
    print("perplexities: " + ", ".join(f"{name} {value:.3f}" for name, value in baselines(stream, 100).items()))


if __name__ == "__main__":
    main()
