"""The resource envelope against published tables; tests/workloads/test_lm.py holds it against the real model."""

from __future__ import annotations

import pytest

from nsightkit.analysis.roofline.envelope import envelope, misaligned, summary
from nsightkit.configurations import MATRIX, SIZES, VARIANTS, find

#: params M; state, activations (flash, naive), logits, peak (flash, naive) in GiB; TFLOP forward and training; share of
#: attention and of the head in %; ms of a step at an RTX 4090's and an H200's 16-bit peak. An independent calculation,
#: as printed.
MATRIX_TABLE = """
model_a          29.52  0.44 0.67 1.14  1.07  2.22  2.69  0.371 1.112  3.5 33.9  6.7  1.1
model_b          28.92  0.43 2.02 4.83  1.07  3.57  6.38  0.449 1.348  8.6 14.0  8.2  1.4
latency_bound    51.15  0.76 0.04 0.06  0.02  0.91  0.92  0.012 0.037  3.3 10.8  0.22 0.04
misaligned_dims  30.86  0.46 1.50 1.76  1.14  3.15  3.40  0.477 1.431  5.8 18.8  8.7  1.4
bad_head_size    45.96  0.68 1.77 3.17  1.07  3.59  5.00  0.677 2.030  5.0 16.3 12.3  2.1
vocab_bottleneck 65.10  0.97 1.88 3.13  10.74 13.66 14.91 1.324 3.973  2.6 63.7 24.1  4.0
wide_ffn         86.15  1.28 2.77 4.17  1.07  5.27  6.67  1.324 3.972  2.9  9.5 24.1  4.0
bandwidth_bound  14.76  0.22 5.38 9.13  8.54  14.17 17.92 1.534 4.602  6.7 32.8 27.9  4.7
compute_bound    257.24 3.83 5.38 9.13  1.07  10.73 14.48 4.066 12.197 2.5  6.2 73.8 12.3
deep_sequential  119.33 1.78 7.51 12.51 1.07  10.57 15.57 2.008 6.024  6.8  4.2 36.5  6.1
"""

#: params M, state GiB, peak flash GiB, peak naive GiB, TFLOP training.
SIZES_TABLE = """
small  128.6   1.92  3.6   5.0   1.60
medium 423.2   6.31  10.5  14.3  5.38
large  969.4   14.45 22.5  29.5  12.33
xl     1998.2  29.78 43.7  55.4  25.32
2.7B   3406.8  50.77 68.0  78.0  42.58
10B    12832.8 191.2 240.5 258.1 160.0
"""


def printed(values: list[float], like: list[str]) -> list[str]:
    """The values with as many digits as the printed ones."""
    return [f"{v:.{len(text.partition('.')[2])}f}" for v, text in zip(values, like, strict=True)]


@pytest.mark.parametrize("line", MATRIX_TABLE.strip().splitlines(), ids=lambda line: line.split()[0])
def test_the_ten_configurations_to_the_printed_digit(line: str):
    name, *expected = line.split()
    found = envelope(find(name, MATRIX))
    gib = 2**30
    values = [
        found.params / 1e6,
        found.state_bytes / gib,
        found.activation_bytes / gib,
        (found.activation_bytes + found.score_bytes) / gib,
        found.logits_bytes / gib,
        found.peak_bytes() / gib,
        found.peak_bytes(scores=True) / gib,
        found.fwd_flops / 1e12,
        found.train_flops / 1e12,
        100 * found.attention_flops / found.fwd_flops,
        100 * found.head_flops / found.fwd_flops,
        found.train_flops
        / 165.16
        / 1e9,  # 165.2 before rounding: no rate further from this one gives all ten as printed
        found.train_flops / 989.4 / 1e9,
    ]
    assert printed(values, expected) == expected


@pytest.mark.parametrize("line", SIZES_TABLE.strip().splitlines(), ids=lambda line: line.split()[0])
def test_the_sizes_to_the_printed_digit(line: str):
    name, *expected = line.split()
    found = envelope(find(name, SIZES))
    gib = 2**30
    peaks = [found.peak_bytes() / gib, found.peak_bytes(scores=True) / gib]
    values = [found.params / 1e6, found.state_bytes / gib, *peaks, found.train_flops / 1e12]
    assert printed(values, expected) == expected


def test_alignment_is_eight_elements_and_not_more():
    aligned = summary((*MATRIX, *VARIANTS)).set_index("config")["aligned"]
    unaligned = ["misaligned_dims", "vocab_bottleneck", "misaligned_dims_even", "misaligned_dims_258"]
    assert list(aligned.index[~aligned]) == unaligned
    assert misaligned(find("vocab_bottleneck")) == ["vocabulary"]
    assert misaligned(find("misaligned_dims")) == ["d_model", "d_ff", "tokens", "d_head", "context"]


def test_the_notes_say_what_the_figures_leave_out():
    notes = {row.config: " | ".join(row.notes) for row in summary((*MATRIX, *VARIANTS)).itertuples()}
    assert "no flash attention" in notes["misaligned_dims"]
    assert "3.65 GB" in notes["misaligned_dims"]
    assert "no flash attention" not in notes["misaligned_dims_even"]
    assert "vocabulary 50257" in notes["vocab_bottleneck"]
    assert "multiple of 8:" not in notes["vocab_aligned"]
