import pytest

from flashkda_build.sass import arithmetic, audited_counts, contracted, number_format, parse, without_flush


def one(text):
    (instruction,) = parse(f"        /*0170*/                   {text} ;")
    return instruction


@pytest.mark.parametrize(
    ("text", "form", "what"),
    [
        ("FADD.FTZ R7, R0, R7", "fp32", "add"),
        ("FADD R7, -RZ, -UR5", "fp32", "move"),
        ("FADD.FTZ R7, RZ, R7", "fp32", "add"),
        ("@!P0 FMUL.FTZ.D2 R7, R0.reuse, 1.4426950216293335", "fp32", "mul"),
        ("FFMA.FTZ R7, R0, R7, R8", "fp32", "fma"),
        ("FFMA.FTZ R7, R0, 1, R8", "fp32", "add"),
        ("FFMA.FTZ R7, R0, R1, -RZ", "fp32", "mul"),
        ("FFMA.FTZ R7, R0, R1, RZ", "fp32", "fma"),
        ("FFMA2.FTZ R8, R0, R2, R4", "fp32", "fma"),
        ("HADD2.BF16_V2 R13, R0, -R13", "bf16", "add"),
        ("HMUL2.BF16_V2 R11, R6, R11", "bf16", "mul"),
        ("HFMA2.MMA.BF16_V2 R9, R6, 1, 1, R9", "bf16", "add"),
        ("HFMA2.BF16_V2 R9, R6, -1, -1, R9", "bf16", "add"),
        ("HFMA2.BF16_V2 R0, R0.H0_H0, R15, -RZ", "bf16", "mul"),
        ("HFMA2.BF16_V2 R0, R0, 0.5, 0.5, -RZ", "bf16", "mul"),
        ("HFMA2.BF16_V2 R0, R0, 0.5, 0.5, R1", "bf16", "fma"),
        ("HFMA2.BF16_V2 R11, R0, R11, R6", "bf16", "fma"),
        ("HFMA2.BF16_V2 R11, R0, R11, RZ", "bf16", "fma"),
        ("HFMA2.BF16_V2 R7, -RZ.H0_H0, RZ.H0_H0, -R0", "bf16", "move"),
        ("HFMA2.MMA R7, -RZ, RZ, 1.875, 0", "fp16", "move"),
        ("HFMA2.BF16_V2 R7, RZ, RZ, R0", "bf16", "fma"),
        ("HFMA2 R7, R0, R1, R2", "fp16", "fma"),
        ("HADD2.F32 R7, -RZ, R0.H1_H1", None, "move"),
        ("IMAD R7, R0, R1, R2", None, None),
    ],
)
def test_arithmetic_is_known_by_its_operands(text, form, what):
    assert number_format(one(text)) == form
    assert arithmetic(one(text)) == what


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("HMMA.16816.F32.BF16 R4, R8.reuse, R12, R4", "HMMA.16816.F32.BF16"),
        ("HMMA.16816.F16 R4, R8, R12, RZ", "HMMA.16816.F16"),
        ("HMMA.1688.F32.BF16 R4, R8, R12, RZ", "other matrix"),
        ("HGMMA.64x64x16.F32 R24, gdesc[UR4], RZ", "other matrix"),
        ("MUFU.EX2 R4, R4", "MUFU.EX2"),
        ("MUFU.EX2.F16 R4, R4", "other MUFU"),
        ("MUFU.RCP R4, R4", "other MUFU"),
        ("F2FP.BF16.F32.PACK_AB R5, R7, R6", "fp32 to bf16"),
        ("F2FP.F16.F32.PACK_AB R5, R7, R6", "fp32 to fp16"),
        ("MOVM.16.MT88 R5, R7", "MOVM"),
        ("STL [R1], R7", "local memory"),
    ],
)
def test_each_audited_instruction_is_counted_once(text, name):
    counts = audited_counts([one(text)])
    assert {key: count for key, count in counts.items() if count} == {name: 1}


def test_packed_blackwell_arithmetic_needs_the_flush_too():
    assert without_flush([one("FADD2 R4, R4, R6"), one("FADD2.FTZ R4, R4, R6")]) == [one("FADD2 R4, R4, R6")]


def test_a_sign_flip_needs_no_flush_but_an_add_of_zero_does():
    assert without_flush([one("FADD R7, -RZ, -UR5"), one("FADD R7, RZ, R5")]) == [one("FADD R7, RZ, R5")]


def test_fp32_multiply_adds_are_no_contraction():
    assert contracted([one("FFMA.FTZ R7, R0, R7, R8")]) == []
