"""What kind of work a kernel does, read from its name.

Names are reliable only for kernels of known libraries (:data:`LIBRARIES`): cuBLAS, cuDNN, CUTLASS, CUB and Thrust,
PyTorch's own kernels, flash attention, NCCL, what ``torch.compile`` generates, and a few more. Every other kernel is
*other*, even if its name contains familiar words. For known ones ordered rules over the demangled name decide; the
first match wins, and :data:`RULES` is the whole truth.

Decisions that a reader may want to know:

- *convolution* is what cuDNN and MIOpen run, Winograd's transforms and offset tables included; *GEMM* includes a
  split-K epilogue.
- *Triton-fused* is what a fusing compiler generated: Triton through ``torch.compile``, nvFuser, XLA,
  TensorRT's Myelin. A Triton *template* (``triton_tem_fused_mm``) is a GEMM or an attention, not a fusion.
- *memory-like* kernels move, fill, cast, gather, scatter, permute or sort data: little arithmetic to each byte.
- *reduction* includes scans, histograms, pooling, arg-max and losses; ``multi_tensor_apply`` (PyTorch's
  ``_foreach`` kernels) is *optimizer*, which is also where gradient clipping runs.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

__all__ = ["CATEGORIES", "CPU_COLLECTIVE", "LIBRARIES", "RULES", "categorize", "category_of"]

#: Every category, in the order tables show them when times are equal.
CATEGORIES = (
    "GEMM",
    "convolution",
    "attention",
    "softmax",
    "normalization",
    "reduction",
    "elementwise",
    "optimizer",
    "memory-like",
    "communication",
    "Triton-fused",
    "other",
)

#: Marks of known libraries, anywhere in a kernel's name.
LIBRARIES = re.compile(
    # PyTorch, CUB, Thrust; their kernels in unnamed namespaces, and short names, by name.
    r"\bat::|\bat_cuda_detail|\bc10::|\bcub::|\bthrust::|softmax_warp_|cunn_|multi_tensor_apply|indexing_backward"
    r"|(vectorized|unrolled|index|distribution)_elementwise|^elementwise_kernel<|vectorized_layer_norm|CatArrayBatched"
    # NVIDIA's and AMD's libraries of products and convolutions.
    r"|cudnn|cublas|cutlass|\bcask_|nvjet|xmma|^(trt_)?(maxwell|pascal|volta|turing|ampere|hopper|blackwell)_|^sm\d\d+_"
    r"|gemv(2T|2N|NSP|x)|splitKreduce|plicit_convolve_|sgemm_largek|n[ch]\w*ToN[ch]\w*Kernel|^Kernel2?$|genericReformat"
    r"|permutationKernel|deep_gemm|\bCijk_|ck_tile|\bck::|miopen|gcnAsmConv|SP3Asm|rocclr|rocprim|hipcub"
    # Communication and attention.
    r"|nccl|rccl|nvshmem|msccl|rocshmem|multimem_|cross_device_reduce|symm_?mem|deep_ep|(one|two)_shot_all_reduce"
    r"|flash_(fwd|bwd|attn)|\bflash::|flashinfer|fmha|MemEffAttention|(Batch|Single)(Prefill|Decode)With|paged_attention"
    # What compilers generate.
    r"|^triton_(poi|red|per|tem|for|unk|mm|bmm|addmm|convolution\w*)(_|$)|^triton__\d|nvfuser_|\bCudaCodeGen::|^__myl_"
    r"|^(loop|input)_\w*fusion|^\w*_fusion(_\d+)?$|^fusion(_\d+)?$|^wrapped_"
    # Libraries of kernels.
    r"|\bvllm::|sgl_|fused_moe_kernel|matmul_ogs|unified_attention|aiter|fbgemm|moe::dev::|^bmm_\w+_cga|^attn_fwd$"
    r"|transformer_engine|\bcuApply|\bcuCompute|\bliger_|^cupy_",
    re.IGNORECASE,
)
# Generic kernels that run a functor: their template arguments name the work.
_ELEMENTWISE_WRAPPER = r"elementwise_(templated_)?kernel|elementwise_kernel_\w+|elementwise_grid_stride_kernel|jitted"
_FUNCTOR_WRAPPER = r"__parallel_for|_kernel_agent|static_kernel|transform_kernel"
_MOVES_DATA = (
    r"copy|FillFunctor|index_|gpu_index_kernel|scatter|gather|uninitialized_fill|fill_functor|take_|put_|flip_|roll_"
    r"|masked_select|unique"
)

#: Collectives on a CPU: PyTorch's annotations of Gloo, MPI and UCC, and vLLM's operators through shared memory.
CPU_COLLECTIVE = re.compile(r"^(gloo|mpi|ucc):|\bshm_(all_?reduce|(all_)?gather|send|recv)")

#: ``(category, pattern, inner)`` in order of precedence. ``pattern`` is searched in the function's qualified name
#: (no return type, no template or call arguments), ``inner``, where there is one, in the full name; case is ignored.
RULES: tuple[tuple[str, str, str | None], ...] = (
    (
        "communication",
        (
            r"nccl|rccl|nvshmem|msccl|rocshmem|multimem_|cross_device_reduce|symm_?mem|deep_ep"
            r"|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|(one|two)_?shot_\w*reduce"
        ),
        None,
    ),
    # Compilers mark fused kernels at the start of the name; its templates are the kernels they expand.
    ("attention", r"^triton_tem\w*(attention|attn)", None),
    ("convolution", r"^triton_(tem\w*_|)convolution", None),
    ("GEMM", r"^triton_(tem\w*_|)(mm|bmm|addmm|baddbmm)(_|$)", None),
    (
        "Triton-fused",
        r"^triton_|nvfuser_|\bCudaCodeGen::|^__myl_|^(loop|input)_\w*fusion|^\w*_fusion(_\d+)?$|^fusion(_\d+)?$|^wrapped_",
        None,
    ),
    ("attention", r"cutlass\w*::|ck_tile::|^entry$", r"flash|fmha|attention"),
    (
        "attention",
        (
            r"flash_?(fwd|bwd|attn|attention|infer|decod|mla)|\bflash::|pytorch_flash::|fmha|attention|attn|sdpa|\bmha_|_mha\b"
            r"|multihead|Batch(Prefill|Decode)With|Single(Prefill|Decode)With|AttentionKernel"
        ),
        None,
    ),
    # Embedding tables fuse their update into the backward gather: the name says optimizer, the time is the gather.
    ("memory-like", r"(?<!rotary_)embedding", None),
    (
        "optimizer",
        (
            r"multi_?tensor_?apply|multi_tensor_\w+|fused_?(adam|sgd|lamb|adagrad|lion)|\badamw?_?(cuda|kernel|math)"
            r"|_(adam|adamw|lamb|lion|muon|sgd|adagrad)\w*_kernel|kAdam|optimizer|lamb_stage|amp_update_scale"
        ),
        None,
    ),
    ("memory-like", _ELEMENTWISE_WRAPPER, _MOVES_DATA),
    ("elementwise", _ELEMENTWISE_WRAPPER, None),
    ("memory-like", _FUNCTOR_WRAPPER, _MOVES_DATA),
    ("reduction", _FUNCTOR_WRAPPER, r"reduce|scan"),
    ("elementwise", _FUNCTOR_WRAPPER, None),
    ("reduction", r"\breduce_kernel\b", None),
    ("softmax", r"soft_?max|cross_?entropy|log_?sum_?exp", None),
    (
        "normalization",
        (
            r"(layer|batch|group|instance|rms|weight|local_response)_?norm|normalization::|\bbn_(fw|bw|act)|\bbn\w*_kernel"
            r"|RowwiseMoments|GammaBeta|ComputeInternalGradients|ComputeFusedParams|ComputeBackwardFusedParams"
            r"|cuCompute(GradInput|PartGrad\w*)|cuApply(Layer|RMS)Norm|\b_?(ln|rms)_(fwd|bwd|parallel)|\blrn|welford"
        ),
        None,
    ),
    # Pooling runs in xmma engines too, so it is asked for before the matrix engines.
    ("reduction", r"pool(ing|2d|3d|1d|_|\b)", None),
    ("memory-like", r"nchwToNhwc|nhwcToNchw|(nhwc|nchw)AddPadding|genericReformat|permutationKernel", None),
    (
        "convolution",
        (
            r"conv(?!er)|fprop|wgrad|dgrad|winograd|implicit_|im2col|col2im|vol2col|col2vol|cask_cudnn|cudnn_\d+x\d+|scudnn"
            r"|\dcudnn_|cudnn::cnn|gcnAsmConv|SP3Asm"
        ),
        None,
    ),
    (
        "GEMM",
        (
            r"(?<!fb)gemm|gemv|^bmm_|nvjet|xmma|cutlass|\bCijk_|^Kernel2?$|mat_?mul|mul_mat|\bmm_kernel|_mma_|wmma"
            r"|splitK_?reduce|cublasLt|epilogue::impl|contraction_kernel|^(trt_)?(maxwell|pascal|volta|turing|ampere"
            r"|hopper|blackwell)_|cudnn::(detail|gemm)|marlin|machete|fused_moe|grouped_mm"
            r"|syrk|trsm|trmm|\bck::kernel_|tensor_operation::device"
        ),
        None,
    ),
    (
        "memory-like",
        (
            r"copy|CatArray|concat|\bcat_|gather|scatter|index|permute|transpose|fill|memset|zero|sort(?!ed)|bucketize|jagged"
            r"|slice|\bstack|\bpad_|padding|_pad\w*_kernel|(reflection|replication)_pad|unfold|reshape|expand|repeat|\bflip"
            r"|\broll|tri[lu]_|masked_select|unique|nonzero|DeviceSelect|DeviceCompact|to_dense|\bcompute_cuda_kernel"
            r"|get_rows|moe_align|offsets_range"
        ),
        None,
    ),
    (
        "reduction",
        (
            r"reduce|reduction|\bsum_|_sum\b|\bmean_|_mean\b|arg_?(max|min)|\b(max|min)_|scan|cumsum|cumprod|histogram"
            r"|top_?k|kth_?value|nll_?loss|NLLCriterion|_loss|loss_|\bdot_kernel|nrm2|asum|norm_kernel|vector_norm|bincount"
            r"|qparam|amax"
        ),
        None,
    ),
    (
        "elementwise",
        (
            r"gelu|silu|relu|sigmoid|tanh|swiglu|geglu|act_and_mul|activation|dropout|pointwise|rotary|\brope"
            r"|quantize|quant_|_quant|_to_float|float_to_|where|clamp|upsampl|interpolat|resample|axpy|axpby|\bscal_"
            r"|scalePackedTensor|vec(tor)?_?(add|mul|sub|scale)|\badd_|_add\b|AddKernel|\bmul_|_mul\b|bias_?add|add_?bias"
            r"|add_?tensor|op_?tensor|random|uniform|normal|curand|philox|searchsorted|bounds_check|sampling|arange"
            r"|linspace|cast"
        ),
        None,
    ),
)

# A return type, and the two spellings of an unnamed namespace, are not part of a function's name.
_UNNAMED = re.compile(r"\(anonymous namespace\)|<unnamed>|\{anonymous\}")
_RETURN_TYPE = re.compile(r"^(?:(?:void|__global__|static)\s+|std::enable_if<.*?>::type\s+)+")
_COMPILED = tuple(
    (category, re.compile(pattern, re.IGNORECASE), inner and re.compile(inner, re.IGNORECASE))
    for category, pattern, inner in RULES
)
_CODE = {category: code for code, category in enumerate(CATEGORIES)}
#: What a compiler fuses has been seen with 3,000 characters; a megabyte of them is an attack on the rules' time.
_LONGEST = 10_000


def category_of(name: str) -> str:
    """Decide the category of one kernel.

    Parameters
    ----------
    name : str
        Demangled (or short) kernel name.

    Returns
    -------
    str
        One of :data:`CATEGORIES`.

    Examples
    --------
    >>> category_of("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN")
    'GEMM'
    >>> category_of("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps>>")
    'reduction'
    """
    name = name[:_LONGEST]
    if not LIBRARIES.search(name):
        return "other"
    function = _RETURN_TYPE.sub("", _UNNAMED.sub("unnamed", name))
    function = re.split(r"[<(]", function, maxsplit=1)[0]
    for category, pattern, inner in _COMPILED:
        if pattern.search(function) and (not inner or inner.search(name)):
            return category
    return "other"


def categorize(names: pd.Index | pd.Series) -> pd.Categorical[str]:
    """Decide the category of each kernel; the rules run once per distinct name, never per row.

    Parameters
    ----------
    names : Index or Series of str or category, shape (n,)
        Kernel names.

    Returns
    -------
    Categorical, shape (n,)
        Its categories are :data:`CATEGORIES`.
    """
    values = names.array if isinstance(names.dtype, pd.CategoricalDtype) else pd.Categorical(names)
    assert isinstance(values, pd.Categorical)
    # Only of names that occur: a reader may share one dictionary between tables. The last slot is for a missing name.
    code_of_name = np.full(len(values.categories) + 1, _CODE["other"], np.int8)
    used = np.setdiff1d(pd.unique(values.codes), -1)
    code_of_name[used] = [_CODE[category_of(str(name))] for name in values.categories[used]]
    return pd.Categorical.from_codes(code_of_name[values.codes], categories=pd.Index(CATEGORIES))
