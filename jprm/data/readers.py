"""The readers by the name of their source."""

from jprm import registry
from jprm.data import prm800k, records, solutions, step_labels
from jprm.data.reader import Reader

READERS: dict[str, Reader] = {
    "columns": records.COLUMNS,
    "gsm8k": solutions.GSM8K,
    "gsm8k_solutions": solutions.GSM8K_SOLUTIONS,
    "jsonl": records.JSONL,
    "math": solutions.MATH,
    "math_shepherd": step_labels.MATH_SHEPHERD,
    "pools": records.POOLS,
    "prm800k": prm800k.READER,
    "prmbench": step_labels.PRMBENCH,
    "processbench": step_labels.PROCESSBENCH,
    "programs": solutions.PROGRAMS,
    "text": records.TEXT,
    "trl": records.TRL,
}


def find(name: str) -> Reader:
    """Returns the reader of a name, or the user's own as `module:NAME` or `FILE.py:NAME`; errors as `registry.find`."""
    return registry.find(name, READERS, "reader", Reader, files=True)
