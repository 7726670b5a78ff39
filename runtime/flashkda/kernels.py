"""The kernels of each device: resolved once, loaded at need, kept for the life of the process."""

import os
import threading
from collections.abc import Iterable

from flashkda.artifacts import ArtifactFolder, installed
from flashkda.driver import Driver, Kernel, PrimaryContext, get_driver
from flashkda.errors import DriverError
from flashkda.log import logger
from flashkda.manifest import Artifact
from flashkda.resolver import DEFAULT_NUMERICS, Rejected, resolve_variants

_lock = threading.RLock()
_devices: "dict[int, DeviceKernels]" = {}
_loaded: dict[Artifact, Kernel] = {}


def _after_fork() -> None:
    """Forget handles of the parent's driver, and a lock that one of its threads may have held."""
    global _lock
    _devices.clear()
    _loaded.clear()
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


class DeviceKernels:
    """What one device runs. Raises `NoArtifactError` or `DriverError` if no compiled kernel fits it."""

    def __init__(self, driver: Driver, folder: ArtifactFolder, ordinal: int) -> None:
        self._driver = driver
        self._folder = folder
        self.facts = driver.facts(ordinal)
        self.manifest = folder.manifest
        variants = resolve_variants(
            folder.manifest,
            numerics=DEFAULT_NUMERICS,
            compute_capability=self.facts.compute_capability,
            driver_version=driver.version,
        )
        if isinstance(variants, Rejected):
            raise variants.error()
        self.variants = variants
        self.context = PrimaryContext(driver, ordinal)
        self._ready: dict[str, Kernel] = {}
        logger.debug("device %d (%s): BV %s", ordinal, self.facts.name, ", ".join(map(str, variants.recurrence)))

    def ready(self, artifacts: Iterable[Artifact], stream: int | None) -> dict[str, Kernel]:
        """Loaded kernels by file name. `stream`: where they are about to be launched, None if nowhere yet.

        Raises `DriverError` if something is left to load while that stream is being captured.
        """
        wanted = tuple(artifacts)
        with _lock:
            missing = [artifact for artifact in wanted if artifact.file not in self._ready]
            if missing:
                self._finish(missing, stream)
            return {artifact.file: self._ready[artifact.file] for artifact in wanted}

    def _finish(self, artifacts: list[Artifact], stream: int | None) -> None:
        entered = self.context.enter()
        try:
            if stream is not None and self._driver.is_capturing(stream):
                raise DriverError(
                    "the kernels are not loaded yet and the current stream is being captured into a CUDA graph, which "
                    f"a load would break; call flashkda.preload({self.facts.ordinal}) before the capture"
                )
            # All are read and verified before the first of them reaches the driver.
            cubins = {artifact: self._folder.read(artifact) for artifact in artifacts if artifact not in _loaded}
            for artifact in artifacts:
                if artifact in cubins:
                    _loaded[artifact] = Kernel(self._driver, artifact, cubins[artifact])
                kernel = _loaded[artifact]
                kernel.finish_on(self.facts.ordinal)
                self._ready[artifact.file] = kernel
        finally:
            if entered:
                self.context.leave()


def device_kernels(ordinal: int) -> DeviceKernels:
    """The kernels of a visible device."""
    found = _devices.get(ordinal)
    if found is None:
        with _lock:
            found = _devices.get(ordinal)
            if found is None:
                found = _devices[ordinal] = DeviceKernels(get_driver(), installed(), ordinal)
    return found
