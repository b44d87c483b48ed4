"""Looking at a kernel: from a short description to its spec, its target and what its assembly consists of.

A description is a kind and its keys, `gate_up:h=2048,i=768,m=4,gate=silu`; :func:`accepted` lists them all.  Kernels of
an ISA that this machine lacks are compiled for a CPU that has it, so that they can be looked at, though not run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from expertile.codegen import cpu
from expertile.codegen import isa as isas
from expertile.codegen.compiler import Target, assembly, compile_ir, optimised_ir
from expertile.codegen.errors import CodegenError
from expertile.runtime import choice
from expertile.runtime.call import BUCKETS
from expertile.runtime.driver import driver_ir
from expertile.runtime.errors import ArgumentError
from expertile.runtime.jit import Spec
from expertile.runtime.spec import DTYPES, ExpertSpec, contiguous
from expertile.templates import formats, gates
from expertile.templates.kernel import ExpertKernel
from expertile.templates.tokens import Finish, Gather

# Descriptions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Key:
    meaning: str
    choices: tuple[str, ...]
    """All values there are; empty for a number from 1 to `largest`, or for any text."""
    default: str | None
    """None for a key that must be given."""
    largest: int | None = 1 << 24
    """None for a key that takes any text."""

    def value(self, name: str, text: str) -> Any:
        """The number, the text or the choice (None for "none", a bool for "true" and "false")."""
        if self.choices:
            if text not in self.choices:
                raise ArgumentError(
                    f"SPEC: {name}: expected one of {', '.join(self.choices)}, got {text!r}"
                )
            return {"none": None, "true": True, "false": False}.get(text, text)
        if self.largest is None:
            return text
        if not (re.fullmatch("[0-9]{1,9}", text) and 1 <= int(text) <= self.largest):
            raise ArgumentError(
                f"SPEC: {name}: expected a number from 1 to {self.largest}, got {text!r}"
            )
        return int(text)


_SWITCH = ("true", "false")
_BEST = "best"
_KEYS = {
    "h": _Key("hidden size", (), None),
    "i": _Key("intermediate size", (), None),
    "m": _Key("tokens, at most a full block", (), "1"),
    "b": _Key("full token blocks in a call, at least", tuple(map(str, BUCKETS)), "1"),
    "gate": _Key("gate function", gates.names(), "silu"),
    "bias": _Key("dtype of the bias", ("none", "bf16", "f32"), "none"),
    "dtype": _Key("dtype of the hidden states", DTYPES, "bf16"),
    "interleaved": _Key("gate and up alternate", _SWITCH, "false"),
    "transposed": _Key("weights lie [inputs, outputs]", _SWITCH, "false"),
    "activations": _Key("what weights are multiplied by", ("bf16", "int8"), "bf16"),
    "weights": _Key("weight format", ("bf16", *formats.names()), "bf16"),
    "variant": _Key("how the kernel is blocked, by name", (), _BEST, largest=None),
}
_KINDS = {
    "gate_up": (
        "h",
        "i",
        "m",
        "b",
        "gate",
        "bias",
        "interleaved",
        "transposed",
        "weights",
        "activations",
        "variant",
    ),
    "down": ("h", "i", "m", "b", "bias", "transposed", "weights", "activations", "variant"),
    "gather": ("h", "dtype"),
    "finish": ("dtype",),
    "driver": (),
}


def accepted(isa: str) -> str:
    """What a description may say for an ISA, one line a kind and one a key."""
    kinds = [f"  {kind}:{','.join(keys)}" if keys else f"  {kind}" for kind, keys in _KINDS.items()]
    keys = [f"  {name:12} {_describe(key)}" for name, key in _keys(isa).items()]
    example = "  gate_up:h=2048,i=768,m=4,gate=silu"
    return "\n".join(["kinds and their keys:", *kinds, "keys:", *keys, "example:", example])


def _keys(isa: str) -> dict[str, _Key]:
    return _KEYS | {"m": replace(_KEYS["m"], largest=isas.by_name(isa).block_tokens)}


def _describe(key: _Key) -> str:
    values = ", ".join(key.choices) or (f"1 to {key.largest}" if key.largest else "a name")
    default = "must be given" if key.default is None else f"default {key.default}"
    return f"{key.meaning}: {values}; {default}"


def parse(text: str, isa: str) -> Spec:
    """The kernel a description names, for the ISA called `isa`.

    Raises ArgumentError for an unknown ISA and, with all that is accepted, for a description that isn't understood.
    """
    if isa not in isas.names():
        raise ArgumentError(f"ISA: expected one of {', '.join(isas.names())}, got {isa!r}")
    try:
        kind, values = _read(text, _keys(isa))
        return _BUILDERS[kind](isa, values)
    except ArgumentError as error:
        raise ArgumentError(f"{error}\n{accepted(isa)}") from None


def _read(text: str, known: dict[str, _Key]) -> tuple[str, dict[str, Any]]:
    """The kind and the value of each of its keys."""
    kind, _, rest = text.partition(":")
    if kind not in _KINDS:
        raise ArgumentError(
            f"SPEC: expected one of {', '.join(_KINDS)} before the colon, got {kind!r}"
        )
    given: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        name, equals, value = item.partition("=")
        if name not in _KINDS[kind]:
            keys = ", ".join(_KINDS[kind]) or "no keys"
            raise ArgumentError(f"SPEC: {kind}: expected {keys}, got {item!r}")
        if name in given:
            raise ArgumentError(f"SPEC: {kind}: {name} is given twice")
        given[name] = value if equals else "true"  # a bare name turns a switch on
    values = {}
    for name in _KINDS[kind]:
        key = known[name]
        text_or_default = given.get(name, key.default)
        if text_or_default is None:
            raise ArgumentError(f"SPEC: {kind}: {name} ({key.meaning}) is missing")
        values[name] = key.value(name, text_or_default)
    return kind, values


def _expert(kind: str) -> Callable[[str, dict[str, Any]], Spec]:
    def build(isa: str, values: dict[str, Any]) -> ExpertKernel:
        layer = ExpertSpec(
            hidden=values["h"],
            intermediate=values["i"],
            experts=1,
            top_k=1,
            weights=values["weights"],
            gate=values.get("gate", "silu"),
            gate_up_bias=values["bias"],
            down_bias=values["bias"],
            interleaved=values.get("interleaved", False),
            transposed=values["transposed"],
            activations=values["activations"],
        )
        kernels = contiguous(layer, isa)
        kernel = kernels.gate_up if kind == "gate_up" else kernels.down
        blocks = int(values["b"])
        if blocks > 1 and values["m"] < kernels.block_tokens:
            raise ArgumentError(
                f"SPEC: b: expected 1 for m={values['m']} (only full blocks, m={kernels.block_tokens}, come several "
                f"in a call), got '{blocks}'"
            )
        return _in_variant(kernel(values["m"], blocks), values["variant"])

    return build


def _in_variant(best: ExpertKernel, name: str) -> ExpertKernel:
    """The candidate with a name; the best if that is "best"."""
    if name == _BEST:
        return best
    found = {variant.name: variant for variant in choice.candidates(best)}
    if name not in found:
        raise ArgumentError(
            f"SPEC: variant: expected {_BEST} or one of {', '.join(found)}, got {name!r}"
        )
    return replace(best, variant=found[name])


@dataclass(frozen=True)
class _Driver:
    """The layer driver as a kernel."""

    isa: str
    name: str = "driver"

    def ir(self) -> str:
        return driver_ir()


_BUILDERS: dict[str, Callable[[str, dict[str, Any]], Spec]] = {
    "gate_up": _expert("gate_up"),
    "down": _expert("down"),
    "gather": lambda isa, values: Gather(isa, values["h"], values["dtype"]),
    "finish": lambda isa, values: Finish(isa, values["dtype"]),
    "driver": lambda isa, values: _Driver("portable"),  # it runs no tile instruction
}


# Targets ----------------------------------------------------------------------------------------------------------

_STAND_INS = {
    "amx": ("sapphirerapids", ("+amx-bf16", "+amx-int8", "+amx-tile")),
    "avx512_bf16": ("cooperlake", ("+avx512bf16", "+avx512bw", "+avx512f", "+avx512vl")),
    "portable_exact": ("haswell", ("+avx2", "+fma")),
    "amx_int8": ("sapphirerapids", ("+amx-int8", "+amx-tile")),
    "avx512_vnni": ("icelake-server", ("+avx512bw", "+avx512f", "+avx512vl", "+avx512vnni")),
}
"""For an ISA that can't run here: the first CPU that has it."""


def target(isa: str) -> Target:
    """What to compile the ISA's kernels for: this machine if it can run them, else a CPU that can.

    Raises CodegenError on a machine whose LLVM doesn't generate code for such a CPU.
    """
    machine = isas.by_name(isa)
    reason = machine.unavailable()
    if reason is None:
        return machine.target()
    triple = cpu.host().triple
    if not triple.startswith("x86_64"):
        raise CodegenError(f"ISA {isa}: expected an x86-64 machine to compile on, got {triple}")
    name, features = _STAND_INS[isa]
    return Target(name, features, triple)


# Assembly ---------------------------------------------------------------------------------------------------------

TILE_INSTRUCTION = (
    r"\b(?:tile(?:load\w*|store\w*|zero|release)|ldtilecfg|tdp\w+|v?dpbf16ps|vpdpbusd)\b"
)
"""Matches the instructions of a tile machine in assembly, and the intrinsics they come from in IR."""

_CLASSES = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("tile multiply", r"tdp"),
        ("tile load", r"tileload"),
        ("tile store", r"tilestore"),
        ("tile set-up", r"tile|ldtilecfg"),
        ("dot product", r"vdpbf16ps|vpdpbusd"),
        ("multiply-add", r"vf(n?m)(add|sub)"),
        ("prefetch", r"prefetch"),
        ("vector move", r"vp?(mov|broadcast|gather|scatter|maskmov)|kmov"),
        ("vector", r"[vk]"),
        ("branch", r"j|call|ret"),
        ("scalar", r""),
    )
)
_INSTRUCTION = re.compile(r"\t([a-z]\w*)(?:\t([^#]*))?")
_LABEL = re.compile(r"(\.?[\w$.]+):")
_TO_STACK = re.compile(r".*, -?\d*\(%rsp\b[^()]*\)(?: \{.*\})?")  # the destination is last
_ONLY_READS = re.compile(r"cmp|test|bt")


@dataclass(frozen=True)
class Statistics:
    """What a kernel's x86-64 assembly consists of. The hot loops are the innermost ones around a multiply of the tile
    machine; in a kernel without such instructions, the ones nested deepest."""

    classes: dict[str, int]
    """Instructions by class."""
    hot_loops: int
    hot_classes: dict[str, int]
    """Instructions in the hot loops by class."""
    spills: int
    """Stores to the stack in the hot loops: what did not fit into registers."""

    @property
    def instructions(self) -> int:
        """All instructions."""
        return sum(self.classes.values())


def measure(listing: str) -> Statistics:
    """Count the instructions of assembly in AT&T syntax."""
    instructions, loops = _instructions_and_loops(listing)
    hot_loops = _hot(instructions, loops)
    hot = [instructions[at] for loop in hot_loops for at in loop]
    return Statistics(
        classes=_by_class(instructions),
        hot_loops=len(hot_loops),
        hot_classes=_by_class(hot),
        spills=sum(_stores_to_stack(*instruction) for instruction in hot),
    )


_Instruction = tuple[str, str]
"""Mnemonic and operands."""


def _instructions_and_loops(listing: str) -> tuple[list[_Instruction], list[range]]:
    """The instructions, and as ranges of them the loops: from a label to the last jump back to it."""
    instructions: list[_Instruction] = []
    labels: dict[str, int] = {}
    ends: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.fullmatch(line):
            mnemonic, operands = instruction[1], (instruction[2] or "").strip()
            if mnemonic.startswith("j") and operands in labels:
                ends[operands] = len(instructions) + 1
            instructions.append((mnemonic, operands))
    return instructions, [range(labels[label], end) for label, end in ends.items()]


def _hot(instructions: list[_Instruction], loops: list[range]) -> list[range]:
    multiplies = [
        at for at, (mnemonic, _) in enumerate(instructions) if re.match("tdp|vdp", mnemonic)
    ]
    around = [loop for loop in loops if any(at in loop for at in multiplies)]
    if around:
        return [loop for loop in around if not any(_inside(other, loop) for other in around)]
    depths = [sum(_inside(loop, other) for other in loops) for loop in loops]
    return [loop for loop, depth in zip(loops, depths, strict=True) if depth == max(depths)]


def _inside(inner: range, outer: range) -> bool:
    return inner != outer and outer.start <= inner.start and inner.stop <= outer.stop


def _by_class(instructions: list[_Instruction]) -> dict[str, int]:
    counts = Counter(
        next(name for name, pattern in _CLASSES if pattern.match(mnemonic))
        for mnemonic, _ in instructions
    )
    return {name: counts[name] for name, _ in _CLASSES if counts[name]}


def _stores_to_stack(mnemonic: str, operands: str) -> bool:
    return bool(_TO_STACK.fullmatch(operands)) and not _ONLY_READS.match(mnemonic)


# Both -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inspection:
    """A kernel and what became of it."""

    kernel: str
    isa: str
    unavailable: str | None
    """Why this machine can't run it, or None."""
    target: Target
    ir: str
    optimised_ir: str
    assembly: str
    statistics: Statistics
    object_bytes: int
    scratch_bytes: int
    """Per-thread scratch of an expert kernel, 0 for the others."""
    variant: str | None
    """The name of an expert kernel's variant."""
    choice: str | None
    """Why it is the best: "measured" (by `expertile tune`) or "predicted"; None for another, that was asked for."""


def inspect(text: str, isa: str) -> Inspection:
    """Compile the kernel that `text` describes for the ISA called `isa`, here or for a CPU that has it.

    Raises what :func:`parse` and :func:`target` raise.
    """
    spec = parse(text, isa)
    code, ir = target(spec.isa), spec.ir()
    listing = assembly(ir, code)
    return Inspection(
        kernel=spec.name,
        isa=spec.isa,
        unavailable=isas.by_name(spec.isa).unavailable(),
        target=code,
        ir=ir,
        optimised_ir=optimised_ir(ir, code),
        assembly=listing,
        statistics=measure(listing),
        object_bytes=len(compile_ir(spec.name, ir, code).object),
        scratch_bytes=spec.scratch_bytes if isinstance(spec, ExpertKernel) else 0,
        variant=spec.variant.name if isinstance(spec, ExpertKernel) else None,
        choice=_choice(spec) if isinstance(spec, ExpertKernel) else None,
    )


def _choice(kernel: ExpertKernel) -> str | None:
    if kernel != choice.best(kernel):
        return None
    measured = choice.tuned(choice.description(kernel)).values()
    return "measured" if kernel.variant in measured else "predicted"
