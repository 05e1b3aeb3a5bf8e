"""The named models: the published sizes, and controls that change what they say they change."""

from __future__ import annotations

import dataclasses

import pytest

from nsightkit.configurations import MATRIX, SIZES, VARIANTS, Configuration, find
from nsightkit.errors import UsageError

#: batch, context, d_model, layers, d_ff, heads, vocabulary, as published.
PUBLISHED = {
    "model_a": (32, 256, 768, 2, 2048, 12, 10_000),
    "model_b": (32, 256, 384, 12, 1024, 12, 10_000),
    "latency_bound": (1, 128, 512, 12, 1536, 8, 10_000),
    "misaligned_dims": (34, 257, 514, 6, 1538, 2, 10_000),
    "bad_head_size": (32, 256, 672, 6, 1792, 12, 10_000),
    "vocab_bottleneck": (64, 256, 512, 4, 1536, 8, 50_257),
    "wide_ffn": (32, 256, 768, 6, 4096, 12, 10_000),
    "bandwidth_bound": (256, 256, 384, 4, 1024, 6, 10_000),
    "compute_bound": (32, 256, 1536, 8, 4096, 24, 10_000),
    "deep_sequential": (32, 256, 512, 32, 1536, 8, 10_000),
}


def test_the_ten_are_as_published_and_in_that_order() -> None:
    assert [(c.name, *dataclasses.astuple(c)[1:8]) for c in MATRIX] == [(name, *PUBLISHED[name]) for name in PUBLISHED]


def test_every_configuration_has_a_name_of_its_own_and_an_intent() -> None:
    everything = (*MATRIX, *VARIANTS, *SIZES)
    assert all(find(c.name) is c for c in everything)
    assert all(c.intent for c in everything)


def test_a_control_differs_from_what_it_controls_in_what_it_says() -> None:
    changed = {}
    for variant in VARIANTS:
        original = find(variant.control_of, MATRIX)
        changed[variant.name] = {
            field.name
            for field in dataclasses.fields(Configuration)
            if field.name not in ("name", "intent", "control_of")
            and getattr(variant, field.name) != getattr(original, field.name)
        }
    assert changed == {
        "misaligned_dims_even": {"d_model", "heads"},
        "misaligned_dims_258": {"d_model"},
        "aligned_dims": {"batch", "context", "d_model", "d_ff", "heads"},
        "head_size_96": {"heads"},
        "vocab_aligned": {"vocabulary"},
    }
    assert find("head_size_96").d_head == 96
    assert find("vocab_aligned").vocabulary == 50_304
    assert find("misaligned_dims_even").d_head == 86
    assert find("misaligned_dims_258").d_head == 258


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="64 is not a multiple of 5 heads"):
        dataclasses.replace(find("smoke"), heads=5)
    with pytest.raises(UsageError, match="at least 1"):
        dataclasses.replace(find("smoke"), layers=0)
    with pytest.raises(UsageError, match="no configuration is called 'huge'; there are model_a, "):
        find("huge")
