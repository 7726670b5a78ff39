"""Answering to the name `flash_kda`, so that programs written for the original call this package unchanged.

Opt-in, in one of two ways that come to the same: a folder with nothing in it but a module `flash_kda` is put on the
module path, by `install_as_flash_kda` from within the process, or by PYTHONPATH from outside of it. The wheel has no
`flash_kda` where Python would look by itself: it would hide, or be hidden by, an installed original without a word, and
which kernels a program runs must not depend on the order of two installations.
"""

import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec

from flashkda.errors import AliasError

NAME = "flash_kda"
#: What goes on the module path.
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "as_flash_kda")


def install_as_flash_kda() -> None:
    """Let `import flash_kda` and `importlib.util.find_spec("flash_kda")` find this package, from now on.

    `flash_kda.fwd` then is `flashkda.fwd` and `flash_kda.get_workspace_size` is `flashkda.workspace_size`: the names,
    order and defaults of the original's arguments. Call it at start-up, before anything looks for `flash_kda` (some
    remember that they found none). Child processes of `multiprocessing`, forked or spawned, have the name too. For
    others, and for programs that one does not write oneself, there is PYTHONPATH, with the folder that the command
    `flashkda alias` prints. A second call changes nothing.

    Raises `AliasError` where there is another flash_kda, imported or installed.
    """
    refuse_another()
    # At the end, and so never in front of anything.
    if FOLDER not in sys.path:
        sys.path.append(FOLDER)
    import_module(NAME)


def refuse_another() -> None:
    """Raise `AliasError` if a `flash_kda` that is not this package's was imported, or could be."""
    loaded = sys.modules.get(NAME)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        if file is None or not _is_folder(os.path.dirname(file)):
            raise AliasError(
                f"another flash_kda was imported already, from {file or 'no file'}: make flashkda's the first, or do "
                "without it"
            )
    found = _find_another()
    if found is not None:
        raise AliasError(
            f"another flash_kda is installed, at {found.origin}, and which one is meant cannot be told: uninstall it, "
            "or do not ask flashkda to answer to its name"
        )


def _find_another() -> ModuleSpec | None:
    """What `import flash_kda` would find without our folder; a mere directory of that name is no package."""
    elsewhere = [entry for entry in sys.path if not _is_folder(entry)]
    for finder in sys.meta_path:
        # Every finder, and not the module path alone: editable installations bring their own. One that looks at the
        # module path takes the one it is given.
        find_spec = getattr(finder, "find_spec", None)
        # Imports pass over finders without it; until Python 3.11 there were such.
        found: ModuleSpec | None = None if find_spec is None else find_spec(NAME, elsewhere)
        if found is not None and found.has_location:
            return found
    return None


def _is_folder(entry: object) -> bool:
    try:
        return isinstance(entry, str) and os.path.realpath(entry) == os.path.realpath(FOLDER)
    except OSError:
        # The current directory was removed.
        return False
