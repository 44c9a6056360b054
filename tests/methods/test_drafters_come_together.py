"""A drafter that is loaded while texts are decoded may have the target return more hidden states."""

from itertools import islice

import pytest
import torch

import saltus
from saltus.methods.mtpc.heads import HeadShape, new_head_model
from saltus.methods.ptp.network import DrafterShape, DraftModel
from saltus.methods.shared.drafter_files import save_drafter
from saltus.training.data.seeded_generator import seeded_generator
from tiny_models import tiny_llama

PROMPT = "the cat sat on the mat and the cat sat on"


@pytest.fixture(scope="module")
def options(tiny_folder, tmp_path_factory) -> dict[str, dict]:
    """Heads that read the target's last states, and a drafter that reads those of a layer besides."""
    target, tokens = tiny_llama(), torch.arange(2, 290)
    heads, drafter = (tmp_path_factory.mktemp(name) for name in ("heads", "drafter"))
    weights = target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach()
    shape = DrafterShape(hidden=32, intermediate=48, hidden_state_layers=(1,), heads=4, kv_heads=2)
    save_drafter("drafter", DraftModel(shape, tokens, *weights), drafter, "tiny", target, {})
    circuit = HeadShape(hidden=32, circuit="hmm", window=4, rank=3, subspace_dim=3)
    model = new_head_model(circuit, tokens, target, seeded_generator(5, "weights"))
    save_drafter("heads", model, heads, "tiny", target, {})
    return {"ptp": {"model": str(drafter)}, "mtpc": {"model": str(heads), "min_probability": 0.0}}


@pytest.mark.parametrize("rests", [False, True], ids=["drafts", "rests"])
def test_a_text_goes_on_when_another_loads_a_drafter(rests, options, tiny_folder):
    engine = saltus.load(str(tiny_folder()), "mtpc", options=options)
    switch = engine.decoder.setup("mtpc").controller(1).drafting_switch
    if rests:  # hidden states are kept meanwhile
        switch.drafting = switch.in_trial = False
    switch.steps_left = 8 if rests else 10**6
    settings = {"max_new_tokens": 60, "ignore_eos": True}
    running = engine.stream(PROMPT, **settings)
    begun = [*islice(running, 4)]
    assert engine.network.hidden_state_layers == ()
    engine.generate(PROMPT, max_new_tokens=2, method="ptp")
    assert engine.network.hidden_state_layers == (1,)
    written = "".join(chunk.text for chunk in [*begun, *running])
    assert written == engine.generate(PROMPT, method="plain", **settings).text
