"""Write a model that says just what another says, and takes longer: with layers after its own that add nothing.

    python experiments/deepened.py --model stories --layers 54 --out deep
    python experiments/infilling.py --model deep ...

So it can be seen how what a method gains goes with the time of a call, while drafts and laws stay as they are.
"""

import argparse
import copy
import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer

from saltus.loading.load_model import load_model
from saltus.loading.model_folders import PAIRWISE_CORRECTION_FILE
from saltus.loading.sources import resolve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="stories", help="a Llama")
    parser.add_argument("--layers", type=int, default=54, help="that are added")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    folder = resolve(given.model)
    model = load_model(given.model, folder, weights="bf16")
    for _ in range(given.layers):
        layer = copy.deepcopy(model.model.layers[-1])
        with torch.no_grad():
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        layer.self_attn.layer_idx = len(model.model.layers)
        model.model.layers.append(layer)
    model.config.num_hidden_layers += given.layers
    model.save_pretrained(given.out)
    AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(given.out)
    if (folder / PAIRWISE_CORRECTION_FILE).is_file():
        shutil.copy(folder / PAIRWISE_CORRECTION_FILE, given.out)
    print(f"written: {given.out}, {sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} million parameters")


if __name__ == "__main__":
    main()
