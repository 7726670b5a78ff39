"""The golden cases: shapes, values and edges, each of which guards some step of the numeric contract."""

from dataclasses import dataclass, field, replace
from typing import Literal

CHUNK = 16
HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class Values:
    """How a tensor is filled; `a`, `b` are the kind's parameters.

    normal: a * n, n ~ (0, 1) | uniform: [a, b) | const: a | sign: +-a | row_sign: +-a, one sign a row |
    affine: a + b * n | zero_rows: a * n with every b-th row zero | row_scale: cycle[row % len] * n.
    A row is one (token, head).
    """

    kind: Literal["normal", "uniform", "const", "sign", "row_sign", "affine", "zero_rows", "row_scale"]
    a: float = 0.0
    b: float = 0.0
    cycle: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Poison:
    """One bf16 element of q, k, v, g or beta replaced by a NaN or Inf (`bits`) at [b, t, h(, d)]."""

    tensor: str
    index: tuple[int, ...]
    bits: int


@dataclass(frozen=True, slots=True)
class Region:
    """Flattened out rows [start, end) of one head, and the sequence's slot in final_state."""

    sequence: int
    head: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Case:
    """One call. Sizes as in `flashkda.fwd`; `state` is the dtype of the states, "none" where there is neither."""

    name: str
    seed: int
    T: int
    H: int = 2
    B: int = 1
    cu_seqlens: tuple[int, ...] | None = None
    state: Literal["none", "bf16", "fp32"] = "none"
    has_initial: bool = False
    has_final: bool = False
    lower_bound: float = -5.0
    scale: float = HEAD_DIM**-0.5
    q: Values = Values("normal", 1.0)
    k: Values = Values("normal", 1.0)
    v: Values = Values("normal", 1.0)
    g: Values = Values("normal", 1.0)
    beta: Values = Values("normal", 1.0)
    A_log: Values = Values("uniform", 0.0, 1.0)
    dt_bias: Values = Values("uniform", 0.0, 1.0)
    initial_state: Values = Values("normal", 0.5)
    poison: Poison | None = field(default=None)

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """[start, end) of every sequence among the B*T flattened tokens."""
        if self.cu_seqlens is not None:
            return tuple(zip(self.cu_seqlens[:-1], self.cu_seqlens[1:], strict=True))
        return tuple((b * self.T, (b + 1) * self.T) for b in range(self.B))

    def without_poison(self) -> "Case":
        """The same call on clean inputs."""
        return replace(self, name=f"{self.name}_clean", poison=None)

    def may_differ_from_clean(self) -> Region | None:
        """The only results that a poisoned case may change: those of the poison's own sequence and head.

        A poison in q reaches its own token only and no state (then `sequence` is -1).
        """
        if self.poison is None:
            return None
        batch, token, head = self.poison.index[:3]
        row = batch * self.T + token
        for number, (start, end) in enumerate(self.sequences):
            if start <= row < end:
                if self.poison.tensor == "q":
                    return Region(-1, head, row, row + 1)
                return Region(number, head, start, end)
        return None


def _bf16(name: str, seed: int, T: int, **more: object) -> Case:
    return Case(name, seed, T, state="bf16", has_initial=True, has_final=True, **more)  # type: ignore[arg-type]


def _fp32(name: str, seed: int, T: int, **more: object) -> Case:
    return Case(name, seed, T, state="fp32", has_initial=True, has_final=True, **more)  # type: ignore[arg-type]


def _poisoned(name: str, tensor: str, index: tuple[int, ...], bits: int) -> Case:
    # Sequence 0 has 20 tokens: its last tile covers tokens 16..31, so it overlaps sequence 1's tokens 20..31.
    return _bf16(name, 160, 50, cu_seqlens=(0, 20, 50), poison=Poison(tensor, index, bits))


_NAN, _PLUS_INF, _MINUS_INF = 0x7FC0, 0x7F80, 0xFF80
_RAGGED = (0, 15, 31, 48)
_EMPTY_FIRST = (0, 0, 5, 38)

CASES: tuple[Case, ...] = (
    # Fixed length, one sequence.
    Case("t1_h1", 101, 1, H=1),
    Case("t16_h1_so", 102, 16, H=1, state="bf16", has_final=True),
    _bf16("t16_h2_bf", 103, 16),
    _bf16("t17_h1_bf", 104, 17, H=1),
    Case("t64_h3_none", 105, 64, H=3),
    _fp32("t95_h6_fp", 106, 95, H=6),
    Case("t100_h2_si_bf", 107, 100, state="bf16", has_initial=True),
    Case("t100_h2_si_fp", 108, 100, state="fp32", has_initial=True),
    Case("t100_h2_so_fp", 109, 100, state="fp32", has_final=True),
    _bf16("t512_h2_bf", 110, 512),
    _fp32("t2000_h1_fp", 111, 2000, H=1),
    # Fixed length, several sequences.
    _bf16("b3_t32_h2_bf", 120, 32, B=3),
    _fp32("b2_t37_h3_fp", 121, 37, B=2, H=3),
    _bf16("b4_t5_h1_bf", 122, 5, B=4, H=1),
    # Packed.
    _bf16("vl_1", 130, 1, cu_seqlens=(0, 1)),
    _bf16("vl_15_16_17", 131, 48, H=3, cu_seqlens=_RAGGED),
    Case("vl_15_16_17_none", 131, 48, H=3, cu_seqlens=_RAGGED),
    _bf16("vl_0_5_33", 132, 38, cu_seqlens=_EMPTY_FIRST),
    _fp32("vl_0_5_33_fp", 132, 38, cu_seqlens=_EMPTY_FIRST),
    Case("vl_0_5_33_so", 132, 38, cu_seqlens=_EMPTY_FIRST, state="bf16", has_final=True),
    _fp32("vl_33_0_0", 133, 33, H=1, cu_seqlens=(0, 33, 33, 33)),
    _bf16("vl_gap", 134, 60, cu_seqlens=(3, 20, 41)),
    _fp32("vl_many", 135, 130, H=1, cu_seqlens=(0, 1, 2, 5, 21, 22, 54, 54, 70, 101, 130)),
    Case("vl_si_bf", 136, 48, cu_seqlens=_RAGGED, state="bf16", has_initial=True),
    Case("vl_si_fp", 137, 48, cu_seqlens=_RAGGED, state="fp32", has_initial=True),
    Case("vl_so_fp", 138, 48, cu_seqlens=_RAGGED, state="fp32", has_final=True),
    _bf16("vl_big", 139, 8192, cu_seqlens=(0, 1300, 1847, 3895, 4858, 5129, 8192)),
    # Gate range.
    _bf16("lb_m1", 140, 70, lower_bound=-1.0),
    _bf16("lb_m01", 141, 70, lower_bound=-0.1),
    _bf16("lb_0", 142, 40, H=1, lower_bound=0.0),
    _bf16("g_p8", 143, 70, g=Values("const", 8.0)),
    _bf16("g_m8", 144, 70, g=Values("const", -8.0)),
    _bf16("g_pm30", 145, 70, g=Values("sign", 30.0)),
    _fp32("g_p30_all", 146, 70, g=Values("const", 30.0)),
    _bf16(
        "g_n8_Alog", 147, 70, g=Values("normal", 8.0), A_log=Values("uniform", -3.0, 3.0),
        dt_bias=Values("uniform", -8.0, 8.0),
    ),
    # Magnitudes.
    _bf16("k_zero_rows", 150, 70, k=Values("zero_rows", 1.0, 3), q=Values("zero_rows", 1.0, 5)),
    _bf16(
        "k_scales", 151, 70, k=Values("row_scale", cycle=(1e-20, 1e-4, 1.0, 1e4, 1e15)),
        q=Values("row_scale", cycle=(1.0, 1e-3, 1e3, 1e-22, 1e17)),
    ),
    # The sum of squares overflows.
    _bf16("k_overflow", 152, 40, H=1, k=Values("row_scale", cycle=(1.0, 3e19, 1e30))),
    _bf16("beta_pm20", 153, 70, beta=Values("sign", 20.0)),
    _bf16("beta_p20", 154, 70, beta=Values("const", 20.0), k=Values("const", 1.0)),
    # Strong coupling inside a chunk: the Neumann powers L^2, L^4, L^8 all matter.
    _bf16("same_k", 170, 70, k=Values("const", 1.0), beta=Values("const", 20.0), lower_bound=-0.01),
    _fp32(
        "near_same_k", 171, 70, H=3, k=Values("affine", 1.0, 0.3), beta=Values("affine", 3.0, 1.0), lower_bound=-0.05
    ),
    _bf16("signed_k", 172, 70, k=Values("row_sign", 1.0), beta=Values("affine", 2.0, 2.0), lower_bound=-0.02),
    _bf16(
        "same_k_vl", 173, 100, cu_seqlens=(0, 21, 100), k=Values("affine", 1.0, 0.1), beta=Values("const", 8.0),
        lower_bound=-0.001,
    ),
    Case("t4096_h2_ws", 174, 4096, state="bf16", has_final=True),
    _fp32("v_big", 155, 70, v=Values("normal", 1e4), initial_state=Values("normal", 100.0)),
    _bf16("scale1", 156, 40, scale=1.0),
    _bf16("scale_03", 157, 40, scale=0.3),
    # bf16 subnormals.
    _fp32("s0_tiny", 158, 40, H=1, initial_state=Values("normal", 1e-39), v=Values("normal", 1e-38)),
    # NaN or Inf in one token.
    _poisoned("nan_q", "q", (0, 24, 0, 7), _NAN),
    _poisoned("nan_v_in_tail", "v", (0, 24, 0, 7), _NAN),
    _poisoned("nan_v_late", "v", (0, 40, 0, 7), _NAN),
    _poisoned("inf_v_in_tail", "v", (0, 24, 1, 9), _PLUS_INF),
    _poisoned("inf_q", "q", (0, 24, 1, 9), _MINUS_INF),
    _poisoned("nan_k_in_tail", "k", (0, 24, 0, 7), _NAN),
    _poisoned("nan_g_in_tail", "g", (0, 24, 0, 7), _NAN),
    _poisoned("nan_beta_in_tail", "beta", (0, 24, 0), _NAN),
    _poisoned("nan_beta_nexthead", "beta", (0, 3, 1), _NAN),
    _poisoned("nan_beta_nexthead0", "beta", (0, 1, 1), _NAN),
    _bf16("nan_v_batch", 161, 20, B=2, poison=Poison("v", (1, 2, 0, 7), _NAN)),
)  # fmt: skip


def case_named(name: str) -> Case:
    """The golden case of that name. Raises KeyError."""
    return {case.name: case for case in CASES}[name]
