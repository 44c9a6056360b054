"""The structs that the kernels read, as ctypes, and the numbers by which they know operations and formats."""

from __future__ import annotations

import ctypes

MAX_WEIGHTS = 4  # of one call of linear, at most

POINTER, INTEGER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Attention(ctypes.Structure):
    """The struct `Attention` of kernels.h, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("query", "key", "value")),
        *((name, INTEGER) for name in ("query_row", "query_head", "key_row", "key_head", "value_row", "value_head")),
        *((name, POINTER) for name in ("keys", "values")),
        ("capacity", INTEGER),
        *((name, POINTER) for name in ("out", "visible", "first", "sinks")),
        *((name, INTEGER) for name in ("rows", "past", "heads", "kv_heads", "dim", "value_dim", "value_size")),
        *((name, REAL) for name in ("scale", "softcap")),
        *((name, INTEGER) for name in ("same_everywhere", "values_in_keys")),
    ]


class Indexer(ctypes.Structure):
    """The struct `Indexer` of kernels.h, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("x", "weight", "query", "key", "offsets")),
        *((name, INTEGER) for name in ("inputs", "heads", "dim", "most", "kept", "pool", "weight_is_float32")),
    ]


class Linear(ctypes.Structure):
    """The struct `Linear` of kernels.h, field for field."""

    _fields_ = [
        ("x", POINTER),
        *((name, INTEGER) for name in ("rows", "inputs", "count")),
        *((name, POINTER * MAX_WEIGHTS) for name in ("weight", "bias", "out")),
        *((name, INTEGER * MAX_WEIGHTS) for name in ("outs", "format")),
        *((name, POINTER) for name in ("norm", "gate", "add")),
        *((name, INTEGER) for name in ("norm_kind", "activation")),
        *((name, REAL) for name in ("epsilon", "limit", "scale")),
        *((name, POINTER * MAX_WEIGHTS) for name in ("down", "up")),
        ("place", POINTER),
        *((name, INTEGER) for name in ("rank", "gated")),
    ]


class Expansion(ctypes.Structure):
    """The struct `Expansion` of packed_weights.h, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("weight", "out", "rows")),
        *((name, INTEGER) for name in ("format", "inputs", "count")),
    ]


class Interleaving(ctypes.Structure):
    """The struct `Interleaving` of interleaving.c, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("blocks", "out")),
        *((name, INTEGER) for name in ("format", "outs", "inputs")),
    ]


class Recoding(ctypes.Structure):
    """The struct `Recoding` of recoding.c, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("blocks", "codebook", "out")),
        *((name, INTEGER) for name in ("format", "count")),
    ]


class Rotary(ctypes.Structure):
    """The struct `Rotary` of kernels.h, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("x", "cos", "sin", "position", "norm")),
        *((name, INTEGER) for name in ("rows", "heads", "dim", "stride", "turned", "interleaved", "norm_kind")),
        ("epsilon", REAL),
    ]


class Norm(ctypes.Structure):
    """The struct `Norm` of kernels.h, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("x", "weight", "out")),
        *((name, INTEGER) for name in ("rows", "size")),
        ("epsilon", REAL),
        *((name, INTEGER) for name in ("kind", "parts")),
        *((name, POINTER) for name in ("add", "room")),
    ]


class Addition(ctypes.Structure):
    """The struct `Addition` of kernels.h, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("x", "add", "out")),
        *((name, INTEGER) for name in ("rows", "size")),
        ("scale", REAL),
    ]


class Columns(ctypes.Structure):
    """The struct `Columns` of kernels.h, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("x", "out")),
        *((name, INTEGER) for name in ("rows", "width", "first", "size")),
    ]


class Op(ctypes.Structure):
    """The struct `Op` of kernels.h, field for field."""

    _fields_ = [("kind", INTEGER), ("of", POINTER), ("which", INTEGER), ("place", INTEGER)]


# kinds of Op
LAYER_BEGINS, PRODUCT, NORMALIZE, ROTATE, ATTEND, ADD, COPY_COLUMNS, EMBED_TOKENS, MIX_EXPERTS = range(9)
CONVOLVE, RECUR, GATE_OUTPUTS, SCALE_COLUMNS, REARRANGE, MULTIPLY_HEADS, XIELU, ADD_POSITIONS = range(9, 17)
SKIP_UNLESS_CHOOSING, CHOOSE_KEYS, KEEP_SELECTED, SCALE_HEADS = range(17, 21)
PANEL = 64  # outputs whose weights of MULTIPLY_HEADS lie together
NORM_KINDS = {"rms": 0, "rms-float32": 1, "layer": 2}
ACTIVATION_NUMBERS = {
    "silu": 0, "gelu_tanh": 1, "gelu": 2, "relu_squared": 3, "sigmoid": 4, "clamped_swiglu": 6, "softplus": 7,
    "relu": 8, "clamped_silu": 9,
}  # fmt: skip
MOST_POOL = 64  # keys that are chosen together
SILU_ALONE = 5  # not of a gate
INTERLEAVED = 64  # added to the numbers of formats, see integer_weights.h
SCORINGS = {"softmax": 0, "sigmoid": 1, "sparse_mixer": 2}


class Angles(ctypes.Structure):
    """The struct `Angles` of kernels.h, field for field."""

    _fields_ = [(name, POINTER) for name in ("cos", "sin", "position")]


class Experts(ctypes.Structure):
    """The struct `Experts` of experts.h, field for field."""

    _fields_ = [
        *(
            (name, POINTER)
            for name in ("x", "norm", "routed", "router", "router_bias", "selection_bias", "expert_scale")
        ),
        *((name, POINTER * 3) for name in ("weight", "bias")),
        *((name, INTEGER * 3) for name in ("format", "weight_step", "bias_step")),
        *((name, POINTER) for name in ("shared", "shared_gate", "add", "out")),
        *((name, INTEGER) for name in ("rows", "hidden", "width", "routed_inputs", "experts", "top_k")),
        *((name, INTEGER) for name in ("groups", "top_groups", "best_of_group")),
        *((name, INTEGER) for name in ("router_is_float32", "scoring", "normalized", "scales_inputs")),
        *((name, INTEGER) for name in ("norm_kind", "activation", "interleaved", "biases_logits", "zero_experts")),
        *((name, REAL) for name in ("epsilon", "scale", "least_sum", "limit", "alpha", "margin")),
    ]


class RecurrentText(ctypes.Structure):
    """The struct `RecurrentText` of recurrent_text.h, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("states", "inputs", "parents", "accepted", "marks", "copies")),
        *((name, INTEGER) for name in ("first", "decided", "nodes", "num_accepted", "num_marks", "node_bytes")),
    ]


MAX_CONVOLUTION_WIDTH = 8
STATE_COLUMNS = 32  # of a recurrence's state that stand together; as many, at least, are kept


class Convolution(ctypes.Structure):
    """The struct `Convolution` of kernels.h, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("x", "before", "after")),
        *((name, INTEGER) for name in ("x_row", "before_row", "after_row")),
        *((name, POINTER) for name in ("weight", "bias", "out")),
        *((name, INTEGER) for name in ("channels", "width", "silu", "state_place", "node_place")),
        ("text", POINTER),
    ]


class Recurrence(ctypes.Structure):
    """The struct `Recurrence` of kernels.h, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("query", "key", "value", "step", "weight")),
        *((name, INTEGER) for name in ("query_row", "key_row", "value_row", "step_row", "weight_row")),
        *((name, POINTER) for name in ("bias", "rate", "skip", "out")),
        *(
            (name, INTEGER)
            for name in ("heads", "groups", "key_dim", "value_dim", "state_place", "node_place", "steps")
        ),
        *((name, REAL) for name in ("least", "most", "scale", "epsilon", "weight_scale", "least_decay")),
        ("rounds_decay", INTEGER),
        ("text", POINTER),
    ]


class GatedNorm(ctypes.Structure):
    """The struct `GatedNorm` of kernels.h, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("x", "gate", "weight")),
        *((name, INTEGER) for name in ("gate_row", "gate_group", "rows", "size", "group", "weights")),
        *((name, INTEGER) for name in ("gate_first", "one_gate", "activation")),
        ("epsilon", REAL),
        ("failed", POINTER),
    ]


class ColumnScale(ctypes.Structure):
    """The struct `ColumnScale` of kernels.h, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("x", "scale")),
        *((name, INTEGER) for name in ("rows", "size")),
    ]


class HeadScale(ctypes.Structure):
    """The struct `HeadScale` of kernels.h, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("x", "scale", "bias", "logs", "position")),
        *((name, INTEGER) for name in ("rows", "heads", "dim")),
    ]


class Xielu(ctypes.Structure):
    """The struct `Xielu` of kernels.h, field for field."""

    _fields_ = [
        ("x", POINTER),
        *((name, INTEGER) for name in ("rows", "size")),
        *((name, REAL) for name in ("above", "below", "slope", "most")),
    ]


class Rearrangement(ctypes.Structure):
    """The struct `Rearrangement` of kernels.h, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("x", "other", "out", "runs")),
        *((name, INTEGER) for name in ("rows", "inputs", "others", "size", "num_runs")),
    ]


class PerHead(ctypes.Structure):
    """The struct `PerHead` of kernels.h, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("x", "weight", "out")),
        *((name, INTEGER) for name in ("format", "weight_step", "rows", "heads", "inputs", "outs", "tail")),
        *((name, INTEGER) for name in ("x_row", "x_head", "out_row", "out_head")),
    ]


MOST_KEPT = 4


class KeptRows(ctypes.Structure):
    """The struct `KeptRows` of kernels.h, field for field."""

    _fields_ = [
        ("x", POINTER * MOST_KEPT),
        ("count", INTEGER),
        *((name, INTEGER * MOST_KEPT) for name in ("step", "size")),
    ]


class Decoder(ctypes.Structure):
    """The struct `Decoder` of kernels.h, field for field."""

    _fields_ = [
        ("embedding", Expansion),
        *((name, REAL) for name in ("embedding_scale", "logit_scale", "logit_softcap")),
        ("norm", Norm),
        ("head", Linear),
        *((name, POINTER) for name in ("tokens", "ops")),
        ("num_ops", INTEGER),
        *((name, POINTER) for name in ("attentions", "key_step", "value_step", "angles", "recurrent")),
        *((name, POINTER) for name in ("kept", "selected", "seconds")),
        *((name, INTEGER) for name in ("texts", "rows", "num_selected", "vocab", "all_states", "narrows")),
    ]


class SecondsOfParts(ctypes.Structure):
    """The seconds of a decoder's calls by part, as decoder.inc counts them."""

    _fields_ = [(name, ctypes.c_double) for name in ("embedding", "linear", "attention", "norms", "unembedding")]


UNKNOWN_TOKEN = 2  # what the kernels `decode` and `draft` return for it


class NearGreatest(ctypes.Structure):
    """The struct `NearGreatest` of kernels.h, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("x", "columns", "values", "counts", "rests")),
        *((name, INTEGER) for name in ("rows", "size", "most", "sample")),
        ("gap", REAL),
    ]


class NearGreatestRows(ctypes.Structure):
    """The struct `NearGreatestRows` of kernels.h, field for field."""

    _fields_ = [("all", NearGreatest), ("from_rows", POINTER), ("into_rows", POINTER)]


class DraftPass(ctypes.Structure):
    """The struct `DraftPass` of kernels.h, field for field."""

    _fields_ = [
        ("decoder", Decoder),
        ("embedding", Expansion),
        ("fuse", Linear),
        ("project", Linear),
        ("likely", NearGreatest),
        *((name, POINTER) for name in ("states", "vectors", "contexts", "queries", "ones", "projected")),
        *((name, INTEGER) for name in ("parts", "vocab")),
        ("epsilon", REAL),
    ]


class Holes(ctypes.Structure):
    """The struct `Holes` of draft_paths.c, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("logits", "states", "unknown", "gate", "sharpness", "left", "second_left")),
        *((name, POINTER) for name in ("right", "banned", "last")),
        *((name, INTEGER) for name in ("vocab", "hidden", "width", "num_banned", "num_last", "second", "first")),
    ]


class DraftPaths(ctypes.Structure):
    """The struct `DraftPaths` of draft_paths.c, field for field."""

    _fields_ = [
        *((name, POINTER) for name in ("columns", "logits", "counts", "rests", "ids", "right", "left", "second_left")),
        *((name, POINTER) for name in ("states", "text_left", "text_second_left", "text_before", "keys", "holes")),
        ("rows", POINTER),
        *((name, INTEGER) for name in ("last_column", "column_before", "positions", "rank", "choices", "nodes")),
        *((name, REAL) for name in ("temperature", "error", "gap", "least", "confidence")),
        *((name, POINTER) for name in ("parents", "tokens", "chances")),
    ]
