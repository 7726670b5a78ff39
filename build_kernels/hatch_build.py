"""Build hook: compiles the cubins and puts them into the wheel as flashkda/artifacts/, with provenance and SBOM."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.builders.utils import get_reproducible_timestamp


class CubinBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Brings artifacts/ up to date for every architecture and includes its files."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # An editable install runs from the checkout, where flashkda-build makes artifacts/ on demand.
        if version == "editable":
            return
        root = Path(self.root)
        sys.path[:0] = [str(root / "build_kernels"), str(root / "runtime")]
        from flashkda_build.architectures import ARCHITECTURES
        from flashkda_build.build import build
        from flashkda_build.manifest import MANIFEST
        from flashkda_build.provenance import PROVENANCE, build_packages, statement
        from flashkda_build.sbom import SBOM, bill_of_materials

        output = root / "artifacts"
        manifest, _ = build(output, ARCHITECTURES, progress=lambda step: self.app.display_info(f"compiled {step.file}"))
        for name in (MANIFEST, *(artifact["file"] for artifact in manifest["artifacts"])):
            build_data["force_include"][str(output / name)] = f"flashkda/artifacts/{name}"

        # Kept until the wheel is written, which is after this returns.
        self._scratch = tempfile.TemporaryDirectory(prefix="flashkda-wheel-")
        provenance, sbom = Path(self._scratch.name, PROVENANCE), Path(self._scratch.name, SBOM)
        packages = build_packages()
        provenance.write_text(json.dumps(statement(manifest, packages), indent=2) + "\n", encoding="utf-8")
        sbom.write_text(bill_of_materials(manifest, packages, get_reproducible_timestamp()), encoding="utf-8")
        build_data["force_include"][str(provenance)] = f"flashkda/{PROVENANCE}"
        build_data["sbom_files"].append(str(sbom))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._scratch.cleanup()
