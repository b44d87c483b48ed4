"""AMX for bytes: TDPBSSD, signed by signed (SDM vol. 2). Tiles and what is known about them are those of `amx`."""

from __future__ import annotations

from expertile.codegen import cpu
from expertile.codegen.isa.amx import Amx
from expertile.codegen.isa.bytes import ByteIsa


class AmxInt8(ByteIsa, Amx):
    name = "amx_int8"
    summary = "AMX tiles, TDPBSSD"
    product = "tdpbssd"

    def unavailable(self) -> str | None:
        if not cpu.host().has("amx-int8"):
            return "the CPU lacks amx-int8"
        return super().unavailable()


ISA = AmxInt8()
