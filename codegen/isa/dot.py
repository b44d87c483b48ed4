"""Vector dot products as a tile machine: what `avx512_bf16` and `portable` share.

A C element is one vector of 16 partial sums: lane p takes the k's 2p and 2p+1 of every chunk, and the lanes are added
up at the end in a fixed tree.  An A row and a B token are then plain 64-byte vectors, every lane works even for one
token, and nothing is broadcast.  A pass holds rows × tokens such vectors in registers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from expertile.codegen.ir import Builder, L, Value, Var, f32, i32, vec
from expertile.codegen.isa.base import BTile, Pass, TileIsa, TilePlan, Variant
from expertile.codegen.layouts import GROUP, RowLayout

_K_BLOCKS = (0, 512, 1024)
_AHEAD = ((), (0,), (0, 4096), (0, 2048, 4096), (0, 512, 1024, 2048, 3072, 4096))

Words = vec(i32, 16)
Sums = vec(f32, 16)


class DotIsa(TileIsa):
    """Subclasses say how one vector of bf16 pairs is multiplied and how many sums their registers hold."""

    layout = RowLayout()
    sum_bytes = 64
    sums: ClassVar[L.VectorType] = Sums
    """What a C element is while it is summed up."""
    registers = True
    shapes: ClassVar[tuple[tuple[int, int], ...]]
    """Rows (of all matrices) and tokens of a pass: as many sums stay in registers."""

    @abstractmethod
    def multiply(self, b: Builder, c: Value, a: Value, v: Value) -> Value:
        """c[p] + a[2p]·v[2p] + a[2p+1]·v[2p+1] in each of 16 lanes; a and v hold bf16 pairs as i32."""

    def variants(self, tokens: int, matrices: int) -> tuple[Variant, ...]:
        found = [
            Variant(
                rows=rows // matrices if together else rows,
                tokens=most,
                together=together,
                k_block=k_block,
                panel=GROUP // matrices if together else GROUP,
                ahead=ahead,
            )
            for rows, most in self.shapes
            for together in {matrices == 1, True}
            if rows >= matrices or not together
            for k_block in _K_BLOCKS
            for ahead in _AHEAD
        ]
        return tuple(dict.fromkeys(found))

    def decoding(self, tokens: int, matrices: int) -> tuple[Variant, ...]:
        plain = self.variants(tokens, matrices)
        # As many decoded rows as a block has leave no registers: never faster than half of them.
        decoding = [
            each for each in plain if each.rows * (matrices if each.together else 1) < GROUP
        ]
        staged = [replace(variant, staged=True) for variant in plain]
        carried = [replace(variant, carried=True) for variant in staged if not variant.k_block]
        return (*decoding, *staged, *carried)

    def plan(self, groups: Sequence[int], blocks: int, variant: Variant) -> TilePlan:
        # Few loop bodies, so that a kernel compiles quickly: passes have at most two widths in a group, and equal
        # groups share theirs.
        equal = len(set(groups)) == 1
        passes = []
        for group, tokens in enumerate(groups[:1] if equal else groups):
            count = -(-tokens // variant.tokens)
            narrow, wider = divmod(tokens, count)
            together = len(groups) if equal else 1
            if wider:
                passes.append(Pass((BTile(group, 0, narrow + 1),), wider, together))
            first = BTile(group, wider * (narrow + 1), narrow)
            passes.append(Pass((first,), count - wider, together))
        return TilePlan(tuple(groups), blocks, variant.rows, tuple(passes))

    def load_cycles(self, plan: TilePlan, one: Pass) -> tuple[float, float]:
        return plan.rows * plan.blocks, one.tiles[0].tokens

    def store_cycles(self, plan: TilePlan, one: Pass) -> tuple[float, float]:
        vectors = plan.rows * plan.blocks * one.tiles[0].tokens
        return (
            3 * vectors,
            3 * vectors,
        )  # a load and a store of half the speed; three instructions to add the lanes

    def configure(self, b: Builder, plan: TilePlan) -> None:
        """Vectors need no preparation."""

    def release(self, b: Builder) -> None:
        """Vectors leave nothing behind."""

    def accumulators(
        self, b: Builder, plan: TilePlan, tile: BTile, block: int, column: int
    ) -> list[list[Var]]:
        zero = b.zero(self.sums)
        return [[b.var(self.sums, zero) for _ in range(tile.tokens)] for _ in range(plan.rows)]

    def load_a(
        self, b: Builder, plan: TilePlan, block: int, address: Value, stride: int, streaming: bool
    ) -> list[Value]:
        return [address.at(row * stride).load(Words) for row in range(plan.rows)]

    def hold_a(self, rows: list[Value]) -> list[Value]:
        return rows

    def load_b(
        self, b: Builder, plan: TilePlan, tile: BTile, column: int, chunk: Value
    ) -> list[Value]:
        return [chunk.at(64 * (tile.first + token)).load(Words) for token in range(tile.tokens)]

    def dot(self, b: Builder, c: list[list[Var]], a: list[Value], v: list[Value]) -> None:
        for sums, row in zip(c, a, strict=True):
            for sum_, token in zip(sums, v, strict=True):
                sum_.set(self.multiply(b, sum_.get(), row, token))

    def save(
        self, b: Builder, plan: TilePlan, c: list[list[Var]], tile: BTile, into: Value
    ) -> None:
        for number, sum_ in enumerate(sum_ for row in c for sum_ in row):
            into.at(64 * number).store(sum_.get())

    def restore(
        self, b: Builder, plan: TilePlan, c: list[list[Var]], tile: BTile, source: Value
    ) -> None:
        for number, sum_ in enumerate(sum_ for row in c for sum_ in row):
            sum_.set(source.at(64 * number).load(self.sums))

    def store(
        self, b: Builder, plan: TilePlan, c: list[list[Var]], tile: BTile, into: Value, row: Value
    ) -> None:
        # Token by token, so that the rows of a token are neighbours in the added-up vectors.
        vectors = [sums[token].get() for token in range(tile.tokens) for sums in c]
        rows = plan.rows
        for start in range(0, len(vectors), GROUP):
            some = vectors[start : start + GROUP]
            totals, step = _add_lanes(b, some)
            for first in range(0, len(some), rows):
                token = tile.first + (start + first) // rows
                lanes = range(first * step, (first + rows) * step, step)
                part = totals.shuffle(lanes) if rows < GROUP else totals
                into.at(64 * token).at(row * 4).store(part)


def _add_lanes(b: Builder, vectors: list[Value]) -> tuple[Value, int]:
    """The sum over the lanes of each of up to 16 vectors, and a step: vectors[i]'s is in lane i · step of the result.

    Halves are added to halves (8, 4, 2, 1 lanes apart) while the vectors are merged two by two: the order of the
    additions of a sum does not depend on its place.
    """
    places = 1 << (len(vectors) - 1).bit_length()
    step = GROUP // places
    half = GROUP // 2
    while half:
        if places > 1:
            places //= 2
            pairs = [
                (x, vectors[i + places] if i + places < len(vectors) else x)
                for i, x in enumerate(vectors[:places])
            ]
        else:
            pairs = [(vectors[0], vectors[0])]
        vectors = [_merge(x, y, half) for x, y in pairs]
        half //= 2
    return vectors[0], step


def _merge(x: Value, y: Value, half: int) -> Value:
    """In groups of 2 · half lanes: x's halves added up in the lower lanes, y's in the upper ones."""
    upper = [bool(lane & half) for lane in range(GROUP)]
    # A blend, as x's lower halves and y's upper ones are where they belong, and one shuffle for the others.
    stay = x.shuffle([lane + GROUP * upper[lane] for lane in range(GROUP)], y)
    come = x.shuffle(
        [lane - half + GROUP if upper[lane] else lane + half for lane in range(GROUP)], y
    )
    return stay + come
