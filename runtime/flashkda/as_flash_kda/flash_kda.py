"""flashkda under the original's name: see `flashkda.alias`."""

from flashkda.alias import refuse_another
from flashkda.api import fwd
from flashkda.api import workspace_size as get_workspace_size

__all__ = ["fwd", "get_workspace_size"]

# From PYTHONPATH this comes before an installed original, and would hide it.
refuse_another()
