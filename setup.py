"""Puts what `tree-rl recipes` writes into the package: recipes, examples, constraints, cluster scripts."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("constraints", "examples", "recipes", "scripts/cluster", "scripts/ray_token.sh")


class BuildWithFiles(build_py):
    """Modules, and the repository's files in tree_rl/shipped; an editable installation has the repository."""

    def run(self) -> None:
        """Build as setuptools does, then copy."""
        super().run()
        if self.editable_mode:
            return
        for name in SHIPPED:
            target = Path(self.build_lib, "tree_rl", "shipped", name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if Path(name).is_dir():
                unwanted = shutil.ignore_patterns("__pycache__", "*.pyc")
                shutil.copytree(name, target, ignore=unwanted, dirs_exist_ok=True)
            else:
                shutil.copy(name, target)


setup(cmdclass={"build_py": BuildWithFiles})
