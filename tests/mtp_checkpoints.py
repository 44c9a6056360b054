"""Write checkpoints of tiny random models with heads for multi-token prediction, by the names that are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from architectures import tiny
from tiny_models import byte_tokenizer

FORMS: dict[str, tuple[str, dict]] = {  # the target's architecture, and what differs from the tiny models of tests
    "Qwen3.5": ("Qwen3_5", {}),
    "Qwen3.5 with experts": ("Qwen3_5Moe", {}),
    "Qwen3-Next": ("Qwen3Next with experts", {}),
    "DeepSeek V3": ("DeepseekV3", {}),
    "GLM-4.5": ("Glm4Moe", {}),
    "GLM-4.7-Flash": ("Glm4MoeLite", {}),
    "ERNIE 4.5": ("Ernie4_5", {}),
    "MiMo": ("Qwen2", {}),
    "MiMo V2": ("MiMoV2Flash", {"mlp_layer_types": ["sparse", "dense"]}),
    "K-EXAONE": ("ExaoneMoe", {"mlp_layer_types": ["sparse", "dense"], "mtp_layer_types": ["full_attention"]}),
    "Nemotron 3 Super": ("NemotronH with experts of latent vectors", {"num_nextn_predict_layers": 1}),
    "EXAONE 4.5": ("Exaone4", {"layer_types": ["sliding_attention"] * 2, "num_nextn_predict_layers": 1}),
}
MIMO_V2 = {  # of a layer's tensors, by Transformers' names
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight", "self_attn.sinks": "self_attn.attention_sink_bias",
}  # fmt: skip
QWENS_NAMES = ("Qwen", "K-EXAONE", "EXAONE")
VOCAB = 300  # of the byte-level tokenizer


def layers_like_a_head(model: Any, make: Any = lambda layer, place: layer) -> Any:
    """The last layer with attention; of Nemotron, where it is that alone, also the last one with experts."""
    layers = dict(enumerate(model.model.layers))
    if not hasattr(model.config, "mtp_layers_block_type"):
        place = max(place for place, layer in layers.items() if hasattr(layer, "self_attn"))
        return make(layers[place], place)
    last = {layer.block_type: place for place, layer in layers.items()}
    places = [last[kind] for kind in model.config.mtp_layers_block_type]
    return torch.nn.ModuleList([make(layers[place], place) for place in places])


def head_tensors(form: str, model: Any, module: int = 0, seed: int = 3) -> dict[str, torch.Tensor]:
    """The tensors of one random module by their published names. Its layer is like the model's last with attention."""
    generator = torch.Generator().manual_seed(seed + module)
    config = model.config
    hidden, layers = config.hidden_size, config.num_hidden_layers
    state = layers_like_a_head(model).state_dict()

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        plus_one = form.startswith("Qwen")  # norms are stored without one
        return 0.2 * torch.randn(shape, generator=generator) + (len(shape) == 1 and not plus_one)

    layer = {}
    for name, weight in state.items():
        if name.endswith("experts.up_proj"):
            at = name.removesuffix("up_proj")
            layer |= {f"{at}{i}.up_proj.weight": up for i, up in enumerate(drawn(weight.shape))}
        elif name.endswith("experts.gate_up_proj"):
            gates, ups = drawn(weight.shape).chunk(2, 1)
            at = name.removesuffix("gate_up_proj")
            layer |= {f"{at}{i}.gate_proj.weight": gate for i, gate in enumerate(gates)}
            layer |= {f"{at}{i}.up_proj.weight": up for i, up in enumerate(ups)}
        elif name.endswith("experts.down_proj"):
            at = name.removesuffix("down_proj")
            layer |= {f"{at}{i}.down_proj.weight": down for i, down in enumerate(drawn(weight.shape))}
        else:
            layer[name] = drawn(weight.shape)
    projection, norms = drawn((hidden, 2 * hidden)), [drawn((hidden,)) for _ in range(3)]
    if form.startswith(QWENS_NAMES):
        names = [
            "mtp.fc.weight",
            "mtp.pre_fc_norm_embedding.weight",
            "mtp.pre_fc_norm_hidden.weight",
            "mtp.norm.weight",
        ]
        at = f"mtp.layers.{module}."
    elif form.startswith("ERNIE"):
        names = [f"model.mtp_{name}.{module}.weight" for name in ("linear_proj", "emb_norm", "hidden_norm")]
        at = f"model.mtp_block.{module}."
    elif form == "MiMo V2":
        at = f"model.mtp.layers.{module}."
        names = [f"{at}{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "final_layernorm")]
        for ours, theirs in MIMO_V2.items():
            layer[theirs] = layer.pop(ours)
    elif form == "Nemotron 3 Super":
        at = "mtp.layers."
        names = [f"{at}{name}.weight" for name in ("0.eh_proj", "0.enorm", "0.hnorm", "1.final_layernorm")]
    elif form == "MiMo":
        at = f"model.mtp_layers.{module}."
        norms_of = ("token_layernorm", "hidden_layernorm", "final_layernorm")
        names = [f"{at}{name}.weight" for name in ("input_proj", *norms_of)]
    else:
        at = f"model.layers.{layers + module}."
        names = [f"{at}{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")]
        layer["embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
        layer["shared_head.head.weight"] = model.get_output_embeddings().weight.detach().clone()
    tensors = dict(zip(names, [projection, *norms], strict=False))
    return tensors | {f"{at}{name}": weight.contiguous() for name, weight in layer.items()}


def write_checkpoint(folder: Path, form: str, modules: int = 1, dtype: torch.dtype = torch.float32, **changes) -> Path:
    """A folder with a tiny model, a tokenizer and heads."""
    name, own = FORMS[form]
    model: Any = tiny(name, vocab_size=VOCAB, **own | changes)
    model.to(dtype).save_pretrained(folder)
    tensors: dict[str, torch.Tensor] = {}
    for module in range(modules):
        tensors |= {key: weight.to(dtype) for key, weight in head_tensors(form, model, module).items()}
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})
    byte_tokenizer().save_pretrained(folder)
    if form == "MiMo":
        files = {"AutoConfig": "configuration_mimo.MiMoConfig", "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"}
        edit_config(folder, model_type="mimo", architectures=["MiMoForCausalLM"], auto_map=files)
    return folder


def write_speculators_head(folder: Path, checkpoint: Path, verifier: str = "tiny") -> Path:
    """The head of one of Qwen's checkpoints in a folder of its own, as speculators writes it, with stacked experts."""
    parts = {"fc": "input_proj", "pre_fc_norm_embedding": "token_layernorm", "pre_fc_norm_hidden": "hidden_layernorm",
             "norm": "final_layernorm"}  # fmt: skip
    tensors: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if name.startswith("mtp.layers.0.mlp.experts."):
            *_, number, kind, _ = name.split(".")
            experts.setdefault(kind, {})[int(number)] = weight
        elif name.startswith("mtp.layers.0."):
            tensors[name.replace("mtp.layers.0.", "mtp_layers.0.")] = weight
        elif name.startswith("mtp."):
            tensors[f"mtp_layers.0.{parts[name.split('.')[1]]}.weight"] = weight
    if experts:
        gates, ups, downs = (
            torch.stack([weight for _, weight in sorted(experts[f"{kind}_proj"].items())])
            for kind in ("gate", "up", "down")
        )
        at = "mtp_layers.0.mlp.experts."
        tensors |= {f"{at}gate_up_proj": torch.cat([gates, ups], 1), f"{at}down_proj": downs}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = {"algorithm": "mtp", "verifier": {"name_or_path": verifier, "architectures": []}}
    config = {"speculators_model_type": "mtp", "architectures": ["MTPDraftModel"], "speculators_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def edit(folder: Path, change) -> None:
    """Change the tensors of a folder: `change` gets and returns them by name."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def edit_config(folder: Path, **changes) -> None:
    """Change the configuration of a folder."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
