"""What a user's kernel is made of: memory of peers, `put`, `signal`, `wait`, and the walk along a schedule's rows.

All of it is Triton, in the subset that versions 3.6 and 3.9 share; it runs in the interpreter, too. Order is that of
heaps: data stores, a barrier of the program, one release add at system scope; the consumer's acquire at system scope,
a barrier, data loads. The barrier stands in the text: 3.6 puts none before a scalar atomic, and the release of
one thread does not order the stores of the others.

A kernel begins with `enter`, which says its rank and its rows. A row is `WIDE` int64 words, see `rows`:

```
rank, k, last, epoch = enter(table, begin, state, rank0, programs)
ok = 1
while (k < last) & (ok != 0):
    row = rows + k * WIDE
    kind = tl.load(row)
    if kind == PUT:
        where = place(table, row, epoch, a, aligned)   # compute a tile, and store it there with `put`
    elif kind == READ:
        where = place(table, row, epoch, a, aligned)   # what lies there is complete
    else:
        ok = turn(table, row, state, rank, epoch, polls)
    k += 1
```
"""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# Functions of Triton: what is annotated there is a constexpr, and nothing else.
from __future__ import annotations

import triton
import triton.language as tl

WIDE = tl.constexpr(16)
PUT, SIGNAL, WAIT, READ, END = (tl.constexpr(k) for k in range(5))
LOOK = tl.constexpr(64)  # polls between looks at the word of failures
EPOCHS = tl.constexpr(64)  # bytes of an instance's state before its epochs, one a program, 64 bytes apart


@triton.jit
def peer(table, rank, offset, like, aligned: tl.constexpr):
    """Return a pointer to a rank's heap, `offset` bytes after its begin, to elements as `like` points to.

    `table` int64 [ranks] are the heaps' addresses. `aligned` promises 16 bytes, without which stores are narrow.
    """
    found = (tl.load(table + rank) + offset).to(tl.pointer_type(like.dtype.element_ty))
    if aligned:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def word(table, rank, offset):
    """Return a pointer to an int32 of a rank's heap."""
    return (tl.load(table + rank) + offset).to(tl.pointer_type(tl.int32))


@triton.jit
def put(where, value, mask):
    """Store a tile in memory of a peer: a peer sees it once it has seen a `signal` that comes later."""
    tl.store(where, value, mask=mask)


@triton.jit
def signal(count):
    """Add one to an int32 of a peer, after all that this program stored."""
    tl.debug_barrier()
    tl.atomic_add(count, 1, sem="release", scope="sys")


@triton.jit
def stamp(where, on: tl.constexpr):
    """Store the nanoseconds of an NVIDIA GPU's clock, int64, where `on`; the interpreter and AMD have no such clock."""
    if on:
        now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
        tl.store(where, now)


@triton.jit
def is_count_below(seen, want):
    """Return whether a count that wraps at 32 bits is below what is wanted, int64 that does not."""
    return ((seen.to(tl.int64) - want) & 0xFFFFFFFF) >= 0x80000000


@triton.jit
def wait(count, want, polls, failed):
    """Return the int32 once it is at least `want`, or what it is after so many polls, or where `failed` is not zero.

    What peers stored before their signal may be read then.
    """
    seen = tl.atomic_add(count, 0, sem="acquire", scope="sys")
    n = 0
    while is_count_below(seen, want) & (n < polls):
        seen = tl.atomic_add(count, 0, sem="acquire", scope="sys")
        n += 1
        if n % LOOK == 0:
            if tl.load(failed, volatile=True) != 0:
                n = polls
    tl.debug_barrier()
    return seen


@triton.jit
def enter(table, begin, state, rank0, programs: tl.constexpr):
    """Return this program's rank, its first row, the one after its last row, and the epoch."""
    pid = tl.program_id(0)
    rank = rank0 + pid // programs
    at = tl.load(table + rank) + state + EPOCHS + (pid % programs) * 64
    epoch = tl.load(at.to(tl.pointer_type(tl.int64)))
    return rank, tl.load(begin + pid), tl.load(begin + pid + 1), epoch


@triton.jit
def place(table, row, epoch, like, aligned: tl.constexpr):
    """Return a pointer to the buffer of a PUT or READ, in the slot of the epoch, to elements as `like` points to."""
    slot = epoch & tl.load(row + 4)
    return peer(table, tl.load(row + 1), tl.load(row + 2) + slot * tl.load(row + 3), like, aligned)


@triton.jit
def turn(table, row, state, rank, epoch, polls):
    """Do what a row says that is no PUT or READ; return 0 where a wait ended before its signal, and note it."""
    kind = tl.load(row)
    ok = 1
    if kind == SIGNAL:
        _signal(table, row, rank, epoch)
    elif kind == WAIT:
        count = word(table, rank, tl.load(row + 2))
        want = tl.load(row + 3) + tl.load(row + 4) * epoch
        seen = wait(count, want, polls, word(table, rank, 0))
        if is_count_below(seen, want):
            ok = 0
            _note(word(table, rank, state), tl.load(row + 7), seen)
    else:
        at = tl.load(table + rank) + tl.load(row + 2)
        tl.store(at.to(tl.pointer_type(tl.int64)), epoch + 1)
    return ok


@triton.jit
def _signal(table, row, rank, epoch):
    """Signal, of a slice only if this is its last arrival: arrivals are counted in an own word."""
    count = word(table, tl.load(row + 1), tl.load(row + 2))
    of = tl.load(row + 4)
    if of == 1:
        signal(count)
    else:
        tl.debug_barrier()
        arrived = tl.atomic_add(word(table, rank, tl.load(row + 3)), 1, sem="acq_rel", scope="sys")
        if ((arrived.to(tl.int64) + 1 - of * (epoch + 1)) & 0xFFFFFFFF) == 0:
            signal(count)


@triton.jit
def _note(record, number, seen):
    """Keep the first wait that failed: whether there is one, its number, what it saw."""
    if tl.atomic_cas(record, 0, 1, scope="sys") == 0:
        tl.store(record + 1, number.to(tl.int32))
        tl.store(record + 2, seen)
