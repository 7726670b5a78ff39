"""What one compiled kernel is: the variant table's row, and how a package of kernels is loaded."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import BuildError

#: parameter type -> bytes
PARAMETER_SIZES = {"pointer": 8, "i64": 8, "i32": 4, "f32": 4}
RECORD_ORDERS = ("a", "b")


@dataclass(frozen=True)
class KernelSpec:
    """One variant.

    kernel: "prepare" or "recurrence". bv: value columns a CTA, None where there is no choice. numerics: the named set
    of roundings. record_order: the order of the record's fields that it writes or reads: mma fragments of operand "a"
    or "b" (DESIGN.md, section 2). threads: a CTA. units_per_cta: tiles of one head a CTA of prepare (1 for the
    recurrence). dynamic_shared_memory: bytes a CTA. min_ctas_per_sm: the occupancy that the design counts on.
    parameters: (name, type) in launch order, type one of PARAMETER_SIZES.
    options: of cute.compile, beyond toolchain.OPTIONS: architecture, or "*" for every other one -> options.
    module: has `trace(spec) -> (host function under @cute.jit, example arguments for cute.compile)`.
    """

    kernel: str
    bv: int | None
    numerics: str
    record_order: str
    threads: int
    units_per_cta: int
    dynamic_shared_memory: int
    min_ctas_per_sm: int
    parameters: tuple[tuple[str, str], ...]
    module: str
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [f"{name}: {kind}" for name, kind in self.parameters if kind not in PARAMETER_SIZES]
        if unknown:
            raise BuildError(f"{self.label}: parameter types {unknown} are not among {sorted(PARAMETER_SIZES)}")
        if self.record_order not in RECORD_ORDERS:
            raise BuildError(f"{self.label}: record order {self.record_order!r} is not one of {RECORD_ORDERS}")

    @property
    def label(self) -> str:
        """e.g. `prepare.flashkda.a`, `recurrence.flashkda.bv32`"""
        variant = f".{self.record_order}" if self.kernel == "prepare" else "" if self.bv is None else f".bv{self.bv}"
        return f"{self.kernel}.{self.numerics}{variant}"

    def options_for(self, arch: str) -> tuple[str, ...]:
        """This variant's own options of cute.compile for the exact target `arch`."""
        return self.options.get(arch, self.options.get("*", ()))

    def file_name(self, arch: str) -> str:
        """File name of the cubin for the exact target `arch`."""
        return f"{self.label}.{arch}.cubin"


def load_kernels(package: str) -> tuple[KernelSpec, ...]:
    """`package`.KERNELS. The package must be importable without the DSL. Raises BuildError if two rows share a name."""
    kernels: tuple[KernelSpec, ...] = importlib.import_module(package).KERNELS
    labels = [spec.label for spec in kernels]
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    if repeated:
        raise BuildError(
            f"{package}.KERNELS names {', '.join(repeated)} twice; kernel, numerics, bv or (of prepare) record_order "
            "must differ"
        )
    return kernels
