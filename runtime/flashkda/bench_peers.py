"""Other implementations that join a benchmark when they can be imported: the original, and flash-linear-attention's.

A local build of the original may offer its two kernels one by one, as `flash_kda.kernels(q, k, v, ...)`: the arguments
of `flash_kda.fwd`, and a dictionary of "prepare" and "recurrence" to functions that launch that kernel alone.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashkda.errors import FlashKDAError

if TYPE_CHECKING:
    from flashkda.bench_inputs import Inputs

OURS = "flashkda"
ORIGINAL = "flash_kda"
FLA = "fla"
PEERS = (ORIGINAL, FLA)
#: Those that join without being asked for, where they can be imported; another one takes a minute to compile and tune.
USUAL_PEERS = (ORIGINAL,)


@dataclass(frozen=True, slots=True)
class Peer:
    """An implementation to compare with.

    exact: whether it promises our bits; prepare_calls: for some tensor sets, a function that runs call i on set i;
    prepare_kernels: the same for each kernel it offers alone, by "prepare" and "recurrence".
    """

    name: str
    version: str
    exact: bool
    prepare_calls: "Callable[[Sequence[Inputs]], Callable[[int], None]]"
    prepare_kernels: "Callable[[Sequence[Inputs]], dict[str, Callable[[int], None]]]"


@dataclass(frozen=True, slots=True)
class Absent:
    """A peer that does not take part, and why."""

    name: str
    reason: str


def find_peer(name: str) -> Peer | Absent:
    """The peer of one of the names in `PEERS`. Imports it; nothing it raises gets out."""
    if find_spec(name) is None:
        return Absent(name, "not installed")
    try:
        return {ORIGINAL: _original, FLA: _fla}[name]()
    except Exception as error:
        return Absent(name, f"cannot be imported: {type(error).__name__}: {error}")


def require_present(absent: Mapping[str, str]) -> None:
    """Raise `FlashKDAError` unless no peer is absent. absent: reasons by name."""
    if absent:
        raise FlashKDAError("; ".join(f"no peer {name}: {reason}" for name, reason in absent.items()))


def original_arguments(one: "Inputs") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the named arguments of `flash_kda.fwd`."""
    from flashkda.bench_inputs import LOWER_BOUND

    states = {"initial_state": one.initial_state, "final_state": one.final_state, "cu_seqlens": one.cu_seqlens}
    return (one.q, one.k, one.v, one.g, one.beta, one.scale, one.out, one.A_log, one.dt_bias, LOWER_BOUND), states


def _original() -> Peer | Absent:
    module = import_module(ORIGINAL)
    if module.fwd.__module__.partition(".")[0] == "flashkda":
        return Absent(ORIGINAL, "the flash_kda here is flashkda under another name")

    def calls(sets: "Sequence[Inputs]") -> Callable[[int], None]:
        arguments = [original_arguments(one) for one in sets]

        def run(index: int) -> None:
            positional, named = arguments[index]
            module.fwd(*positional, **named)

        return run

    def kernels(sets: "Sequence[Inputs]") -> dict[str, Callable[[int], None]]:
        if not hasattr(module, "kernels"):
            return {}
        offered = []
        for one in sets:
            positional, named = original_arguments(one)
            offered.append(module.kernels(*positional, **named))
        return {name: _by_index([each[name] for each in offered]) for name in ("prepare", "recurrence")}

    return Peer(ORIGINAL, _version(module, ORIGINAL), exact=True, prepare_calls=calls, prepare_kernels=kernels)


def _by_index(functions: Sequence[Callable[[], None]]) -> Callable[[int], None]:
    def run(index: int) -> None:
        functions[index]()

    return run


def _fla() -> Peer:
    # Else it hands the call on to flash_kda, and would be measured under another's name.
    os.environ["FLA_FLASH_KDA"] = "0"
    module = import_module("fla")
    chunk_kda = import_module("fla.ops.kda").chunk_kda

    def calls(sets: "Sequence[Inputs]") -> Callable[[int], None]:
        from flashkda.bench_inputs import LOWER_BOUND

        # Its states are fp32; in its own layout, for it need not transpose then.
        states = [one.initial_state.float() for one in sets]

        def run(index: int) -> None:
            one = sets[index]
            chunk_kda(
                q=one.q, k=one.k, v=one.v, g=one.g, beta=one.beta, scale=one.scale, initial_state=states[index],
                output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=LOWER_BOUND, A_log=one.A_log,
                dt_bias=one.dt_bias.flatten(), cu_seqlens=one.cu_seqlens,
            )  # fmt: skip

        return run

    version = _version(module, "flash-linear-attention")
    return Peer(FLA, version, exact=False, prepare_calls=calls, prepare_kernels=lambda sets: {})


def _version(module: ModuleType, distribution: str) -> str:
    # Not at the top: the command's options need this module's names, and this import takes longer than all the rest.
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return str(getattr(module, "__version__", "of unknown version"))
