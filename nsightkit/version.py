"""The version of nsightkit; a separate module, so that any other can import it."""

__version__ = "0.1.0"
