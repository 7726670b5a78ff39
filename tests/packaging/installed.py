"""Checks an installed flashkda with nothing but the package and what is beside it; no GPU is used.

    python installed.py CUDA_PYTHON_MAJOR [--torch] [--no-network] [--not-root]

Any network access, and any file opened for writing, fails the run. The flags say what must be so: a torch without CUDA
beside it, no way out of this machine, another user than root. Run by .ci/run in environments of their own; it is
no pytest module, as pytest is not there.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import socket
import sys


def forbid(event: str, arguments: tuple[object, ...]) -> None:
    """Audit hook: nothing may be written and nobody be asked."""
    if event.startswith("socket."):
        raise AssertionError(f"network access: {event} {arguments}")
    if event == "open":
        flags = arguments[2]
        if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR) and arguments[0] != os.devnull:
            raise AssertionError(f"opened for writing: {arguments[0]}")
    if event in ("os.mkdir", "os.rename", "os.remove"):
        raise AssertionError(f"{event} {arguments}")


def check_no_network() -> None:
    """The hook sees what Python does; a missing route holds for native code too."""
    # Not /sys/class/net, which shows the interfaces of the namespace it was mounted in.
    found = [name for _, name in socket.if_nameindex()]
    assert found == ["lo"], f"there are network interfaces: {found}"
    for family, address in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                # Sends nothing: looks for a route, and fails at once without one.
                probe.connect((address, 9))
        except OSError:
            continue
        raise AssertionError(f"there is a route to {address}")


def check_read_only() -> None:
    found = importlib.util.find_spec("flashkda")
    assert found is not None and found.origin is not None
    try:
        with open(os.path.join(os.path.dirname(found.origin), "written"), "w"):
            pass
    except PermissionError:
        return
    raise AssertionError("the packages are not read-only for this user")


def check_import() -> None:
    before = set(sys.modules)
    import flashkda

    for name in ("torch", "numpy", "cuda", "click", "cutlass"):
        assert name not in set(sys.modules) - before, f"importing flashkda loaded {name}"
    assert flashkda.__version__ == importlib.metadata.version("flashkda")
    assert all(getattr(flashkda, name) for name in flashkda.__all__)
    assert flashkda.workspace_size(8192, 96) > 0
    assert importlib.util.find_spec("cutlass") is None, "the DSL came along with the wheel"


def check_info() -> bool:
    """Whether there is a driver."""
    from click.testing import CliRunner

    from flashkda.cli import main

    shown = CliRunner().invoke(main, ["info"])
    assert shown.exit_code == 0, shown.output
    report = json.loads(CliRunner().invoke(main, ["info", "--json"]).stdout)
    assert report["ok"] and not report["artifacts"]["problems"] and not report["artifacts"]["unlisted"]
    assert report["artifacts"]["overridden_by"] is None
    if report["driver"] is not None:
        return True
    assert report["devices"] == [] and "driver" in report["driver_problem"]
    return False


def check_resolver() -> None:
    from flashkda.artifacts import installed
    from flashkda.errors import DriverError, NoArtifactError
    from flashkda.resolver import DEFAULT_NUMERICS, Rejected, listed_bvs, listed_orders, resolve_variants

    manifest = installed().manifest
    for artifact in manifest.artifacts:
        assert installed().read(artifact)
    # Compute capability; the architecture that serves it; drivers below and above its floor.
    for capability, arch, below, above in (
        ("8.0", None, 11080, 13000),
        ("9.0", "sm_90a", 11080, 12000),
        ("10.0", "sm_100a", 12060, 12080),
        ("10.3", "sm_103a", 12080, 12090),
        ("12.0", None, 12060, 13000),
    ):
        for driver in (below, above):
            found = resolve_variants(
                manifest, numerics=DEFAULT_NUMERICS, compute_capability=capability, driver_version=driver
            )
            if arch is not None and driver == above:
                assert not isinstance(found, Rejected), found
                assert {artifact.arch for artifact in found.artifacts()} == {arch}
                assert tuple(found.prepare) == listed_orders(manifest, DEFAULT_NUMERICS)
                assert tuple(found.recurrence) == listed_bvs(manifest, DEFAULT_NUMERICS)
                continue
            assert isinstance(found, Rejected), (capability, driver)
            assert isinstance(found.error(), NoArtifactError if arch is None else DriverError)


def check_calls(with_torch: bool) -> None:
    import flashkda

    assert (importlib.util.find_spec("torch") is not None) == with_torch
    rows = beta = parameter = None
    expected = "install torch"
    if with_torch:
        import torch

        # Either will do for a call without CUDA tensors; the last line says which it was.
        assert torch.version.cuda is None or not torch.cuda.is_available(), "this torch has a CUDA device"
        rows = torch.zeros(1, 4, 2, 128, dtype=torch.bfloat16)
        beta, parameter = rows[..., 0], torch.zeros(2)
        expected = "q.to('cuda')"
    try:
        flashkda.fwd(rows, rows, rows, rows, beta, 1.0, rows, parameter, parameter, -5.0)
    except flashkda.ArgumentError as error:
        assert expected in str(error), error
    else:
        raise AssertionError("a call without CUDA tensors was accepted")


def check_preload() -> None:
    import flashkda

    for device in (None, 0):
        try:
            flashkda.preload(device)
        except flashkda.DriverError as error:
            assert "driver" in str(error), error
        else:
            raise AssertionError("kernels were loaded without a driver")


def check_bindings(major: int) -> None:
    found = importlib.metadata.version("cuda-bindings")
    assert found.startswith(f"{major}."), f"cuda-bindings is {found}"
    from cuda.bindings import driver

    assert driver.CUlaunchConfig and driver.cuLibraryLoadData


def torch_build() -> str:
    import torch

    if torch.version.cuda is None:
        return f"{torch.__version__}, built without CUDA"
    return f"{torch.__version__}, built with CUDA {torch.version.cuda}, without a device"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("cuda_python_major", type=int)
    for flag in ("--torch", "--no-network", "--not-root"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    if options.not_root:
        assert 0 not in (os.getuid(), os.geteuid()), "run as root"
    if options.no_network:
        check_no_network()
    check_read_only()
    sys.addaudithook(forbid)
    assert "HOME" not in os.environ
    check_import()
    has_driver = check_info()
    check_resolver()
    check_bindings(options.cuda_python_major)
    check_calls(options.torch)
    if not has_driver:
        check_preload()
    versions = {name: importlib.metadata.version(name) for name in ("flashkda", "cuda-python", "cuda-bindings")}
    network = "without a network" if options.no_network else "with whatever network there is"
    print("works on Python", sys.version.split()[0], "as uid", os.geteuid(), network, versions)
    print("torch:", torch_build() if options.torch else "none")
