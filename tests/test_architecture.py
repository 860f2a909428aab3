"""The shape of the program: which part may import which, and what each kind of file may not contain.

Imports are read from the source, also those inside functions and under TYPE_CHECKING, so that nothing is hidden.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[1]

# Lowest first. A module belongs to the longest name here that it lies in, and imports only from its own part and from
# parts above it in this list. A new module that no name covers fails the first test: give it its place.
LAYERS = (
    "engine",  # the version, nothing else
    "engine.errors",
    "engine.seeds",
    "engine.versions",
    "engine.settings",
    "engine.events",
    "engine.workspace",
    "engine.presets",
    "engine.runs",
    "engine.data",
    "engine.captioners",
    "engine.state",
    "engine.noise",
    "engine.precision",
    "engine.families",
    "engine.lora_weights",
    "engine.exports",
    "engine.roles",
    "engine.methods",
    "engine.optim",
    "engine.objectives",
    "engine.denoiser",
    "engine.loss_run",
    "engine.plan",
    "engine.proof",
    "engine.checkpoints",
    "engine.trained",
    "engine.source",
    "engine.sampling",
    "engine.embedded",
    "engine.verify",
    "engine.export",
    "engine.preview",
    "engine.trainer",
    "engine.worker",
    "engine.doctor",
    "engine.demo",
    "engine.terminal",
    "engine.cli",
    "webui",
    "webui.app",
    "webui.main",
)

# What the page and the commands import before they know whether training is wanted.
WITHOUT_TORCH = (
    "engine.errors", "engine.settings", "engine.events", "engine.workspace", "engine.presets", "engine.runs",
    "engine.doctor", "engine.cli", "engine.worker", "webui.main", "webui.app",
)  # fmt: skip

# Where any exception may be caught, and why.
EDGES = {
    "engine.cli.main": "the command line: anything unforeseen becomes one line and a report",
    "engine.worker._run": "the process of a run: anything unforeseen becomes a `failed` event",
    "engine.data.pixels.decode": "image decoders raise nearly anything on a damaged file",
    "engine.data.pixels._orientation": "so does reading EXIF",
    "engine.exports.verification.load_into_pipeline": "so do diffusers and peft on a LoRA that does not fit",
    "engine.captioners.captioner._texts": "a captioner may be any model; its failures belong to the report",
}

MUTATORS = {
    "append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "clear", "remove", "discard",
}  # fmt: skip
STARTING_PROCESSES = re.compile(
    r"(subprocess|multiprocessing|torch\.multiprocessing|os\.(system|popen|fork|forkpty|exec\w+|spawn\w+|posix_spawn\w*)"
    r"|pty|asyncio\.create_subprocess\w*|concurrent\.futures\.ProcessPoolExecutor)(\.|$)"
)


@dataclass(frozen=True)
class Import:
    """`target` is absolute; `running` is False under TYPE_CHECKING; `top` is False inside functions."""

    target: str
    line: int
    running: bool
    top: bool


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module

    def functions(self) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        """(dotted name with classes, function), nested ones included."""
        yield from _functions(self.tree, self.name)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}.{child.name}", child
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _functions(child, f"{prefix}.{child.name}" if named else prefix)


@cache
def modules() -> dict[str, Module]:
    found = {}
    for path in sorted([*ROOT.glob("engine/**/*.py"), *ROOT.glob("webui/**/*.py")]):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path, ast.parse(path.read_text(encoding="utf-8")))
    assert len(found) > 60, "the source was not found"
    return found


@cache
def imports(name: str) -> tuple[Import, ...]:
    module = modules()[name]
    package = name.split(".") if module.path.name == "__init__.py" else name.split(".")[:-1]
    typing_only = {
        id(inner)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            inner = [f"{base}.{alias.name}" for alias in node.names]
            targets = [target if target in modules() else base for target in inner] if _is_ours(base) else inner
        else:
            continue
        running = id(node) not in typing_only
        found += [Import(target, node.lineno, running, node in module.tree.body) for target in targets]
    return tuple(found)


def _is_ours(name: str) -> bool:
    return name.split(".")[0] in ("engine", "webui")


def layer(name: str) -> int | None:
    """Position of the part a module lies in. The packages' own entries hold nothing but `__init__.py`."""
    fitting = [part for part in LAYERS if name == part or (name.startswith(f"{part}.") and "." in part)]
    return LAYERS.index(max(fitting, key=len)) if fitting else None


def all_functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for module in modules().values():
        yield from module.functions()


# --- imports ----------------------------------------------------------------------------------------------------------


def test_every_module_has_a_place_in_the_layers_and_every_place_a_module() -> None:
    assert [name for name in modules() if layer(name) is None] == []
    assert [part for part in LAYERS if part not in modules()] == []


def test_each_part_imports_only_from_parts_above_it_in_the_list() -> None:
    wrong = []
    for name in modules():
        for item in imports(name):
            if not _is_ours(item.target):
                continue
            own, other = layer(name), layer(item.target)
            assert own is not None and other is not None, f"{name} imports {item.target}, which has no place"
            if other > own:
                wrong.append(f"{name}:{item.line} imports {item.target}")
    assert wrong == []


def test_the_engine_never_imports_the_page() -> None:
    wrong = [
        f"{name}:{item.line}"
        for name in modules()
        if name.startswith("engine")
        for item in imports(name)
        if item.target.split(".")[0] in ("webui", "gradio")
    ]
    assert wrong == []


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    def needs(name: str) -> Iterable[str]:
        return {item.target for item in imports(name) if _is_ours(item.target) and item.running}

    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for other in needs(name):
                visit(other, (*path, name))
            done.add(name)

    for name in modules():
        visit(name, ())


def test_the_page_and_the_settings_are_imported_without_torch() -> None:
    heavy = "{'torch', 'diffusers', 'transformers', 'peft', 'accelerate'}"
    script = "import importlib, sys\n"
    for name in WITHOUT_TORCH:
        script += f"importlib.import_module({name!r})\n"
        script += f"found = {heavy} & set(sys.modules)\nassert not found, ({name!r}, found)\n"
        if name == "engine.cli":
            script += "assert 'gradio' not in sys.modules, 'commands need not wait for Gradio'\n"
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# --- what a part may not contain --------------------------------------------------------------------------------------


def _names_used(module: Module) -> Iterator[tuple[int, str]]:
    """Dotted names in the source: imported ones, and attribute chains such as `os.system`."""
    for item in imports(module.name):
        yield item.line, item.target
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def test_only_runs_starts_processes() -> None:
    found = {
        name
        for name, module in modules().items()
        if any(STARTING_PROCESSES.match(used) for _, used in _names_used(module))
    }
    assert found == {"engine.runs"}


def _in_part(part: str) -> list[Module]:
    found = [module for name, module in modules().items() if name.startswith(f"{part}.")]
    assert found, part
    return found


def test_families_hold_no_optimizer_no_loop_and_write_no_file() -> None:
    forbidden = re.compile(
        r"(^|\.)(optim|backward|zero_grad|save_pretrained|save_file|save_model|save|dump|write_text|write_bytes|mkdir|rmdir"
        r"|unlink|rename|touch|rmtree|Optimizer|AdamW|GradScaler|Accelerator|EventLog)$"
    )
    wrong = []
    for module in _in_part("engine.families"):
        wrong += [f"{module.name}:{line} {used}" for line, used in _names_used(module) if forbidden.search(used)]
        wrong += [f"{module.name}:{node.lineno} opens a file for writing" for node in _opens_for_writing(module.tree)]
    assert wrong == []


def _opens_for_writing(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "open":
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            words = [str(item.value) for item in given if isinstance(item, ast.Constant)]
            if any(re.fullmatch(r"[rbt]*[wax+][wax+bt]*", word) for word in words):
                yield node


def test_objectives_know_no_adapter_library_and_no_accelerate() -> None:
    """Also not through what they import."""
    reached: set[str] = set()
    waiting = [module.name for module in _in_part("engine.objectives")]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [item.target for item in imports(name) if _is_ours(item.target)]
    outside = {item.target.split(".")[0] for name in reached for item in imports(name)}
    assert "torch" in outside
    assert outside & {"peft", "accelerate", "diffusers", "transformers", "safetensors"} == set()


def test_any_exception_is_caught_only_at_the_edges() -> None:
    found: dict[str, list[int]] = {}
    for name, module in modules().items():
        functions = list(module.functions())
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ExceptHandler) or not _catches_anything(node):
                continue
            if isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None:
                continue  # cleans up and lets it go on
            around = [f for f, function in functions if function.lineno <= node.lineno <= (function.end_lineno or 0)]
            found.setdefault(around[-1] if around else name, []).append(node.lineno)
    assert {where: lines for where, lines in found.items() if where not in EDGES} == {}
    assert set(EDGES) - set(found) == set(), "EDGES names places that do not catch everything any more"


def _catches_anything(handler: ast.ExceptHandler) -> bool:
    kinds = [] if handler.type is None else getattr(handler.type, "elts", [handler.type])
    return handler.type is None or any(ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)


def test_modules_hold_no_state() -> None:
    """Constants only, and nothing changes a constant that is a list, a set or a dict."""
    wrong = []
    allowed = {"app", "logger", "__all__", "__version__"}
    for name, module in modules().items():
        constants = set()
        for node in module.tree.body:
            for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
                if isinstance(target, ast.Name) and target.id not in allowed:
                    constants.add(target.id)
                    if not target.id.lstrip("_")[:1].isupper():
                        wrong.append(f"{name}:{node.lineno} {target.id} is not written as a constant")
        wrong += [f"{name}:{node.lineno} global" for node in ast.walk(module.tree) if isinstance(node, ast.Global)]
        wrong += [f"{name}:{line} changes {constant}" for line, constant in _changes(module.tree, constants)]
    assert wrong == []


def _changes(tree: ast.Module, constants: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            owner: ast.expr | None = node.func.value
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            owner = node.value
        elif isinstance(node, ast.AugAssign):
            owner = node.target
        else:
            continue
        if isinstance(owner, ast.Name) and owner.id in constants:
            yield node.lineno, owner.id


def test_functions_are_short_and_take_few_parameters() -> None:
    long, many = [], set()
    for name, function in all_functions():
        lines = (function.end_lineno or 0) - function.lineno + 1
        if lines >= 100:
            long.append(f"{name}: {lines} lines")
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        is_command = any(ast.unparse(decorator).startswith("app.command") for decorator in function.decorator_list)
        if len([a for a in arguments if a.arg not in ("self", "cls")]) >= 10 and not is_command:
            many.add(name)
    assert long == []
    assert many == set()  # commands are left out: a command's parameters are its options


# --- registries -------------------------------------------------------------------------------------------------------


def test_every_family_id_has_a_class_that_imports() -> None:
    from engine.families import registry
    from engine.families.family import Family

    assert registry.FAMILIES
    for family_id in registry.FAMILIES:
        family = registry.get(family_id)
        assert isinstance(family, Family) and family.spec.id == family_id
    assert set(registry.PIPELINES.values()) == set(registry.FAMILIES)


def test_every_captioner_has_a_class_that_imports() -> None:
    from engine.captioners.captioner import CAPTIONERS, captioner_class

    assert CAPTIONERS
    for name in CAPTIONERS:
        found = captioner_class(name)
        assert all(callable(getattr(found, part)) for part in ("prepare", "caption", "close"))


def _variants(annotation: Any) -> list[Any]:
    """The settings classes of a union."""
    found = [c for a in get_args(annotation) for c in ([a] if isinstance(a, type) else _variants(a))]
    return [kind for kind in found if isinstance(kind, type) and issubclass(kind, BaseModel)]


def test_every_method_of_the_settings_is_built() -> None:
    from engine.families.registry import get
    from engine.methods.registry import build_method
    from engine.settings import schema

    kinds = _variants(schema.Method)
    assert {kind.__name__ for kind in kinds} >= {"Lora", "Full"}
    for kind in kinds:
        assert build_method(kind(), get("sd15")).roles(None)


def test_every_optimizer_of_the_settings_is_built() -> None:
    import torch

    from engine import optim
    from engine.settings import schema

    kinds = _variants(schema.Optimizer)
    assert len(kinds) >= 5
    for kind in kinds:
        built = optim.build(kind(), [torch.nn.Parameter(torch.zeros(2, 2))])
        assert isinstance(built, torch.optim.Optimizer), kind


# --- the tree ---------------------------------------------------------------------------------------------------------


def _git(*arguments: str) -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git clone")
    ran = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return ran.stdout.splitlines()


def test_R106_no_test_is_hidden_by_gitignore() -> None:
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard", "tests")
    on_disk = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py")}
    assert on_disk
    assert on_disk - set(listed) == set()


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    """Neither the folder this lies in, nor a home folder; examples write /home/someone and the like."""
    someone = r"someone|somebody|user|me|name|alice|bob|ann|anna|eve|you"
    places = [rf"/(?:home|Users)/(?!(?:{someone})\b)\w+/", re.escape(str(ROOT))]
    if ROOT.parent.name not in ("", "tmp", "home", "root", "opt", "srv", "src", "app", "var"):
        places.append(re.escape(str(ROOT.parent)) + "/")
    place = re.compile(r"(?<![\w.~>}\]-])(?:" + "|".join(places) + ")")
    wrong = []
    checked = 0
    for name in _git("ls-files", "--cached", "--others", "--exclude-standard"):
        path = ROOT / name
        if not path.is_file() or path.suffix in (".png", ".safetensors", ".jpg"):
            continue
        checked += 1
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if place.search(line):
                wrong.append(f"{name}:{number}: {line.strip()[:80]}")
    assert checked > 60
    assert wrong == []
