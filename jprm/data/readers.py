"""The readers by the name of their source."""

from jprm import registry
from jprm.data import gsm8k, math, math_shepherd, prm800k, prmbench, processbench, programs, records
from jprm.data.reader import Reader

READERS: dict[str, Reader] = {
    "columns": records.COLUMNS,
    "gsm8k": gsm8k.READER,
    "gsm8k_solutions": gsm8k.SOLUTIONS,
    "jsonl": records.JSONL,
    "math": math.READER,
    "math_shepherd": math_shepherd.READER,
    "pools": records.POOLS,
    "prm800k": prm800k.READER,
    "prmbench": prmbench.READER,
    "processbench": processbench.READER,
    "programs": programs.READER,
    "text": records.TEXT,
    "trl": records.TRL,
}


def find(name: str) -> Reader:
    """Returns the reader of a name, or the user's own as `module:NAME` or `FILE.py:NAME`; errors as `registry.find`."""
    return registry.find(name, READERS, "reader", Reader, files=True)
