"""Runs in a fresh process, as the text of `python -c`: what comes between a context and the first result, step by step.

Arguments: whose ("flashkda", "flash_kda", "fla"), the device's index, and for one of several at once a word: it prints
that as a line, and waits for a line on its standard input, before the first step and again before it ends. The last
line of its output, but for that word, is a JSON object of milliseconds by step, in order. Nothing of flashkda may be
imported at the top, for its import is one of the steps.
"""

import json
import sys
import time


def wait_for_others(ready: str) -> None:
    print(ready, flush=True)
    if not sys.stdin.readline():
        sys.exit("nobody waits for this process any more")


def main(subject: str, ordinal: int, ready: str | None = None) -> None:
    import torch

    torch.cuda.set_device(ordinal)
    tokens, heads, dim = 256, 6, 128
    q, k, v, g, out = torch.randn((5, 1, tokens, heads, dim), device="cuda").bfloat16().unbind(0)
    beta = torch.randn((1, tokens, heads), device="cuda").bfloat16()
    a_log, dt_bias = torch.rand(heads, device="cuda"), torch.rand((heads, dim), device="cuda")
    initial = torch.randn((1, heads, dim, dim), device="cuda").bfloat16()
    final = torch.empty_like(initial)
    arguments = (q, k, v, g, beta, dim**-0.5, out, a_log, dt_bias, -5.0)
    steps: dict[str, float] = {}
    torch.cuda.synchronize()
    if ready is not None:
        wait_for_others(ready)
    last = time.perf_counter()

    def done(step: str) -> None:
        nonlocal last
        now = time.perf_counter()
        steps[step] = (now - last) * 1000
        last = now

    with torch.inference_mode():
        if subject == "flashkda":
            from flashkda import fwd

            done("import")
            from flashkda.artifacts import installed

            installed()
            done("manifest")
            from flashkda.driver import get_driver

            get_driver()
            done("driver")
            from flashkda.kernels import device_kernels

            kernels = device_kernels(ordinal)
            bv = min(kernels.variants.recurrence)
            kernels.ready((kernels.variants.prepare_for(bv), kernels.variants.recurrence[bv]), None)
            done("load")
            fwd(*arguments, initial, final, bv=bv)
            torch.cuda.synchronize()
            done("first call")
            fwd(*arguments, initial, final, bv=bv)
        elif subject == "flash_kda":
            from importlib import import_module

            original = import_module("flash_kda")
            done("import")
            original.fwd(*arguments, initial, final)
            torch.cuda.synchronize()
            done("first call")
            original.fwd(*arguments, initial, final)
        else:
            from importlib import import_module

            chunk_kda = import_module("fla.ops.kda").chunk_kda
            done("import")
            named = {
                "initial_state": initial.float(), "output_final_state": True, "use_qk_l2norm_in_kernel": True,
                "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "safe_gate": True,
                "lower_bound": -5.0, "A_log": a_log, "dt_bias": dt_bias.flatten(),
            }  # fmt: skip
            chunk_kda(q, k, v, g, beta, dim**-0.5, **named)
            torch.cuda.synchronize()
            done("first call")
            chunk_kda(q, k, v, g, beta, dim**-0.5, **named)
        torch.cuda.synchronize()
        done("second call")
    print(json.dumps(steps))
    if ready is not None:
        wait_for_others(ready)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
