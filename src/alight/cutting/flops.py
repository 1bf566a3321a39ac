"""The counter of FLOPs: a module runs on the meta device, so shapes flow, no data do, and no weight is copied.

Counted are matrix products, convolutions and attention, by the formulas of torch's registry; a multiply-add is 2 FLOPs.
Operations that work once per element (activations, norms, pooling, sums) or only move data count 0, as is usual; any
other operation without a formula is listed as unknown. On real tensors torch runs fused kernels for attention and
recurrent layers, some of which have no formula; on the meta device it runs their decompositions, which have.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

Result = TypeVar("Result")
aten = torch.ops.aten

# Formulas that torch's registry lacks, from the shapes of the operands.
FORMULAS: Mapping[Any, Callable[..., int]] = {
    aten.dot: lambda a, b: 2 * prod(a),
    aten.vdot: lambda a, b: 2 * prod(a),
    aten.mv: lambda a, b: 2 * prod(a),
    aten.addmv: lambda added, a, b: 2 * prod(a),
    aten.addr: lambda added, a, b: 2 * prod(a) * prod(b),
    aten.addbmm: lambda added, a, b: 2 * prod(a) * b[-1],
    aten._int_mm: lambda a, b: 2 * prod(a) * b[-1],
}

# Operations that cost once per element or only move data, and are neither views nor marked as pointwise by torch.
FREE = frozenset(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d
    max_pool2d_with_indices max_pool3d_with_indices fractional_max_pool2d max_unpool2d
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm miopen_batch_norm
    _batch_norm_with_update _batch_norm_no_update native_layer_norm native_group_norm _fused_rms_norm
    _softmax _log_softmax _safe_softmax logsumexp _logcumsumexp logcumsumexp
    hardswish hardswish_ rrelu_with_noise _prelu_kernel native_dropout bernoulli bernoulli_
    sum mean prod amax amin aminmax max min argmax argmin all any var var_mean std std_mean norm nansum count_nonzero
    linalg_vector_norm cumsum cumprod cummax cummin median nanmedian mode diff renorm
    sort topk kthvalue argsort unique_dim _unique2 unique_consecutive searchsorted bucketize bincount histc nonzero
    cat stack _pack_padded_sequence _pad_packed_sequence unsafe_split unsafe_chunk unsafe_split_with_sizes
    split_with_sizes_copy unbind_copy index _unsafe_index index_select index_put index_put_ _unsafe_index_put index_add
    index_add_ index_copy index_fill _index_put_impl_ gather scatter scatter_ scatter_add scatter_add_ scatter_reduce
    take masked_select masked_fill masked_scatter where embedding _embedding_bag one_hot repeat repeat_interleave
    tile roll flip rot90 tril triu diag diag_embed tril_indices triu_indices meshgrid
    constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
    replication_pad3d pixel_shuffle pixel_unshuffle channel_shuffle im2col col2im
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler_2d grid_sampler_3d affine_grid_generator
    clone copy_ copy _to_copy _copy_from contiguous lift lift_fresh lift_fresh_copy _unsafe_view view as_strided
    as_strided_ resize_ set_ alias _reshape_alias_copy _conj_physical detach detach_ fill fill_ zero zero_ expand_copy
    empty empty_like empty_strided new_empty new_empty_strided new_zeros new_ones new_full zeros zeros_like ones
    ones_like full full_like arange linspace logspace eye scalar_tensor _efficientzerotensor
    rand rand_like randn randn_like randint randint_like randperm normal normal_ uniform uniform_ random_ exponential_
    _local_scalar_dense equal is_same_size _assert_async _assert_scalar _assert_tensor_metadata sym_size sym_numel
    item is_nonzero _fused_sdp_choice
    """.split()
)


NORMS = (nn.functional.batch_norm, nn.functional.layer_norm, nn.functional.group_norm)


def count_flops(module: nn.Module, *inputs: Tensor) -> int:
    """Return the FLOPs of one call of a module, in its present mode.

    >>> count_flops(nn.Linear(12, 7), torch.zeros(5, 12))
    840
    """

    def counted(inputs: tuple[Tensor, ...]) -> int:
        with torch.no_grad(), FlopCounter() as counter:
            module(*inputs)
        return counter.flops

    return without_data(counted, inputs)


def without_data(run: Callable[[Any], Result], inputs: Any) -> Result:
    """Run a function of tensors on the meta device, or on the tensors themselves if it needs their values."""
    try:
        with _WeightsOnMeta():
            return run(tree_map(_as_meta, inputs))
    except Exception:  # it asks for values, or an operation has no meta kernel; other errors are raised again below
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no formula on a CPU
            return run(inputs)


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of every operation that torch dispatches while it is open.

    >>> with FlopCounter() as counter:
    ...     result = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> counter.flops
    48
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.unknown: set[str] = set()  # operations without a formula

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = getattr(func, "_overloadpacket", func)
        if kind not in flop_registry and hasattr(func, "decompose"):
            with self:  # a composite operation is counted by its parts
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if kind in flop_registry:
            self.flops += flop_registry[kind](*args, **kwargs, out_val=result)
        elif kind in FORMULAS:
            self.flops += FORMULAS[kind](*(part.shape for part in args if isinstance(part, Tensor)))
        elif not _is_free(func):
            self.unknown.add(str(kind))
        return result


class _WeightsOnMeta(TorchFunctionMode):
    """Replaces every tensor that meets one on the meta device by one there: weights and constants are not moved."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments = (args, kwargs or {})
        if any(isinstance(part, Tensor) and part.is_meta for part in tree_leaves(arguments)):
            arguments = tree_map(_as_meta, arguments)
        args, kwargs = arguments
        quick = like_input(func, args)
        return func(*args, **kwargs) if quick is None else quick


def like_input(func: Any, args: Sequence[Any]) -> Tensor | None:
    """Return the result of a norm or GELU without data, for which torch takes milliseconds in Python; or None."""
    if (func not in NORMS and func is not nn.functional.gelu) or not args or not args[0].is_meta:
        return None
    return torch.empty_like(args[0], memory_format=torch.contiguous_format if func in NORMS else torch.preserve_format)


def _as_meta(part: Any) -> Any:
    """Return a tensor's shape, strides and dtype without its data; anything else unchanged."""
    return part.to("meta") if isinstance(part, Tensor) and not part.is_meta else part


def _is_free(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload):
        return False
    namespace, _, name = func._schema.name.partition("::")
    if namespace in ("prim", "debugprims", "inductor"):
        return True
    return namespace == "aten" and (func.is_view or torch.Tag.pointwise in func.tags or name in FREE)
