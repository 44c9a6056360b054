"""The formats in which other trainers read hidden states, by the names of the trainers."""

from saltus.training.data.state_formats.specforge import SPECFORGE
from saltus.training.data.state_formats.speculators import SPECULATORS
from saltus.training.data.state_formats.state_format import StateFormat

FORMATS: dict[str, StateFormat] = {"speculators": SPECULATORS, "specforge": SPECFORGE}
