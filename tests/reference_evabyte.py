"""EvaByte straight from its definition: a whole text at once, position by position, head by head, in float32.

Also random weights in the form of a published folder. Nothing here is shared with the package.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["EvaByteForCausalLM"], "attention_class": "eva", "attention_bias": False, "bos_token_id": 1,
    "chunk_size": 4, "eos_token_id": 2, "fp32_ln": False, "fp32_logits": True, "fp32_skip_add": True,
    "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256,
    "model_type": "evabyte", "norm_add_unit_offset": True, "num_attention_heads": 4, "num_chunks": None,
    "num_hidden_layers": 2, "num_key_value_heads": 4, "num_pred_heads": 8, "pad_token_id": 0, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": False, "vocab_size": 320, "window_size": 16,
}  # fmt: skip


def random_weights(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights by their published names, large enough that distributions have favourites."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 0.25) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    hidden, wide, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    centre = 0.0 if config["norm_add_unit_offset"] else 1.0
    found = {
        "model.embed_tokens.weight": draw(config["vocab_size"], hidden, scale=1.0),
        "model.norm.weight": centre + draw(hidden),
        "lm_head.weight": draw(config.get("num_pred_heads", 1) * config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        own = f"model.layers.{layer}."
        for name in ("q", "k", "v", "o"):
            found[f"{own}self_attn.{name}_proj.weight"] = draw(hidden, hidden)
        for name in ("adaptive_phi", "adaptive_mu_k"):
            found[f"{own}self_attn.{name}"] = draw(1, heads, 1, 1, hidden // heads, scale=1.0)
        found[f"{own}mlp.gate_proj.weight"] = draw(wide, hidden)
        found[f"{own}mlp.up_proj.weight"] = draw(wide, hidden)
        found[f"{own}mlp.down_proj.weight"] = draw(hidden, wide)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{own}{name}.weight"] = centre + draw(hidden)
    return found


def write_folder(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, shards: int = 1, **changes) -> Path:
    """A folder as published: config.json and safetensors, in several files with an index if `shards` is more."""
    config = CONFIG | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenization_evabyte.py").write_text("raise AssertionError('code of a checkpoint was run')\n")
    weights = {name: weight.to(dtype) for name, weight in random_weights(config, seed).items()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    files = {name: f"model-{1 + i % shards:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(weights)}
    for file in set(files.values()):
        save_file({name: weight for name, weight in weights.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def norm(x: torch.Tensor, weight: torch.Tensor, config: dict) -> torch.Tensor:
    scale = 1 + weight if config["norm_add_unit_offset"] else weight
    return x / (x.pow(2).mean() + config["rms_norm_eps"]).sqrt() * scale


def rotated(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[half + i] * math.sin(angle)
        out[half + i] = x[half + i] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def attended(position: int, query, keys, values, mu, phi, config: dict) -> torch.Tensor:
    """One head at one position: exact within its window, one key and value for each chunk of earlier windows."""
    window, chunk, size = config["window_size"], config["chunk_size"], len(query)
    start = position - position % window
    all_keys, all_values = [], []
    for begin in range(0, start, chunk):
        k, v = torch.stack(keys[begin : begin + chunk]), torch.stack(values[begin : begin + chunk])
        pooled = torch.softmax(k @ mu, 0)
        features = torch.softmax((k @ phi - k.pow(2).sum(-1) / 2) / math.sqrt(size), 0)
        all_keys.append(sum(pooled[j] * k[j] for j in range(chunk)))
        all_values.append(sum(features[j] * v[j] for j in range(chunk)))
    all_keys += keys[start : position + 1]
    all_values += values[start : position + 1]
    weights = torch.softmax(torch.stack(all_keys) @ query / math.sqrt(size), 0)
    return weights @ torch.stack(all_values)


def reference(weights: dict[str, torch.Tensor], tokens, config: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of all heads [positions, heads, vocab], and the last hidden states [positions, hidden]."""
    heads, theta = config["num_attention_heads"], config["rope_theta"]
    size = config["hidden_size"] // heads
    weights = {name: weight.float() for name, weight in weights.items()}
    states = [weights["model.embed_tokens.weight"][int(token)] for token in tokens]
    for layer in range(config["num_hidden_layers"]):
        own = {name.removeprefix(f"model.layers.{layer}."): weight for name, weight in weights.items()}
        inputs = [norm(x, own["input_layernorm.weight"], config) for x in states]
        outs = [torch.zeros(config["hidden_size"]) for _ in inputs]
        for head in range(heads):
            rows = slice(head * size, (head + 1) * size)
            q, k, v = ([own[f"self_attn.{name}_proj.weight"][rows] @ x for x in inputs] for name in "qkv")
            q, k = ([rotated(x, i, theta) for i, x in enumerate(part)] for part in (q, k))
            mu, phi = (own[f"self_attn.adaptive_{name}"][0, head, 0, 0] for name in ("mu_k", "phi"))
            for i in range(len(inputs)):
                outs[i][rows] = attended(i, q[i], k, v, mu, phi, config)
        states = [x + own["self_attn.o_proj.weight"] @ out for x, out in zip(states, outs, strict=True)]
        for i, x in enumerate(states):
            y = norm(x, own["post_attention_layernorm.weight"], config)
            gate = torch.nn.functional.silu(own["mlp.gate_proj.weight"] @ y)
            states[i] = x + own["mlp.down_proj.weight"] @ (gate * (own["mlp.up_proj.weight"] @ y))
    last = torch.stack([norm(x, weights["model.norm.weight"], config) for x in states])
    return (last @ weights["lm_head.weight"].T).unflatten(-1, (-1, config["vocab_size"])), last
