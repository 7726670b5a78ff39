"""Machine code -> instructions -> the counts that bit identity rests on. Disassembles with nvdisasm from PyPI."""

import importlib.metadata
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError

NVDISASM = "nvidia-cuda-nvdisasm"

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.[A-Z0-9_]+)*)\s*([^;]*);")
_FP32 = {"FADD", "FMUL", "FFMA", "FADD2", "FMUL2", "FFMA2", "FADD32I", "FMUL32I", "FFMA32I"}
_HALF = {"HADD2", "HMUL2", "HFMA2", "HADD2_32I", "HMUL2_32I", "HFMA2_32I"}
_MATRIX = re.compile(r"[A-Z]?MMA|[A-Z]*GMMA|UTC[A-Z]*MMA")
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?(e[-+]?\d+)?|INF|QNAN|0x[0-9a-f]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction without its predicate.

    name: before the first dot; modifiers: the rest of the opcode; operands: destination first, without reuse flags and
    half selectors, a pair of fp16 immediates as one operand "x, y".
    """

    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def opcode(self) -> str:
        return ".".join((self.name, *self.modifiers))

    def __str__(self) -> str:
        return f"{self.opcode} {', '.join(self.operands)}"


def _operands(text: str) -> tuple[str, ...]:
    parts = [re.sub(r"\.(reuse|H[01]_H[01]|H[01])", "", part.strip()) for part in text.split(",")]
    merged: list[str] = []
    for part in parts:
        if merged and _NUMBER.fullmatch(part) and _NUMBER.fullmatch(merged[-1]):
            merged[-1] += f", {part}"
        else:
            merged.append(part)
    return tuple(part for part in merged if part)


def parse(listing: str) -> list[Instruction]:
    """Instructions of an nvdisasm listing, in order."""
    return [Instruction(m[1], tuple(m[2].split(".")[1:]), _operands(m[3])) for m in _INSTRUCTION.finditer(listing)]


def nvdisasm() -> Path:
    """Path of the disassembler. Raises BuildError if its package is not installed."""
    try:
        files = importlib.metadata.files(NVDISASM) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name in ("nvdisasm", "nvdisasm.exe"):
            return Path(str(file.locate()))
    raise BuildError(f"nvdisasm is not installed: pip install {NVDISASM} (it is in this package's `build` extra)")


def disassemble(cubin: bytes) -> list[Instruction]:
    """Instructions of a cubin. Raises BuildError if nvdisasm refuses it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(nvdisasm()), "-c", file.name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"nvdisasm ended with {done.returncode}: {done.stderr.strip()}")
    instructions = parse(done.stdout)
    if not instructions:
        raise BuildError("nvdisasm found no instruction in the cubin")
    return instructions


def _is_zero(operand: str) -> bool:
    return operand in ("RZ", "URZ", "-RZ", "-URZ")


def _is_minus_zero(operand: str) -> bool:
    return operand in ("-RZ", "-URZ")


def _is_one(operand: str) -> bool:
    return operand in ("1", "-1", "1, 1", "-1, -1")


def arithmetic(instruction: Instruction) -> str | None:
    """What an fp32, bf16x2 or fp16x2 instruction computes: add, mul, fma or move; None for any other instruction.

    ptxas writes an add or a mul as an FMA where that pipe is freer. x*1 + y and x*y + -0 round once, exactly as the add
    and the mul do; x*y + +0 does not count as one, since it turns -0 into +0.
    """
    name, operands = instruction.name.removesuffix("_32I").removesuffix("32I"), instruction.operands
    if instruction.name not in _FP32 | _HALF:
        return None
    if name.startswith(("FADD", "HADD")):
        # x + -0 is x itself, whatever x; x + +0 turns -0 into +0.
        return "move" if any(_is_minus_zero(operand) for operand in operands[1:]) else "add"
    if name.startswith(("FMUL", "HMUL")):
        return "mul"
    if len(operands) != 4:
        return "fma"
    _, a, b, c = operands
    if _is_zero(a) and _is_zero(b) and a != b:
        return "move"
    if _is_one(a) or _is_one(b):
        return "add"
    return "mul" if _is_minus_zero(c) else "fma"


def number_format(instruction: Instruction) -> str | None:
    """One of fp32, bf16, fp16 for arithmetic instructions, else None. HADD2.F32 converts fp16 to fp32 and is none."""
    if instruction.name in _FP32:
        return "fp32"
    if instruction.name in _HALF and "F32" not in instruction.modifiers:
        return "bf16" if any(m.startswith("BF16") for m in instruction.modifiers) else "fp16"
    return None


def is_matrix(instruction: Instruction) -> bool:
    """Whether it runs on the tensor cores."""
    return _MATRIX.fullmatch(instruction.name) is not None


#: The audited counts, in the order of the report.
MATRIX_OPCODES = ("HMMA.16816.F32.BF16", "HMMA.16816.F16")
MUFU_FUNCTIONS = ("EX2", "TANH", "RSQ")
AUDITED = (
    *MATRIX_OPCODES,
    "other matrix",
    *(f"MUFU.{function}" for function in MUFU_FUNCTIONS),
    "other MUFU",
    *(f"{form} {what}" for form in ("fp32", "bf16", "fp16") for what in ("add", "mul", "fma")),
    "fp32 to bf16",
    "fp32 to fp16",
    "MOVM",
    "local memory",
)


def _category(instruction: Instruction) -> str | None:
    name, modifiers = instruction.name, instruction.modifiers
    if is_matrix(instruction):
        return instruction.opcode if instruction.opcode in MATRIX_OPCODES else "other matrix"
    if name == "MUFU":
        return f"MUFU.{modifiers[0]}" if len(modifiers) == 1 and modifiers[0] in MUFU_FUNCTIONS else "other MUFU"
    if (form := number_format(instruction)) is not None:
        what = arithmetic(instruction)
        return None if what == "move" else f"{form} {what}"
    if name == "F2FP" and "F32" in modifiers:
        return "fp32 to bf16" if "BF16" in modifiers else "fp32 to fp16" if "F16" in modifiers else None
    if name in ("LDL", "STL"):
        return "local memory"
    return name if name == "MOVM" else None


def audited_counts(instructions: list[Instruction]) -> dict[str, int]:
    """How often each of AUDITED occurs."""
    found = Counter(_category(instruction) for instruction in instructions)
    return {name: found[name] for name in AUDITED}


def without_flush(instructions: list[Instruction]) -> list[Instruction]:
    """fp32 arithmetic that keeps denormals; the numeric contract flushes all of it."""
    return [
        i for i in instructions if number_format(i) == "fp32" and arithmetic(i) != "move" and "FTZ" not in i.modifiers
    ]


def contracted(instructions: list[Instruction]) -> list[Instruction]:
    """bf16 and fp16 FMAs with three real operands; the numeric contract rounds the mul and the add apart."""
    return [i for i in instructions if number_format(i) in ("bf16", "fp16") and arithmetic(i) == "fma"]


def wrongly_flushed(instructions: list[Instruction]) -> list[Instruction]:
    """bf16 and fp16 arithmetic that flushes; the numeric contract keeps subnormals there."""
    return [i for i in instructions if number_format(i) in ("bf16", "fp16") and "FTZ" in i.modifiers]


def not_nearest(instructions: list[Instruction]) -> list[Instruction]:
    """Arithmetic and conversions to 16 bits that round otherwise than to nearest even."""
    return [
        i
        for i in instructions
        if (number_format(i) is not None or (i.name == "F2FP" and "F32" in i.modifiers))
        and {"RZ", "RM", "RP", "RS"} & set(i.modifiers)
    ]
