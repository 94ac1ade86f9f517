"""Prints how many problems of each benchmark a training file holds, by normalised text.

    python examples/contamination.py train.jsonl math.json gsm8k.json

Files are of any form that `jprm prepare` reads. Only equal texts are found (`jprm.methods.data.overlap.normalise`), no
paraphrases. To leave the shared problems out of training, prepare again with `--exclude math.json gsm8k.json`.
"""

import sys

from jprm.methods.data.overlap import problems_in

train, *benchmarks = sys.argv[1:]
trained = problems_in(train)
for path in benchmarks:
    problems = problems_in(path)
    shared = sorted(problems & trained)
    print(f"{path}: {len(shared)} of {len(problems)} problems are in {train}", *shared[:20], sep="\n  ")
