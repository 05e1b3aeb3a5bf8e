"""The named models: the published sizes, and controls that change what they say they change."""

from __future__ import annotations

import dataclasses

import pytest

from nsightkit.configurations import MATRIX, SIZES, VARIANTS, Configuration, find
from nsightkit.errors import UsageError


def test_every_configuration_has_a_name_of_its_own_and_an_intent():
    everything = (*MATRIX, *VARIANTS, *SIZES)
    assert all(find(c.name) is c for c in everything)
    assert all(c.intent for c in everything)


def test_a_control_differs_from_what_it_controls_in_what_it_says():
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


def test_impossible_sizes_are_refused():
    with pytest.raises(UsageError, match="64 is not a multiple of 5 heads"):
        dataclasses.replace(find("smoke"), heads=5)
    with pytest.raises(UsageError, match="at least 1"):
        dataclasses.replace(find("smoke"), layers=0)
    with pytest.raises(UsageError, match="no configuration is called 'huge'; there are model_a, "):
        find("huge")
