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
            note(table, rank, state, tl.load(row + 7), seen, epoch)
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
def note(table, rank, state, number, seen, epoch):
    """Keep of what failed the first, for the host: a number, what was seen there, and the epoch.

    A state begins with the address of that record, which the host reads without waiting, and a word of who was first.
    """
    own = tl.load(table + rank) + state
    if tl.atomic_cas((own + 8).to(tl.pointer_type(tl.int32)), 0, 1, scope="sys") == 0:
        record = tl.load(own.to(tl.pointer_type(tl.int64))).to(tl.pointer_type(tl.int64))
        tl.store(record + 1, epoch)
        tl.debug_barrier()
        tl.store(record, ((number.to(tl.int64) + 1) << 32) | (seen.to(tl.int64) & 0xFFFFFFFF))


# Blocks from every rank to every rank, by a matrix of counts. `spot` int64 says where an instance lies in every heap:
# offset of its buffer, bytes between slots, slots - 1, offsets of counters, of slices, and of its state.

ROWS, STACK, BESIDE, WHOLE = (tl.constexpr(k) for k in range(4))
LINE = tl.constexpr(128)  # bytes of a counter


@triton.jit
def begin_blocks(table, spot, rank0, programs: tl.constexpr):
    """Return this program's rank, its number there, and the epoch."""
    pid = tl.program_id(0)
    rank, p = rank0 + pid // programs, pid % programs
    at = tl.load(table + rank) + tl.load(spot + 5) + EPOCHS + p * 64
    return rank, p, tl.load(at.to(tl.pointer_type(tl.int64)))


@triton.jit
def end_blocks(table, spot, rank, p, epoch):
    """End the program's epoch."""
    at = tl.load(table + rank) + tl.load(spot + 5) + EPOCHS + p * 64
    tl.store(at.to(tl.pointer_type(tl.int64)), epoch + 1)


@triton.jit
def serve(rank, step, ranks: tl.constexpr):
    """Return whom a rank serves at a step: the own block last, and at every step all ranks different ones."""
    return (rank + 1 + step) % ranks


@triton.jit
def by_16(n):
    """Return a multiple of 16 as what every version of Triton sees to be one: 3.6 loses a hint on a sum."""
    return n // 16 * 16


@triton.jit
def _sum_first(row, n, stride, ranks: tl.constexpr, span: tl.constexpr):
    """Return the sum of the first n of `ranks` numbers; `span` is a power of two from `ranks`."""
    r = tl.arange(0, span)
    return tl.sum(tl.load(row + r * stride, mask=(r < ranks) & (r < n), other=0), 0)


@triton.jit
def block(cuts, source, to, columns, form: tl.constexpr, ranks: tl.constexpr, span: tl.constexpr):
    """Return where a block comes from, first row, rows, first column, columns, and where it goes, row, column, length.

    `cuts` int64 are as `BlockCuts` says: of ROWS a matrix [ranks, ranks], of WHOLE heights [ranks], else heights and
    widths [2, ranks].
    """
    if form == ROWS:
        row = _sum_first(cuts + source * ranks, to, 1, ranks, span)
        high = tl.load(cuts + source * ranks + to)
        left = row * 0
        wide = left + columns
        there = _sum_first(cuts + to, source, ranks, ranks, span)
        over, length = left, wide
    elif form == STACK:
        left = _sum_first(cuts + ranks, to, 1, ranks, span)
        wide = tl.load(cuts + ranks + to)
        row = left * 0
        high = tl.load(cuts + source)
        there = _sum_first(cuts, source, 1, ranks, span)
        over, length = row, wide
    elif form == WHOLE:
        there = _sum_first(cuts, source, 1, ranks, span)
        high = tl.load(cuts + source)
        row = there * 0
        left, over = row, row
        wide = row + columns
        length = wide
    else:
        row = _sum_first(cuts, to, 1, ranks, span)
        high = tl.load(cuts + to)
        left = row * 0
        wide = tl.load(cuts + ranks + source)
        there = left
        over = _sum_first(cuts + ranks, source, 1, ranks, span)
        length = _sum_first(cuts + ranks, ranks, 1, ranks, span)
    return row, high, left, wide, there, over, length


@triton.jit
def rows_ahead(cuts, rank, rank0, form: tl.constexpr, ranks: tl.constexpr):
    """Return how many rows (of BESIDE tables) the ranks before have, of those whose operands lie one after another."""
    rows = 1 if form == WHOLE else (ranks if form == ROWS else 2)
    return tl.load(cuts + rows * ranks + rank - rank0)


@triton.jit
def landing(table, spot, to, epoch, like, aligned: tl.constexpr):
    """Return a pointer to a rank's buffer in the slot of the epoch, to elements as `like` points to."""
    return peer(table, to, tl.load(spot) + (epoch & tl.load(spot + 2)) * tl.load(spot + 1), like, aligned)


@triton.jit
def await_count(table, spot, rank, number, want, epoch, polls):
    """Wait for a counter of the own rank; return 0 where that ended before its signal, and note it."""
    ok = 1
    seen = wait(word(table, rank, tl.load(spot + 3) + number * LINE), want, polls, word(table, rank, 0))
    if is_count_below(seen, want):
        ok = 0
        note(table, rank, tl.load(spot + 5), number, seen, epoch)
    return ok


@triton.jit
def arrive(table, spot, rank, to, epoch, programs: tl.constexpr):
    """This program has put all it has for a rank: the last of all programs to say so signals it."""
    count = word(table, to, tl.load(spot + 3) + rank * LINE)
    if programs == 1:
        signal(count)
    else:
        tl.debug_barrier()
        arrived = tl.atomic_add(word(table, rank, tl.load(spot + 4) + to * LINE), 1, sem="acq_rel", scope="sys")
        if ((arrived.to(tl.int64) + 1 - programs * (epoch + 1)) & 0xFFFFFFFF) == 0:
            signal(count)
