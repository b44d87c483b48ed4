"""Operand layouts: how a tile machine wants its B operand (the tokens), and how its C tiles lie when stored.

The unit is a **chunk**: 32 consecutive k of up to 16 tokens (a **group**).  With two bf16 in a 32-bit word it is a
matrix of 16 words by w tokens, 64·w bytes, and the two layouts are each other's transpose:

    PairLayout   word p of all tokens, then word p+1 …    the B tile of AMX (VNNI): row p = pair (2p, 2p+1)
    RowLayout    all 16 words of token 0, then token 1 …  one 64-byte vector a token, for vector dot products

Four int8 in a word make the same of 64 k.  The C of 16 features by w tokens follows suit: feature-major `[16][w]` or
token-major `[w][16]`, fp32 or int32, 64·w bytes.
A group is its chunks one after another; a token block of m tokens is its groups one after another (16, 16, …, rest),
so it takes 64·m bytes a chunk in either layout.  No kernel template knows which layout it works with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from expertile.codegen.ir import Builder, Value, f32, i16, i32, i64, vec

GROUP = 16
"""Tokens in a group, and rows (features) in a tile."""
CHUNK = 32
"""k in a chunk."""


def chunks_of(k: int) -> int:
    """Chunks that hold k elements."""
    return -(-k // CHUNK)


def groups_of(tokens: int) -> list[int]:
    """Sizes of the groups of a block of `tokens` tokens."""
    full, rest = divmod(tokens, GROUP)
    return [GROUP] * full + ([rest] if rest else [])


def round_to_bf16(b: Builder, x: Value) -> Value:
    """fp32 vector → the bf16 bits in the low half of each i32 lane: to nearest even, NaN stays NaN.

    In integer arithmetic, because the instruction for it flushes denormals and exists on few CPUs: this way all ISAs
    agree to the bit.
    """
    bits = x.bitcast(vec(i32, x.lanes))
    odd = (bits >> 16) & 1
    rounded = (bits + odd + 0x7FFF) >> 16
    quiet = (bits >> 16) | 0x40
    return b.select(x.is_nan(), quiet, rounded)


def transpose(b: Builder, rows: Sequence[Value]) -> list[Value]:
    """16 vectors of 16 lanes, transposed in registers: four rounds of exchanging blocks of 8, 4, 2 and 1."""
    rows = list(rows)
    for step in (8, 4, 2, 1):
        for i in (i for i in range(GROUP) if not i & step):
            upper, lower = rows[i], rows[i + step]
            keep = [lane if not lane & step else lane - step + GROUP for lane in range(GROUP)]
            swap = [lane + step if not lane & step else lane + GROUP for lane in range(GROUP)]
            rows[i], rows[i + step] = upper.shuffle(keep, lower), upper.shuffle(swap, lower)
    return rows


@dataclass(frozen=True)
class Column(ABC):
    """Tokens of a group, whose words take turns in vectors of 16: read as bf16, and written as half as many of int8.

    A step is 16 words of the latter. What it writes was read in that step or before, so that it can be done in place.
    """

    group: Value
    tokens: Value
    """Of the whole group."""

    @abstractmethod
    def steps(self, chunks: int) -> int:
        """How many there are in so many chunks of int8."""

    @abstractmethod
    def read(self, step: Value) -> tuple[Value, Value]:
        """The even and the odd words of a step."""

    @abstractmethod
    def write(self, step: Value, words: Value) -> None:
        """What becomes of them."""

    @abstractmethod
    def written(self, step: Value) -> Value:
        """What a step wrote."""

    @abstractmethod
    def over_lanes(self, what: str, lanes: Value) -> Value:
        """The "add" or the "smax" (LLVM's names) of the lanes (i32) of each token, in all of them."""

    @abstractmethod
    def keep(self, chunk: int, number: int, values: Value) -> None:
        """Write word `number` of a chunk of each token, from any of its lanes."""


class OperandLayout(ABC):
    """One way of laying out chunks and stored C tiles."""

    token_bytes: ClassVar[int]
    """From a token to the next, in a chunk and in a stored C alike."""

    @abstractmethod
    def pack(
        self,
        b: Builder,
        tokens: Value,
        row: Callable[[Value], Any],
        chunks: Sequence[tuple[int, int]],
        read: Callable[[Any, Value, int], Value],
        group: Value,
    ) -> None:
        """Gather `tokens` (1…16, i64) tokens into `group`.

        `row(t)` is what there is to know about token t, such as its address; it may be asked again for the last one.
        `read(row, chunk, part)` are a token's 16 words of a chunk, where `part` is the index of the range in `chunks`
        (first, end) the chunk comes from: full chunks and the masked tail differ.
        """

    @abstractmethod
    def flat_features(self, tokens: int) -> list[int]:
        """The feature (0…15) of each element of a stored C of `tokens` tokens, in memory order."""

    @abstractmethod
    def pack_features(
        self, b: Builder, c: Value, tokens: int, group: Value, feature: Value
    ) -> None:
        """Round the stored C at `c` to bf16 and write it as the k's `feature`…`feature`+15 of `group`."""

    @abstractmethod
    def each_token(
        self, b: Builder, c: Value, tokens: int, use: Callable[[Value, Value], None]
    ) -> None:
        """Call `use(token, vector)` for the stored C at `c`: an i64 and the fp32 vector of the token's 16 features."""

    @abstractmethod
    def word(self, chunk: Value, tokens: Value | int, token: Value | int, number: int) -> Value:
        """Where word `number` of a token is in a chunk of a group of `tokens`."""

    @abstractmethod
    def spread(self, b: Builder, chunk: Value, tokens: int, number: int, element: int) -> Value:
        """Word `number` (i32) of the tokens that elements `element`…`element`+15 of a stored C belong to."""

    @abstractmethod
    def each_column(
        self, b: Builder, tokens: Value, group: Value, use: Callable[[Column], None]
    ) -> None:
        """Call `use` for all columns of a group of `tokens` tokens; it may be emitted for several kinds of them."""

    def half_chunk(self, group: Value, feature: Value, tokens: int, second_half: int) -> Value:
        """Where in `group` the 16 features from `feature` (a multiple of 16) begin."""
        return group.at((feature >> 5) * (64 * tokens) + ((feature >> 4) & 1) * second_half)


class RowLayout(OperandLayout):
    """Token-major: the operand of a vector dot product."""

    token_bytes = 64

    def pack(
        self,
        b: Builder,
        tokens: Value,
        row: Callable[[Value], Any],
        chunks: Sequence[tuple[int, int]],
        read: Callable[[Any, Value, int], Value],
        group: Value,
    ) -> None:
        with b.loop(0, tokens) as token:
            source, into = row(token), group.at(token * 64)
            for part, (first, end) in enumerate(chunks):
                with b.loop(first, end) as chunk:
                    into.at(chunk * tokens * 64).store(read(source, chunk, part))

    def flat_features(self, tokens: int) -> list[int]:
        return list(range(GROUP)) * tokens

    def pack_features(
        self, b: Builder, c: Value, tokens: int, group: Value, feature: Value
    ) -> None:
        into = self.half_chunk(group, feature, tokens, 32)

        def store(token: Value, vector: Value) -> None:
            into.at(token * 64).store(round_to_bf16(b, vector).to(vec(i16, GROUP)))

        self.each_token(b, c, tokens, store)

    def each_token(
        self, b: Builder, c: Value, tokens: int, use: Callable[[Value, Value], None]
    ) -> None:
        with b.loop(0, tokens) as token:
            use(token, c.at(token * 64).load(vec(f32, GROUP)))

    def word(self, chunk: Value, tokens: Value | int, token: Value | int, number: int) -> Value:
        return chunk.at(token * 64).at(4 * number)

    def spread(self, b: Builder, chunk: Value, tokens: int, number: int, element: int) -> Value:
        return b.splat(self.word(chunk, tokens, element // GROUP, number).load(i32), GROUP)

    def each_column(
        self, b: Builder, tokens: Value, group: Value, use: Callable[[Column], None]
    ) -> None:
        with b.loop(0, tokens) as token:
            use(_TokenColumn(group.at(token * 64), tokens))


@dataclass(frozen=True)
class _TokenColumn(Column):
    """A single token, 16 of its words a chunk; `group` is where its first word is."""

    def steps(self, chunks: int) -> int:
        return chunks

    def read(self, step: Value) -> tuple[Value, Value]:
        first, second = (self._chunk(step * 2 + i).load(vec(i32, GROUP)) for i in range(2))
        even, odd = (first.shuffle(range(i, 2 * GROUP, 2), second) for i in range(2))
        return even, odd

    def write(self, step: Value, words: Value) -> None:
        self._chunk(step).store(words)

    def written(self, step: Value) -> Value:
        return self._chunk(step).load(vec(i32, GROUP))

    def over_lanes(self, what: str, lanes: Value) -> Value:
        b = lanes.b
        return b.splat(b.call(f"llvm.vector.reduce.{what}.v16i32", i32, [lanes]), GROUP)

    def keep(self, chunk: int, number: int, values: Value) -> None:
        self._chunk(chunk).at(4 * number).store(values.extract(0))

    def _chunk(self, chunk: Value | int) -> Value:
        return self.group.at(self.tokens * 64 * chunk)


class PairLayout(OperandLayout):
    """Feature-major, k in pairs: the operand of AMX (SDM vol. 2, TDPBF16PS)."""

    token_bytes = 4

    def pack(
        self,
        b: Builder,
        tokens: Value,
        row: Callable[[Value], Any],
        chunks: Sequence[tuple[int, int]],
        read: Callable[[Any, Value, int], Value],
        group: Value,
    ) -> None:
        # The words of one token are a B column; for a single token that is the row as it is.
        with b.if_else(tokens.eq(1)) as (alone, several):
            with alone:
                source = row(b.const(tokens.type, 0))
                for part, (first, end) in enumerate(chunks):
                    with b.loop(first, end) as chunk:
                        group.at(chunk * 64).store(read(source, chunk, part))
            with several:
                last = tokens - 1
                sources = [row(b.min(b.const(tokens.type, token), last)) for token in range(GROUP)]
                lanes = b.mask(tokens, GROUP)
                for part, (first, end) in enumerate(chunks):
                    with b.loop(first, end) as chunk:
                        words = transpose(b, [read(source, chunk, part) for source in sources])
                        into = group.at(chunk * tokens * 64)
                        for pair, columns in enumerate(words):
                            into.at(tokens * (4 * pair)).store_masked(columns, lanes)

    def flat_features(self, tokens: int) -> list[int]:
        return [feature for feature in range(GROUP) for _ in range(tokens)]

    def _feature_rows(self, c: Value, tokens: int) -> list[Value]:
        # Lanes from `tokens` on hold the next rows' values: never stored, and scratch is padded for the last row.
        return [c.at(4 * tokens * feature).load(vec(f32, GROUP)) for feature in range(GROUP)]

    def pack_features(
        self, b: Builder, c: Value, tokens: int, group: Value, feature: Value
    ) -> None:
        into = self.half_chunk(group, feature, tokens, 32 * tokens)
        if tokens == 1:
            into.store(round_to_bf16(b, c.load(vec(f32, GROUP))).to(vec(i16, GROUP)))
            return
        rows = [round_to_bf16(b, row) for row in self._feature_rows(c, tokens)]
        for pair in range(GROUP // 2):
            words = rows[2 * pair] | (rows[2 * pair + 1] << 16)
            into.at(4 * tokens * pair).store_masked(words, tokens)

    def each_token(
        self, b: Builder, c: Value, tokens: int, use: Callable[[Value, Value], None]
    ) -> None:
        if tokens == 1:
            use(b.const(i64, 0), c.load(vec(f32, GROUP)))
            return
        for token, vector in enumerate(transpose(b, self._feature_rows(c, tokens))[:tokens]):
            use(b.const(i64, token), vector)

    def word(self, chunk: Value, tokens: Value | int, token: Value | int, number: int) -> Value:
        return chunk.at(tokens * (4 * number)).at(token * 4)

    def spread(self, b: Builder, chunk: Value, tokens: int, number: int, element: int) -> Value:
        words = self.word(chunk, tokens, 0, number).load_masked(vec(i32, GROUP), tokens)
        return words.shuffle([(element + lane) % tokens for lane in range(GROUP)])

    def each_column(
        self, b: Builder, tokens: Value, group: Value, use: Callable[[Column], None]
    ) -> None:
        with b.if_else(tokens.eq(1)) as (alone, several):
            with alone:
                use(_TokenColumn(group, tokens))
            with several:
                use(_LaneColumn(group, tokens, b.mask(tokens, GROUP)))


@dataclass(frozen=True)
class _LaneColumn(Column):
    """All tokens of a group, each in a lane."""

    lanes: Value

    def steps(self, chunks: int) -> int:
        return GROUP * chunks

    def read(self, step: Value) -> tuple[Value, Value]:
        even, odd = (
            self._words(step * 2 + i).load_masked(vec(i32, GROUP), self.lanes) for i in range(2)
        )
        return even, odd

    def write(self, step: Value, words: Value) -> None:
        self._words(step).store_masked(words, self.lanes)

    def written(self, step: Value) -> Value:
        return self._words(step).load_masked(vec(i32, GROUP), self.lanes)

    def over_lanes(self, what: str, lanes: Value) -> Value:
        return lanes

    def keep(self, chunk: int, number: int, values: Value) -> None:
        self._words(GROUP * chunk + number).store_masked(values, self.lanes)

    def _words(self, number: Value | int) -> Value:
        return self.group.at(self.tokens * 4 * number)
