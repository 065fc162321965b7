"""Outside `core` nothing branches on an op: what has to be known of one is asked of it.

A branch is a test of which op there is, wherever it is written:

- `isinstance`, `issubclass`, a `match` or a comparison with an op's class, or with a name given to classes (a union, a
  tuple, an import under another name, also of such a name from another module), and `type(op)` or `op.__class__`;
- a `match` or a comparison, `in` included, with an op's name as a string, or with a tuple, list or set that has one;
- a dictionary keyed by classes or names, one read or written at a constant name, and a `register` of a class;
- `getattr`, `hasattr` or `vars` of an op, and `getattr` by an op's name.

An op is what is called `op`, is an `.op`, was assigned from one, or has an annotation that says so. The kinds under
which `hardware` prices collectives are their names. To make an op is no branch, nor to compare its facets.
"""

import ast
from pathlib import Path

import pytest

from shardplan.core.op import Op
from shardplan.core.ops import OPS

SOURCE = Path(__file__).parent.parent / "src" / "shardplan"


def below(kind: type) -> set[str]:
    """The names of a class of ops and of all its subclasses in the package."""
    known = {kind.__name__} if kind.__module__.startswith("shardplan.core.") else set()
    return known.union(*(below(c) for c in kind.__subclasses__()))


CLASSES = below(Op)
NAMES = set(OPS)

LANGUAGE = "the published language of reductions, whose instructions have these names"
ALLOWED = {
    "execution/jax/native.py": "the table of the collectives that XLA has",
    "execution/torch/machine_timings.py": "which buffers a timed collective of torch.distributed takes",
    "execution/torch/native.py": "the table of the collectives that libraries have",
    "hardware/prices/algorithms.py": "the library model: which algorithms a collective has",
    "hardware/prices/gloo_messages.py": "the library model: of which messages gloo's collectives are",
    "hardware/measured/sample_setup.py": "the vocabulary of nccl-tests, whose logs name collectives otherwise",
    "interop/importers/columns.py": "importers: the ops through which a dim of a source keeps what it is",
    "interop/importers/flat.py": "importers: the ops through which a dim of a source keeps what it is",
    "interop/jax/eager_move.py": "which steps `device_put` does no better",
    "interop/exports/recipe.py": "the exports: what each op is as a move of arrays",
    "movement/reductions/instructions.py": LANGUAGE,
    "movement/reductions/state_graph.py": LANGUAGE,
    "movement/reductions/state_matrix.py": LANGUAGE,
    "movement/reductions/type_graph.py": LANGUAGE,
    "movement/reductions/typed_path.py": LANGUAGE,
}
MOST = 15
# Words of another vocabulary that are an op's name too: attributes of MSCCL's thread blocks, opcodes of XLA,
# primitives of JAX.
FOREIGN = {
    "interop/exports/msccl_schema.py": {"send"},
    "interop/hlo.py": {"send", "opaque"},
    "cli/command_group.py": {"reduce"},  # a command
    "simulation/closed/chips.py": {"attention"},  # a parameter of a machine
    "launches/arguments.py": {"gather", "all_gather"},  # kinds of context, in Transformer Engine's words and ours
    "launches/handover/megatron.py": {"gather"},  # a kind of context, in Transformer Engine's words
    "simulation/closed/configurations.py": {"gather", "attention", "dispatch"},  # fields of strategies and their values
    "simulation/accuracy/step_fitting.py": {"attention"},
    "simulation/accuracy/machine_timings.py": {"attention"},
    "simulation/accuracy/subject.py": {
        "gather",
        "all_gather",
        "dispatch",
    },  # as frameworks write them
    "movement/weights/table.py": {"split"},  # the key of a table
    "movement/weights/frameworks.py": {"split"},  # how a table stores a product
    "movement/weights/derive/tables.py": {"split"},
    "movement/weights/derive/family_form.py": {"pad"},  # the name of an atom
    "simulation/closed/form.py": {"attention", "dispatch"},
    "simulation/closed/memory.py": {"attention"},
    "simulation/closed/part_seconds.py": {"attention"},
    "simulation/inference/request_timeline.py": {"gather"},
    "simulation/inference/space.py": {"gather", "attention"},
    "simulation/searching/space.py": {"attention", "dispatch"},
    "strategy/strategy.py": {"gather"},
    "strategy/sizes.py": {"softmax"},  # the router of a mixture
    "strategy/model_config.py": {"dropout"},  # a field of builders
    "interop/importers/jax_table.py": {"gather", "iota", "pad", "reshape", "slice", "split", "top_k"},
}


def mentioned(node: ast.AST) -> set[str]:
    """The identifiers in an expression."""
    nodes = list(ast.walk(node))
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


class Names:
    """What a module gives names to, found in one walk: what it assigns, imports, and annotates as arguments."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.assigned: list[tuple[str, ast.expr]] = []
        self.imported: list[tuple[str, str, str]] = []  # the module, its name there and here
        self.arguments: list[tuple[str, set[str]]] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self.assigned += ((t.id, node.value) for t in targets if isinstance(t, ast.Name))
            elif isinstance(node, ast.ImportFrom) and node.module:
                self.imported += ((node.module, alias.name, alias.asname or alias.name) for alias in node.names)
            elif isinstance(node, ast.arg) and node.annotation:
                self.arguments.append((node.arg, mentioned(node.annotation)))
        # Without those that are made by a call: they are no classes.
        self.renamed = [
            (name, mentioned(value))
            for name, value in self.assigned
            if not any(isinstance(n, ast.Call) for n in ast.walk(value))
        ]


def classes_in(module: Names, elsewhere: dict[str, set[str]]) -> set[str]:
    """The names that stand for op classes in a module; `elsewhere` are those of other modules."""
    known = set(CLASSES)
    for source, name, here in module.imported:
        if name in CLASSES | elsewhere.get(source, set()) and source.startswith("shardplan"):
            known.add(here)
    while True:
        found = {name for name, words in module.renamed if words & known}
        if found <= known:
            return known
        known |= found


class Branches(ast.NodeVisitor):
    """The branches of a module, as pieces of its text."""

    def __init__(self, module: Names, elsewhere: dict[str, set[str]], foreign: set[str]) -> None:
        self.found: list[str] = []
        self.classes = classes_in(module, elsewhere)
        self.words = NAMES - foreign
        self.generics = {"list", "tuple", "dict", "set", "type"}
        self.generics |= {here for source, _, here in module.imported if source in ("typing", "collections.abc")}
        self.lists = {name for name, value in module.assigned if self.named(value)}
        self.ops = {"op"}
        self.ops |= {name for name, value in module.assigned if self.is_op(value)}
        self.ops |= {name for name, words in module.arguments if words & self.classes}
        self.visit(module.tree)

    def named(self, node: ast.AST | None) -> bool:
        """Whether it is an op's name, or a collection of such."""
        if isinstance(node, ast.Constant):
            return isinstance(node.value, str) and node.value in self.words
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return any(self.named(x) for x in node.elts)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset"):
            return any(self.named(x) for x in node.args)
        return False

    def tells(self, node: ast.AST | None) -> bool:
        """Whether an expression says which op."""
        if node is None:
            return False
        known = isinstance(node, ast.Name) and node.id in self.lists
        return known or self.named(node) or bool(mentioned(node) & self.classes)

    def is_op(self, node: ast.AST) -> bool:
        """Whether an expression is an op."""
        if isinstance(node, ast.Attribute):
            return node.attr == "op"
        return isinstance(node, ast.Name) and node.id in self.ops

    def hit(self, node: ast.AST) -> None:
        self.found.append(ast.unparse(node))

    def visit_Compare(self, node: ast.Compare) -> None:
        if any(self.tells(x) for x in (node.left, *node.comparators)):
            self.hit(node)
        self.generic_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        if self.tells(node.cls):
            self.hit(node)
        self.generic_visit(node)

    def visit_MatchValue(self, node: ast.MatchValue) -> None:
        if self.tells(node.value):
            self.hit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        if any(self.tells(key) for key in node.keys):
            self.hit(node)
        self.generic_visit(node)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        if self.tells(node.key) or any(self.tells(g.iter) for g in node.generators):
            self.hit(node)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        of_types = isinstance(node.value, ast.Name) and node.value.id in self.generics
        if self.named(node.slice) or (not of_types and mentioned(node.slice) & self.classes):
            self.hit(node)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr == "__class__" and self.is_op(node.value):
            self.hit(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = mentioned(node.func)
        first, second = [*node.args, None, None][:2]
        if (
            (called & {"isinstance", "issubclass"} and self.tells(second))
            or (called & {"type", "vars", "getattr", "hasattr"} and first is not None and self.is_op(first))
            or ("getattr" in called and isinstance(second, ast.Attribute) and self.is_op(second.value))
            or (called & {"dict", "fromkeys"} and any(self.tells(x) for x in node.args))
            or ("dict" in called and any(k.arg in self.words for k in node.keywords))
            or ("register" in called and self.tells(first))
        ):
            self.hit(node)
        self.generic_visit(node)


def scanned(root: Path) -> dict[str, list[str]]:
    """The branches of every file below `root` but those of core, by its path."""
    modules = {path.relative_to(root).as_posix(): Names(ast.parse(path.read_text())) for path in root.rglob("*.py")}
    dotted = {"shardplan." + name.removesuffix(".py").replace("/", "."): module for name, module in modules.items()}
    elsewhere: dict[str, set[str]] = {}
    for _ in range(2):  # a name of a name of classes
        elsewhere = {name: classes_in(module, elsewhere) - CLASSES for name, module in dotted.items()}
    found = {
        name: Branches(module, elsewhere, FOREIGN.get(name, set())).found
        for name, module in modules.items()
        if not name.startswith("core/")
    }
    return {name: hits for name, hits in found.items() if hits}


def test_only_these_files_branch_on_an_op() -> None:
    found = scanned(SOURCE)
    assert {name: hits for name, hits in found.items() if name not in ALLOWED} == {}
    assert {*ALLOWED} <= found.keys(), "a file that no longer branches needs no reason"
    assert len(ALLOWED) <= MOST
    assert not {name for name in ALLOWED if name.startswith(("report/", "cli/", "simulation/"))}


def test_words_that_mean_something_else_are_there() -> None:
    for name in FOREIGN:
        assert Branches(Names(ast.parse((SOURCE / name).read_text())), {}, set()).found


HEAD = "from shardplan.core.ops import AllGather, Send as Away\nfrom shardplan.core import ops\n"
CAUGHT = [
    "isinstance(x, AllGather)",
    "isinstance(x, Away)",
    "isinstance(x, ops.Reduce | int)",
    "issubclass(c, (str, ops.Collective))",
    "Own = (AllGather, int)\nisinstance(x, Own)",
    "Own: object = AllGather | None\nMore = Own\nisinstance(x, More)",
    "from shardplan.execution.other import Union\nisinstance(x, Union)",
    "type(x) is AllGather",
    "x.kind in (ops.AllToAll, Away)",
    "Own = {AllGather}\nx in Own",
    "match x:\n    case AllGather(dim=0): pass",
    "match x:\n    case int() | ops.Slice(): pass",
    "match x:\n    case 'permute': pass",
    "match x:\n    case AllGather.name: pass",
    "x.name == 'all_gather'",
    "[s.op.name for s in p] != ['all_reduce']",
    "x in {'reduce', 'broadcast'}",
    "KINDS = frozenset({'reduce'})\nx in KINDS",
    "x == AllGather.kind",
    "{AllGather: 1}",
    "{'all_gather': 1, 'other': 2}",
    "dict(all_gather=1)",
    "dict.fromkeys((AllGather, int))",
    "{c.name: c for c in (AllGather, Away)}",
    "table[AllGather] = 1",
    "self.table[ops.Reduce]",
    "table['slice']",
    "getattr(step.op, 'chunks', 1)",
    "hasattr(op, 'axes')",
    "mine = step.op\ngetattr(mine, 'axes')",
    "def f(x: AllGather): return hasattr(x, 'axes')",
    "getattr(calls, step.op.name)",
    "vars(op)",
    "type(op).__name__",
    "step.op.__class__",
    "f.register(AllGather)",
]
FREE = [
    "x = AllGather(0, ('a',))",
    "found.append(ops.Reduce(('a',)))",
    "def f(op: ops.Op) -> AllGather: return op.in_chunks(2)",
    "op.chunks > 1",
    "step.op.members(t) == ('a',)",
    "isinstance(pattern, Groups)",
    "getattr(error, 'name', None)",
    "ring('broadcast' if x else y)",
    "rows = [('all_reduce', 1.0)]",
    "title == 'all reduce'",
    "table['data']",
    "op.name + ': ' + str(x)",
    "{'axes': 1, 'chunks': 2}",
    "type(error).__name__",
    "from torch import Tensor\nisinstance(x, Tensor)",
    "names = {c: 1 for c in found}",
    "from collections.abc import Sequence\nx: Sequence[AllGather] = field(default_factory=list[ops.Op])",
]


def branches(text: str) -> list[str]:
    return Branches(Names(ast.parse(HEAD + text)), {"shardplan.execution.other": {"Union"}}, set()).found


@pytest.mark.parametrize("text", CAUGHT)
def test_a_branch_is_seen(text: str) -> None:
    assert branches(text)


@pytest.mark.parametrize("text", FREE)
def test_what_is_no_branch_is_left_alone(text: str) -> None:
    assert branches(text) == []
