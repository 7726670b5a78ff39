"""The goldens on this machine's GPU: bits where the recording applies, consistency and accuracy anywhere."""

import time
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from flashkda.errors import FlashKDAError
from flashkda.manifest import Record

if TYPE_CHECKING:
    import torch

#: The recording is of this compute capability; whether another's tensor cores and function tables agree is unknown.
RECORDED_ON = "9.0"
_ERROR_FACTOR = 2.0
_ERROR_FLOOR = 0.01


@dataclass(slots=True)
class Outcome:
    """One case: what failed (empty if nothing), and the relative errors against float64 where taken."""

    name: str
    failures: list[str] = field(default_factory=list)
    rel_out: float | None = None
    rel_final_state: float | None = None


def run(device: int = 0, *, json: bool = False) -> int:
    """Run every golden with every compiled BV and the automatic choice; print a table, or one JSON object.

    device: index among the visible CUDA devices. Returns the exit code: 0 if everything passed, else 1.
    Raises `FlashKDAError` where the test cannot run (no torch or numpy, no device, no artifact for it).
    """
    for module in ("numpy", "torch"):
        if find_spec(module) is None:
            raise FlashKDAError(f"the self-test needs {module}, which is not installed; pip install {module}")
    import torch

    from flashkda.kernels import device_kernels

    kernels = device_kernels(device)
    exact = kernels.facts.compute_capability == RECORDED_ON
    variants = tuple(kernels.variants.recurrence)
    started = time.perf_counter()
    outcomes = run_cases(torch.device("cuda", device), kernels.manifest.contract.record, variants, exact)
    seconds = time.perf_counter() - started
    failed = [outcome.name for outcome in outcomes if outcome.failures]

    if json:
        from json import dumps

        report = {
            "device": kernels.facts.name,
            "bits_compared": exact,
            "bv": variants,
            "seconds": round(seconds, 1),
            "ok": not failed,
            "cases": [asdict(outcome) for outcome in outcomes],
        }
        click.echo(dumps(report, indent=2))
        return int(bool(failed))

    click.echo(f"{kernels.facts.name}: BV {', '.join(map(str, variants))} and automatic")
    click.echo("bits against the goldens" if exact else "no golden bits for this chip: BV variants and accuracy only")
    click.echo(f"{'case':<20} {'error of out':>12} {'of state':>12}  result")
    for outcome in outcomes:
        errors = f"{_shown(outcome.rel_out):>12} {_shown(outcome.rel_final_state):>12}"
        click.echo(f"{outcome.name:<20} {errors}  {'; '.join(outcome.failures) or 'ok'}")
    click.echo(f"{len(outcomes) - len(failed)} of {len(outcomes)} cases passed in {seconds:.1f} s")
    return int(bool(failed))


def run_cases(device: "torch.device", record: Record, variants: tuple[int, ...], exact: bool) -> list[Outcome]:
    """Every golden on a device; `exact`: its bits must be the recorded ones."""
    import torch

    from flashkda.goldens.cases import CASES
    from flashkda.goldens.digests import load_digests
    from flashkda.goldens.inputs import inputs_sha256, make_inputs
    from flashkda.goldens.run import device_inputs, float64_errors, leaks, run_case, wrong_digests

    outcomes = []
    with torch.inference_mode():
        for case in CASES:
            digests = load_digests()[case.name]
            outcome = Outcome(case.name)
            if inputs_sha256(make_inputs(case)) != digests.inputs:
                outcome.failures.append("the generated inputs are not the recorded ones")
            tensors = device_inputs(case, device)
            result = run_case(case, tensors, record, None)
            if exact:
                outcome.failures += [f"{name} differs" for name in wrong_digests(case, result, digests)]
            for bv in variants:
                if not result.same_bits(run_case(case, tensors, record, bv)):
                    outcome.failures.append(f"bv={bv} differs from the automatic choice")
            if case.poison is None:
                outcome.rel_out, outcome.rel_final_state = float64_errors(case, tensors, result)
                for name, error, recorded in (
                    ("out", outcome.rel_out, digests.rel_out),
                    ("final_state", outcome.rel_final_state, digests.rel_final_state),
                ):
                    allowed = max(_ERROR_FLOOR, _ERROR_FACTOR * (recorded or 0.0))
                    if error is not None and not error <= allowed:
                        outcome.failures.append(f"relative error of {name} is {error:.3g}, allowed {allowed:.3g}")
            else:
                clean = case.without_poison()
                clean_result = run_case(clean, device_inputs(clean, device), record, None)
                outcome.failures += [f"the poison leaks into {name}" for name in leaks(case, result, clean_result)]
            outcomes.append(outcome)
    return outcomes


def _shown(error: float | None) -> str:
    return "" if error is None else f"{error:.2e}"
