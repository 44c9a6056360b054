"""The text of Apertus 1.5: layers as those of Apertus."""

from saltus.models.architectures import apertus

CLASSES = {"Apertus1p5TextForCausalLM"}
describe = apertus.describe
