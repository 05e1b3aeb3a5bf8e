"""The Trace model, one reader a format, and the Parquet store."""

from nsightkit.trace.model import GPU_TABLES, TABLES, Gpu, Trace, TraceMeta
from nsightkit.trace.open import load

__all__ = ["GPU_TABLES", "TABLES", "Gpu", "Trace", "TraceMeta", "load"]
