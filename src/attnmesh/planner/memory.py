"""How much a rank holds at once while attention goes over the mesh, by formula."""

from attnmesh.mesh.schedule import Exchange
from attnmesh.mesh.shapes import Shape


def peak_activations(shape: Shape, q_heads: int, kv_heads: int, exchange: Exchange) -> float:
    """The most that the backward pass holds beyond its inputs, under a full mask with values as wide as keys.

    In elements of float32 for each token of a rank's shard and each column of a head. With f the share of the heads
    that go at once, q and k the heads here, C ranks along keys and R along queries (each term where its axis is > 1):

        gradients of the shard                q + 2k
        rows: q, dout, out                    f 3C q      out alone without a keys axis
        made by a kernel: dq, dk, dv          f (C q + 2R k)
        gathered keys and values              f 2R k      while the kernel runs, and C q of dout masked
        sent, coming and kept of dk and dv    f (4R - 2) k    after the kernel
        sent, coming and kept of dq           f (2C - 1) q    after that, while the next group's kernel runs
        the next group's gathers              f (2C q + 2R k)

    Not counted: what a heads axis swaps, and gathered tokens that are not in order and have to be put so.
    Round a ring R is 1 in what a kernel holds and makes, beside one chunk sent, one coming, and the same of its
    gradients, with dq growing from step to step.
    """
    _, rows, columns = shape
    q, k = q_heads, kv_heads  # a heads axis gives each rank fewer heads of as many more tokens
    groups = exchange.head_groups(shape, kv_heads)
    share = 1 / groups
    at_once = 1 if exchange.ring else rows
    own, row = q + 2 * k, share * columns * q
    standing = own + row * (3 if columns > 1 else 1)
    made, gathered = row + share * 2 * at_once * k, share * 2 * at_once * k if rows > 1 else 0
    back = share * (2 * columns - 1) * q if columns > 1 else 0
    coming = share * (2 * columns * q * (columns > 1) + 2 * rows * k * (rows > 1)) if groups > 1 else 0
    under_way = 0.0
    if exchange.ring and rows > 1:
        under_way = row + (8 * k if rows > 2 else 2 * k)
    moments = (
        standing + row + made + gathered + under_way + coming + (back if groups > 1 else 0),
        standing + made + coming + (share * (4 * rows - 2) * k if rows > 1 and not exchange.ring else 0),
        standing + row + coming + back,
    )
    return max(moments)
