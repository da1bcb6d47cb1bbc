"""The step's completions as rows of completions.jsonl: text, rewards, advantage, and for some each token's mismatch."""


class CompletionRows:
    """Builds the rows; every token is decoded once a run.

    Args:
        tokenizer: decodes single tokens, for the completion browser.
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._decoded: dict[int, str] = {}

    def build(self, logs: dict, token_ids: list[list[int]], token_mismatch: dict[int, list[float]]) -> list[dict]:
        """One row a completion.

        Args:
            logs: TRL's columns `prompt`, `completion`, `advantages` and `rewards` (by function) of the step.
            token_ids: the sampled tokens of each completion.
            token_mismatch: row -> |trainer - sampler logprob| of each of its tokens [nats]; rows without it get none.
        """
        texts = zip(logs["prompt"], logs["completion"], logs["advantages"], strict=True)
        rows = []
        for index, (prompt, completion, advantage) in enumerate(texts):
            row = {"prompt": prompt, "completion": completion, "advantage": advantage}
            row["rewards"] = {name: column[index] for name, column in logs["rewards"].items()}
            if index in token_mismatch:
                row["tokens"] = self._texts(token_ids[index])
                row["token_mismatch"] = token_mismatch[index]
            rows.append(row)
        return rows

    def _texts(self, token_ids):
        for token in set(token_ids) - self._decoded.keys():
            self._decoded[token] = self._tokenizer.decode([token])
        return [self._decoded[token] for token in token_ids]
