"""Values that go through a model of transformers from one plug-in to another."""

from collections.abc import Callable
from typing import Any, NoReturn

from attnmesh.errors import KernelError

FAMILIES = "use a family like Llama, Qwen, Mistral, Gemma 3 or gpt-oss"


class Opaque:
    """A value that a model hands on as it is. Any look into it raises: the model does what is not served here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python itself asks every object for these
        self._refuse(name)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], *_: Any) -> NoReturn:
        """Raise for every function of PyTorch."""
        cls._refuse(func.__name__)

    @staticmethod
    def _refuse(what: str) -> NoReturn:
        expected = "a model that hands masks and cached keys to attention as they are"
        given = f"one that reads them by {what}, as attention of its own does"
        raise KernelError("attnmesh in transformers", expected, given, FAMILIES)


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Opaque, *_: Any) -> NoReturn:
        self._refuse(name)

    return refuse


for _name in (
    *("getitem", "setitem", "len", "iter", "contains", "bool", "neg", "invert", "lt", "le", "gt", "ge", "matmul"),
    *(f"{side}{name}" for side in ("", "r", "i") for name in ("add", "sub", "mul", "truediv", "and", "or", "xor")),
):
    setattr(Opaque, f"__{_name}__", _refusing(_name))
