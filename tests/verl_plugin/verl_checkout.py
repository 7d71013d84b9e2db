"""What tree_rl assumes of verl, held against a checkout of verl that is only read: no import, no installation.

    python tests/verl_plugin/verl_checkout.py /path/to/verl     # the folder that holds the package verl

It prints what is missing or changed there, one line each. verl's classes may inherit, and its modules may import, what
we name; both are followed.
"""

import ast
import sys
from collections.abc import Iterable
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

from tree_rl.verl_plugin import compat

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
OTHER = ast.Pass()
"""What a name is bound to if neither a function nor a class."""


class Checkout:
    """The package verl in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cache  # noqa: B019 # a checkout lives as long as the process
    def names(self, module: str) -> dict[str, ast.AST] | None:
        """What a module binds, in branches too; None if there is no such module."""
        path = self.folder.joinpath(*module.split("."))
        files = [path / "__init__.py", path.with_suffix(".py")]
        file = next((one for one in files if one.is_file()), None)
        if file is None:
            return {} if path.is_dir() else None
        found: dict[str, ast.AST] = {}
        left = list(ast.parse(file.read_text()).body)
        while left:
            node = left.pop(0)
            if isinstance(node, Definition):
                found[node.name] = node
            elif isinstance(node, ast.ImportFrom):
                package = module if file.name == "__init__.py" else module.rpartition(".")[0]
                node.module = resolve_name("." * node.level + (node.module or ""), package)
                found |= {alias.asname or alias.name: node for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.asname or alias.name.split(".")[0]: OTHER for alias in node.names}
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {one.id: OTHER for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            left += [child for child in ast.iter_child_nodes(node) if isinstance(node, ast.If | ast.Try | ast.With)]
            left += node.body if isinstance(node, ast.ExceptHandler) else []
        return found

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """The module that defines a name, and the definition; None if the name is unbound."""
        names = self.names(module)
        if names is None or name not in names:
            return (module, OTHER) if self.names(f"{module}.{name}") is not None else None
        node = names[name]
        if not isinstance(node, ast.ImportFrom):
            return module, node
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        if not str(node.module).startswith("verl"):
            return module, OTHER
        return self.find(str(node.module), original)

    def member(self, module: str, owner: ast.AST, name: str) -> ast.AST | None:
        """A member of a class or of its bases; None if there is none."""
        if not isinstance(owner, ast.ClassDef):
            return OTHER
        for node in owner.body:
            if isinstance(node, Definition) and node.name == name:
                return node
        for base in owner.bases:
            found = self.find(module, base.id) if isinstance(base, ast.Name) else None
            member = self.member(*found, name) if found is not None else None
            if member is not None:
                return member
        return None

    def broken_name(self, module: str, name: str) -> str | None:
        """A line if a module does not bind a name."""
        if self.names(module) is None:
            return f"no module {module}{name and ', for '}{name}"
        return None if not name or self.find(module, name) else f"no {name} in {module}"

    def broken_call(self, call: str) -> str | None:
        """A line if a function or method, "owner.method(a, b)", is missing or has other parameters."""
        path, wanted = call.removesuffix(")").split("(")
        owner, *rest = path.split(".")
        module = compat.PRIVATE_NAMES.get(owner) or compat.PRIVATE_MODULES[owner]
        if not module.startswith("verl"):
            return None
        found = self.find(module, owner) if owner in compat.PRIVATE_NAMES else self.find(module, rest[0])
        if found is None:
            return f"no {path} in {module}"
        where, node = found
        member = self.member(where, node, rest[0]) if owner in compat.PRIVATE_NAMES and rest else node
        if member is None:
            return f"no {path} in {where}"
        if not isinstance(member, FUNCTION):
            return None
        given = ", ".join(_parameters(member))
        return None if given == wanted else f"{path}({given}), here ({wanted})"


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = node.args
    names = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return [one.arg for one in names if one is not None and one.arg not in ("self", "cls")]


def broken(folder: Path, calls: Iterable[str]) -> list[str]:
    """What tree_rl needs and a checkout lacks, one line each; a call is written "owner.method(a, b)"."""
    checkout = Checkout(folder)
    names = [*compat.PRIVATE_NAMES.items(), *(("", module) for module in compat.PRIVATE_MODULES.values())]
    lines = [checkout.broken_name(module, name) for name, module in names if module.startswith("verl")]
    return sorted({line for line in (*lines, *map(checkout.broken_call, calls)) if line})


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
    from verl_contract import CALLED, overridden

    found = broken(Path(sys.argv[1]), [*CALLED, *overridden()])
    print("\n".join(found))
    print(f"{len(found)} of verl's names and signatures break")
    sys.exit(bool(found))
