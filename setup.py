"""Packaging of megarl; launch/constraints.txt pins the versions for CPUs, launch/constraints-gpu-*.txt for GPUs."""

from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")

INSTALL_REQUIRES = [
    "torch>=2.6",
    "megatron-core>=0.16.1",
    "transformers>=4.51",
    "safetensors",
    "ray>=2.52",
    "hydra-core>=1.3",
    "omegaconf>=2.3",
    "tensordict>=0.6",
    "numpy",
    "pyarrow",
    "jinja2",
    "einops",  # megatron-core imports it in its mixture-of-experts code
    "bm25s",  # ranking of tools/retrieval_server.py
    "jsonschema",  # arguments of tools, requests to the chat endpoint
    "aiohttp",  # the chat endpoint, calls to judges and sandboxes
    "math-verify",  # answers of mathematics
    "psutil",
    'pyseccomp ; platform_system == "Linux"',  # system calls of programs in the code sandbox; needs libseccomp2
    "pyyaml",
    "rich",
    "plotly",
]

EXTRAS_REQUIRE = {
    "wandb": ["wandb"],
    "tensorboard": ["tensorboard"],
    "swanlab": ["swanlab"],
    "mlflow": ["mlflow-skinny"],  # all that a client needs
    "sweep": ["hydra-joblib-launcher", "hydra-submitit-launcher", "hydra-optuna-sweeper"],
    "docs": ["zensical", "mkdocstrings-python"],
    "bench": ["matplotlib"],  # figures of benchmarks
    "gpu": ["transformer-engine[pytorch]>=2.0"],
    "sglang": ["sglang>=0.5.17"],
    "dev": [
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "hypothesis",
        "ruff",
        "mypy",
        "import-linter",
        "build",  # of the wheel that a test installs
        "zensical",
        "mkdocstrings-python",
        "hydra-joblib-launcher",
        "hydra-submitit-launcher",
        "hydra-optuna-sweeper",
        "tensorboard",
        "wandb",
        "swanlab",
        "mlflow-skinny",
        "quickjs",  # runs the script of the report's page
        "datasets",  # writes the folders that megarl reads by itself
        "peft",  # trains, reads and writes adapters as megarl does
        "accelerate",  # of peft
    ],
}

setup(
    name="megarl",
    version="0.1.0",
    description="Reinforcement learning for large language models on Megatron-Core",
    long_description=README,
    long_description_content_type="text/markdown",
    author="The authors of megarl",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["reinforcement learning", "RLHF", "PPO", "GRPO", "large language models", "Megatron-Core"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11,<3.13",
    # the YAML files stand at the top of the repository, and are installed inside the package
    packages=[*find_packages(include=["megarl", "megarl.*"]), "megarl.configs"],
    package_dir={"megarl.configs": "configs"},
    package_data={
        "megarl": ["py.typed"],
        "megarl.configs": ["**/*.yaml"],
        "megarl.ops.report": ["page/*"],
        "megarl.rollout.sglang": ["cpu_shim/**/*.py"],
    },
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["megarl=megarl.__main__:main"]},
)
