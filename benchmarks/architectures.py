"""What a call of a model costs, by architecture: random weights in true shapes, beside Transformers' own decoding.

    python benchmarks/architectures.py gemma3-1b qwen3.5-0.8b --out architectures.json
    python benchmarks/architectures.py lfm2-1.2b --weights q8_0

For each model: milliseconds of a call of one row and of eight after 200 tokens, the share outside products and
attention, and milliseconds of a token by Transformers' `generate` with the same weights in bfloat16, on as many
threads. With `--weights` our layers, embeddings and experts are packed. Models of many layers are cut; the table says
to how many. Ours is the median of `--rounds`, Transformers' token the best of a third as many; it is a whole step of
`generate`, ours a call of the network.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from saltus.evaluation.profiling.call_profile import profile_call
from saltus.loading.huge_pages import place_in_huge_pages
from saltus.loading.packing import PACKINGS, pack_places, packable_places
from saltus.models.causal import CausalNetwork

CONTEXT, ROWS, NEW_TOKENS = 200, (1, 8), 8
COMPUTED = ("linear layers", "attention", "unembedding")  # parts of a call: all others are outside
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # the class, and its configuration
    "gemma3-1b": ("Gemma3", {
        "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
    }),
    "lfm2-1.2b": ("Lfm2", {
        "hidden_size": 2048, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 65536, "num_hidden_layers": 16, "layer_types": [
            "full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)
        ],
    }),
    "qwen3.5-0.8b": ("Qwen3_5", {
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "linear_num_value_heads": 16,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "tie_word_embeddings": True,
    }),
    "gpt-oss-20b, 4 layers": ("GptOss", {"num_hidden_layers": 4, "num_local_experts": 32}),
    "qwen3-30b-a3b, 4 layers": ("Qwen3Moe", {
        "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True,
    }),
}  # fmt: skip


def random_model(name: str) -> Any:
    """A model of these shapes in bfloat16: norms are one, other weights small and repeated every million."""
    family, settings = MODELS[name]
    text = "Text" if family in ("Gemma3", "Qwen3_5") else ""
    config = getattr(transformers, f"{family}{text}Config")(**settings)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    numbers = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16) * 0.02
    with torch.no_grad():
        for weight in model.parameters():
            flat = weight.view(-1)
            for part in flat.split(len(numbers)):
                part.copy_(numbers[: len(part)] if weight.ndim > 1 else torch.ones_like(part))
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # computed, not empty
    for path, buffer in model.named_buffers():
        if path.endswith("embed_scale"):
            buffer.fill_(config.hidden_size**0.5)
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def milliseconds_of_transformers(model: Any, rounds: int) -> float:
    """Of a token of `generate`, without the prompt: the best of the rounds."""
    prompt = torch.arange(3, 3 + CONTEXT)[None]

    def seconds(count: int) -> float:
        started = time.perf_counter()
        model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return time.perf_counter() - started

    def best(measure: Callable[[], float]) -> float:
        return min(measure() for _ in range(rounds))

    seconds(2)
    return 1000 * (best(lambda: seconds(2 + NEW_TOKENS)) - best(lambda: seconds(2))) / NEW_TOKENS


def measure(name: str, weights: str, rounds: int) -> dict[str, Any]:
    """One model's row of the table."""
    model = random_model(name)
    found: dict[str, Any] = {"model": name, "weights": weights}
    found["parameters"] = sum(weight.numel() for weight in model.parameters())
    place_in_huge_pages(model)
    found["transformers_ms"] = milliseconds_of_transformers(model, max(rounds // 3, 2))
    if weights != "bf16":
        pack_places(packable_places(model, 32).values(), weights, "int8")
        model.tie_weights()
    place_in_huge_pages(model)
    network = CausalNetwork(model)
    found["compute_path"] = network.compute_path
    for rows in ROWS:
        profile = profile_call(network, rows, CONTEXT, 1000, rounds)
        computed = sum(milliseconds for part, milliseconds in profile["parts"].items() if part in COMPUTED)
        found[f"rows_{rows}"] = {**profile, "outside": 1 - computed / profile["ms"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all where none is given")
    parser.add_argument("--weights", choices=("bf16", *PACKINGS), default="bf16", help="of our layers")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="everything that was measured, as JSON")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"{sorted(unknown)[0]} is none of {', '.join(MODELS)}")
    rows = []
    print(
        "| model | parameters | 1 row, ms | outside products and attention | 8 rows | Transformers, a token | ratio |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in options.models or MODELS:
        rows.append(row := measure(name, options.weights, options.rounds))
        one, eight, theirs = row["rows_1"], row["rows_8"], row["transformers_ms"]
        print(
            f"| {name} | {row['parameters'] / 1e9:.2f} B | {one['ms']:.1f} | {one['outside']:.1%} |"
            f" {eight['ms'] / one['ms']:.2f} × | {theirs:.0f} | {theirs / one['ms']:.1f} × |",
            flush=True,
        )
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
