"""What users type stays: names, signatures, and a docstring on everything public."""

import ast
import inspect
import re
from pathlib import Path

import mxnet as mx
import pytest

import odsgd_kvstore
from odsgd_kvstore import testing

PACKAGE = Path(odsgd_kvstore.__file__).parent
NAMES = [
    "ODSGDStore",
    "Trainer",
    "__version__",
    "global_weights",
    "is_active",
    "module_checkpoint",
    "synchronize",
]
TRAINER = (
    "self, params, optimizer, optimizer_params=None, kvstore='dist_odsgd', *, "
    "local_optimizer=None, local_optimizer_params=None, warmup_steps=None, delay=None, "
    "compression_params=None, update_on_kvstore=None"
)
SIGNATURES = {
    odsgd_kvstore.Trainer.__init__: TRAINER,
    odsgd_kvstore.Trainer.step: "self, batch_size, ignore_stale_grad=False",
    odsgd_kvstore.Trainer.synchronize: "self",
    odsgd_kvstore.Trainer.global_weights: "self",
    odsgd_kvstore.Trainer.save_states: "self, fname",
    odsgd_kvstore.Trainer.load_states: "self, fname",
    odsgd_kvstore.Trainer.allreduce: "self, value",
    odsgd_kvstore.Trainer.sync_aux: "self",
    odsgd_kvstore.Trainer.join: "self",
    odsgd_kvstore.Trainer.stats: "self",
    odsgd_kvstore.synchronize: "x",
    odsgd_kvstore.global_weights: "x",
    odsgd_kvstore.is_active: "kvstore",
    odsgd_kvstore.module_checkpoint: (
        "mod, prefix, period=1, save_optimizer_states=False"
    ),
    testing.run_local: (
        "fn, num_workers=2, num_servers=1, timeout=60, env=None, *, "
        "stock_servers=False, bandwidth=None"
    ),
}


def plain(function):
    """A signature without annotations."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    return text[1:-1]


def test_all_is_exactly_the_public_names():
    assert sorted(odsgd_kvstore.__all__) == NAMES
    assert all(hasattr(odsgd_kvstore, name) for name in NAMES)


def test_nothing_else_is_public_but_modules():
    names = {name for name in vars(odsgd_kvstore) if not name.startswith("_")}
    modules = {name for name in names if inspect.ismodule(vars(odsgd_kvstore)[name])}
    assert names - modules == {name for name in NAMES if not name.startswith("_")}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_signature_is_as_designed(function):
    assert plain(function) == SIGNATURES[function]


def test_defaults_are_as_designed():
    config = odsgd_kvstore.config.Config()
    assert (config.local_optimizer, config.warmup_steps, config.delay) == (
        "auto",
        200,
        1,
    )


def test_version_is_one_of_pep_440():
    assert re.fullmatch(r"\d+(\.\d+)+((a|b|rc|\.dev)\d+)?", odsgd_kvstore.__version__)


def test_trainer_has_what_a_gluon_trainer_has():
    for name, value in inspect.getmembers(mx.gluon.Trainer, callable):
        if not name.startswith("_"):
            ours = inspect.signature(getattr(odsgd_kvstore.Trainer, name)).parameters
            assert list(ours) == list(inspect.signature(value).parameters), name


def test_store_has_what_a_kvstore_has():
    for name, value in inspect.getmembers(mx.kvstore.KVStore, callable):
        if not name.startswith("_"):
            ours = inspect.signature(getattr(odsgd_kvstore.ODSGDStore, name)).parameters
            assert list(ours) == list(inspect.signature(value).parameters), name


def public(tree, prefix):
    """(name, node) of a module's public classes, functions and methods."""
    for node in tree.body:
        kinds = (ast.ClassDef, ast.FunctionDef)
        if isinstance(node, kinds) and not node.name.startswith("_"):
            yield f"{prefix}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public(node, f"{prefix}.{node.name}")


def documented():
    """(name, node) of everything public in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield name, tree
        yield from public(tree, name)


DOCUMENTED = dict(documented())
# These are called through a base class, which documents them.
INHERITED = re.compile(
    r"\.(Native|Standalone|Mirror\w+|Replica|NamedOptimizer|DelayCompensation)\."
)


def own(name):
    """Whether a public thing needs a docstring of its own."""
    return not INHERITED.search(name)


@pytest.mark.parametrize("name", [n for n in DOCUMENTED if own(n)])
def test_docstring_begins_with_a_summary_line(name):
    text = ast.get_docstring(DOCUMENTED[name])
    assert text, f"{name} has no docstring"
    summary, *rest = text.splitlines()
    assert summary.rstrip().endswith((".", ":", "::")) and len(summary) <= 88
    assert not rest or rest[0] == "", f"no empty line after the summary of {name}"


FUNCTIONS = [n for n in DOCUMENTED if isinstance(DOCUMENTED[n], ast.FunctionDef)]


def parameters(node):
    """Names of a function's parameters, but for self and for private ones."""
    arguments = [*node.args.args, *node.args.kwonlyargs]
    return [a.arg for a in arguments if a.arg not in ("self", "cls", "_")]


def entry_points():
    """The functions and classes that users call, by name in `DOCUMENTED`."""
    for name in FUNCTIONS:
        module, _, _ = name.partition(".")
        users = ("trainer", "evaluation", "kvstore", "testing", "schedule", "config")
        returns = DOCUMENTED[name].returns
        is_refusal = isinstance(returns, ast.Name) and returns.id == "NoReturn"
        if module in users and parameters(DOCUMENTED[name]) and not is_refusal:
            yield name


def section(text, title):
    """The text of a NumPy-style section, '' if there is none."""
    match = re.search(
        rf"^{title}\n-{{{len(title)}}}\n(.*?)(?=^\w[\w ]*\n---|\Z)",
        text,
        re.MULTILINE | re.DOTALL,
    )
    return match.group(1) if match else ""


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if own(n)])
def test_parameters_section_names_real_parameters_in_order(name):
    node = DOCUMENTED[name]
    text = section(ast.get_docstring(node) or "", "Parameters")
    if not text:
        return
    given = [
        p.strip()
        for line in re.findall(r"^(\S[^:\n]*)(?: :|$)", text, re.MULTILINE)
        for p in line.split(",")
    ]
    known = parameters(node)
    known += [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
    known += [f"*{node.args.vararg.arg}"] if node.args.vararg else []
    assert [p for p in given if p not in known] == []
    assert given == [p for p in known if p in given]


@pytest.mark.parametrize("name", list(entry_points()))
def test_what_users_call_describes_its_parameters(name):
    text = ast.get_docstring(DOCUMENTED[name])
    described = section(text, "Parameters")
    for parameter in parameters(DOCUMENTED[name]):
        named = re.search(rf"^(.*, )?\*{{0,2}}{parameter}\b.*", described, re.MULTILINE)
        assert named or f"`{parameter}`" in text, f"{name} does not say {parameter}"


@pytest.mark.parametrize("kind", [odsgd_kvstore.Trainer, odsgd_kvstore.ODSGDStore])
def test_class_describes_the_parameters_of_its_constructor(kind):
    text = section(inspect.getdoc(kind), "Parameters")
    for parameter in list(inspect.signature(kind).parameters):
        assert re.search(rf"^{parameter} : \S", text, re.MULTILINE), parameter


@pytest.mark.parametrize("kind", [odsgd_kvstore.Trainer, odsgd_kvstore.ODSGDStore])
def test_class_names_the_paper(kind):
    text = section(inspect.getdoc(kind), "References")
    assert "OD-SGD: One-Step Delay" in text and "17(4), 2020" in text
