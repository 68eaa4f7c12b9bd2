"""What goes through a model of transformers from one plug-in to another."""

from typing import Any

from attnmesh.errors import KernelError

FAMILIES = "use a family like Llama, Qwen, Mistral, Gemma 3 or gpt-oss"


class Opaque:
    """A model hands it on as it is. One that looks into it does something to masks or keys that is not served here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # what Python itself asks every object for
        expected = "a model that hands masks and cached keys to attention as they are"
        raise KernelError("attnmesh in transformers", expected, f"one that asks for their .{name}", FAMILIES)
