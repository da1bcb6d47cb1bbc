"""How a question becomes a prompt: tags around working out and answer, and a chat template for models that have none.

The generation prompt opens the working-out tag, so a base model that was never told anything starts to work at once.
Prompts are rendered to text once, here; `rendered` proves that the text gives the token ids that the template itself
gives, and trainer and sampler both get those.
"""

from dataclasses import dataclass

from kit.errors import ArgumentError


@dataclass(frozen=True)
class Tags:
    """What stands around the working out and around the answer; an empty tag is not used.

    With empty answer tags the answer is what follows the end of the working out, or the whole text.

    Example:
        >>> Tags().answer_of("2+2 is 4</think> <answer> 4 </answer>"), Tags().answer_of("4")
        ('4', None)
        >>> BUNDLED.answer_of("steps: 2+2+0=4</think> 4"), PLAIN.answer_of(" 4 ")
        ('4', '4')
    """

    work_start: str = "<think>"
    work_end: str = "</think>"
    answer_start: str = "<answer>"
    answer_end: str = "</answer>"

    @property
    def used(self) -> tuple[str, ...]:
        """The tags that are not empty, in the order in which they must come."""
        return tuple(tag for tag in (self.work_start, self.work_end, self.answer_start, self.answer_end) if tag)

    def answer_of(self, text: str) -> str | None:
        """The answer in a completion, without the space around it; None where its tags are missing or it is empty."""
        if self.work_end and not self.answer_start:
            _, found, text = text.rpartition(self.work_end)
            if not found:
                return None
        if self.answer_start:
            _, found, text = text.rpartition(self.answer_start)
            if not found:
                return None
        if self.answer_end:
            text, found, _ = text.partition(self.answer_end)
            if not found:
                return None
        return text.strip() or None

    def instructions(self) -> str:
        """What a model is told about the tags; empty when there are none."""
        sentences = []
        if self.work_start and self.work_end:
            sentences.append(f"Work out the problem between {self.work_start} and {self.work_end}.")
        if self.answer_start and self.answer_end:
            sentences.append(f"Then give the answer alone between {self.answer_start} and {self.answer_end}.")
        return " ".join(sentences)


BUNDLED = Tags(answer_start="", answer_end="")  # what the bundled model learnt in its pre-training
PLAIN = Tags("", "", "", "")  # the completion is the answer


def chat_template(tags: Tags) -> str:
    """A chat template (Jinja) for a base model: instructions, `Q:` and `A:`, and the working-out tag already open.

    Example:
        >>> from jinja2 import Template
        >>> Template(chat_template(BUNDLED)).render(
        ...     messages=[{"role": "user", "content": "24+67=?"}], add_generation_prompt=True)
        'Q: 24+67=?\\nA: <think>'
    """
    opening = tags.work_start.replace("\\", "\\\\").replace("'", "\\'")
    return (
        "{%- for message in messages -%}"
        "{%- if message['role'] == 'system' -%}{{ message['content'] + '\\n\\n' }}"
        "{%- elif message['role'] == 'user' -%}{{ 'Q: ' + message['content'] + '\\nA: ' }}"
        "{%- else -%}{{ message['content'] + (eos_token or '') + '\\n' }}"
        "{%- endif -%}"
        "{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{ '{opening}' }}}}{{%- endif -%}}"
    )


def set_template(tokenizer, tags: Tags, template: str = "auto") -> str:
    """Give the tokenizer the kit's chat template: with "auto" if it has none, with "kit" in any case.

    Returns:
        In words, whose template is used from now on.
    """
    if template not in ("auto", "kit"):
        raise ArgumentError(f"template is {template!r}; expected 'auto' (the model's own, if it has one) or 'kit'.")
    if template == "auto" and tokenizer.chat_template:
        return "the model's own chat template"
    tokenizer.chat_template = chat_template(tags)
    return "the kit's chat template" if template == "kit" else "the kit's chat template (the model has none)"


def rendered(tokenizer, question: str, instructions: str = "") -> str:
    """The prompt of a question, up to where the completion begins.

    Raises:
        ArgumentError: the rendered text, tokenized, is not what the template gives as tokens (a tokenizer that puts its
            own begin token before a template that has one, for instance).
    """
    messages = [{"role": "system", "content": instructions}] if instructions else []
    messages.append({"role": "user", "content": question})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True)
    if tokenizer(text).input_ids != list(ids["input_ids"]):
        begin = tokenizer.bos_token or ""
        if begin and text.startswith(begin) and tokenizer(text.removeprefix(begin)).input_ids == list(ids["input_ids"]):
            return text.removeprefix(begin)
        raise ArgumentError(
            f"The prompt of this tokenizer's chat template is not tokenized as the template does it: "
            f"{tokenizer.decode(tokenizer(text).input_ids)[:120]!r}. Set add_bos_token=False, or use --template kit."
        )
    return text
