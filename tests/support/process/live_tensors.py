"""The memory of tensors that live while a function runs."""

from weakref import finalize

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Peak bytes of the live tensors that operators allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
        made = operator(*arguments, **(options or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((arguments, options)) if isinstance(x, Tensor)}
        for x in tree_leaves(made):
            if isinstance(x, Tensor) and x.device.type != "meta":
                storage = x.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    finalize(storage, self.sizes.pop, storage._cdata)
        self.most = max(self.most, sum(self.sizes.values()))
        return made
