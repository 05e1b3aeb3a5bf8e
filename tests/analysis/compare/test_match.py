"""Matching names: equal ones first, then ones that are equal without what versions change."""

import pytest

from nsightkit.analysis.compare.match import pair, plain_kernel, plain_range

ADD = "void at::native::vectorized_elementwise_kernel<{}, at::native::CUDAFunctor_add<float>, {}>(int)"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # The same kernel, as two demanglers spell it.
        (ADD.format("(int)4", "std::array<char *, (unsigned long)3>"), ADD.format("4", "std::array<char*, 3ul>")),
        ("void <unnamed>::softmax<float>(float *)", "(anonymous namespace)::softmax<float>(float*)"),
        # Another element type or vector width, another number of a fused kernel.
        (ADD.format("4", "T"), ADD.format("8", "T").replace("float", "c10::BFloat16")),
        (ADD.format("4", "T"), ADD.format("4", "T").replace("vectorized", "unrolled")),
        ("triton_red_fused__to_copy_mean_0", "triton_red_fused__to_copy_mean_11"),
        # Another card, tile or version.
        ("volta_sgemm_128x32_nt", "ampere_sgemm_64x64_nt"),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_tn_align8>(T::Params)",
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64_64x6_tn_align4>(T::Params)",
        ),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", "nvjet_tst_128x256_64x4_1x2_h_bz_bias_TNN"),
        ("volta_scudnn_128x64_relu_interior_nn_v1", "volta_scudnn_128x128_relu_interior_nn_v2"),
        ("nvkernel_solve_F1L204_2", "nvkernel_solve_F1L210_2"),
    ],
)
def test_the_same_kernel_by_another_name(one: str, other: str):
    assert plain_kernel(one) == plain_kernel(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("volta_sgemm_128x32_nt", "volta_sgemm_128x32_nn"),
        (ADD.format("4", "T"), ADD.format("4", "T").replace("add", "mul")),
        ("triton_poi_fused_add_3", "triton_poi_fused_mul_3"),
        ("nvkernel_solve_F1L204_2", "nvkernel_main_F1L204_2"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN"),
        ("flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "flash_bwd_kernel<Flash_bwd_kernel_traits<64>>"),
        ("", "<"),
        ("x" * 10_000, "[lambda("),
    ],
)
def test_other_kernels_stay_others(one: str, other: str):
    assert plain_kernel(one) != plain_kernel(other)


def test_names_of_ranges_without_their_numbers():
    assert plain_range("step 12") == plain_range("step 7")
    assert plain_range("layer_3.mlp") == "layer_#.mlp"


def test_the_same_name_goes_first():
    before = ["volta_sgemm_128x32_nt", "volta_sgemm_64x64_nt", "gone"]
    after = ["volta_sgemm_64x64_nt", "volta_sgemm_128x128_nt", "fresh"]
    assert pair(before, after, plain_kernel) == [
        ("normalised", ["volta_sgemm_128x32_nt"], ["volta_sgemm_128x128_nt"]),
        ("name", ["volta_sgemm_64x64_nt"], ["volta_sgemm_64x64_nt"]),
        ("disappeared", ["gone"], []),
        ("appeared", [], ["fresh"]),
    ]
