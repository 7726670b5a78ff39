"""The goldens that are stored in full (tests/goldens/*.npz), cut into sequences and heads for the model.

A file holds, as bits, the arrays that the digests are of (out, final_state, the workspace in the original's tile order)
and three that nothing stores but that follow from them: `sigmoid_bf16` [B*T, H] (beta after the sigmoid, as the
recurrence rounds it), and for cases with a weak gate `sigmoid_fp16` [B*T, H] (as prepare rounds it) and `k_inverse`
[H, tiles, 16, 128]. The chip's tanh and ex2 leave a few candidates for each; these are the ones that reproduce every
recorded bit: a row of 128 outputs for a sigmoid; k_restored, a column of Mqk and one of INV for a row of k_inverse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from recurrence import Record
from rounding import Float64, from_bf16_bits, from_fp32_bits

from flashkda.goldens.cases import CHUNK, HEAD_DIM, Case, case_named
from flashkda.goldens.inputs import make_inputs
from flashkda.manifest import Record as RecordLayout
from flashkda.manifest import RecordField

FOLDER = Path(__file__).parent.parent / "goldens"
NAMES = tuple(sorted(file.stem for file in FOLDER.glob("*.npz")))
_VALUES = {np.dtype(np.uint16): from_bf16_bits, np.dtype(np.uint32): from_fp32_bits}
WORKSPACE = ("k_decayed", "q_decayed", "k_restored", "g_total", "inv", "mqk")

#: The workspace record as the kernels lay it out (the manifest says the same of the compiled ones).
RECORD = RecordLayout(
    13600,
    (
        RecordField("k_decayed", 0, 4096, "bf16", (CHUNK, HEAD_DIM)),
        RecordField("q_decayed", 4096, 4096, "bf16", (CHUNK, HEAD_DIM)),
        RecordField("k_restored", 8192, 4096, "bf16", (CHUNK, HEAD_DIM)),
        RecordField("g_total", 12288, 512, "fp32", (HEAD_DIM,)),
        RecordField("inv", 12800, 384, "bf16", (3, 8, 8)),
        RecordField("mqk", 13184, 384, "bf16", (3, 8, 8)),
        RecordField("beta_sigmoid", 13568, 32, "bf16", (CHUNK,)),
    ),
)


@dataclass(frozen=True)
class Run:
    """One sequence and head: what goes in, and the bits that must come out."""

    record: Record
    v: Float64  # bf16 [T, 128]
    beta: Float64  # bf16 [T], after the sigmoid
    initial_state: Float64  # [128, 128]
    out: NDArray[np.uint16]  # [T, 128]
    final_state: NDArray[np.generic] | None  # [128, 128]


@dataclass(frozen=True)
class Tile:
    """One chunk and head of a case whose k_inverse is known."""

    k_decayed: Float64  # bf16 [16, 128]
    q_decayed: Float64  # bf16 [16, 128]
    k_inverse: Float64  # bf16 [16, 128]
    g_total: Float64  # fp32 [128]
    beta: Float64  # fp16 [16], after the sigmoid, 0 past the sequence's end
    length: int
    k_restored: NDArray[np.uint16]
    inv: NDArray[np.uint16]
    mqk: NDArray[np.uint16]


def load(name: str) -> tuple[Case, dict[str, NDArray[np.generic]]]:
    """A case and its stored arrays."""
    with np.load(FOLDER / f"{name}.npz") as archive:
        return case_named(name), {key: archive[key] for key in archive.files}


def runs(name: str) -> Iterator[Run]:
    """All sequences and heads of a case."""
    case, arrays = load(name)
    inputs = make_inputs(case)
    v = from_bf16_bits(inputs["v"].reshape(-1, case.H, HEAD_DIM))
    beta = from_bf16_bits(arrays["sigmoid_bf16"])
    out = arrays["out"].reshape(-1, case.H, HEAD_DIM)
    for number, (start, end), tiles in _tiles(case):
        for head in range(case.H):
            fields = {key: arrays[key][head, tiles] for key in WORKSPACE}
            values = {key: _VALUES[bits.dtype](bits) for key, bits in fields.items()}
            initial = np.zeros((HEAD_DIM, HEAD_DIM))
            if case.has_initial:
                stored = inputs["initial_state"][number, head]
                initial = stored.astype(np.float64) if case.state == "fp32" else from_bf16_bits(stored)
            final = arrays["final_state"][number, head] if case.has_final else None
            yield Run(Record(**values), v[start:end, head], beta[start:end, head], initial, out[start:end, head], final)


def tiles_with_known_k_inverse() -> Iterator[tuple[str, Tile]]:
    """Every chunk and head of every such case, with a label."""
    for name in NAMES:
        case, arrays = load(name)
        if "k_inverse" not in arrays:
            continue
        sigmoid = arrays["sigmoid_fp16"].view(np.float16).astype(np.float64)
        for _, (start, end), tiles in _tiles(case):
            for head in range(case.H):
                for tile in range(tiles.start, tiles.stop):
                    first = start + CHUNK * (tile - tiles.start)
                    length = min(CHUNK, end - first)
                    beta = np.zeros(CHUNK)
                    beta[:length] = sigmoid[first : first + length, head]
                    own = {key: arrays[key][head, tile] for key in (*WORKSPACE, "k_inverse")}
                    yield (
                        f"{name}[{head},{tile}]",
                        Tile(
                            k_decayed=from_bf16_bits(own["k_decayed"]),
                            q_decayed=from_bf16_bits(own["q_decayed"]),
                            k_inverse=from_bf16_bits(own["k_inverse"]),
                            g_total=from_fp32_bits(own["g_total"]),
                            beta=beta,
                            length=length,
                            k_restored=own["k_restored"],
                            inv=own["inv"],
                            mqk=own["mqk"],
                        ),
                    )


def _tiles(case: Case) -> Iterator[tuple[int, tuple[int, int], slice]]:
    first = 0
    for number, (start, end) in enumerate(case.sequences):
        count = -(-(end - start) // CHUNK)
        yield number, (start, end), slice(first, first + count)
        first += count
