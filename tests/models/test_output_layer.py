"""What stands between a model's last hidden states and its logits is what the model itself computes."""

import pytest
import torch

from architectures import text, tiny
from saltus.models.decoder_of import decoder_of
from saltus.models.output_layer import last_norm_factors, logit_scaling

SOFT = {"final_logit_softcapping": 2.0}


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Llama", {}), ("Cohere", {}), ("Cohere2", {}), ("FalconH1", {}), ("Granite", {}), ("Gemma2", SOFT),
        ("GraniteSWA", {"logits_scaling": 3.0}),
    ],
)  # fmt: skip
def test_scaled_products_are_the_model_s_logits(name, changes):
    model = tiny(name, **changes)
    found = model(torch.from_numpy(text(30))[None], output_hidden_states=True)
    products = model.get_output_embeddings()(found.hidden_states[-1])
    torch.testing.assert_close(logit_scaling(model)(products), found.logits)
    assert torch.equal(products, found.logits) == (name == "Llama")


@torch.no_grad()
@pytest.mark.parametrize("name", ["Llama", "Gemma", "Gemma2", "Gemma3", "Gemma4", "Qwen3Next"])
def test_factors_of_the_last_norm_are_those_of_its_outputs(name):
    model = tiny(name)
    norm = decoder_of(model).norm
    norm.weight.copy_(torch.linspace(-0.5, 2, len(norm.weight)))
    x = torch.randn(5, len(norm.weight), generator=torch.Generator().manual_seed(0))
    normalised = x / x.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(last_norm_factors(model) * normalised, norm(x), rtol=1e-4, atol=1e-4)


def test_a_last_norm_without_weights_has_no_factors():
    assert last_norm_factors(tiny("Olmo")) is None
