"""speculators' offline data: an Arrow data set of the tokens, beside a file of safetensors for each text.

Read in `train/data.py`, `train/vocab_mapping.py` and `hs_connectors/transfer.py` of speculators 0.9. Its trainers apply
the model's last norm themselves. `datasets.load_from_disk` reads the data set.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import safe_open
from safetensors.torch import save

from saltus.training.data.hidden_states import Sample
from saltus.training.data.state_formats.state_format import StateFormat, TextStates, loss_mask
from saltus.training.loop.checkpoint import write_atomically, write_json

ARROW_FILE = "data-00000-of-00001.arrow"
TEXTS_PER_BATCH = 1000  # of the Arrow file
TOKENS = {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"}
FEATURES = {"input_ids": TOKENS, "loss_mask": TOKENS, "seq_len": {"dtype": "int64", "_type": "Value"}}


def _file_name(number: int) -> str:
    return f"hidden_states/hs_{number}.safetensors"


def _write(states: TextStates, file: BinaryIO) -> None:
    all_states = torch.cat([states.layer_states, states.last_states[:, None]], 1)
    file.write(save({"token_ids": states.tokens, "hidden_states": all_states}))


def _read_tokens(file: Path) -> list[int]:
    with safe_open(file, "pt") as states:
        return states.get_tensor("token_ids").tolist()


def _name_layers(layers: Sequence[int]) -> str:
    return f"--target-layer-ids {' '.join(map(str, layers))}"


def _check_installed() -> None:
    if find_spec("pyarrow") is None:
        raise ValueError("the data sets of speculators are Arrow files, which need pyarrow: pip install pyarrow")


def _finish(folder: Path, texts: Sequence[Sample]) -> None:
    """The data set, and how often each token is trained on."""
    counts = Counter(int(token) for sample in texts for token in sample.completion)
    write_atomically(folder / "token_freq.pt", lambda out: torch.save(dict(counts), out))
    write_atomically(folder / ARROW_FILE, lambda out: _write_arrow(texts, out))
    digest = blake2b((folder / ARROW_FILE).read_bytes(), digest_size=8).hexdigest()
    info = {"citation": "", "description": "", "features": FEATURES, "homepage": "", "license": ""}
    write_json(folder / "dataset_info.json", info)
    write_json(folder / "state.json", {
        "_data_files": [{"filename": ARROW_FILE}], "_fingerprint": digest, "_format_columns": None,
        "_format_kwargs": {}, "_format_type": "torch", "_output_all_columns": False, "_split": None,
    })  # fmt: skip


def _write_arrow(texts: Sequence[Sample], file: BinaryIO) -> None:
    import pyarrow

    tokens = pyarrow.list_(pyarrow.int64())
    info = {"huggingface": json.dumps({"info": {"features": FEATURES}})}
    schema = pyarrow.schema([("input_ids", tokens), ("loss_mask", tokens), ("seq_len", pyarrow.int64())], info)
    with pyarrow.ipc.new_stream(file, schema) as stream:
        for start in range(0, len(texts), TEXTS_PER_BATCH):
            part = texts[start : start + TEXTS_PER_BATCH]
            columns = {
                "input_ids": [sample.tokens for sample in part],
                "loss_mask": [loss_mask(sample) for sample in part],
                "seq_len": [len(sample.tokens) for sample in part],
            }
            stream.write_batch(pyarrow.RecordBatch.from_pydict(columns, schema))


SPECULATORS = StateFormat(False, _file_name, _write, _read_tokens, _finish, _name_layers, _check_installed)
