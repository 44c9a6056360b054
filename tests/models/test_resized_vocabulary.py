"""Embeddings with more or fewer rows than the tokenizer has tokens, as padding and added tokens make them."""

import pytest

import saltus
from tiny_models import byte_tokenizer, tiny_llama


@pytest.fixture(scope="module")
def added_token(tmp_path_factory):
    """A model whose tokenizer got a token that the embeddings have no row for."""
    folder, tokenizer = tmp_path_factory.mktemp("added"), byte_tokenizer()
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.add_tokens(["[NEW]"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return saltus.load(str(folder), "lookup")


def test_a_token_without_an_embedding_is_refused_before_any_call(added_token):
    new = len(added_token.tokenizer) - 1
    for prompt, more in (("the [NEW] cat", {"raw": True}), ([[5, new]], {"raw": True}), ([[-1]], {"raw": True})):
        with pytest.raises(ValueError, match=r"token .*of the prompt has no embedding in .*leave it out$"):
            added_token.generate(prompt, max_new_tokens=4, **more)
    with pytest.raises(ValueError, match=rf"^token {new} \(\[NEW\]\) of the prediction has no embedding"):
        added_token.generate("the cat", prediction="a [NEW] one", max_new_tokens=4)
    assert added_token.generate("the cat", max_new_tokens=4, ignore_eos=True).tokens


def test_ids_that_only_the_embeddings_have_are_read(tiny_folder):
    engine = saltus.load(str(tiny_folder(vocab_size=400)), "plain")
    assert len(engine.tokenizer) <= 300
    assert engine.generate([[5, 390, 7]], raw=True, max_new_tokens=4, ignore_eos=True)[0].tokens


@pytest.mark.parametrize(("target", "draft"), [(308, 400), (400, 308)])
def test_a_draft_model_may_be_padded_to_another_vocabulary(tiny_folder, target, draft):
    folders = str(tiny_folder(vocab_size=target)), str(tiny_folder(seed=1, vocab_size=draft))
    settings = {"max_new_tokens": 40, "temperature": 1.0, "seed": 3, "ignore_eos": True, "raw": True}
    engine = saltus.load(folders[0], draft_model=folders[1], adaptive=False)
    drafted = engine.generate("the cat sat on", **settings)
    assert drafted.tokens == engine.generate("the cat sat on", method="plain", **settings).tokens
    assert max(drafted.tokens) >= 308 or target == 308, "ids that the smaller one cannot read occur"
    by_rejection = saltus.load(folders[0], draft_model=folders[1], rule="reject").generate("the cat sat on", **settings)
    assert len(by_rejection.tokens) == 40
    assert max(by_rejection.tokens) < target
