"""Which kernel is which: by name, by spelling, and by what launched it."""

import random

import pytest

import nsightkit
from nsightkit.analysis.compare.match import HOW, Kernel, pair, plain_range, spellings
from nsightkit.analysis.timeline import kernels

ADD = "void at::native::vectorized_elementwise_kernel<{}, at::native::CUDAFunctor_add<float>, {}>(int)"


def paired(before: list[Kernel], after: list[Kernel]) -> list[tuple[str, list[str], list[str]]]:
    return [(p.how, [before[i].name for i in p.before], [after[i].name for i in p.after]) for p in pair(before, after)]


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("one", "other", "level"),
    [
        # The same kernel, as two demanglers spell it.
        (ADD.format("(int)4", "std::array<char *, (unsigned long)3>"), ADD.format("4", "std::array<char*, 3ul>"), 0),
        ("void <unnamed>::softmax<float>(float *)", "(anonymous namespace)::softmax<float>(float*)", 0),
        # Another element type, another vector width.
        (ADD.format("4", "T"), ADD.format("8", "T").replace("float", "c10::BFloat16"), 1),
        ("triton_poi_fused_add_3", "triton_poi_fused_add_17", 1),
        ("triton_red_fused__to_copy_mean_0", "triton_red_fused__to_copy_mean_11", 1),
        # Another card, tile, instruction shape or version.
        ("volta_sgemm_128x32_nt", "ampere_sgemm_64x64_nt", 2),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_tn_align8>(T::Params)",
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64_64x6_tn_align4>(T::Params)",
            2,
        ),
        (
            "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN",
            "nvjet_tst_128x256_64x4_1x2_h_bz_bias_TNN",
            2,
        ),
        ("volta_scudnn_128x64_relu_interior_nn_v1", "volta_scudnn_128x128_relu_interior_nn_v2", 2),
        (
            "ampere_bf16_s16816gemm_bf16_64x64_ldg8_f2f_tn",
            "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_tn",
            2,
        ),
        ("nvfuser_pointwise_f0_c1_r0_g0", "nvfuser_pointwise_f3_c1_r0_g2", 2),
        # OpenMP's kernels are named for a line, and for a file's number on its disk.
        ("nvkernel_solve_F1L204_2", "nvkernel_solve_F1L210_2", 2),
        ("__omp_offloading_10309_3bc2f_main_l42", "__omp_offloading_fd02_99ac1_main_l45", 2),
        (ADD.format("4", "T"), ADD.format("4", "T").replace("vectorized", "unrolled"), 2),
    ],
)
def test_the_same_kernel_by_another_name(one: str, other: str, level: int) -> None:
    same = [a == b for a, b in zip(spellings(one), spellings(other), strict=True)]
    assert same == [i >= level for i in range(3)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("volta_sgemm_128x32_nt", "volta_sgemm_128x32_nn"),
        (ADD.format("4", "T"), ADD.format("4", "T").replace("add", "mul")),
        ("triton_poi_fused_add_3", "triton_poi_fused_mul_3"),
        ("nvkernel_solve_F1L204_2", "nvkernel_main_F1L204_2"),
        ("__omp_offloading_10309_3bc2f_main_l42", "__omp_offloading_10309_3bc2f_solve_l42"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN"),
        ("flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "flash_bwd_kernel<Flash_bwd_kernel_traits<64>>"),
    ],
)
def test_other_kernels_stay_others(one: str, other: str) -> None:
    assert not set(spellings(one)) & set(spellings(other))


@pytest.mark.parametrize(
    "name", ["", "<", ">", "()", "a<b<c", "x" * 10_000, "<" * 5000, "kernel<>", "\x1b[31m", "[lambda(", "🦑"]
)
def test_any_text_has_spellings(name: str) -> None:
    assert all(isinstance(text, str) for text in spellings(name))


def test_names_of_ranges_without_their_numbers() -> None:
    assert plain_range("step 12") == plain_range("step 7")
    assert plain_range("layer_3.mlp") == "layer_#.mlp"
    assert plain_range("forward") == "forward"


# ---------------------------------------------------------------- rounds


def test_a_stricter_round_goes_first() -> None:
    before = [Kernel("volta_sgemm_128x32_nt", "GEMM"), Kernel("volta_sgemm_64x64_nt", "GEMM")]
    after = [Kernel("volta_sgemm_64x64_nt", "GEMM"), Kernel("volta_sgemm_128x128_nt", "GEMM")]
    assert paired(before, after) == [
        ("name", ["volta_sgemm_64x64_nt"], ["volta_sgemm_64x64_nt"]),
        ("normalised", ["volta_sgemm_128x32_nt"], ["volta_sgemm_128x128_nt"]),
    ]


def test_what_launched_it() -> None:
    before = [
        Kernel("conv_old", "GEMM", "aten::conv"),
        Kernel("conv_offsets", "memory-like", "aten::conv"),
        Kernel("gone", "reduction", "aten::sum"),
    ]
    after = [
        Kernel("winograd", "GEMM", "aten::conv"),
        Kernel("winograd_tail", "GEMM", "aten::conv"),
        Kernel("fresh", "softmax", "aten::softmax"),
    ]
    assert paired(before, after) == [
        ("operator", ["conv_old"], ["winograd", "winograd_tail"]),
        ("disappeared", ["conv_offsets"], []),
        ("disappeared", ["gone"], []),
        ("appeared", [], ["fresh"]),
    ]


@pytest.mark.parametrize("seed", range(10))
def test_every_kernel_is_in_exactly_one_row(seed: int) -> None:
    rng = random.Random(seed)
    words = ["volta_sgemm_64x32_nn", "ampere_sgemm_128x64_nn", "triton_poi_fused_add_mul", "add_kernel", "x"]

    def side() -> list[Kernel]:
        names = sorted({f"{rng.choice(words)}_{rng.randrange(4)}" for _ in range(12)})
        return [Kernel(name, name[:5], rng.choice([None, "aten::add", "aten::mul"])) for name in names]

    before, after = side(), side()
    pairs = pair(before, after)
    assert sorted(i for p in pairs for i in p.before) == list(range(len(before)))
    assert sorted(i for p in pairs for i in p.after) == list(range(len(after)))
    for how, was, now in pairs:
        assert how in HOW
        assert (bool(was), bool(now)) == (how != "appeared", how != "disappeared")


def test_two_cards_one_program(shared_traces) -> None:
    # An A100 ran this program's products on tensor cores through cutlass, a V100 through its own sgemm.
    known = []
    for name in ("control__control", "test__test"):
        table = kernels.summary(nsightkit.load(shared_traces / "hta" / f"trace_diff__{name}.json.gz"))
        known.append([Kernel(*row) for row in table[["name", "category"]].itertuples(index=False)])
    pairs = paired(*known)
    layouts = set()
    for how, was, now in pairs:
        if how == "normalised" and any("sgemm" in name for name in now):
            assert all("cutlass_80_tensorop_s1688gemm" in name or name.startswith("ampere_sgemm") for name in was)
            (layout,) = {name.rsplit("_", 1)[1] for name in now if name.startswith("volta_sgemm")}
            assert all(f"_{layout}" in name for name in (*was, *now))
            layouts.add(layout)
    assert layouts == {"nn", "nt", "tn", "tt"}
    # Embedding kernels differ in the dimension that they were compiled for.
    assert sum(how == "normalised" and "split_embedding" in was[0] for how, was, _ in pairs) == 3
    assert sum(how == "name" for how, *_ in pairs) == 104
