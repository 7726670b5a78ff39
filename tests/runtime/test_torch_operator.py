"""The operator `torch.ops.flashkda.fwd`: what tracing sees of a call, and the functional form on top of it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flashkda
from flashkda.errors import ArgumentError

torch = pytest.importorskip("torch")
FakeTensorMode = pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode

RUNTIME = Path(__file__).parents[2] / "runtime"
Arguments = dict[str, Any]
POOLS = ("state_indices", "has_initial_state", "checkpoints", "checkpoint_cu_starts", "checkpoint_every")


def make_arguments(device: str = "cpu", heads: int = 2) -> Arguments:
    """Everything that a call can be given, on a device that tracing is content with."""

    def rows() -> Any:
        return torch.ones(1, 20, heads, 128, dtype=torch.bfloat16, device=device)

    found: Arguments = {name: rows() for name in ("q", "k", "v", "g")}
    found["beta"] = torch.ones(1, 20, heads, dtype=torch.bfloat16, device=device)
    found |= {"scale": 0.5, "out": rows()}
    found |= {"A_log": torch.ones(heads, device=device), "dt_bias": torch.ones(heads, 128, device=device)}
    found["lower_bound"] = -5.0
    found["initial_state"] = torch.ones(2, heads, 128, 128, device=device)
    found["final_state"] = torch.zeros(2, heads, 128, 128, device=device)
    found["cu_seqlens"] = torch.tensor([0, 7, 20], device=device)
    found["workspace"] = torch.zeros(100000, dtype=torch.uint8, device=device)
    found["state_indices"] = torch.tensor([1, 0], device=device)
    found["has_initial_state"] = torch.ones(2, dtype=torch.bool, device=device)
    found["checkpoints"] = torch.zeros(3, heads, 128, 128, device=device)
    found["checkpoint_cu_starts"] = torch.tensor([0, 1, 2], device=device)
    return found | {"checkpoint_every": 16}


@pytest.fixture
def operator() -> Any:
    from flashkda.torch_operator import fwd

    return fwd.default


@pytest.fixture
def stand_in(operator: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """In the kernels' place, on any device: out = v + q, final_state = initial_state + 1, checkpoints = 3."""
    from flashkda import torch_operator

    calls: list[tuple[Any, ...]] = []

    def run(tensors: tuple[Any, ...], scale: float, lower_bound: float, bv: int | None, every: int | None) -> None:
        calls.append((scale, lower_bound, bv, every))
        q, _, v, _, _, out, _, _, initial_state, final_state, _, _, _, _, checkpoints, _ = tensors
        if checkpoints is not None:
            checkpoints.fill_(3)
        out.copy_(v + q)
        if final_state is not None:
            final_state.copy_(1 if initial_state is None else initial_state + 1)

    monkeypatch.setattr(torch_operator, "run", run)
    return calls


@pytest.mark.parametrize(
    "absent", [(), POOLS, POOLS[2:], ("initial_state", "final_state", "cu_seqlens", "workspace", *POOLS)]
)
def test_opcheck_passes(operator: Any, stand_in: Any, absent: tuple[str, ...]) -> None:
    arguments = {name: value for name, value in make_arguments().items() if name not in absent}
    torch.library.opcheck(operator, (), arguments)


def test_opcheck_passes_with_a_state_updated_in_place(operator: Any, stand_in: Any) -> None:
    arguments = make_arguments()
    torch.library.opcheck(operator, (), arguments | {"initial_state": arguments["final_state"]})


def test_the_schema_mutates_what_a_call_writes_and_nothing_else(operator: Any) -> None:
    written = [
        argument.name for argument in operator._schema.arguments if argument.alias_info and argument.alias_info.is_write
    ]
    assert written == ["out", "final_state", "workspace", "checkpoints"]
    assert not operator._schema.returns


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_call_is_one_graph_and_keeps_its_writes(stand_in: list[tuple[Any, ...]], backend: str) -> None:
    torch.compiler.reset()

    def layer(arguments: Arguments) -> Any:
        out = torch.empty_like(arguments["v"])
        flashkda.fwd(**(arguments | {"out": out, "initial_state": arguments["final_state"]}), bv=64)
        return out * 2

    arguments = make_arguments()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    with torch.inference_mode():
        assert bool((compiled(arguments) == 4).all())
        assert bool((compiled(arguments) == 4).all())
    assert bool((arguments["final_state"] == 2).all())
    assert bool((arguments["checkpoints"] == 3).all())
    assert stand_in == [(0.5, -5.0, 64, 16)] * 2


def test_the_functional_form_compiles(stand_in: list[tuple[Any, ...]]) -> None:
    torch.compiler.reset()
    without = ("out", "final_state", *POOLS)
    arguments = {name: value for name, value in make_arguments().items() if name not in without}
    compiled = torch.compile(flashkda.prefill, fullgraph=True, backend="aot_eager", dynamic=True)
    for seqlen in (20, 15, 12):
        cut = {name: arguments[name][:, :seqlen] for name in ("q", "k", "v", "g", "beta")}
        with torch.no_grad():
            out, state = compiled(**(arguments | cut), output_final_state=True)
        assert out.shape == (1, seqlen, 2, 128) and bool((out == 2).all())
        assert state.shape == (2, 2, 128, 128) and bool((state == 2).all())
    assert len(stand_in) == 3


def test_the_first_use_in_a_process_may_be_inside_a_compiled_function() -> None:
    code = (
        "import torch, flashkda\n"
        "from torch._dynamo.testing import CompileCounterWithBackend\n"
        "backend = CompileCounterWithBackend('eager')\n"
        "@torch.compile(fullgraph=True, backend=backend)\n"
        "def layer(rows, beta, a, b):\n"
        "    out = torch.empty_like(rows)\n"
        "    flashkda.fwd(rows, rows, rows, rows, beta, 1.0, out, a, b, -5.0)\n"
        "    return out\n"
        "rows = torch.zeros(1, 4, 2, 128, dtype=torch.bfloat16)\n"
        "try:\n"
        "    layer(rows, rows[..., 0], torch.zeros(2), torch.zeros(2, 128))\n"
        "except flashkda.ArgumentError as error:\n"
        "    print(error)\n"
        "print([str(node.target) for node in backend.graphs[0].graph.nodes if 'flashkda' in str(node.target)])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(RUNTIME)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, check=True
    )
    refusal, nodes = result.stdout.splitlines()
    assert refusal == "q is a tensor on cpu, but must be a tensor on a CUDA device: move it with q.to('cuda')"
    assert nodes == "['flashkda.fwd']"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_lost_gradient_is_refused_when_tracing(stand_in: list[tuple[Any, ...]], backend: str) -> None:
    torch.compiler.reset()
    arguments = make_arguments()
    arguments["k"].requires_grad_()
    with pytest.raises(Exception, match=r"'k', 'a tensor that requires grad'.*torch\.no_grad"):
        torch.compile(flashkda.fwd, fullgraph=True, backend=backend)(**arguments)
    assert not stand_in
    with torch.no_grad():
        torch.compile(flashkda.fwd, fullgraph=True, backend=backend)(**arguments)
    assert len(stand_in) == 1


def test_the_operator_refuses_gradients_and_cpu_tensors_as_a_call_does(operator: Any, artifact_folder: Path) -> None:
    arguments = make_arguments()
    with pytest.raises(ArgumentError, match="q is a tensor on cpu"):
        operator(**arguments)
    arguments["dt_bias"].requires_grad_()
    with pytest.raises(ArgumentError, match="dt_bias is a tensor that requires grad"):
        operator(**arguments)


def test_the_operator_traces_on_the_meta_device(operator: Any) -> None:
    assert operator(**make_arguments("meta")) is None


def test_the_operator_launches_what_a_call_launches(
    operator: Any, on_cuda: Callable[..., Any], artifact_folder: Path, cuda: Any
) -> None:
    arguments = {
        name: on_cuda(value) if isinstance(value, torch.Tensor) else value for name, value in make_arguments().items()
    }
    flashkda.fwd(**arguments)
    operator(**arguments)
    assert [launch.values for launch in cuda.launches[2:]] == [launch.values for launch in cuda.launches[:2]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_the_functional_form_allocates_its_results(
    on_cuda: Callable[..., Any], artifact_folder: Path, cuda: Any, packed: bool, with_state: bool
) -> None:
    arguments = make_arguments()
    for name in ("out", "final_state", "workspace", "initial_state", *POOLS, *(() if packed else ("cu_seqlens",))):
        del arguments[name]
    arguments = {
        name: on_cuda(value) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
    }
    out, state = flashkda.prefill(**arguments, output_final_state=with_state)
    assert (out.shape, out.dtype) == (arguments["v"].shape, torch.bfloat16)
    recurrence = cuda.launches[1]
    assert recurrence.values["out"] == out.data_ptr()
    if with_state:
        assert (state.shape, state.dtype) == ((2 if packed else 1, 2, 128, 128), torch.float32)
        assert recurrence.values["final_state"] == state.data_ptr()
    else:
        assert state is None and recurrence.values["final_dtype"] == 0


@pytest.mark.parametrize(
    ("name", "value"), [("v", None), ("v", torch.zeros(3)), ("cu_seqlens", [0, 4]), ("cu_seqlens", torch.zeros(3))]
)
def test_the_functional_form_refuses_what_gives_no_shape(artifact_folder: Path, name: str, value: object) -> None:
    arguments = {key: value for key, value in make_arguments().items() if key not in ("out", "final_state", *POOLS)}
    with pytest.raises(ArgumentError) as caught:
        flashkda.prefill(**(arguments | {name: value}), output_final_state=True)
    assert caught.value.argument == name


def test_tensors_without_memory_are_refused(on_cuda: Callable[..., Any], artifact_folder: Path, cuda: Any) -> None:
    arguments = {
        name: on_cuda(value) if isinstance(value, torch.Tensor) else value for name, value in make_arguments().items()
    }
    flashkda.fwd(**arguments)
    # What a FakeTensor reports as its address.
    fake = on_cuda(arguments["g"].as_subclass(torch.Tensor), address=0)
    with pytest.raises(ArgumentError, match=r"g is a tensor without memory.*torch\.compile"):
        flashkda.fwd(**(arguments | {"g": fake}))
    assert len(cuda.launches) == 2


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_workspace_is_not_allocated_where_there_is_no_memory(
    on_cuda: Callable[..., Any], artifact_folder: Path, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_empty = torch._C._VariableFunctions.empty

    def empty(*sizes: Any, device: Any, **options: Any) -> Any:
        # Fake tensors are not made members of the made-up device's class.
        return plain_empty(*sizes, device="cpu" if torch.device(device).type == "cuda" else device, **options)

    monkeypatch.setattr(torch, "empty", empty)
    arguments = {
        name: on_cuda(value) if isinstance(value, torch.Tensor) else value for name, value in make_arguments().items()
    }
    workspace = arguments.pop("workspace")
    refusals = []

    def call(x: Any) -> Any:
        with pytest.raises(ArgumentError) as caught:
            flashkda.fwd(**arguments)
        refusals.append(caught.value.argument)
        flashkda.fwd(**arguments, workspace=workspace)
        return x.sum()

    with FakeTensorMode():
        call(torch.zeros(3))
    torch.func.grad(call)(torch.zeros(3))
    torch.func.functionalize(call)(torch.zeros(3))
    assert refusals == ["workspace"] * 3
    assert len(cuda.launches) == 6


def test_calls_inside_torch_func_are_refused(on_cuda: Callable[..., Any], artifact_folder: Path, cuda: Any) -> None:
    arguments = {
        name: on_cuda(value) if isinstance(value, torch.Tensor) else value for name, value in make_arguments().items()
    }
    flashkda.fwd(**arguments)

    class Wrapped(type(arguments["k"])):  # type: ignore[misc]
        def data_ptr(self) -> int:
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")

    wrapped = arguments["k"].as_subclass(Wrapped)
    with pytest.raises(ArgumentError, match="k is a tensor without memory"):
        flashkda.fwd(**(arguments | {"k": wrapped}))


@pytest.mark.parametrize("call", ["flashkda.fwd(*[1] * 10)", "flashkda.prefill(*[1] * 9)"])
def test_without_torch_a_call_says_so(call: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"import flashkda\ntry: {call}\nexcept flashkda.ArgumentError as error: print(error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=60, check=True, env=os.environ | {"PYTHONPATH": str(RUNTIME)},
    )  # fmt: skip
    assert "is a int, but must be a torch.Tensor: install torch" in result.stdout
