"""Use Saltus inside Transformers: model.generate with a decoding loop of ours."""

import argparse

import saltus

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="a short name, a folder, or a hub id")
parser.add_argument("--prompt", default="The cat sat on the mat, and the cat sat on the")
parser.add_argument("--max-new-tokens", type=int, default=32)
given = parser.parse_args()

engine = saltus.load(given.model)
model, tokenizer = engine.model, engine.tokenizer  # or those of AutoModelForCausalLM and AutoTokenizer
inputs = tokenizer(given.prompt, return_tensors="pt")
speculate = saltus.custom_generate("lookup", seed=0)  # keep it: it remembers call costs and acceptance rates
output = model.generate(**inputs, max_new_tokens=given.max_new_tokens, do_sample=False, custom_generate=speculate)
print(tokenizer.decode(output[0], skip_special_tokens=True))
