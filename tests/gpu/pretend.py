"""A pytest plugin: a device that is one in name only, for the mistakes that need no GPU to be made.

Its tensors lie on the CPU and say that they do not. An operation on tensors of two devices is refused as CUDA
refuses it, with the exceptions that CUDA makes: numbers of no dimension, and indices from the CPU. Everything
else is computed, so code that looks at its data runs as it would. What `is_cuda` decides is not seen.

    PCA_TORCH_TEST_DEVICE=pretend pytest tests/gpu -p tests.gpu.pretend
"""

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "pretend"
LACKS = ("sparse", "autocast", "generator")  # a layout, a mode, and random numbers of its own
LIBRARY = torch.library.Library("aten", "IMPL")
INDEXING = ("aten.index.", "aten.index_put", "aten._index_put")


class There(Tensor):
    """A tensor of that device around one of the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner):
        if inner.layout != torch.strided:
            raise NotImplementedError("this device has dense tensors alone")
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Device.run(func, args, kwargs or {})

    def tolist(self):
        return self.inner.tolist()

    def numpy(self, *, force=False):
        raise TypeError(f"can't convert {NAME} device type tensor to numpy")

    def __array__(self, *args, **kwargs):
        return self.numpy()

    def __deepcopy__(self, memo):
        return There(self.inner.clone())


class Device(TorchDispatchMode):
    """Keeps the two devices apart while it is entered."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    @staticmethod
    def run(func, args, kwargs):
        name, target = str(func), kwargs.get("device")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor for tensor in tensors if isinstance(tensor, There)]
        moves = name.startswith(("aten._to_copy", "aten.copy_"))
        if there and not moves:
            _refuse_mixed(name, args, [t for t in tensors if t.dim() and not isinstance(t, There)])
        goes = bool(there) if target is None else target.type == NAME
        if not (there or goes):
            return func(*args, **kwargs)
        generator = kwargs.get("generator")
        if goes and generator is not None:
            raise RuntimeError(f"expected a {NAME!r} device type for generator but found 'cpu'")
        kwargs = {key: value for key, value in kwargs.items() if key != "driver"}  # of CUDA's own
        if target is not None and goes:
            kwargs["device"] = torch.device("cpu")
        out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        if name.startswith("aten._local_scalar_dense"):
            return out
        written = [a for a, of in zip(args, func._schema.arguments, strict=False) if _is_written(of)]
        if len(written) == 1 and isinstance(out, Tensor):
            return written[0]
        return tree_map(_outer, out) if goes else out


def _refuse_mixed(name, args, from_cpu):
    """Two devices in one operation.

    Raises:
        RuntimeError: as CUDA has it.
    """
    index_only = name.startswith(INDEXING) and not any(tensor is args[0] for tensor in from_cpu)
    if from_cpu and not index_only:
        shapes = [tuple(tensor.shape) for tensor in from_cpu]
        raise RuntimeError(f"{name}: expected all tensors to be on one device, {shapes} are on the CPU")


def _inner(leaf):
    return leaf.inner if isinstance(leaf, There) else leaf


def _outer(leaf):
    return There(leaf) if isinstance(leaf, Tensor) and not isinstance(leaf, There) else leaf


def _is_written(argument):
    return argument.alias_info is not None and argument.alias_info.is_write


def _empty(size, stride, *, dtype=None, **_):
    """What `torch.tensor(..., device=...)` asks for below every mode."""
    return There(torch.empty_strided(size, stride, dtype=dtype))


def _copy(source, target, non_blocking=False):
    """And then this."""
    target.inner.copy_(source)
    return target


def pytest_configure():
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    LIBRARY.impl("empty_strided", _empty, "PrivateUse1")
    LIBRARY.impl("_copy_from", _copy, "PrivateUse1")


def pytest_collection_modifyitems(items):
    for item in items:
        if any(word in item.nodeid for word in LACKS):
            item.add_marker(pytest.mark.skip(reason=f"the {NAME} device lacks it"))


@pytest.fixture(autouse=True)
def device_is_there():
    with Device(), torch.no_grad():
        yield
