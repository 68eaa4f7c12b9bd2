"""Recurrent layers beside attention, as values of a workload."""

from dataclasses import KW_ONLY, dataclass

from attnmesh.errors import ShapeError, check_choice
from attnmesh.planner.checks import bounded_count

TRANSITIONS = ("matrix", "diagonal", "scalar")
"""Forms of a recurrent layer's `A` per head."""


@dataclass(frozen=True)
class Recurrent:
    """Equal recurrent layers, such as those of Gated DeltaNet, Mamba-2, Lightning attention or RG-LRU.

    The tokens of a shard map each state by `S -> A S + B`. A convolution needs the last tokens of the shard before.

    Args:
        heads: States per layer. 0 for a convolution without a state, with `key_dim` and `value_dim` 0.
        key_dim: Rows of a state.
        value_dim: Columns of a state.
        layers: Layers.
        transition: The form of `A` per head: "matrix" (`key_dim` squared numbers), "diagonal" (`key_dim`) or "scalar".
        conv_channels: Channels of the short causal convolution. 0 for none.
        conv_width: Tokens that an output of the convolution sees. 1 for none.

    Raises:
        ClusterError: A count is no integer, is too small, or is above 1e15.
        KernelError: The transition is unknown.
        ShapeError: Some of a state's counts are 0 and others not, one of the two `conv` counts is missing, or the
            layer has neither a state nor a convolution.

    >>> import attnmesh as am
    >>> deltanet = Recurrent(32, 128, 128, layers=36, conv_channels=8192, conv_width=4)
    >>> qwen3_next = am.Workload(16, 2, 256, 131072, layers=12, recurrent=deltanet)
    >>> qwen3_next.scan_bytes(8, am.Zigzag()), qwen3_next.halo_bytes(8, am.Zigzag()), qwen3_next.state_bytes
    (1811939328, 7077888, 77266944)
    """

    heads: int
    key_dim: int
    value_dim: int
    _: KW_ONLY
    layers: int = 1
    transition: str = "matrix"
    conv_channels: int = 0
    conv_width: int = 1

    def __post_init__(self) -> None:
        for name in ("heads", "key_dim", "value_dim", "layers", "conv_channels", "conv_width"):
            least = 1 if name in ("layers", "conv_width") else 0
            object.__setattr__(self, name, bounded_count(f"Recurrent {name}", getattr(self, name), least))
        check_choice("Recurrent transition", self.transition, TRANSITIONS, 'pass "matrix"')
        state = (self.heads, self.key_dim, self.value_dim)
        if any(state) != all(state):
            given = f"{self.heads} heads of {self.key_dim} x {self.value_dim}"
            fix = "pass Recurrent(heads, key_dim, value_dim), or 0, 0, 0 for a convolution alone"
            raise ShapeError("Recurrent", "a state of 1 or more in each count, or 0 in all", given, fix)
        if (self.conv_channels > 0) != (self.conv_width > 1):
            expected = "conv_channels of 1 or more and conv_width of 2 or more, or neither"
            given = f"{self.conv_channels} x {self.conv_width}"
            raise ShapeError("Recurrent", expected, given, "pass both or neither")
        if self.heads == self.conv_channels == 0:
            fix = "pass heads, or conv_channels= and conv_width="
            raise ShapeError("Recurrent", "a state or a convolution", "neither", fix)

    @property
    def state_numbers(self) -> int:
        """Numbers of the states of one layer and sequence."""
        return self.heads * self.key_dim * self.value_dim

    @property
    def map_numbers(self) -> int:
        """Numbers of the affine maps of one layer and sequence: `A` and `B` of each head."""
        linear = {"matrix": self.key_dim**2, "diagonal": self.key_dim, "scalar": 1}[self.transition]
        return self.heads * linear + self.state_numbers

    @property
    def halo_numbers(self) -> int:
        """Numbers of the halo of one layer and sequence: the tokens before a shard that its convolution needs."""
        return (self.conv_width - 1) * self.conv_channels

    @property
    def title(self) -> str:
        """The layers in a few words.

        >>> Recurrent(32, 128, 128, layers=36).title
        '36 recurrent layers of 32 states of 128x128'
        """
        layers = f"{self.layers} recurrent layer{'s' * (self.layers > 1)}"
        states = f"{self.heads} state{'s' * (self.heads > 1)} of {self.key_dim}x{self.value_dim}"
        return f"{layers} of {states if self.heads else f'a convolution of {self.conv_channels}x{self.conv_width}'}"
