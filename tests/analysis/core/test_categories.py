"""Kernel names from Volta to Hopper end up in the right category."""

# ruff: noqa: E501 - kernel names are as long as they are
from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import nsightkit
from nsightkit.analysis.core import categories
from nsightkit.analysis.core.categories import CATEGORIES, categorize, category_of
from nsightkit.analysis.timeline import kernels

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, "

NAMES = {
    "GEMM": [
        "volta_sgemm_128x64_nn",
        "volta_fp16_s884gemm_fp16_128x64_ldg8_f2f_nn",
        "volta_h884gemm_64x64_ldg8_tn",
        "turing_fp16_s1688gemm_fp16_256x128_ldg8_f2f_tn",
        "ampere_sgemm_128x64_tn",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn",
        "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_kernel",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel__5x_cublas",
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x256_16x3_tn_align4>"
            "(cutlass_80_tensorop_s1688gemm_128x256_16x3_tn_align4::Params)"
        ),
        "void cutlass::Kernel<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_32x1_nn_align8>(Params)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>>>(Params)",
        "Kernel2",
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT",
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN",
        "nvjet_sm90_tst_mma_128x256x64_4_64x256x64_cta1x2_bz_coopA_TNT",
        (
            "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false, "
            "cublasGemvParams<cublasGemvTensorStridedBatched<float const>>>(float, float)"
        ),
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float, float, float, false, true>"
            "(cublasGemvParamsEx<int>)"
        ),
        "void splitKreduce_kernel<32, 16, int, float, float, float, float, true, false, false>(cublasSplitKParams<float>)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasLt::cublasSplitKParams<float>)",
        "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI32x32x8x1_SN_1LDSB0_APM1",
        "Cijk_Alik_Bljk_SB_MT64x64x16_SE_1LDSB0",
        "_ZN7ck_tile6kentryILi256ELi1ENS_10GemmKernelINS_17GemmTilePartitionE",
        "triton_tem_fused_mm_3",
        "triton_tem_fused_addmm_gelu_12",
        "triton_mm",
        "fused_moe_kernel",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 7168u, 2048u>(float*)",
    ],
    "convolution": [
        "volta_scudnn_128x64_relu_interior_nn_v1",
        "turing_h1688cudnn_256x128_ldg8_relu_exp_small_nhwc_tn_v1",
        "maxwell_scudnn_winograd_128x128_ldg1_ldg4_tile148n_nt",
        "sm80_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc_tilesize128x64x64_execute_kernel_trt",
        "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, true, false, true>(int, int, int)",
        "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(cudnn::winograd_nonfused::Params)",
        "void cudnn::cnn::wgrad_alg0_engine<float, 128, 5, 5, 3, 3, 3, false, 512>(int, int, int)",
        "cudnn_infer_ampere_scudnn_128x32_relu_medium_nn_v1",
        "void cudnn::ops::convolve_common_engine_float_NHWC<__half, __half, 128, 5, 5, 3, 3, 3, true>(int)",
        "cask_cudnn::computeOffsetsKernel(cask_cudnn::ComputeOffsetsParams)",
        "miopenSp3AsmConv_v21_1_2_gfx9_fp32_f2x3_stride1",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::half_t>>(Flash)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128>>(Flash)",
        "void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8>>(Flash)",
        "void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, 64, 128>>(Flash)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Mainloop>>>(Params)",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)",
        "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128_4x1x1_cga1x1x1_kernel0_0",
        "void vllm::paged_attention_v2_kernel<__nv_bfloat16, __nv_bfloat16, 128, 16, 128>(float*, float*)",
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<(flashinfer::MaskMode)1, 64u>(Params)",
        "triton_tem_fused_flex_attention_0",
        "_ZN7ck_tile6kentryILi256ELi2ENS_13FmhaFwdKernelINS_23BlockFmhaPipelineQRKSVS",
    ],
    "softmax": [
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(float*, float const*)",
        "void (anonymous namespace)::softmax_warp_backward<float, float, float, 10, true>(float*, float const*)",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float, Epilogue>(float*, float*)",
        "void at::native::(anonymous namespace)::cunn_SoftMaxBackward<4, float, float, float, Epilogue>(float*)",
        "void cudnn::softmax_fw_kernel<2, float, float, 256, 1>(cudnnTensorStruct, float const*)",
        "liger_cross_entropy_kernel",
    ],
    "normalization": [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float, float const*)",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<float, float>(long, long)",
        "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel<float, float>(float const*)",
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float, float>(long, float, float const*)",
        "void at::native::batch_norm_collect_statistics_kernel<at::native::InvStd, float, float, float, int>(Accessor)",
        "void at::native::batch_norm_transform_input_kernel<float, float, float, true, int>(Accessor)",
        "void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>(cudnnTensorStruct, float const*)",
        "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>(float, float)",
        "void vllm::rms_norm_kernel<c10::BFloat16>(c10::BFloat16*, c10::BFloat16 const*)",
        "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*)",
        "void cuApplyLayerNorm<float, float, float>(float*, float*)",
        "MIOpenBatchNormFwdTrainSpatial.kd",
    ],
    "reduction": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float, float, float>>>(R)",
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float, "
            "at::native::sum_functor<float>>>>(R)"
        ),
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*)",
        "void at_cuda_detail::cub::DeviceScanKernel<at_cuda_detail::cub::AgentScanPolicy<128, 15, long>>(long*)",
        "void at::native::(anonymous namespace)::max_pool_forward_nchw<float, float>(int, float const*)",
        "sm50_xmma_pooling_fw_4d_FP16FP32NHWC_Average_FastDiv_CAlign8_execute_kernel_trt",
        "void at::native::tensor_kernel_scan_innermost_dim<float, std::plus<float>>(float*, float const*)",
        "void cudnn::pooling_fw_4d_kernel<float, float, cudnn::maxpooling_func<float>, 0, false>(cudnnTensorStruct)",
        "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const>>>(cublasDotParams)",
    ],
    "elementwise": [
        ELEMENTWISE
        + "at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<float>)",
        ELEMENTWISE
        + "at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&, at::native::GeluType)::{lambda()#1}>(int)",
        ELEMENTWISE + "at::native::(anonymous namespace)::where_kernel_impl(at::TensorIterator&)::{lambda()#1}>(int)",
        (
            "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::BinaryFunctor<float, float, "
            "float, at::native::binary_internal::MulFunctor<float> > >(at::TensorIteratorBase&)::{lambda(int)#1}>(int)"
        ),
        "void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out(c10::Scalar const&)>(int)",
        "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4>(long)",
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>(float)",
        "void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel>(c10::BFloat16*)",
        "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)",
        "void cudnn::ops::scalePackedTensor_kernel<float, float>(cudnnTensor4dStruct, float*, float)",
    ],
    "optimizer": [
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
            "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>(Meta)"
        ),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
            "TensorListMetadata<2>, at::native::(anonymous namespace)::BinaryOpListAlphaFunctor<float, 2, 2, 0>>(Meta)"
        ),
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>, float, float>(long, int volatile*)",
    ],
    "memory-like": [
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>(int)",
        ELEMENTWISE
        + "at::native::FillFunctor<float>, at::detail::Array<char*, 1> >(int, at::native::FillFunctor<float>)",
        ELEMENTWISE + "at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda(float)]>(int)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 3, 64, 64>(float*)",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>(Info)",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_kernel_impl>>(int)",
        "void at::native::_scatter_gather_elementwise_kernel<128, 4, Internal>(int, Internal)",
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long)",
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, float, long>(long const*)",
        "void nchwToNhwcKernel<float, float, float, true, false, (cudnnKernelDataType_t)0>(int, int, int)",
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16>(__nv_bfloat16 const*)",
        "void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, int, int>::Policy800>(int*)",
        "__amd_rocclr_copyBuffer.kd",
        "__amd_rocclr_fillBufferAligned.kd",
    ],
    "communication": [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<(unsigned long)4096>)",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
        "rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)",
        "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)",
    ],
    "Triton-fused": [
        "triton_poi_fused_add_cos_sin_0",
        "triton_red_fused__softmax_add_mean_3",
        "triton_per_fused_native_layer_norm_1",
        "triton_poi_fused__scaled_dot_product_attention_4",
        "triton__0d1d2d3d4d5d",
        "<unnamed>::nvfuser_none_f0_c0_r0_g0(<unnamed>::Tensor<<unnamed>::__half, (int)3, (int)3>)",
        "loop_add_fusion",
        "input_reduce_fusion_2",
    ],
    # Of no known library, whatever words they hold.
    "other": [
        "my_kernel",
        "",
        "matmul_kernel",
        "_attn_fwd",
        "_layer_norm_fwd_1pass_kernel",
        "compute_residual(double *, double *, int)",
        "my_reduce_kernel",
        "void reduce_blocks<float>(float*)",
        "gather_forces",
        "saxpy(double *, double *, double *, double, int)",
        "triton_softmax",
    ],
}

TRACES = [
    "cs336-zx3xyy/result_2_7B_nvtx.sqlite",
    "hta/trace_diff__test__test.json.gz",
    "kineto/resnet50_num_workers_0__worker0.1623143089861.pt.trace.json.gz",
    "nsys-ai/mfu_2gpu_before.sqlite",
    "nvFuser/report1_c.sqlite",
    "tracelens/h100__facebook_timesformer-base-finetuned-k400__1016002.json.gz",
]


@pytest.mark.parametrize(("category", "name"), [(c, n) for c, names in NAMES.items() for n in names])
def test_real_names(category: str, name: str):
    assert category_of(name) == category


def test_every_category_has_names():
    assert set(NAMES) == set(CATEGORIES)
    assert {category for category, *_ in categories._RULES} == set(CATEGORIES) - {"other"}


def test_rules_run_once_for_each_name(monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []
    monkeypatch.setattr(categories, "category_of", lambda name: seen.append(name) or "GEMM")
    names = pd.Series(pd.Categorical(["a", "b", "a"] * 1000))
    assert list(categorize(names)[:3]) == ["GEMM"] * 3
    assert seen == ["a", "b"]


def test_takes_an_index_and_missing_names():
    assert list(categorize(pd.Index(["triton_poi_fused_add_0", "nope"]))) == ["Triton-fused", "other"]
    missing = pd.Series(pd.Categorical.from_codes([0, -1], ["volta_sgemm_32x32_nn"]))
    assert list(categorize(missing)) == ["GEMM", "other"]
    assert len(categorize(pd.Series([], dtype="category"))) == 0


def test_a_hostile_name_takes_no_time():
    # Patterns that backtrack without end would hang here.
    for name in ("std::enable_if<" * 5000, "_adam" * 20000, "(" * 50000, "void " * 20000):
        assert category_of(name) in CATEGORIES


@pytest.mark.parametrize("name", TRACES)
def test_little_is_left_in_other(name: str, shared_traces: Path):
    table = kernels.summary(nsightkit.load(shared_traces / name, cache=False))
    left = table[table["category"] == "other"]
    listed = ", ".join(f"{row['name']!r} {row['share']:.2%}" for row in left.to_dict("records"))
    assert len(table)
    assert left["share"].sum() < 0.03, f"in other: {listed}"
