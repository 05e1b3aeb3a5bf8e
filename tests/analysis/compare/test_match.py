"""Which kernel is which: by name, by spelling, by what launched it, and by what a compiler fused."""

import random

import pytest

import nsightkit
from nsightkit.analysis.compare.match import HOW, Kernel, pair, plain_range, spellings
from nsightkit.analysis.timeline import kernels

ADD = "void at::native::vectorized_elementwise_kernel<{}, at::native::CUDAFunctor_add<float>, {}>(int)"


def found(before: list[Kernel], after: list[Kernel]) -> list[tuple[str, list[str], list[str]]]:
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
    assert found(before, after) == [
        ("name", ["volta_sgemm_64x64_nt"], ["volta_sgemm_64x64_nt"]),
        ("normalised", ["volta_sgemm_128x32_nt"], ["volta_sgemm_128x128_nt"]),
    ]


def test_what_launched_it() -> None:
    before = [
        Kernel("conv_old", "GEMM", "aten::conv"),
        Kernel("conv_offsets", "memory-like", "aten::conv"),
        Kernel("mine_v1_slow", "other", None, "attention"),
        Kernel("gone", "reduction", "aten::sum", "loss"),
    ]
    after = [
        Kernel("winograd", "GEMM", "aten::conv"),
        Kernel("winograd_tail", "GEMM", "aten::conv"),
        Kernel("new_attention", "other", None, "attention"),
        Kernel("fresh", "softmax", "aten::softmax", "loss"),
    ]
    assert found(before, after) == [
        ("operator", ["conv_old"], ["winograd", "winograd_tail"]),
        ("range", ["mine_v1_slow"], ["new_attention"]),
        ("disappeared", ["conv_offsets"], []),
        ("disappeared", ["gone"], []),
        ("appeared", [], ["fresh"]),
    ]


def test_fused_kernels_are_those_whose_operators_they_list() -> None:
    plain = [
        Kernel("vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "elementwise", "aten::add"),
        Kernel("vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>", "elementwise", "aten::gelu"),
        Kernel("vectorized_layer_norm_kernel", "normalization", "aten::native_layer_norm"),
        Kernel("exp_kernel", "elementwise", "aten::exp"),
        Kernel("ampere_sgemm_64x64_nn", "GEMM", "aten::add"),  # never part of a pointwise kernel
    ]
    fused = [
        Kernel("triton_poi_fused_add_gelu_0", "Triton-fused"),
        Kernel("triton_per_fused_add_native_layer_norm_1", "Triton-fused"),
    ]
    assert found(plain, fused) == [
        ("fused", [k.name for k in plain[:3]], [k.name for k in fused]),
        ("disappeared", ["exp_kernel"], []),
        ("disappeared", ["ampere_sgemm_64x64_nn"], []),
    ]
    # The other way round a compiler was switched off; and without operators the names of kernels have to do.
    (how, one, other), *_ = found(fused, plain)
    assert (how, len(one), len(other)) == ("fused", 2, 3)
    alone = [kernel._replace(operator=None) for kernel in plain]
    assert found(alone, fused)[0] == ("fused", [k.name for k in plain[:3]], [k.name for k in fused])


def test_a_compiler_that_does_not_say_what_it_fused() -> None:
    plain = [Kernel("exp_kernel", "elementwise", None, "mlp"), Kernel("sum_kernel", "reduction", None, "loss")]
    fused = [Kernel("triton_poi_fused_0", "Triton-fused", None, "mlp")]
    assert found(plain, fused) == [
        ("fused", ["exp_kernel"], ["triton_poi_fused_0"]),
        ("disappeared", ["sum_kernel"], []),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_every_kernel_is_in_exactly_one_row(seed: int) -> None:
    rng = random.Random(seed)
    words = [
        "volta_sgemm_64x32_nn",
        "ampere_sgemm_128x64_nn",
        "triton_poi_fused_add_mul",
        "add_kernel",
        "mul_kernel",
        "x",
    ]
    kinds = {"volta": "GEMM", "amper": "GEMM", "trito": "Triton-fused"}

    def side() -> list[Kernel]:
        names = {f"{rng.choice(words)}_{rng.randrange(4)}" for _ in range(12)}
        launchers = [None, "aten::add", "aten::mul"]
        return [
            Kernel(n, kinds.get(n[:5], "elementwise"), rng.choice(launchers), rng.choice([None, "a", "b"]))
            for n in sorted(names)
        ]

    before, after = side(), side()
    pairs = pair(before, after)
    assert sorted(i for p in pairs for i in p.before) == list(range(len(before)))
    assert sorted(i for p in pairs for i in p.after) == list(range(len(after)))
    assert {p.how for p in pairs} <= set(HOW)
    for how, one, other in pairs:
        assert bool(one) == (how != "appeared")
        assert bool(other) == (how != "disappeared")


def test_two_cards_one_program(shared_traces) -> None:
    # An A100 ran this program's products on tensor cores through cutlass, a V100 through its own sgemm.
    sides = [
        kernels.summary(nsightkit.load(shared_traces / "hta" / f"trace_diff__{name}.json.gz"))
        for name in ("control__control", "test__test")
    ]
    known = [[Kernel(*row) for row in table[["name", "category"]].itertuples(index=False)] for table in sides]
    pairs = found(*known)
    layouts = {}
    for how, one, other in pairs:
        if how == "normalised" and any("sgemm" in name for name in other):
            assert all("cutlass_80_tensorop_s1688gemm" in name or name.startswith("ampere_sgemm") for name in one)
            assert all(name.startswith("volta_sgemm") for name in other)
            (layout,) = {name.rsplit("_", 1)[1] for name in other}
            assert all(f"_{layout}" in name for name in one)
            layouts[layout] = len(one), len(other)
    assert layouts.keys() == {"nn", "nt", "tn", "tt"}
    # Embedding kernels differ in the dimension that they were compiled for.
    assert sum(how == "normalised" and "split_embedding" in one[0] for how, one, _ in pairs) == 3
    assert sum(how == "name" for how, *_ in pairs) == 104
