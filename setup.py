"""The packages of megarl, since ``pyproject.toml`` cannot map a folder; everything else is declared there.

``configs/`` stands at the top of the repository, and is installed inside the package.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["megarl", "megarl.*"]), "megarl.configs"],
    package_dir={"megarl.configs": "configs"},
)
