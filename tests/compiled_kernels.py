"""Compile every kernel for GPUs that a decoder, a drafter and the picks launch, for a GPU that need not be there.

    python tests/compiled_kernels.py CAPABILITY…    # such as 80 90
    python tests/compiled_kernels.py --widest CAPABILITY…    # a few, among them those that need most memory

Launches compile in place of running, so that calls on the CPU reach all of them; what they compute is memory as it was.
Prints a line for each binary. Exits with an error where Triton or ptxas refuses one, where a register is written to
while a product of a warp group may still read it, where products of few rows have other matrix instructions than
those of many, which may add in another order, and where products are not rounded as the source says. Binaries that lie
in Triton's cache are not compiled again, and the listing of their instructions lies beside them. Launches that differ
in sizes alone share a binary: what is compiled for a size depends on how often 2 divides it.
"""

import hashlib
import re
import struct
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from saltus.kernels.packed_weight import PackedWeight
from saltus.methods.ptp.gpu_draft_pass import GPUDraftPass
from saltus.methods.ptp.network import DrafterShape, DraftModel
from saltus.methods.published.dflash_model import DFlashModel, DFlashShape
from saltus.methods.published.eagle_model import EagleModel, EagleShape
from saltus.methods.published.gpu_block_layers import GPUBlockLayers
from saltus.methods.published.gpu_eagle_layers import GPUEagleLayers
from saltus.methods.shared.context_rows import ContextKVCache, ContextRows, DraftRows
from saltus.models.cuda import launching, linear_kernels, pick_kernels
from saltus.models.cuda.described_layers import described_for_gpu
from saltus.models.cuda.expert_kernels import SortedPairs, expert_product, sum_experts
from saltus.models.cuda.fixed_shape_attention import StaticInputs
from saltus.models.cuda.fixed_shape_calls import FixedShape
from saltus.models.cuda.gpu_decoder import GPUDecoder
from saltus.models.cuda.gpu_recurrent import StatesOfCall
from saltus.models.cuda.kv_pages import KVPagePool
from saltus.models.cuda.packed_planes import LAYOUTS
from saltus.models.cuda.packed_weight import GPUPackedWeight
from saltus.models.cuda.recurrent_inputs import RecurrentInputs
from saltus.models.cuda.routing_kernels import RouterWeights, route
from saltus.models.cuda.state_pages import StatePool
from saltus.models.decoder_description import Experts

TYPES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.int64: "*i64", torch.int32: "*i32",
    torch.uint8: "*u8",
}  # fmt: skip
FLOATS8 = "8-bit floats by 128 inputs"
Format = GGMLQuantizationType | str
EXPERT_FORMATS = [
    getattr(GGMLQuantizationType, name) for name in ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4", "NVFP4")
] + [FLOATS8]
OPTIONS = ("num_warps", "num_stages")
PRODUCTS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")  # of warps, of warp groups (Hopper), of tensor memory
OPERAND_IN_REGISTERS = r"wgmma\.mma_async\S* +\{[^}]*\}, *\{"
SIZES = {"N": 128, "K": 128, "WIDTH": 16, "FIRST": 16, "STRIDE": 16}  # of a weight: to a tile's size, to a vector's
WITH_PRODUCTS = {
    "_linear",
    "_gate_and_up",
    "_packed_linear",
    "_packed_expert_linear",
    "_per_head_linear",
    "_attend_split",
    "_combine",
}
ONE_SUM = {"_combine", "_recur"}  # kernels
SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}  # bytes of a program


def kind_of(name: str, value: Any) -> Any:
    """The same for all values of a constant that a kernel is compiled alike for: those of two and more parts, too."""
    if name in SIZES:
        return min(value & -value, SIZES[name]) or SIZES[name]
    return min(value, 2) if name == "PARTS" else value


class Compiler:
    """What launches call: `run` compiles the kernel for the values of its arguments, once for each kind of them."""

    def __init__(self, capability: int, chosen: set[str] | None = None) -> None:
        self.capability, self.chosen = capability, chosen
        self.binaries: dict[Any, Any] = {}
        self.read_registers: list[tuple[str, bytes]] = []  # kernels, and their code, with products that do
        self.products: dict[str, set[str]] = {}  # the matrix instructions of each kernel of linear layers

    def run(self, function: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        if self.chosen and function.__name__ not in self.chosen:
            return
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        given = dict(zip(function.arg_names, args, strict=False)) | named
        signature, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(function.params):
            value = given[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[(place,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = TYPES[value.dtype]
                attributes[(place,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        alike = [kind_of(function.arg_names[place], value) for (place,), value in constants.items()]
        key = function.__name__, str(signature), str(alike), str(options)
        if key not in self.binaries:
            source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
            made = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
            self.binaries[key] = made
            assert made.metadata.shared <= SHARED_MEMORY[self.capability], "more shared memory than there is"
            if re.search(OPERAND_IN_REGISTERS, made.asm["ptx"]):
                self.read_registers.append((str(key), code_of(made.asm["cubin"])))
            if "linear" in key[0] or key[0] == "_gate_and_up":
                found = self.products.setdefault(key[0], set())
                found |= {name for name in PRODUCTS if re.search(rf"\s{re.escape(name)}\b", made.asm["ptx"])}
                assert len(found) == 1, f"{key[0]} multiplies by {' and '.join(sorted(found)) or 'single numbers'}"
            check_rounding(key[0], made.asm["ptx"], self.capability)
            print(self.capability, key[0], f"{made.metadata.shared:,} bytes of shared memory", flush=True)

    def check_registers(self) -> None:
        """Fail where a register is written to while a product may read it."""
        lines = machine_code(b"".join(code for _, code in self.read_registers)) if self.read_registers else []
        begin = 0
        for key, code in self.read_registers:
            end = begin + len(code)
            early = early_writes([(place, line) for place, line in lines if begin <= place < end])
            assert not early, f"{key} writes to registers that a product reads: {early[0]}"
            begin = end


def check_rounding(name: str, instructions: str, capability: int) -> None:
    """Fail where products and sums are fused that must not be (`rounded_product`), and subnormal numbers become 0.

    The lanes of a warp must agree on the sums of `ONE_SUM`: several of them write the same one to shared memory. GPUs
    before Hopper have no other product of two numbers of 16 bits than a fused one with −0.
    """
    assert capability < 90 or not re.search(r"\bfma\.rn\S*\.b?f16", instructions), (
        f"{name} adds products before it rounds them"
    )
    assert "packed" not in name or ".ftz" not in instructions, f"{name} takes packed integers for 0"
    if name in ONE_SUM:
        of_others = re.findall(r"shfl\.sync\.bfly\.b32\s+(%r\d+)", instructions)
        added = re.findall(r"fma\.rn\.f32\s+%r\d+, %r\d+, %r\d+, (%r\d+)", instructions)
        assert not {*of_others} & {*added}, f"the lanes of {name} have different sums"


def code_of(binary: bytes) -> bytes:
    """The instructions of a binary, an ELF file with one kernel."""
    (table,) = struct.unpack_from("<Q", binary, 40)
    size, count, names = struct.unpack_from("<3H", binary, 58)
    sections = [struct.unpack_from("<2I4Q", binary, table + number * size) for number in range(count)]
    [code] = [binary[start : start + length] for name, *_, start, length in sections
              if binary.startswith(b".text.", sections[names][4] + name)]  # fmt: skip
    return code


def machine_code(code: bytes) -> list[tuple[int, str]]:
    """The instructions of Hopper's kernels, each after its address; the program takes 0.3 s for any number of them."""
    program = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    kept = Path(triton.knobs.cache.dir) / f"{hashlib.sha256(code).hexdigest()}.sass"
    if not kept.exists():
        with tempfile.NamedTemporaryFile(suffix=".bin") as file:
            file.write(code)
            file.flush()
            command = [program, "-b", "SM90a", "-ndf", file.name]
            listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        part = Path(tempfile.mkstemp(dir=kept.parent)[1])
        part.write_text(listing)
        part.replace(kept)
    lines = (re.search(r"/\*([0-9a-f]{4,})\*/ +(.*?) *;", line) for line in kept.read_text().splitlines())
    return [(int(found[1], 16), found[2]) for found in lines if found]


def early_writes(lines: list[tuple[int, str]]) -> list[tuple[str, str]]:
    """Products whose left operand lies in registers, and what writes to these before the next wait, around loops, too.

    Reading them after that is undefined (PTX, wgmma.wait_group); triton#9433 and old releases of ptxas do it.
    """
    found = []
    for place, line in lines:
        jump = re.search(r"BRA 0x([0-9a-f]+)", line)
        if not jump or int(jump[1], 16) >= place:
            continue
        loop = [each for at, each in lines if int(jump[1], 16) <= at <= place]
        for start, product in enumerate(loop):
            operands = re.match(r"HGMMA\S* +R\d+, R(\d+), gdesc", product)
            read = set(range(int(operands[1]), int(operands[1]) + 4)) if operands else set()
            for after in loop[start + 1 :] + loop[:start]:
                if not read or "WARPGROUP.DEPBAR" in after:
                    break
                if read & written_registers(after):
                    found.append((product, after))
    return found


def written_registers(instruction: str) -> set[int]:
    """The registers of an instruction's result; none of stores and of products, which wait for each other."""
    parts = re.match(r"(?:@!?U?P\w+ +)?(\S+) +(?:P\d+, )?R(\d+)(?:\.reuse)?(?:,|$)", instruction)
    if not parts or parts[1].startswith(("ST", "RED", "HGMMA", "LDGSTS", "BAR")):
        return set()
    wide = 4 if ".128" in parts[1] or ".M88.4" in parts[1] else 2 if ".64" in parts[1] or ".WIDE" in parts[1] else 1
    return set(range(int(parts[2]), int(parts[2]) + wide))


def decode(
    rows: int, packed: tuple[GGMLQuantizationType, ...] = (), bias: bool = False, norms: bool = False,
    heads: int = 4, kv_heads: int = 2, head_dim: int = 64,
) -> None:  # fmt: skip
    """A call of a decoder of one layer, whose linear layers may be packed in some formats by turns."""
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": heads,
             "num_key_value_heads": kv_heads, "vocab_size": 300, "head_dim": head_dim}  # fmt: skip
    config = Qwen3Config(**sizes) if norms else Qwen2Config(**sizes, attention_bias=bias)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layers = [module for module in model.modules() if packed and isinstance(module, torch.nn.Linear)]
    for number, layer in enumerate(layers):
        layer._parameters["weight"] = packed_weight(packed[number % len(packed)], *layer.weight.shape)
    run(GPUDecoder(model), rows)


def decode_described() -> None:
    """Calls of decoders with norms after mixer and MLP, another activation, other rotations or none."""
    from transformers import (
        ApertusConfig,
        CohereConfig,
        Exaone4Config,
        FalconConfig,
        Gemma2Config,
        Gemma3TextConfig,
        Glm4Config,
        GPT2Config,
        GPTNeoXConfig,
        GptOssConfig,
        HunYuanDenseV1Config,
        LlamaConfig,
        Olmo2Config,
        OPTConfig,
        Phi3Config,
        Starcoder2Config,
    )

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 1, "vocab_size": 300, "head_dim": 256,
             "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    many_heads = {"num_attention_heads": 16, "head_dim": 128, "hidden_size": 2048}
    for config in (
        Gemma3TextConfig(**sizes), Exaone4Config(**sizes), Glm4Config(**sizes, pad_token_id=0),
        Olmo2Config(**sizes | many_heads), Gemma2Config(**sizes), CohereConfig(**sizes), gemma4(), llama4(), gemma3n(),
        HunYuanDenseV1Config(**sizes), GptOssConfig(**sizes, num_local_experts=4), latent(),
        Starcoder2Config(**sizes), GPTNeoXConfig(**sizes), GPT2Config(**sizes),
        OPTConfig(**sizes, word_embed_proj_dim=256, ffn_dim=512), ApertusConfig(**sizes),
        FalconConfig(hidden_size=256, num_attention_heads=4, num_hidden_layers=1, vocab_size=300),
        LlamaConfig(**sizes, mlp_bias=True, pad_token_id=0),
        Phi3Config(**sizes | {"num_attention_heads": 32, "head_dim": 96, "hidden_size": 3072, "pad_token_id": 0}),
    ):  # fmt: skip
        run(described(config), 1)


def decode_recurrently() -> None:
    """Calls of decoders whose layers keep a state: the gated delta rule and attention, Mamba, Mamba-2, convolutions."""
    from transformers import (
        BambaConfig,
        FalconMambaConfig,
        KimiLinearConfig,
        Lfm2Config,
        Lfm3Config,
        MambaConfig,
        Qwen3_5TextConfig,
    )

    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 1, "vocab_size": 300, "head_dim": 64, "pad_token_id": 0}  # fmt: skip
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    kimi = {"linear_num_heads": 2, "linear_head_dim": 128, "num_local_experts": 8, "moe_intermediate_size": 128,
            "num_shared_experts": 1, "eos_token_id": 1, "bos_token_id": 2}  # fmt: skip
    mamba = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 128, "attn_layer_indices": [1]}
    for config in (
        Qwen3_5TextConfig(**sizes, **kinds, **heads), BambaConfig(**sizes, **mamba),
        MambaConfig(hidden_size=256, num_hidden_layers=1, vocab_size=300),
        FalconMambaConfig(hidden_size=1024, num_hidden_layers=1, vocab_size=300),
        Lfm2Config(**sizes, layer_types=["conv", "full_attention"]),
        Lfm3Config(**sizes, layer_types=["conv", "full_attention"]), KimiLinearConfig(**sizes | kimi, **kinds),
    ):  # fmt: skip
        run(described(config), 1)


def gemma4() -> Any:
    """Heads of two sizes, the larger of which a program reads in parts, values that are keys, per-layer inputs."""
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=1,
        head_dim=256, global_head_dim=512, num_global_key_value_heads=1, attention_k_eq_v=True, vocab_size=300,
        vocab_size_per_layer_input=300, hidden_size_per_layer_input=64, pad_token_id=0,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip


def gemma3n() -> Any:
    """Several streams of hidden states, a low-rank branch and sparse gates, of sizes that are no powers of two."""
    from transformers import Gemma3nTextConfig

    return Gemma3nTextConfig(
        hidden_size=320, intermediate_size=640, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
        head_dim=64, num_kv_shared_layers=0, vocab_size=300, vocab_size_per_layer_input=200, laurel_rank=64,
        hidden_size_per_layer_input=64, activation_sparsity_pattern=[0.95, 0.0], pad_token_id=0,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip


def llama4() -> Any:
    """Rotated heads in chunks and heads whose queries grow, each with experts."""
    from transformers import Llama4TextConfig

    return Llama4TextConfig(
        hidden_size=256, intermediate_size=256, intermediate_size_mlp=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=64, vocab_size=300, num_local_experts=4, no_rope_layers=[1, 0], pad_token_id=0,
    )  # fmt: skip


def latent() -> Any:
    """Latent attention with the sizes of GLM-4.7-Flash, whose heads are no power of two."""
    from transformers import Mistral4Config

    return Mistral4Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, first_k_dense_replace=1, vocab_size=300,
        num_attention_heads=20, q_lora_rank=256, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64,
        v_head_dim=256, head_dim=256, rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    )  # fmt: skip


def described(config: Any) -> GPUDecoder:
    """A decoder of random weights by its description."""
    from transformers import AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

    is_unlisted = isinstance(config, Mistral4Config)  # among the models that Transformers 5.17 finds by themselves
    make: Any = Mistral4ForCausalLM._from_config if is_unlisted else AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.bfloat16)
    description = described_for_gpu(model)
    assert description is not None
    return GPUDecoder(model, description=description)


def run(decoder: GPUDecoder, rows: int) -> None:
    """A call of so many rows."""
    pool, device, recurrent = KVPagePool(len(decoder.layers), 256), torch.device("cpu"), None
    inputs = StaticInputs(FixedShape(-(-rows // 8), 8, 2, 0), 32, device)
    if (shape := decoder.state_shape) is not None:
        states = StatePool(len(decoder.places_of_states), shape, decoder.model.dtype, device, pool.graphs.clear)
        recurrent = StatesOfCall(states, RecurrentInputs(inputs.shape, shape.taps, 32, device))
    logits, _ = decoder(inputs, pool, recurrent=recurrent)
    pick_kernels.find_tokens(logits, inputs.keys, inputs.temperatures)


def multiply_widest() -> None:
    """Products of few and of many rows, attention to large heads, packed experts."""
    decode(1)
    decode(160, norms=True, heads=8, kv_heads=1, head_dim=256)
    run(described(gemma4()), 160)
    for rows in (1, 160):
        run(described(latent()), rows)
    for rows in (1, 200):
        linear_kernels.product(torch.zeros(rows, 512, dtype=torch.bfloat16), packed_weight(FLOATS8, 256, 512), rows)
    pairs = SortedPairs.of(torch.zeros(128, 2, dtype=torch.int64), 8)
    expert_product(torch.zeros(128, 256, dtype=torch.bfloat16), packed_stack(FLOATS8, 8, 192, 256), pairs)


def packed_weight(format: Format, outputs: int, inputs: int) -> GPUPackedWeight:
    if not isinstance(format, GGMLQuantizationType):
        floats = torch.zeros(outputs, inputs, dtype=torch.float8_e4m3fn)
        return GPUPackedWeight.from_floats(floats, torch.ones(outputs, -(-inputs // 128)), 128)
    if format is GGMLQuantizationType.NVFP4:
        none = torch.zeros(outputs, inputs, dtype=torch.uint8)
        return GPUPackedWeight.from_packed(
            PackedWeight.from_four_bit_floats(none, none[:, ::16].contiguous(), torch.ones(1), "int8"), "cpu"
        )
    weights, size = GGML_QUANT_SIZES[format]
    blocks = torch.zeros(outputs, inputs // weights * size, dtype=torch.uint8)
    return GPUPackedWeight.from_packed(PackedWeight.from_blocks(blocks, format, "int8"), "cpu")


def multiply_packed() -> None:
    """Products with weights of each format, by tiles of few and of many rows and of few and of many outputs."""
    for format in (*LAYOUTS, FLOATS8):
        for rows, outputs in ((1, 64), (200, 256)):
            linear_kernels.product(
                torch.zeros(rows, 512, dtype=torch.bfloat16), packed_weight(format, outputs, 512), rows
            )


def multiply_by_experts() -> None:
    """The experts of a row and of many, as they lie in a model, transposed and packed."""
    for rows in (1, 128):
        x, stack = (torch.zeros(*sizes, dtype=torch.bfloat16) for sizes in ((128, 256), (8, 192, 256)))
        slots, vector = torch.zeros(rows, dtype=torch.int64), torch.zeros(8)
        plain = RouterWeights.of(stack[0, :8], x.dtype, vector.to(x.dtype))
        grouped = RouterWeights.of(stack[0, :8].float(), x.dtype, None, vector, vector)
        groups = {"groups": 4, "top_groups": 2, "best_of_group": 2}
        route(x, plain, Experts("", "", 4), rows, slots, 256)
        picks, weights = route(
            x, grouped, Experts("", "", 4, scoring="sigmoid", is_normalized=True, **groups), rows, slots, 256
        )
        pairs, x, biases = SortedPairs.of(picks, 8), x[:rows], stack[:, :, 0].contiguous()
        outputs = expert_product(x, stack, pairs)
        expert_product(x, stack.mT.contiguous(), pairs, True, biases)
        for format in EXPERT_FORMATS:
            expert_product(x, packed_stack(format, 8, 192, 256), pairs, biases=biases)
        for activation, interleaved in (("silu", False), ("gelu_tanh", False), ("clamped_swiglu", True)):
            linear_kernels.activate(outputs, outputs[:, :96].contiguous(), activation, interleaved, 7.0, 1.702)
        linear_kernels.activate(outputs, outputs.clone(), "relu_squared")
        parts = torch.zeros(2, rows, 192)
        for shared, gate in ((None, None), (parts, None), (parts, parts[..., :1].contiguous())):
            sum_experts(outputs, weights, torch.float32, shared, gate)


def packed_stack(format: Format, experts: int, outputs: int, inputs: int) -> GPUPackedWeight:
    whole = packed_weight(format, experts * outputs, inputs)
    return GPUPackedWeight(whole.planes, whole.block_layout, (experts, outputs, inputs))


def draft() -> None:
    """A pass of a drafter."""
    shape = DrafterShape(64, 128, (1,), layers=2, heads=2, kv_heads=1, reads_uniforms=False, correction=16)
    embeddings = torch.randn(90, 64)
    drafter = DraftModel(shape, torch.arange(3, 80), embeddings, embeddings).eval().to(torch.bfloat16)
    drafter.embeddings = [drafter.embeddings[0].to(torch.bfloat16)]
    ours = GPUDraftPass(drafter, use_cuda_graphs=False)
    states, queries = (torch.zeros(count, size, dtype=torch.bfloat16) for count, size in ((9, 128), (4, 64)))
    ours([DraftRows(states, np.arange(9), queries, ContextKVCache(ours.new_kv_cache), 0)])


def draft_as_published() -> None:
    """Passes of an EAGLE-3 head and of a DFlash drafter."""
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 64}
    embeddings, tokens = torch.zeros(90, 64, dtype=torch.bfloat16), torch.arange(90)
    eagle = EagleModel(EagleShape(64, 128, (1,), **sizes), tokens, embeddings, embeddings)
    block = DFlashModel(DFlashShape(64, 128, (1,), mask_token=4, layers=1, **sizes), tokens, embeddings, embeddings)
    for module in (eagle, block.own_modules()):
        module.to_empty(device="cpu").to(torch.bfloat16)
    eagle.tokens = tokens
    layers, blocks = (made(model, use_cuda_graphs=False)
                      for made, model in ((GPUEagleLayers, eagle), (GPUBlockLayers, block)))  # fmt: skip
    states = torch.zeros(9, 64, dtype=torch.bfloat16)
    cache, other = layers.new_kv_cache(), blocks.new_kv_cache()
    layers.chains(layers.read([np.arange(9)], [states], [cache], [0])[0][-1:], [2], [cache], [9])
    blocks.write_context([states], [other], [9])
    blocks.run_together([ContextRows(states[:8], other, 9, 8, False)])


def launch_all() -> None:
    """Every kernel."""
    decode(1)
    decode(160, bias=True)
    decode(1, norms=True, heads=28, kv_heads=4, head_dim=128)
    decode(1, norms=True, heads=8, kv_heads=1, head_dim=256)
    decode(1, packed=(GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K))
    decode_described()
    decode_recurrently()
    multiply_packed()
    multiply_by_experts()
    draft()
    draft_as_published()


def main() -> None:
    warnings.filterwarnings("ignore")
    widest = sys.argv[1] == "--widest"
    for capability in map(int, sys.argv[2 if widest else 1 :]):
        compiler = Compiler(capability, WITH_PRODUCTS if widest else None)
        launching.LARGEST_SHARED_MEMORY = SHARED_MEMORY[capability]
        launching.pipeline_bytes.cache_clear()
        JITFunction.run = lambda self, *args, compiler=compiler, **named: compiler.run(self, *args, **named)
        with torch.inference_mode():
            (multiply_widest if widest else launch_all)()
        compiler.check_registers()


if __name__ == "__main__":
    main()
