"""Random heads of the EAGLE-3 family as others publish them, and what they compute, row by row in float64.

Nothing here is shared with the package.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import set_seed

TOKENS = torch.cat([torch.arange(3, 20), torch.arange(50, 200)])
HIDDEN, DIM, HEADS, KV_HEADS, WIDE = 32, 16, 4, 2, 48
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 64}  # fmt: skip


def weight_sizes(config: dict, states: int = 3) -> dict[str, tuple[int, ...]]:
    """By the names of speculators."""
    layers = config.get("transformer_layer_config", config)
    sizes = {"fc.weight": (HIDDEN, states * HIDDEN), "norm.weight": (HIDDEN,)}
    if config.get("norm_before_fc"):
        sizes["input_norm.weight"] = (states * HIDDEN,)
    if config.get("fc_norm"):
        sizes |= {f"fc_norm.{number}.weight": (HIDDEN,) for number in range(states)}
    for number in range(layers["num_hidden_layers"]):
        at, inputs = f"layers.{number}.", HIDDEN if number else 2 * HIDDEN
        outs = {"q_proj": HEADS * DIM, "k_proj": KV_HEADS * DIM, "v_proj": KV_HEADS * DIM}
        sizes |= {f"{at}self_attn.{name}.weight": (size, inputs) for name, size in outs.items()}
        sizes[f"{at}self_attn.o_proj.weight"] = (HIDDEN, HEADS * DIM)
        if layers.get("attention_bias"):
            sizes |= {f"{at}self_attn.{name}.bias": (size,) for name, size in (outs | {"o_proj": HIDDEN}).items()}
        if layers["model_type"] == "qwen3":
            sizes |= {f"{at}self_attn.{name}_norm.weight": (DIM,) for name in "qk"}
        sizes |= {f"{at}mlp.{name}_proj.weight": (WIDE, HIDDEN) for name in ("gate", "up")}
        sizes[f"{at}mlp.down_proj.weight"] = (HIDDEN, WIDE)
        names = ["input_layernorm", "post_attention_layernorm"] + ([] if number else ["hidden_norm"])
        sizes |= {f"{at}{name}.weight": (HIDDEN,) for name in names}
    return sizes


def published_head(folder: Path, form: str = "speculators", layers: dict | None = None, **changes) -> tuple[dict, dict]:
    """A random head: its weights by the names of speculators, and its config.json. `layers` are settings of layers."""
    set_seed(13)
    settings = {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_hidden_layers": 1,
        "vocab_size": 300, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
        "rms_norm_eps": 1e-5,
    } | (layers or {})  # fmt: skip
    config = {"draft_vocab_size": len(TOKENS)}
    if form == "original":
        config |= settings | {"architectures": ["LlamaForCausalLMEagle3"]}
    else:
        config |= {
            "speculators_model_type": "eagle3", "transformer_layer_config": settings,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 4], "norm_before_residual": True, "norm_output": True,
        }  # fmt: skip
    true = config | changes
    weights = {name: 0.3 * torch.randn(size) + ("norm" in name) for name, size in weight_sizes(true).items()}
    if form == "peagle":
        config = true = (
            config | {"speculators_model_type": "peagle", "mask_token_id": 7, "norm_output": False} | changes
        )
        weights["mask_hidden"] = torch.randn(1, 1, 3 * HIDDEN)
    weights["lm_head.weight"] = torch.randn(len(TOKENS), HIDDEN)
    if form != "original":
        weights["embed_tokens.weight"] = torch.randn(300, HIDDEN)
    mapping = {"d2t": TOKENS - torch.arange(len(TOKENS)), "t2d": torch.isin(torch.arange(300), TOKENS)}
    folder.mkdir(exist_ok=True)
    if form == "original":
        saved = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()} | mapping
        torch.save(saved, folder / "pytorch_model.bin")
    else:
        save_file(weights | mapping, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(true))
    return weights, true


def frequencies(rope: dict, dim: int) -> tuple[torch.Tensor, float]:
    """The angles of a step, and the factor of cosines and sines (Peng et al. 2024 for YaRN; Llama 3.1's rule)."""
    base = rope.get("rope_theta", 10000.0) ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if (kind := rope.get("rope_type", "default")) == "default":
        return base, 1.0
    lengths, length, factor = 2 * math.pi / base, rope["original_max_position_embeddings"], rope["factor"]
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = ((length / lengths - low) / (high - low)).clamp(0, 1)
        return base * (smooth + (1 - smooth) / factor), 1.0
    edges = [
        dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.get("rope_theta", 10000.0)))
        for turns in (rope["beta_fast"], rope["beta_slow"])
    ]
    low, high = max(math.floor(edges[0]), 0), min(math.ceil(edges[1]), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return base * (1 - ramp) + base / factor * ramp, 0.1 * math.log(factor) + 1


class PlainEagle:
    """A head, row by row."""

    def __init__(self, weights: dict, config: dict, embeddings: torch.Tensor) -> None:
        self.w = {name: weight.double() for name, weight in weights.items()}
        self.config, self.layers = config, config.get("transformer_layer_config", config)
        self.embeddings = embeddings.double()
        rope = self.layers.get("rope_parameters") or self.layers.get("rope_scaling") or {}
        self.angles, self.factor = frequencies(rope, DIM)
        self.cache: list[tuple[list, list]] = [([], []) for _ in range(self.layers["num_hidden_layers"])]

    def norm(self, x, name):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.w[name]

    def project(self, name, x):
        out = self.w[f"{name}.weight"] @ x
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    def heads(self, at, kind, x, position):
        part = self.project(f"{at}self_attn.{kind}_proj", x).view(-1, DIM)
        if f"{at}self_attn.{kind}_norm.weight" in self.w:
            part = self.norm(part, f"{at}self_attn.{kind}_norm.weight")
        cos, sin = ((position * self.angles).cos() * self.factor, (position * self.angles).sin() * self.factor)
        first, second = part[:, : DIM // 2], part[:, DIM // 2 :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], 1)

    def fused(self, states):
        states = states.double()
        if self.config.get("norm_before_fc"):
            states = self.norm(states, "input_norm.weight")
        if self.config.get("fc_norm"):
            states = torch.cat([self.norm(p, f"fc_norm.{i}.weight") for i, p in enumerate(states.split(HIDDEN))])
        return self.w["fc.weight"] @ states

    def row(self, token, state):
        position = len(self.cache[0][0])
        for number, (keys, values) in enumerate(self.cache):
            at = f"layers.{number}."
            if number == 0:
                normalised = self.norm(state, at + "hidden_norm.weight")
                residual = normalised if self.config.get("norm_before_residual") else state
                x = torch.cat([self.norm(self.embeddings[token], at + "input_layernorm.weight"), normalised])
            else:
                residual, x = state, self.norm(state, at + "input_layernorm.weight")
            keys.append(self.heads(at, "k", x, position))
            values.append(self.project(at + "self_attn.v_proj", x).view(-1, DIM))
            kinds = self.layers.get("layer_types") or ["full_attention"] * len(self.cache)
            first = max(position + 1 - self.layers["sliding_window"], 0) if kinds[number] != "full_attention" else 0
            query, found = self.heads(at, "q", x, position), []
            for head in range(HEADS):
                kv = head * KV_HEADS // HEADS
                scores = torch.stack([key[kv] for key in keys[first:]]) @ query[head] / DIM**0.5
                found.append(scores.softmax(0) @ torch.stack([value[kv] for value in values[first:]]))
            out = residual + self.project(at + "self_attn.o_proj", torch.cat(found))
            x = self.norm(out, at + "post_attention_layernorm.weight")
            gate, up = self.w[at + "mlp.gate_proj.weight"] @ x, self.w[at + "mlp.up_proj.weight"] @ x
            state = out + self.w[at + "mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        return state

    def chain(self, states, tokens, drafts):
        """The logits of each draft of the likeliest chain."""
        for token, state in zip(tokens, states, strict=True):
            out = self.row(token, self.fused(state))
        logits = []
        for _ in range(drafts):
            normalised = self.norm(out, "norm.weight")
            logits.append(self.w["lm_head.weight"] @ normalised)
            out = self.row(int(TOKENS[logits[-1].argmax()]), normalised if self.config.get("norm_output") else out)
        return torch.stack(logits)

    def block(self, states, tokens, drafts):
        """The logits of each draft of one pass (P-EAGLE)."""
        masked = self.fused(self.w["mask_hidden"].flatten())
        rows = [(token, self.fused(state)) for token, state in zip(tokens, states, strict=True)]
        rows += [(self.config["mask_token_id"], masked)] * (drafts - 1)
        outs = [self.row(*row) for row in rows][-drafts:]
        return torch.stack([self.w["lm_head.weight"] @ self.norm(out, "norm.weight") for out in outs])
