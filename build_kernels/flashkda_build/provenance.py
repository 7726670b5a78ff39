"""Where a set of cubins comes from: an in-toto statement with SLSA provenance, unsigned, for the wheel to carry.

Format: https://in-toto.io/Statement/v1 with the predicate https://slsa.dev/provenance/v1.
"""

import base64
import importlib.metadata
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .digest import sha256
from .toolchain import DSL

#: Name of the file, in the package folder.
PROVENANCE = "provenance.json"
#: How BuildPackage.contents is computed, for those who have the wheel.
CONTENTS = (
    "dirHash of the wheel's files but RECORD, not the wheel's sha256; in an empty folder, the wheel unpacked: "
    "find . -type f ! -path './*.dist-info/RECORD' | cut -c3- | LC_ALL=C sort | xargs sha256sum | sha256sum"
)
# What an installer adds or rewrites: its own name, bytecode, scripts with the interpreter's path.
_INSTALLERS_OWN = re.compile(r".*\.pyc|\.\./.*|[^/]*\.dist-info/(INSTALLER|REQUESTED|RECORD|direct_url\.json)")


@dataclass(frozen=True)
class BuildPackage:
    """An installed distribution that the compiler is made of.

    contents: in-toto's dirHash over the files that its wheel holds, as RECORD lists them. Not the sha256 of the wheel:
    an installer writes that down only for what it was given by URL, and nobody may be asked during a build.
    """

    name: str
    version: str
    contents: str

    @property
    def purl(self) -> str:
        """Package URL."""
        return f"pkg:pypi/{self.name}@{self.version}"


def build_packages() -> tuple[BuildPackage, ...]:
    """The DSL and its libraries as installed, by name. Raises importlib.metadata.PackageNotFoundError."""
    found: dict[str, BuildPackage] = {}
    pending = [DSL]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        distribution = importlib.metadata.distribution(name)
        found[name] = BuildPackage(name, distribution.version, _contents(distribution))
        pending += _parts(distribution)
    return tuple(found[name] for name in sorted(found))


def _parts(distribution: importlib.metadata.Distribution) -> Iterator[str]:
    """The DSL's own distributions that this one cannot do without."""
    for requirement in distribution.requires or ():
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        if name and name[0].startswith(DSL) and "extra ==" not in requirement:
            yield name[0]


def _contents(distribution: importlib.metadata.Distribution) -> str:
    digests = {}
    for file in distribution.files or ():
        if file.hash is not None and not _INSTALLERS_OWN.fullmatch(file.as_posix()):
            # RECORD spells digests in unpadded base64.
            digest = base64.urlsafe_b64decode(file.hash.value + "=" * (-len(file.hash.value) % 4)).hex()
            digests[file.as_posix()] = digest
    # Sorted by path and spelt like sha256sum's output: https://in-toto.io's dirHash, Go's Hash1.
    return sha256("".join(f"{digest}  {path}\n" for path, digest in sorted(digests.items())).encode())


def statement(manifest: dict[str, Any], packages: tuple[BuildPackage, ...]) -> dict[str, Any]:
    """The statement about a manifest's cubins, built with `packages` by this interpreter."""
    toolchain = manifest["toolchain"]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": file["file"], "digest": {"sha256": file["sha256"]}} for file in manifest["artifacts"]],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:flashkda:build:1",
                "externalParameters": {"command": manifest["build_command"]},
                "internalParameters": {
                    "dsl": f"{toolchain['dsl']} {toolchain['dsl_version']} ({toolchain['flavour']})",
                    "ptxas": toolchain["ptxas_version"],
                    "options": toolchain["options"],
                    "python": platform.python_version(),
                    "machine": platform.machine(),
                },
                "resolvedDependencies": [
                    {
                        "uri": f"pkg:pypi/flashkda@{manifest['package_version']}",
                        "digest": {"sha256": manifest["source_digest"]},
                        "annotations": {"digest": "source_digest of the manifest, over all that the cubins depend on"},
                    },
                    *(
                        {
                            "uri": package.purl,
                            "digest": {"dirHash": package.contents},
                            "annotations": {"digest": CONTENTS},
                        }
                        for package in packages
                    ),
                ],
            },
            "runDetails": {"builder": {"id": "urn:flashkda:flashkda-build"}},
        },
    }
