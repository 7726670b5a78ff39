"""The wheel's software bill of materials, CycloneDX in JSON: the compiled kernels, and what compiled them.

Only the build of a wheel needs this module and the library behind it.
"""

import uuid
from datetime import datetime, timezone
from typing import Any

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from .digest import sha256
from .manifest import canonical
from .provenance import BuildPackage

#: Name of the file, in the wheel's .dist-info/sboms.
SBOM = "flashkda.cdx.json"


def bill_of_materials(manifest: dict[str, Any], packages: tuple[BuildPackage, ...], timestamp: int) -> str:
    """CycloneDX 1.6 JSON about a manifest's cubins.

    timestamp: seconds since 1970, of the build. Equal arguments give equal text.
    """
    version = manifest["package_version"]
    root = Component(
        type=ComponentType.LIBRARY,
        name="flashkda",
        version=version,
        purl=PackageURL("pypi", None, "flashkda", version),
        bom_ref=f"pkg:pypi/flashkda@{version}",
        licenses=[DisjunctiveLicense(id="Apache-2.0")],
        properties=[Property(name="flashkda:source_digest", value=manifest["source_digest"])],
    )
    bom = Bom(
        # Random by default; what is described decides instead.
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"flashkda:{sha256(canonical(manifest).encode())}"),
        metadata=BomMetaData(component=root, timestamp=datetime.fromtimestamp(timestamp, timezone.utc)),
    )
    bom.metadata.tools.components.update(_tool(package) for package in packages)
    bom.metadata.tools.components.add(
        Component(type=ComponentType.APPLICATION, name="ptxas", version=manifest["toolchain"]["ptxas_version"])
    )
    cubins = [_cubin(artifact) for artifact in manifest["artifacts"]]
    for cubin in cubins:
        bom.components.add(cubin)
    bom.register_dependency(root, cubins)
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def _tool(package: BuildPackage) -> Component:
    return Component(
        type=ComponentType.LIBRARY,
        name=package.name,
        version=package.version,
        purl=PackageURL("pypi", None, package.name, package.version),
        bom_ref=package.purl,
        properties=[Property(name="flashkda:contents_dirHash", value=package.contents)],
    )


def _cubin(artifact: dict[str, Any]) -> Component:
    return Component(
        type=ComponentType.FILE,
        name=f"flashkda/artifacts/{artifact['file']}",
        bom_ref=artifact["file"],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=artifact["sha256"])],
        properties=[
            Property(name="flashkda:arch", value=artifact["arch"]),
            Property(name="flashkda:kernel", value=artifact["kernel"]),
        ],
    )
