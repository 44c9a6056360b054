"""Random assistants of Gemma 4 as they are published, and their drafts by Transformers' own class, text by text."""

from pathlib import Path

import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig, set_seed


def published_assistant(folder: Path, target=None, **changes) -> Gemma4AssistantForCausalLM:
    """A random assistant in a folder, by default for the tests' tiny Llama, whose layers see all of the text."""
    settings = {
        "vocab_size": 300, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8,
        "layer_types": ["full_attention"] * 2, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": 2, "initializer_range": 0.3, "max_position_embeddings": 512,
    }  # fmt: skip
    states = 32
    if target is not None:
        names = "vocab_size", "sliding_window", "attention_k_eq_v", "rope_parameters"
        settings |= {name: getattr(target.config, name) for name in names}
        local, full = (target.config.per_layer_config[f"{kind}_attention"] for kind in ("sliding", "full"))
        settings |= {"head_dim": local.head_dim, "num_key_value_heads": local.num_key_value_heads}
        settings |= {"global_head_dim": full.head_dim, "num_global_key_value_heads": full.num_key_value_heads}
        settings["layer_types"], states = ["sliding_attention", "full_attention"], target.config.hidden_size
    own = {name: changes.pop(name) for name in list(changes) if name in settings}
    set_seed(5)
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**settings | own), backbone_hidden_size=states, **changes
    )
    model = Gemma4AssistantForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith(("norm.weight", "layer_scalar")):
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    for name, values in model.named_buffers():
        if name.endswith("layer_scalar"):
            values.uniform_(0.5, 1.5)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(settings["vocab_size"]))
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def reference_logits(assistant, target, tokens: list[int], count: int) -> torch.Tensor:
    """The logits of `count` drafts after a text: keys and values of all of its tokens but the last."""
    read = target.model(
        torch.tensor([tokens[:-1]]), use_cache=True, return_shared_kv_states=True, output_hidden_states=True
    )
    shared, state, token = read.shared_kv_states, read.last_hidden_state[:, -1:], tokens[-1]
    position, logits = torch.tensor([[len(tokens) - 1]]), []
    for _ in range(count):
        embedded = target.get_input_embeddings()(torch.tensor([[token]]))
        out = assistant(
            inputs_embeds=torch.cat([embedded, state], -1), position_ids=position, shared_kv_states=dict(shared.items())
        )
        logits.append(out.logits[0, 0])
        state, token = out.last_hidden_state, int(out.logits.argmax())
    return torch.stack(logits)
