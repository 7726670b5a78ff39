"""Kimi Delta Attention prefill that returns FlashKDA's bytes, from kernels compiled ahead of time.

Everything but `__version__` is resolved on first use: importing the package loads no torch, no CUDA and no heavy
standard module.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from flashkda.alias import install_as_flash_kda
    from flashkda.api import fwd, prefill, preload, workspace_size
    from flashkda.errors import AliasError, ArgumentError, ArtifactError, DriverError, FlashKDAError, NoArtifactError

__version__ = "0.1.0"

__all__ = [
    "AliasError",
    "ArgumentError",
    "ArtifactError",
    "DriverError",
    "FlashKDAError",
    "NoArtifactError",
    "__version__",
    "fwd",
    "install_as_flash_kda",
    "prefill",
    "preload",
    "workspace_size",
]

_HOMES = {
    "fwd": "flashkda.api",
    "prefill": "flashkda.api",
    "preload": "flashkda.api",
    "workspace_size": "flashkda.api",
    "install_as_flash_kda": "flashkda.alias",
    "AliasError": "flashkda.errors",
    "ArgumentError": "flashkda.errors",
    "ArtifactError": "flashkda.errors",
    "DriverError": "flashkda.errors",
    "FlashKDAError": "flashkda.errors",
    "NoArtifactError": "flashkda.errors",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module at the first access."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'flashkda' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
