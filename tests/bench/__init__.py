"""Benchmarks: each compares nsightkit with a named alternative in the same run."""
