"""A class beside `MathShepherd` in search-and-learn's `sal/models/reward_models.py`, to be returned by `load_prm`.

It asks `jprm serve`, at the address JPRM_URL, for the score of every step. The answers to a question are one request,
so that their common prefixes are computed once.
"""

import uuid

from sal.models.reward_models import PRM

from jprm.clients import Client


class RemotePRM(PRM):
    def load_model_and_tokenizer(self, **kwargs):
        self.client = Client()
        self.key = uuid.uuid4().hex  # answers that grow by a step compute only that step
        return None, None

    def score(self, questions, outputs):
        records = []
        for question, answers in zip(questions, outputs, strict=True):
            samples = [{"steps": [step for step in answer.split("\n\n") if step.strip()]} for answer in answers]
            records.append({"problem": question, "samples": samples})
        scored = self.client.score_many(records, caller=self.key)
        return [[sample["scores"] or [0.0] for sample in result.record["samples"]] for result in scored]
