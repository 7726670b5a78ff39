"""The package's logger, `flashkda`: silent unless the application configures logging."""

import logging

logger = logging.getLogger("flashkda")
logger.addHandler(logging.NullHandler())
