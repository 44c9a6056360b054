"""saltus.json: every kind is read as it was written, by the keys of files that exist."""

import json

import pytest

from saltus.networks.loading.metadata import DrafterMetadata, check_target, find_metadata, read_metadata, write_metadata

SHAPE, CARD = {"width": 4}, {"steps": 3}
KINDS = {
    "drafter": (DrafterMetadata("drafter", "tiny", "abc", SHAPE, CARD), "card fingerprint kind shape target"),
    "heads": (DrafterMetadata("heads", "tiny", "abc", SHAPE, CARD), "card fingerprint kind shape target"),
    "adapter": (
        DrafterMetadata("adapter", "tiny", "abc", SHAPE, CARD, {"a": "0f"}),
        "files seal settings target target_name training",
    ),
    "model": (DrafterMetadata("model", "tiny", None, {}, CARD), "trained_from training"),
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
    with pytest.raises(ValueError, match="something else"):
        read_metadata(tmp_path, "heads" if kind == "drafter" else "drafter")
    data = json.loads((tmp_path / "saltus.json").read_text())
    for key in {*data} - {"card"}:
        (tmp_path / "saltus.json").write_text(json.dumps({name: data[name] for name in data if name != key}))
        with pytest.raises(ValueError, match=r"saltus\.json was changed or cut|something else"):
            read_metadata(tmp_path, metadata.kind)


def test_another_target_is_refused_with_both_names(tmp_path):
    metadata, _ = KINDS["adapter"]
    check_target(metadata, tmp_path, "abc", "tiny")
    with pytest.raises(ValueError, match=r"was trained for tiny \(abc\), not huge \(xyz\); train it again with saltus"):
        check_target(metadata, tmp_path, "xyz", "huge")
