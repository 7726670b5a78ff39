"""The one table of GPU architectures that cubins are built for."""

import re
from dataclasses import dataclass

from .errors import BuildError


@dataclass(frozen=True)
class Architecture:
    """name: exact compile target. least_driver: as cuDriverGetVersion reports it (12000 is CUDA 12.0)."""

    name: str
    compute_capabilities: tuple[str, ...]
    products: tuple[str, ...]
    least_driver: int

    @property
    def sm(self) -> int:
        """SM version as the ELF header spells it: 90, 100, 103."""
        return int(self.name.removeprefix("sm_").rstrip("af"))


# The suffix `a` ties a cubin to one compute capability. The family target sm_100f would serve 10.0 and 10.3 with one
# file, but being allowed to load is no proof that it runs there, so each chip gets its own.
# least_driver: ptxas 12.9 output needs a 12.x driver (R525); the Blackwell chips themselves need R570 (12.8) and
# R575 (12.9).
ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("sm_90a", ("9.0",), ("h100", "h200", "gh200"), 12000),
    Architecture("sm_100a", ("10.0",), ("b200", "gb200"), 12080),
    Architecture("sm_103a", ("10.3",), ("b300", "gb300"), 12090),
)


def parse_architecture(text: str) -> Architecture:
    """The architecture meant by `sm_100a`, `sm_100`, `100a`, `100`, `10.0` or a product name such as `b200`.

    Case is ignored. Raises BuildError for anything that is not in ARCHITECTURES.
    """
    wanted = text.strip().lower()
    number = re.fullmatch(r"(?:sm_?)?(\d+)a?", wanted)
    for arch in ARCHITECTURES:
        if wanted in arch.products or wanted in arch.compute_capabilities or (number and int(number[1]) == arch.sm):
            return arch
    known = "; ".join(f"{a.name} ({', '.join(a.products)})" for a in ARCHITECTURES)
    raise BuildError(
        f"architecture {text!r} is not one that can be built. Known: {known}. A new one needs a row in ARCHITECTURES."
    )


def parse_architectures(texts: tuple[str, ...]) -> tuple[Architecture, ...]:
    """The architectures meant, in the table's order and without repeats; all of them for an empty tuple."""
    if not texts:
        return ARCHITECTURES
    wanted = {parse_architecture(text) for text in texts}
    return tuple(arch for arch in ARCHITECTURES if arch in wanted)
