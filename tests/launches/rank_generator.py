"""Megatron's groups, written anew from its definition: rank = sum of coordinate * stride, the first name fastest."""

import itertools


def rank_groups(order, degrees, wanted):
    """The groups over the names in `wanted`, each in ascending order of its members' coordinates."""
    names = order.split("-")
    strides, stride = {}, 1
    for name in names:
        strides[name] = stride
        stride *= degrees.get(name, 1)
    others = [n for n in names if n not in wanted]
    inside = [n for n in names if n in wanted]
    found = []
    # The slowest name outermost, as in Megatron's own lists.
    for fixed in itertools.product(*(range(degrees.get(n, 1)) for n in reversed(others))):
        base = sum(c * strides[n] for c, n in zip(fixed, reversed(others), strict=True))
        found.append(
            [
                base + sum(c * strides[n] for c, n in zip(moving, reversed(inside), strict=True))
                for moving in itertools.product(*(range(degrees.get(n, 1)) for n in reversed(inside)))
            ]
        )
    return found


def takes(order, degrees):
    """Whether Megatron's `initialize_model_parallel` gets past its assertions: its two generators, in plain lists."""
    tp, cp, ep, dp, pp = (degrees.get(n, 1) for n in ("tp", "cp", "ep", "dp", "pp"))
    world = tp * cp * ep * dp * pp
    dense = {"tp": tp, "cp": cp, "dp": world // (tp * cp * pp), "pp": pp}
    expert = {"tp": tp, "ep": ep, "dp": world // (tp * ep * pp), "pp": pp}
    if not (order.endswith("pp") or pp == 1 or expert["dp"] == dense["dp"]):
        return False
    return sorted(rank_groups(order, dense, {"pp"})) == sorted(rank_groups(order, expert, {"pp"}))
