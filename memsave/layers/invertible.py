"""Whether the output of a norm tells its normalized input, so that it may be kept in its place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_dynamo_compiling
from torch.multiprocessing.reductions import StorageWeakRef

from .. import kernels
from .._context import is_plain, is_value_known

#: How many times larger than the weight the bias may be: xhat loses as many bits as this has.
LARGEST_RATIO = 16
#: By dtype, the least weight: of smaller ones ``xhat * weight`` has fewer digits. (Its inverse is
#: the largest.)
LEAST_WEIGHT = {
    dtype: torch.finfo(dtype).tiny / torch.finfo(dtype).eps
    for dtype in (torch.float32, torch.float64)
}


def is_invertible(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether ``xhat`` can be read off ``y``: its dtype is wide, and no weight is (nearly) zero or
    infinite, or small beside its bias.

    On an accelerator it waits for the device, once per version of the parameters; of what is
    written to their ``.data`` there are no versions.
    """
    if is_dynamo_compiling():
        return False  # There are no values to look at.
    least = LEAST_WEIGHT.get(input.dtype) if is_plain(input) else None
    if least is None or not torch.is_grad_enabled():
        return False
    if kernels.nodes is not None:
        is_known = kernels.nodes.is_invertible(input, weight, bias, LARGEST_RATIO)
        if is_known is not None:
            return is_known
    if not is_value_known(input, weight, bias):
        return False
    if isinstance(input, FakeTensor) or input.is_meta:
        return True  # as if they were like those of a trained model
    if weight is None:
        return bias is None
    return (_tells if input.is_cpu else tells_once)(weight, bias, least)


def _tells(weight: Tensor, bias: Tensor | None, least: float) -> bool:
    with torch.no_grad():
        size = weight.abs()
        fits = (size >= least) & (size <= 1 / least)
        if bias is not None:
            fits = fits & (bias.abs() <= LARGEST_RATIO * size)
        return bool(fits.all())


def tells_its_input(module: Any) -> bool:
    """Whether ``xhat`` can be read off the output of a norm with the parameters that it has now."""
    weight, bias = module.weight, getattr(module, "bias", None)
    if weight is None:
        return bias is None
    least = LEAST_WEIGHT.get(weight.dtype)
    if least is None or type(weight) not in (Tensor, nn.Parameter) or weight.is_meta:
        return True
    return _tells(weight, bias, least)


#: What was found, by where the weight lies. (Weak references are to storages: tensors that have
#: some cannot be swapped, ``torch.utils.swap_tensors``.)
_found: dict[int, tuple[Any, bool]] = {}


def _state(tensor: Tensor) -> tuple[Any, ...]:
    layout = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    return *layout, tensor._version, StorageWeakRef(tensor.untyped_storage())


def tells_once(weight: Tensor, bias: Tensor | None, least: float) -> bool:
    """As ``_tells``, looked up once per version of the parameters. (Which views of one storage have
    in common.)
    """
    state = [_state(tensor) for tensor in (weight, bias) if tensor is not None]
    place = weight.data_ptr()
    found = _found.get(place)
    if found is None:
        for key, ((first, *_), _) in [*_found.items()]:
            if first[-1].expired():
                _found.pop(key, None)
    if found is None or found[0] != state:
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # A CUDA graph cannot wait for a look.
        found = _found[place] = (state, _tells(weight, bias, least))
    return found[1]
