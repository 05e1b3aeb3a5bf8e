"""The version of nsightkit; a separate module, so that any other can import it."""

from __future__ import annotations

__version__ = "0.1.0"
