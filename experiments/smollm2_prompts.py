"""Prompts of five kinds for a teacher, made of given texts: translations, summaries, questions, passages, essays.

    python experiments/smollm2_prompts.py --articles enwik8.xz --german sentences.txt --out prompts.jsonl
    saltus collect text --prompts prompts.jsonl -t 0 -t 0.7 -n 160 --out teacher

A drafter is best at texts that are similar to its training texts, so the prompts should resemble those of its users.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from saltus.training.data.seeded_generator import seeded_generator

MARKUP = [
    (re.compile(r"&lt;.*?&gt;|&amp;\w+;|\{\{.*?\}\}|\{\|.*?\|\}", re.DOTALL), " "),
    (re.compile(r"\[\[(?:[^\]|]*\|)?([^\]|:]*)\]\]"), r"\1"),
    (re.compile(r"\[\[.*?\]\]|\[http\S*( [^\]]*)?\]"), r"\1"),
    (re.compile(r"&quot;"), '"'),
    (re.compile(r"'{2,}|\(\s*[,;]?\s*\)"), ""),
]
ARTICLE = re.compile(r"<title>([^<:]+)</title>.*?<text[^>]*>(.*?)</text>", re.DOTALL)
SHORT = [
    "What is {0}?", "Where does the name {0} come from?", "Who was involved in {0}?", "When did {0} begin?",
    "What is {0} known for?", "How many people know of {0} today?", "Which country is {0} most connected with?",
]  # fmt: skip
LONG = [
    "Explain {0} to a ten-year-old.", "Write a short essay about {0}.", "Compare {0} with {1}.",
    "Imagine you are an expert on {0}. How would you begin a lecture on it?",
    "Draft a polite email to a colleague in which you ask for material on {0}.",
    "What are the most common misunderstandings about {0}, and how would you correct them?",
    "How has {0} changed the way we think about {1}? Give three examples.",
    "Write a scene in which two old friends argue about {0}.", "List five facts about {0}, one line each.",
    "Suggest a plan of four steps for somebody who wants to learn about {0}.",
]  # fmt: skip


def articles(file: Path, characters: int) -> Iterator[tuple[str, str]]:
    """Titles and plain text of the articles in an encyclopaedia's XML."""
    opener = lzma.open if file.suffix == ".xz" else open
    with opener(file, "rt", encoding="utf-8", errors="ignore") as source:
        text = source.read(characters)
    for title, body in ARTICLE.findall(text):
        for pattern, replacement in MARKUP:
            body = pattern.sub(replacement, body)
        lines = [line for line in body.splitlines() if len(line) > 200 and line[0].isalpha()]
        if lines:
            yield title, " ".join(" ".join(lines).split())


def sentences(file: Path) -> list[str]:
    """Sentences of a plain text, of 6 to 40 words."""
    parts = re.split(r"(?<=[.!?])\s+", " ".join(file.read_text(errors="ignore").split()))
    return [each for each in parts if 6 <= len(each.split()) <= 40 and each[0].isupper()]


def beginning(text: str, words: int) -> str:
    """The beginning of a text, up to the end of a sentence."""
    part = " ".join(text.split()[:words])
    return part[: part.rfind(". ") + 1] or part


def prompts(all_articles: list[tuple[str, str]], german: list[str], count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Kinds and prompts, equally many of each kind."""
    generator = seeded_generator(seed, "prompts")
    long_articles = [each for each in all_articles if len(each[1]) > 900]
    for number in range(count):
        (title, _), (other, _) = (all_articles[at] for at in generator.choice(len(all_articles), 2, replace=False))
        (about, text), (_, beside) = (
            long_articles[at] for at in generator.choice(len(long_articles), 2, replace=False)
        )
        length = int(generator.integers(80, 260))
        short, long = (str(generator.choice(each)) for each in (SHORT, LONG))
        yield "translation", f"Translate German to English: {german[number % len(german)]}"
        yield "summary", f"Summarize: {beginning(text, length)}"
        yield "passages", f"{beginning(beside, length // 2)}\n{beginning(text, length)}\n{short.format(about)}"
        yield "question", short.format(title)
        yield "writing", long.format(title, other)


def main() -> None:
    """Write the prompts as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--articles", type=Path, required=True, help="a dump of an encyclopaedia, XML, .xz or plain")
    parser.add_argument("--german", type=Path, required=True, help="any German text")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--of-each", type=int, default=200, help="prompts of each of the five kinds")
    parser.add_argument("--characters", type=int, default=30_000_000, help="of the articles to read")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    all_articles, german = list(articles(options.articles, options.characters)), sentences(options.german)
    german = [german[at] for at in seeded_generator(options.seed, "german").permutation(len(german))]
    if not all_articles or not german:
        sys.exit(f"{options.articles if not all_articles else options.german} holds no articles or sentences")
    with options.out.open("w") as out:
        for source, prompt in prompts(all_articles, german, options.of_each, options.seed):
            out.write(json.dumps({"source": source, "prompt": prompt}, ensure_ascii=False) + "\n")
    print(f"{5 * options.of_each} prompts, {len(all_articles)} articles, {len(german)} sentences")


if __name__ == "__main__":
    main()
