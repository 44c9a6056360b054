"""Random drafters of the DFlash family as others publish them, and what they compute, row by row in float64.

Nothing here is shared with the package.
"""

import json
from pathlib import Path

import torch
from reference_eagle import frequencies
from safetensors.torch import save_file
from transformers import set_seed

HIDDEN, WIDE, DIM, HEADS, KV_HEADS, VOCABULARY = 32, 48, 16, 4, 2, 300
LAYERS = {
    "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_hidden_layers": 2,
    "vocab_size": VOCABULARY, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
    "rope_theta": 1e6,
}  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
RANK, STATE = 6, 10
DOMINO = ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight")
TOKENS = torch.cat([torch.arange(50, 200), torch.arange(3, 20)])  # of a cut vocabulary; not ascending


def block_drafter(folder: Path, kind: str, layers: dict | None = None, **changes) -> tuple[dict, dict]:
    """A random drafter with an own output layer: its weights, and its config.json. `changes` go to dflash_config."""
    set_seed(17)
    layers = LAYERS | (layers or {})
    given = {"mask_token_id": 7, "target_layer_ids": [0, 2], "block_size": 5} | changes
    cut, gated = "draft_vocab_size" in given, given.get("markov_head_type") == "gated"
    drafted = len(TOKENS) if cut else VOCABULARY
    sizes = {"fc.weight": (HIDDEN, 2 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for at in ("layers.0.", "layers.1."):
        for name, size in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            sizes[f"{at}self_attn.{name}_proj.weight"] = size * DIM, HIDDEN
        sizes |= {f"{at}self_attn.{name}_norm.weight": (DIM,) for name in "qk"}
        sizes |= {f"{at}{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
        sizes |= {f"{at}mlp.{name}_proj.weight": (WIDE, HIDDEN) for name in ("gate", "up")}
        sizes |= {f"{at}mlp.down_proj.weight": (HIDDEN, WIDE), f"{at}self_attn.o_proj.weight": (HIDDEN, HEADS * DIM)}
        if kind == "dflash2":
            for name in ("attention_conv", "mlp_conv"):
                sizes[f"{at}{name}.base_kernel"] = 2, 2, HIDDEN
                sizes[f"{at}{name}.kernel_projection.weight"] = 2 * 2 * HIDDEN // 8, HIDDEN
    if given.get("attention_sink_bias"):
        sizes |= {f"layers.{number}.self_attn.attention_sink_bias": (HEADS,) for number in range(2)}
    if kind == "dflash2":
        given = CONVOLVED | given
        sizes |= {f"candidate_selector.{name}_codebook": (VOCABULARY, RANK) for name in ("predecessor", "successor")}
        sizes["candidate_selector.hidden_projection.weight"] = RANK, HIDDEN
    if kind == "dspark":
        given = {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True,
                 "confidence_head_with_markov": True} | given  # fmt: skip
        sizes |= {"markov_head.markov_w1.weight": (VOCABULARY, RANK), "markov_head.markov_w2.weight": (drafted, RANK)}
        if given["enable_confidence_head"]:
            sizes |= {"confidence_head.proj.weight": (1, HIDDEN + RANK), "confidence_head.proj.bias": (1,)}
        if gated:
            sizes["markov_head.gate_proj.weight"] = RANK, HIDDEN + RANK
            sizes["markov_head.gate_proj.bias"] = (RANK,)
    if kind == "xpress":
        given = {"xpress_rank": RANK} | ({} if cut else {"xpress_mlp_hidden": 2 * RANK}) | given
        head = {"token_embed.weight": (VOCABULARY, RANK), "readout.weight": (drafted, RANK)}
        head |= {f"down_{name}.weight": (RANK, HIDDEN) for name in "hg"} | {"in_proj.weight": (RANK, 3 * RANK)}
        head |= {"mix_l": (RANK, 5, 5), "mlp_down.weight": (RANK, 2 * RANK)}
        head |= {f"mlp_{name}.weight": (2 * RANK, RANK) for name in ("gate", "up")}
        sizes |= {f"refiner_head.{name}": size for name, size in head.items()}
    if kind == "domino":
        named = {"logits_correction_emb_dim": RANK} if cut else {"emb_dim": RANK, "projector_type": "domino"}
        given = named | {"gru_hidden_dim": STATE, "pure_draft_prefix_len": 1} | given
        sizes |= {"prefix_gru.weight_ih_l0": (3 * STATE, HIDDEN), "prefix_gru.weight_hh_l0": (3 * STATE, STATE)}
        sizes |= {"embed_proj.0.weight": (RANK, HIDDEN + STATE), "embed_proj.2.weight": (drafted, RANK)}
    weights = {name: 0.3 * torch.randn(size) + ("norm" in name) for name, size in sizes.items()}
    weights["lm_head.weight"] = torch.randn(drafted, HIDDEN)
    saved = dict(weights)
    if cut:  # the format of speculators
        saved = {f"logits_correction.{name}" if name in DOMINO else name: weight for name, weight in saved.items()}
        saved |= {"d2t": TOKENS - torch.arange(len(TOKENS)), "t2d": torch.isin(torch.arange(VOCABULARY), TOKENS)}
        given["aux_hidden_state_layer_ids"] = [layer + 1 for layer in given.pop("target_layer_ids")]
        config = {"speculators_model_type": kind, "transformer_layer_config": layers} | given
    else:
        name = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel",
                "xpress": "Qwen3XPressModel", "domino": "DominoDraftModel"}[kind]  # fmt: skip
        saved = {_xpress_name(each): weight for each, weight in saved.items()}
        if "architectures" in layers:
            name = layers["architectures"][0]
        if "dspark_bonus_anchor" in layers:  # as NVIDIA's
            saved = {f"model.{each}": weight for each, weight in saved.items()}
        config = layers | {"architectures": [name], "dflash_config": given}
    folder.mkdir(exist_ok=True)
    save_file(saved, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return weights, config


def _xpress_name(name: str) -> str:
    """Of a weight in the format of vLLM."""
    if not name.startswith("refiner_head."):
        return name
    for theirs, own in {"token_embed": "w1", "readout": "w2", "mix_l": "mix.L"}.items():
        name = name.replace(theirs, own)
    for part in ("gate", "up", "down"):
        name = name.replace(f"mlp_{part}", f"mlp.{part}_proj")
    return name.replace("refiner_head", "xpress_head")


class PlainBlock:
    """A drafter over one block, row by row. `causal` and `window` are those of each layer."""

    def __init__(self, weights, config, embeddings, causal=(False, False), window=(None, None)) -> None:
        self.w = {name: weight.double() for name, weight in weights.items()}
        self.given = config | config.get("dflash_config", {})
        layers = config.get("transformer_layer_config", config)
        rope = {"rope_theta": layers["rope_theta"]} | (layers.get("rope_scaling") or {})
        self.angles, self.factor = frequencies(rope, DIM)
        self.embeddings, self.causal, self.window = embeddings.double(), causal, window

    def norm(self, x, name):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.w[name]

    def rotated(self, x, position):
        cos, sin = (position * self.angles).cos() * self.factor, (position * self.angles).sin() * self.factor
        if not self.given.get("rope_is_neox_style", True):  # neighbouring numbers are rotated together
            first, second = x[:, ::2], x[:, 1::2]
            return torch.stack([first * cos - second * sin, second * cos + first * sin], 2).flatten(1)
        first, second = x[:, : DIM // 2], x[:, DIM // 2 :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], 1)

    def convolved(self, at, side, rows, sources):
        """y[i] = Σₜ (base[t] + δ[i, t]) x[i − t]; δ comes from `sources`."""
        if f"{at}.base_kernel" not in self.w:
            return rows
        base, found = self.w[f"{at}.base_kernel"][side], []
        for number, source in enumerate(sources):
            changes = (self.w[f"{at}.kernel_projection.weight"] @ source).view(2, 2, -1)[side]
            terms = [
                (base[tap] + changes[tap].repeat_interleave(8)) * rows[number - tap]
                for tap in range(2)
                if number >= tap
            ]
            found.append(sum(terms))
        return found

    def block(self, states, last_token, masks):
        """The logits and the last hidden states of all rows."""
        context = self.norm(states.double() @ self.w["fc.weight"].T, "hidden_norm.weight")
        mask = self.embeddings[self.given["mask_token_id"]]
        rows = [self.embeddings[last_token], *[mask] * masks]
        for number in range(2):
            at = f"layers.{number}."
            sources = [self.norm(row, at + "input_layernorm.weight") for row in rows]
            inputs = self.convolved(at + "attention_conv", 0, sources, sources)
            keys, values = [], []
            for position, read in enumerate([*context, *inputs]):
                key = (self.w[at + "self_attn.k_proj.weight"] @ read).view(-1, DIM)
                keys.append(self.rotated(self.norm(key, at + "self_attn.k_norm.weight"), position))
                values.append((self.w[at + "self_attn.v_proj.weight"] @ read).view(-1, DIM))
            keys, values, outs = torch.stack(keys), torch.stack(values), []
            for row, x in enumerate(inputs):
                position = len(context) + row
                first = max(position + 1 - self.window[number], 0) if self.window[number] else 0
                seen = slice(first, position + 1 if self.causal[number] else None)
                query = (self.w[at + "self_attn.q_proj.weight"] @ x).view(-1, DIM)
                query, heads = self.rotated(self.norm(query, at + "self_attn.q_norm.weight"), position), []
                for head in range(HEADS):
                    kv = head * KV_HEADS // HEADS
                    scores = keys[seen, kv] @ query[head] / DIM**0.5
                    sinks = self.w.get(at + "self_attn.attention_sink_bias")
                    if sinks is not None:  # an extra score, whose weight is dropped
                        scores = torch.cat([scores, sinks[head : head + 1]])
                    heads.append(scores.softmax(0)[: len(keys[seen])] @ values[seen, kv])
                outs.append(self.w[at + "self_attn.o_proj.weight"] @ torch.cat(heads))
            outs = self.convolved(at + "attention_conv", 1, outs, sources)
            rows = [row + out for row, out in zip(rows, outs, strict=True)]
            sources = [self.norm(row, at + "post_attention_layernorm.weight") for row in rows]
            outs = []
            for x in self.convolved(at + "mlp_conv", 0, sources, sources):
                gate, up = self.w[at + "mlp.gate_proj.weight"] @ x, self.w[at + "mlp.up_proj.weight"] @ x
                outs.append(self.w[at + "mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up))
            outs = self.convolved(at + "mlp_conv", 1, outs, sources)
            rows = [row + out for row, out in zip(rows, outs, strict=True)]
        last = torch.stack([self.norm(row, "norm.weight") for row in rows])
        return last @ self.w["lm_head.weight"].T, last

    def pair_bias(self, state, left):
        """DSpark's: what the token before adds to the logits."""
        embedded = self.w["markov_head.markov_w1.weight"][left]
        if "markov_head.gate_proj.weight" in self.w:
            read = torch.cat([state, embedded])
            gate = self.w["markov_head.gate_proj.weight"] @ read + self.w["markov_head.gate_proj.bias"]
            embedded = gate.sigmoid() * embedded
        return self.w["markov_head.markov_w2.weight"] @ embedded

    def confidence(self, state, left):
        read = torch.cat([state, self.w["markov_head.markov_w1.weight"][left]])
        return (self.w["confidence_head.proj.weight"][0] @ read + self.w["confidence_head.proj.bias"][0]).sigmoid()

    def refinement(self, states, before):
        """XPress's: what is added to the logits of the last row that has a token in `before`, those before the rows."""
        head = {name.removeprefix("refiner_head."): w for name, w in self.w.items() if name.startswith("refiner_head.")}
        mean, rows = states.mean(0), []
        for state, token in zip(states, before, strict=False):
            parts = head["down_h.weight"] @ state, head["down_g.weight"] @ mean, head["token_embed.weight"][token]
            rows.append(head["in_proj.weight"] @ torch.cat(parts))
        last = len(rows) - 1
        x = rows[last] + sum(head["mix_l"][:, last, j] * rows[j] for j in range(last + 1))
        gate, up = head["mlp_gate.weight"] @ x, head["mlp_up.weight"] @ x
        return head["readout.weight"] @ (x + head["mlp_down.weight"] @ (gate * gate.sigmoid() * up))

    def prefix_bias(self, state, tokens):
        """Domino's: what the tokens from the last decided one on add to the logits, by torch's own GRU."""
        by_token, by_state, first, second = (self.w[name] for name in DOMINO)
        gru = torch.nn.GRU(HIDDEN, STATE, bias=False, dtype=torch.float64)
        gru.load_state_dict({"weight_ih_l0": by_token, "weight_hh_l0": by_state})
        with torch.no_grad():
            read = gru(self.embeddings[torch.tensor(tokens)])[1][0]
        return second @ torch.nn.functional.silu(first @ torch.cat([state, read]))

    def pair_score(self, state, left):
        """DFlash 2's selector."""
        projected = self.w["candidate_selector.hidden_projection.weight"] @ state
        before = self.w["candidate_selector.predecessor_codebook"][left] * projected
        return self.w["candidate_selector.successor_codebook"] @ before
