"""saltus.json: every kind is read as it was written, with the same keys."""

import json
from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from saltus.loading.metadata import DrafterMetadata, check_target, find_metadata, read_metadata, write_metadata
from saltus.loading.model_identity import embedding_signs, model_fingerprint

SHAPE, CARD, SIGNS = {"width": 4}, {"steps": 3}, "0:AA=="
FIELDS = "files kind settings target_fingerprint target_name target_signs training"
KINDS = {
    "drafter": (
        DrafterMetadata("drafter", "tiny", "abc", SIGNS, SHAPE, CARD),
        FIELDS,
    ),
    "heads": (
        DrafterMetadata("heads", "tiny", "abc", SIGNS, SHAPE, CARD),
        FIELDS,
    ),
    "adapter": (
        DrafterMetadata("adapter", "tiny", "abc", SIGNS, SHAPE, CARD, {"a": "0f"}),
        f"digest {FIELDS}",
    ),
    "mtp-head": (DrafterMetadata("mtp-head", "tiny", "abc", SIGNS, {}, CARD), FIELDS),
    "model": (DrafterMetadata("model", "tiny", None, None, {}, CARD), FIELDS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_are_read_as_they_were_written_and_keep_their_keys(kind, tmp_path):
    metadata, keys = KINDS[kind]
    assert find_metadata(tmp_path) is None
    write_metadata(tmp_path, metadata)
    assert read_metadata(tmp_path) == read_metadata(tmp_path, metadata.kind) == find_metadata(tmp_path) == metadata
    assert sorted(json.loads((tmp_path / "saltus.json").read_text())) == keys.split()


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_of_another_kind_or_with_a_missing_key_are_refused(kind, tmp_path):
    metadata, _ = KINDS[kind]
    write_metadata(tmp_path, metadata)
    option = {"drafter": "ptp.model", "heads": "mtpc.model", "mtp-head": "mtp.model", "model": "--model"}.get(kind, "")
    with pytest.raises(ValueError, match=f"something else; give a folder that .*, or this one as {option}"):
        read_metadata(tmp_path, "heads" if kind == "drafter" else "drafter")
    data = json.loads((tmp_path / "saltus.json").read_text())
    for key in data:
        (tmp_path / "saltus.json").write_text(json.dumps({name: data[name] for name in data if name != key}))
        with pytest.raises(ValueError, match=r"saltus\.json was changed or cut|something else"):
            read_metadata(tmp_path, metadata.kind)


def embeddings(seed: int = 0, width: int = 64) -> SimpleNamespace:
    """As much of a model as its identity needs."""
    weight = torch.nn.Embedding(300, width, _weight=torch.randn(300, width, generator=torch.manual_seed(seed)))
    return SimpleNamespace(get_input_embeddings=lambda: weight, named_parameters=weight.named_parameters)


def quantized(model: SimpleNamespace, format: GGMLQuantizationType) -> SimpleNamespace:
    values = model.get_input_embeddings().weight.detach().numpy()
    weight = torch.nn.Embedding(*values.shape, _weight=torch.from_numpy(dequantize(quantize(values, format), format)))
    return SimpleNamespace(get_input_embeddings=lambda: weight, named_parameters=weight.named_parameters)


def metadata_for(model: SimpleNamespace, signs: bool = True) -> DrafterMetadata:
    return DrafterMetadata("drafter", "tiny", model_fingerprint(model), embedding_signs(model) if signs else None)


def test_another_target_is_refused_with_both_names(tmp_path):
    metadata = metadata_for(embeddings())
    check_target(metadata, tmp_path, embeddings(), "tiny")
    for other in (embeddings(seed=1), embeddings(width=96)):
        with pytest.raises(ValueError, match=r"was trained for tiny \(\w+\), not huge \(\w+\); train it again with"):
            check_target(metadata, tmp_path, other, "huge")


@pytest.mark.parametrize("format", ["Q8_0", "Q5_1", "Q4_1", "Q4_0"])
def test_the_same_model_in_another_precision_is_accepted_and_said_so(format, tmp_path, caplog):
    other = quantized(embeddings(), GGMLQuantizationType[format])
    check_target(metadata_for(embeddings()), tmp_path, other, "packed")
    if model_fingerprint(other) == model_fingerprint(embeddings()):
        assert not caplog.records
    else:
        assert "packed has similar weights, not the same: the text is exact" in caplog.text
    check_target(metadata_for(other), tmp_path, embeddings(), "plain")
    with pytest.raises(ValueError, match="was trained for tiny"):  # files from before signs were kept
        check_target(metadata_for(embeddings(seed=2), signs=False), tmp_path, other, "packed")
